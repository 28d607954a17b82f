"""Write the pages and the picture of docs/evidence/ that are made of the figures stored there.

    python tools/evidence.py

Benchmarks write their figures to docs/evidence/NAME.json. This tool makes tables of them; a figure stands in no other
place. Cells that a run lacks stay empty.
"""

import json
import statistics
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "evidence"
HEADS = {
    "floor: the products alone": "floor",
    "chunked": "chunked",
    "chunked, fast": "half",
    "chunked, lean": "lean",
    "torch_compile": "torch.compile",
    "cce": "cce",
    "liger": "liger",
    "standard": "standard",
    "filtered": "filtered",
}
SHAPES = {  # of benchmarks/linear_cross_entropy.py: N tokens, D hidden, V vocabulary
    "gemma2_2b": "8192, 2304, 256000",
    "qwen3_1_7b": "4096, 2048, 151936",
    "llama3_8b": "8192, 4096, 128256",
    "qwen3_0_6b": "16384, 1024, 151936",
    "small": "8192, 768, 65536",
    "gpt2_odd": "8192, 768, 50257",
    "qwen2_odd": "6000, 1536, 151669",
    "xlmr_odd": "8192, 1024, 250002",
    "llama3_odd": "4096, 4096, 128259",
    "bert_odd": "16384, 1024, 30522",
    "llama3_8b, half the tokens": "4096, 4096, 128256",
    "gpt_oss": "8192, 2880, 201088",
    "million, D=64": "8192, 64, 1000448",
    "million, D=128": "8192, 128, 1000000",
    "ten million": "4096, 128, 10000000",
    "rollouts, D=1024": "32768, 1024, 151936",
    "rollouts, D=2048": "32768, 2048, 151936",
}


def stored(name: str) -> dict[str, Any]:
    """Return the figures that a benchmark wrote."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a compact table of Markdown."""
    header = list(header)
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("|" + "|".join(line) + "|" for line in lines) + "\n"


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form).removesuffix(".").replace("e-0", "e-")


def pair(ms: float | None, mib: float | None) -> str:
    return ", ".join(filter(None, (number(ms, "#.3g"), number(mib, ",.0f"))))


def errors(row: dict[str, Any]) -> str:
    return ", ".join(number(row[key], ".1e") for key in ("hidden_error", "weight_error") if row.get(key))


def page(title: str, says: str, *parts: str, commands: Iterable[str]) -> str:
    """Return a page: its commands first, then its tables."""
    listed = "\n".join([*commands, "python tools/evidence.py"])
    return "\n".join([f"# {title}\n", f"```bash\n{listed}\n```\n", f"{says}\n", *parts])


def about(machine: dict[str, str]) -> str:
    """Return the device and the versions of a run."""
    return "; ".join([machine["device"], *(f"{k} {v}" for k, v in machine.items() if k != "device")]) + "."


def by_name(rows: list[dict[str, Any]], name: str = "provider") -> dict[str, dict[str, Any]]:
    return {row[name]: row for row in rows}


