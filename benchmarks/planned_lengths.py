"""Plan a step of one long row by each way to save memory, and draw memory over length. It needs no GPU.

    python benchmarks/planned_lengths.py --out docs/evidence/long_context.json   # plans, and draws beside it
    python benchmarks/planned_lengths.py --out docs/evidence/long_context.json --draw   # draws what is stored
    python benchmarks/planned_lengths.py --tiny --lengths 512 1024 --out /tmp/lengths.json

The lines are predicted, of one device, an H200 by default, with layers that are not compiled; the picture has marks for
what long_rows.py measured, with compiled layers. A way ends with the first length that the device has too little memory
for. A plan takes half a minute.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from configured import ROOT, composed

import lit_fused
from lit_fused.app.commands.memory_plan import planned

LENGTHS = [8192, 32768, 131072, 524288, 1048576]
CONTEXT = ["strategy=context", "trainer.devices=4"]
OURS, TEXT = "#14998a", "#808080"  # Light and dark pages show them, and the contrast's, alike.
WAYS = {  # by name: overrides, and the colour of a line
    "loss=standard memory=none": (["loss=standard", "memory=none"], "#e8710a"),
    "memory=none": (["memory=none"], OURS),
    "memory=checkpoint": (["memory=checkpoint"], OURS),
    "memory=long": (["memory=long"], OURS),
    "memory=long strategy=context, 4 GPUs": (["memory=long", *CONTEXT], OURS),
}
COMMANDS = {  # of docs/long_context.md
    "qwen3_0_6b on one GPU": ["model=qwen3_0_6b", "data.block_size=524288", "memory=long"],
    "qwen3_1_7b on 4 GPUs": ["model=qwen3_1_7b", "data.block_size=1048576", "memory=long", *CONTEXT],
}
TINY = ["hidden_size=32", "intermediate_size=64", "num_hidden_layers=1", "vocab_size=512"]


def peak_gib(overrides: list[str], memory_gib: float) -> float:
    cfg = composed("data=synthetic", "data.batch_size=1", "precision=bf16-true", "compile=none", *overrides)
    options = lit_fused.PlanOptions(memory_gib=memory_gib, compute_capability=9.0)
    return round(planned(cfg, options)["peak_gib"], 3)


def figures(options: argparse.Namespace) -> dict[str, Any]:
    tiny = [f"model.config.{word}" for word in TINY] if options.tiny else []
    model = [f"model={options.model}", *tiny]
    ways: dict[str, list[float]] = {name: [] for name in WAYS}
    for name, (overrides, _) in WAYS.items():
        for length in options.lengths:
            ways[name].append(peak_gib([*model, *overrides, f"data.block_size={length}"], options.memory_gib))
            print(f"{name:<40}{length:>10,}{ways[name][-1]:>12.2f} GiB", flush=True)
            if ways[name][-1] > options.memory_gib:
                break
    runs = {} if options.tiny else {n: peak_gib(words, options.memory_gib) for n, words in COMMANDS.items()}
    return {
        "planned": True,
        "model": options.model,
        "precision": "bf16-true",
        "memory_gib": options.memory_gib,
        "lengths": options.lengths,
        "peak_gib": ways,
        "commands_peak_gib": runs,
    }


def draw(found: dict[str, Any], measured: list[dict[str, Any]], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 11, "text.color": TEXT, "xtick.color": TEXT, "ytick.color": TEXT})
    figure, axes = pyplot.subplots(figsize=(8.6, 4.8), layout="constrained")
    lengths = found["lengths"]
    for name, (_, color) in WAYS.items():
        gib = found["peak_gib"][name]
        ends = lengths[len(gib) - 1]
        axes.plot(lengths[: len(gib)], gib, "o-", color=color, markersize=4, linewidth=2)
        label = name.replace(" memory=none", "").replace(" strategy", "\nstrategy")
        axes.annotate(label, (ends, gib[-1]), (8, 0), textcoords="offset points", va="center", color=color)
    for label, way, mark in (("measured", "memory=", "D"), ("Liger, measured", "liger", "x")):
        points = [(row["length"], row["gpu_gib"]) for row in measured if row["way"].startswith(way)]
        axes.plot(*zip(*points, strict=True), mark, color=TEXT, markersize=7, label=label, zorder=3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    limit = found["memory_gib"]
    axes.axhline(limit, color=TEXT, linewidth=1, linestyle=(0, (5, 3)))
    axes.annotate(f"an H200, {limit:.0f} GiB", (lengths[0], limit), (0, 4), textcoords="offset points")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n < 2**20 else f"{n // 2**20}M" for n in lengths])
    axes.set_xlim(right=1.05 * lengths[-1])
    ticks = [2**n for n in range(2, 10, 2)]
    axes.set_yticks(ticks, [f"{n:,}" for n in ticks])
    axes.minorticks_off()
    axes.tick_params(length=0)
    axes.grid(axis="y", color=TEXT, alpha=0.2)
    axes.spines[:].set_visible(False)
    axes.set_title(f"GiB of a GPU over tokens of a row: {found['model']}, {found['precision']}", loc="left")
    figure.savefig(picture, dpi=130, transparent=True)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3_0_6b", help="a choice of conf/model")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--memory-gib", type=float, default=139.8, help="of the GPU")
    parser.add_argument("--tiny", action="store_true", help="another width and depth, to try the script")
    parser.add_argument("--draw", action="store_true", help="draw the stored figures, and plan nothing")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file; the picture lies beside it")
    options = parser.parse_args(arguments)
    if not options.draw:
        options.out.write_text(json.dumps(figures(options), indent=1) + "\n")
    measured = json.loads((ROOT / "docs/evidence/long_rows.json").read_text())["rows"]  # of long_rows.py, compiled
    draw(json.loads(options.out.read_text()), measured, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