def head() -> str:
    """Return the page of the loss alone, forward and backward, on a GPU."""
    runs, trained, other = stored("head"), stored("trained_head"), stored("other_paths")
    odd_run, tail_run, sizes_run = stored("head_odd"), stored("head_tail"), stored("chunk_rows")
    peers = {"trained": stored("head_peers"), "long tail": stored("head_peers_tail")}
    quack = {inputs: {n: by_name(r) for n, r in of.items()} for inputs, of in stored("head_quack")["inputs"].items()}
    odd = {name: by_name(rows) for name, rows in odd_run["shapes"].items()}
    catalogues, scale = stored("catalogues"), stored("items_scale")
    shapes = {name: by_name(rows) for name, rows in (runs["shapes"] | catalogues["shapes"]).items()}
    shown = {key: name for key, name in HEADS.items() if key != "filtered"}

    def cost(row: dict[str, Any] | None) -> str:
        if not row or row.get("note"):
            return row["note"].partition(":")[0].replace("cannot run", "out of memory") if row else ""
        return pair(row["ms"], row["extra_mib"])

    judged = list(trained["shapes"])
    kinds = {"standard": "standard", "chunked": "chunked", "chunked, float32 sums": "float32_accumulation=true"}
    kinds |= {"cce": "cce", "liger": "liger"}
    [cases] = other["shapes"].values()
    ways = ["chunked", "chunked, other cards", "torch.compile", "cce", "standard"]
    sizes = sorted({size for points in runs["memory"].values() for size, _ in points})
    items = sorted({point[0] for points in scale["ways"].values() for point in points})
    return page(
        "The output layer alone, on a GPU",
        f"Forward and backward of the loss, without a model. Time in ms, then extra memory beyond the inputs in MiB, "
        f"gradients included; bfloat16. {about(runs['machine'])} Each `.json` beside this page has quartiles, "
        f"forward alone and all errors.\n\n![Time against memory at seven shapes, and memory over tokens](head.png)",
        "## Time and memory\n",
        table(["N, D, V", *shown.values()], [[SHAPES[n], *(cost(r.get(k)) for k in shown)] for n, r in shapes.items()]),
        "*floor*: the three matrix products alone, by cuBLAS. *half*, *lean*: `loss.logits_budget_mib` that fills half "
        "of torch.compile's memory, or 512 MiB beside the weight's gradient.\n",
        "## A vocabulary that is no multiple of 8\n",
        "Time and memory, then the errors of dh and dW against float64. cuBLAS moves 16 bytes at a time, so a product "
        "whose extent is no multiple takes up to five times as long; `lit_fused/ops/products.py` cuts it there.\n",
        table(
            ["N, D, V", "chunked", "", 'chunked, `reduction="none"`', "torch.compile", ""],
            [
                [
                    *(SHAPES[name], cost(of["chunked"]), errors(of["chunked"]), cost(of["chunked, none"])),
                    *(cost(of["torch_compile"]), errors(of["torch_compile"])),
                ]
                for name, of in odd.items()
            ],
        ),
        "## Inputs with a long tail\n",
        "The inputs above have the softmax of a trained model, with a few likely entries in a row. Here all logits are "
        "independent and normal, with deviation 4. Time and memory, then the errors of dh and dW.\n",
        table(
            ["N, D, V", "chunked", "", "torch.compile", "", "standard"],
            [
                [
                    *(SHAPES[name], cost(of["chunked"]), errors(of["chunked"]), cost(of["torch_compile"])),
                    *(errors(of["torch_compile"]), cost(of["standard"])),
                ]
                for name, of in ((name, by_name(rows)) for name, rows in tail_run["shapes"].items())
            ],
        ),
        "## Beside the heads of others, on both inputs\n",
        "One run for each kind of inputs; time and memory, then the errors of dh and dW. Liger's kernel in CuTe takes "
        "N that 128 divides and V that 256 divides.\n",
        table(
            ["N, D, V", "inputs", "chunked", "", "torch.compile", "cce", "", "TRL 1.16", "", "Liger, CuTe"],
            [
                [
                    *(SHAPES[name], inputs, cost(of["chunked"]), errors(of["chunked"]), cost(of["torch_compile"])),
                    *(cost(of["cce"]), errors(of["cce"]), cost(of["trl"]), errors(of["trl"])),
                    "" if of["liger, CuTe"]["note"] else cost(of["liger, CuTe"]),
                ]
                for inputs, run in peers.items()
                for name, of in ((name, by_name(rows)) for name, rows in run["shapes"].items())
            ],
        ),
        "### Beside quack 0.6.5\n",
        "Another run, read from what it printed: time and memory, forward alone in ms (as in evaluation), errors. "
        "quack does not run the first shape above (an epilogue's operand is ambiguous), nor an odd V (its kernel does "
        "not compile).\n",
        table(
            ["N, D, V", "inputs", "chunked", "forward", "", "quack", "forward", "", "torch.compile", "forward"],
            [
                [
                    *(SHAPES[name], inputs, cost(of["chunked"]), number(of["chunked"]["forward_ms"], ".2f")),
                    *(errors(of["chunked"]), cost(of["quack"]), number(of["quack"]["forward_ms"], ".2f")),
                    *(errors(of["quack"]), cost(of["torch_compile"])),
                    number(of["torch_compile"]["forward_ms"], ".2f"),
                ]
                for inputs, shapes_of in quack.items()
                for name, of in shapes_of.items()
            ],
        ),
        "## Rows of a chunk\n",
        "ms of forward and backward with `chunk_size=`, by a bare loop that is not kept; one size twice differed by "
        "1 to 3 %, once by 27 %. By default a chunk has 2816 rows, or 2^22 / D if that is more, and at most half of "
        f"the tokens or a fiftieth of the memory. {sizes_run['machine']}; {sizes_run['versions']}.\n",
        table(
            ["N, D, V", *(f"{rows:,}" for rows in sizes_run["rows"])],
            [[SHAPES[name], *(number(ms, "#.3g") for ms in of_shape)] for name, of_shape in sizes_run["ms"].items()],
        ),
        "## Errors of the gradients (dh, dW) against float64\n",
        "A Llama of 115M parameters (D=768, V=65536) after 906 steps on Python sources, before them, and with one row "
        "times 20. Rounding an exact gradient to bfloat16 costs 1.7e-3.\n",
        table(
            ["", *judged],
            [[v, *(errors(by_name(trained["shapes"][s])[k]) for s in judged)] for k, v in kinds.items()],
        ),
        "## Other dtypes, options and cards\n",
        "N, D, V = 4096, 2048, 151936. *Other cards*: the same card without Hopper's kernels.\n",
        table(
            ["", *ways],
            [
                [case, *(pair(heads.get(w, {}).get("ms"), heads.get(w, {}).get("extra_mib")) for w in ways)]
                for case, heads in cases.items()
            ],
        ),
        "## Extra MiB over tokens, D=1024, V=151936\n",
        table(
            ["tokens", *(f"{size:,}" for size in sizes)],
            [[n, *(number(dict(points).get(s), ",.0f") for s in sizes)] for n, points in runs["memory"].items()],
        ),
        f"## Catalogues: {scale['users']} users, D=64\n",
        table(
            ["items", *scale["ways"]],
            [
                [
                    f"{n:,}",
                    *(pair(*{p[0]: p[1:] for p in points}.get(n, (None, None))) for points in scale["ways"].values()),
                ]
                for n in items
            ],
        ),
        "The sampled softmax is another loss. cut-cross-entropy's gradients are refused as wrong at a million items.\n",
        "![Time and memory over the size of the catalogue](items_scale.png)\n",
        commands=[x["command"] for x in (runs, odd_run, tail_run, *peers.values(), catalogues, trained, other, scale)],
    )


def filtered() -> str:
    """Return the page of the approximate backward."""
    heads, curve, training = stored("filtered_head"), stored("filtered_curve"), stored("filtered_training")
    names = [row["provider"] for row in heads["shapes"]["trained"]]
    rows = []
    for name in names:
        one, before = (by_name(heads["shapes"][when])[name] for when in ("trained", "initial"))
        held = number(one["held_mib"], ".0f")
        rows.append(
            [name, pair(one["ms"], one["extra_mib"]), held, errors(one), number(before["ms"], ".4g"), errors(before)]
        )
    points = by_name(curve["points"]["trained"], "name")
    curves = []
    for power in (6, 8, 10, 11, 12, 13, 14, 16):
        one, plain = (points[f"2^-{power}, groups of 2048{end}"] for end in ("", ", no correction"))
        shares = [f"{100 * one[key]:.1f} %" for key in ("kept", "dropped")]
        curves.append([f"2^-{power}", *shares, errors(one), f"{one['ms']:.2f}", errors(plain)])
    ends: dict[str, dict[int, dict[str, Any]]] = {}
    for run in training["runs"]:
        ends.setdefault(run["loss"], {})[run["seed"]] = run
    finals = []
    for loss, seeds in ends.items():
        last = [run["validation"][-1] for run in seeds.values()]
        apart = statistics.mean(run["validation"][-1] - ends["exact"][s]["validation"][-1] for s, run in seeds.items())
        spread = f"{statistics.mean(last):.4f} ± {statistics.stdev(last):.4f}"
        finals.append(
            [loss, ", ".join(f"{value:.4f}" for value in last), spread, f"{apart:+.4f}", f"{run_time(seeds)}"]
        )
    settings = training["settings"]
    return page(
        "The filtered backward, measured",
        f"{about(heads['machine'])} bfloat16, errors of dh and dW against float64. The hidden states are a Llama's "
        "(N=8192, D=2048, V=131072, 4 layers, tied) after 610 steps of 32,768 tokens of Python sources, and before "
        "them. All was measured with one bound, of 5 % of a group's probability.",
        "## One output layer\n",
        table(["", "ms, extra MiB", "MiB until backward", "errors", "before training: ms", "errors"], rows),
        "## Over filter_eps, groups of 2048, without a bound\n",
        table(["eps", "kept columns", "dropped mass", "errors", "ms", "errors without the correction"], curves),
        "![Error against kept columns and against time](filtered_curve.png)\n",
        "## Training\n",
        f"A Llama (D={settings['hidden_size']}, V={settings['vocabulary']:,}, {settings['layers']} layers) from "
        f"scratch, {settings['steps']} steps of {settings['tokens']} tokens, the same seeds for each loss. *plain*: "
        "the filter without its correction.\n",
        table(["loss", "validation loss of each seed", "mean", "less exact", "ms a step"], finals),
        "![Losses over steps, and differences to exact with the same seed](filtered_training.png)\n",
        commands=[
            "python benchmarks/train_head.py --text FOLDER_OF_SOURCES --vocabulary 131072 --hidden-size 2048 "
            "--layers 4 --minutes 2.5 --out wide_head.pt",
            heads["command"],
            curve["command"],
            "python benchmarks/filtered_training.py --text FOLDER_OF_SOURCES --steps 2400 --jobs 3 --out "
            "docs/evidence/filtered_training",
        ],
    )


def run_time(seeds: dict[int, dict[str, Any]]) -> str:
    return f"{statistics.mean(run['ms_per_step'] for run in seeds.values()):.0f}"


def token_scores() -> str:
    """Return the page of scores of tokens."""
    found, bits, policy = stored("token_scores"), stored("token_scores_invariant"), stored("policy_loss")
    rows = []
    for shape, heads in found["shapes"].items():
        for row in heads:
            cost = [
                number(row.get("ms"), ".2f"),
                number(row.get("forward_ms"), ".2f"),
                number(row.get("extra_mib"), ",.0f"),
            ]
            rows.append([SHAPES[shape] if row is heads[0] else "", row["provider"], *cost, errors(row)])
    return page(
        "Token scores, measured",
        f"{about(found['machine'])} trl 1.16.0. bfloat16, forward and backward of `sum(weight * log_prob)`; errors of "
        'dh and dW against float64. *Loss per token*: `linear_cross_entropy(reduction="none")`.',
        table(["N, D, V", "", "ms", "forward, ms", "extra MiB", "errors"], rows),
        "## The same bits in any batch\n",
        "Another run: `invariant=True` beside the fast path. ms, forward alone, errors of dh and dW.\n",
        table(
            ["N, D, V", "entropy", "fast", "", "", "invariant", "", ""],
            [
                [SHAPES[shape], "yes" if entropy else "no"]
                + [
                    cell
                    for row in (of["token_scores" + entropy], of["token_scores" + entropy + ", invariant"])
                    for cell in (number(row["ms"], ".2f"), number(row["forward_ms"], ".2f"), errors(row))
                ]
                for shape, of in ((shape, by_name(heads)) for shape, heads in bits["shapes"].items())
                for entropy in ("", ", entropy")
            ],
        ),
        "## A policy's loss\n",
        "Another run: GRPO's loss of rollouts, with entropies. *lit_fused* is `FusedPolicyModule`'s own loss with what "
        "it logs; *trl*, *verl*, *liger, CuTe*, *compiled chunks* and *logits* are their scores under TRL's formula; "
        f"*liger, GRPO* is `LigerFusedLinearGRPOLoss`. trl 1.16.0, verl {policy['machine']['verl']}.\n",
        table(
            ["N, D, V", "", "ms", "tokens/s", "forward, ms", "extra GiB", "errors"],
            [
                [
                    *(SHAPES[shape] if row is heads[0] else "", row["provider"], number(row["ms"], ".1f")),
                    *(number(row["tokens_per_sec"], ",d"), number(row.get("forward_ms"), ".1f")),
                    *(number(row.get("extra_gib"), ".2f"), errors(row)),
                ]
                for shape, heads in policy["shapes"].items()
                for row in heads
            ],
        ),
        commands=[
            'python benchmarks/token_scores.py --turns 2 --out docs/evidence/token_scores --providers "loss per token" '
            'token_scores "token_scores, entropy" "token_scores, entropy, 64 selected" "liger, CuTe" '
            '"liger, CuTe, entropy" trl "trl, entropy"',
            "python benchmarks/token_scores.py --turns 2 --out docs/evidence/token_scores_invariant --shapes "
            'llama3_8b gemma2_2b qwen3_0_6b qwen3_1_7b --providers token_scores "token_scores, invariant" '
            '"token_scores, entropy" "token_scores, entropy, invariant"',
            "python benchmarks/policy_loss.py --turns 2 --out docs/evidence/policy_loss",
        ],
    )


def qwen3_memory() -> str:
    """Return the page of whole runs of a model with a large vocabulary."""
    found = stored("qwen3_memory")
    columns = {
        "loss": "",
        "compile": "",
        "optimizer": "",
        "gib": ".1f",
        "tokens_per_sec": ",.0f",
        "mfu": ".1%",
        "val_loss": ".4f",
    }
    tables = [
        table(
            ["loss", "layers", "AdamW", "peak, GiB", "tokens/s", "MFU", "validation loss"],
            [[format(run[key], form) if key in run else "" for key, form in columns.items()] for run in sweep["runs"]],
        )
        for sweep in found["sweeps"]
    ]
    return page(
        "A 0.6B model with a vocabulary of 151,936",
        f"{found['what']}. {about(found['machine'])} The float32 logits of a step are 9.27 GiB. The tokens are random: "
        "ln 151,936 = 11.93 is the lowest loss. A table for each command; figures of the first are up to 1 % apart "
        "from turn to turn.\n\n![Peak memory and speed of each loss](qwen3_memory.png)",
        *tables,
        commands=[sweep["command"] for sweep in found["sweeps"]],
    )


def draw(path: Path) -> None:
    """Draw memory and speed of whole runs side by side, a bar for each loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = stored("qwen3_memory")
    runs = [run for sweep in found["sweeps"] for run in sweep["runs"] if "shown" in run]
    pyplot.rcParams.update({"font.size": 12})
    names = [run["shown"].replace(" (", "\n(") for run in runs]
    colors = ["#00796b" if run["loss"] == "chunked" else "#9e9e9e" for run in runs]
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 4.3), sharey=True, layout="constrained")
    panels = (
        ("gib", "peak memory, GiB", "{:.1f}"),
        ("tokens_per_sec", "tokens per second", "{:,.0f}"),
    )
    for axis, (key, title, form) in zip(axes, panels, strict=True):
        values = [run[key] for run in runs]
        bars = axis.barh(names, values, color=colors, height=0.7)
        axis.bar_label(bars, [form.format(value) for value in values], padding=4)
        axis.set_title(title, loc="left")
        axis.set_xlim(0, 1.2 * max(values))
        axis.set_xticks([])
        axis.tick_params(length=0)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def measured(name: str) -> str:
    """Return a page of measurements that have no tool of their own: a section for each command."""
    found = stored(name)
    usual = f"{found['machine']}; {found['versions']}."
    parts = [f"# {found['title']}\n", f"{found['says']} {usual}".strip() + "\n"]
    for part in found["sections"]:
        parts.append(f"## {part['title']}\n")
        if part["commands"]:
            parts.append("\n".join(["```bash", *part["commands"], "```\n"]))
        where = f"{part['machine']}; {part['versions']}."
        parts.append(f"{part['what']}{'' if where == usual else ' ' + where}\n")
        forms = [form for _, form in part["columns"]]
        rows = [
            ["" if cell is None else format(cell, form) for cell, form in zip(row, forms, strict=True)]
            for row in part["rows"]
        ]
        parts.append(table([title for title, _ in part["columns"]], rows).replace("e-0", "e-"))
        parts += [f"{part['picture']}\n"] if "picture" in part else []
    return "\n".join(parts)


PAGES = {
    "head": head,
    "filtered": filtered,
    "token_scores": token_scores,
    "qwen3_memory": qwen3_memory,
    **{name: partial(measured, name) for name in ("runs", "devices", "faults")},
}


def main() -> None:
    for name, text in PAGES.items():
        (FOLDER / f"{name}.md").write_text(text())
    draw(FOLDER / "qwen3_memory.png")
    print(f"wrote {', '.join(PAGES)} in {FOLDER}")


if __name__ == "__main__":
    main()
