"""Time the full softmax over a catalogue, and its rankings: milliseconds and extra memory.

    python benchmarks/items.py
    python benchmarks/items.py --shapes 256,16,5000 --device cpu --dtype float32
    python benchmarks/items.py --scale 100000 300000 1000000 3000000 10000000 --out items_scale.json
    python benchmarks/items.py --picture items_scale.json

Of each shape (users N, D hidden, items V): forward and backward of ``linear_cross_entropy``, ``top_items`` with the
rank of each target, the same with 50 items excluded, and both from the matrix of scores, where it has less than 10^10
entries. Medians of five turns.

``--scale`` measures forward and backward of every way to a loss over catalogues that grow, as
``linear_cross_entropy.py`` does; a way that runs out of memory has no further points. ``--picture`` draws them.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from linear_cross_entropy import PROVIDERS, Bench, Loss, inputs, machine
from torch import Tensor

from lit_fused import linear_cross_entropy, top_items

SHAPES = ["8192,64,1000000", "8192,128,1000000", "4096,64,10000000", "4096,128,10000000"]
TURNS, K, SEEN = 5, 10, 50
WIDTH, NEGATIVES = 64, 4096
WAYS = {  # name: provider and colour, which is seen on light and on dark pages
    "full softmax, lit_fused": ("chunked", "#d62728"),
    "plain logits": ("standard", "#7f7f7f"),
    "torch.compile": ("torch_compile", "#1f77b4"),
    "cut-cross-entropy": ("cce", "#2ca02c"),
    f"sampled softmax, {NEGATIVES} negatives": ("sampled", "#ff7f0e"),
}


def measured(function: Callable[[], Any], on_gpu: bool) -> str:
    times, before = [], 0
    for turn in range(TURNS + 1):
        if on_gpu:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        function()
        if on_gpu:
            torch.cuda.synchronize()
        times += [1e3 * (time.perf_counter() - start)] * (turn > 0)
    extra = f"{(torch.cuda.max_memory_allocated() - before) / 2**20:>10,.0f} MiB" if on_gpu else ""
    return f"{statistics.median(times):>10.1f} ms{extra}"


def ranked(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    scores = (hidden @ weight.T).float()
    return scores.topk(K).indices, (scores > scores.gather(1, targets[:, None])).sum(1)


def sampled(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the sampled softmax with uniform negatives of the batch, which all have one correction."""
    drawn = torch.randint(len(weight), (NEGATIVES,), device=weight.device)
    positive, negative = (hidden * weight[targets]).sum(-1, keepdim=True), hidden @ weight[drawn].T
    negative = negative.masked_fill(drawn == targets[:, None], -torch.inf)
    return F.cross_entropy(torch.cat([positive, negative], 1).float(), torch.zeros_like(targets))


def over_catalogues(
    sizes: list[int], users: int, ways: list[str], device: torch.device
) -> Iterator[dict[str, list[list[float]]]]:
    """Yield after each size, of each way, items, milliseconds and extra MiB of forward and backward where it ran."""
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    for items in sizes:
        bench = Bench(*inputs((users, WIDTH, items), device))
        for name in [name for name in ways if items == sizes[0] or len(found[name]) == sizes.index(items)]:
            torch._dynamo.reset()
            provider = WAYS[name][0]
            try:
                loss: Loss = sampled if provider == "sampled" else PROVIDERS[provider]()
                bench.step(loss)  # without what is allocated once
                bench.hidden.grad = bench.weight.grad = None
                extra = bench._extra(partial(bench.step, loss))[0] if device.type == "cuda" else 0.0
                milliseconds = statistics.median(bench.time(partial(bench.step, loss)))
                found[name].append([items, milliseconds, extra])
                print(f"{items:>12,}  {name:<40}{milliseconds:>10.2f} ms{extra:>12,.0f} MiB", flush=True)
            except (ImportError, RuntimeError) as problem:  # absent, or out of memory
                print(f"{items:>12,}  {name:<40}{str(problem).strip().splitlines()[0][:100]}", flush=True)
            bench.hidden.grad = bench.weight.grad = None
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        yield found


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw time above memory, narrow, so that a page on a telephone can be read."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 13})
    figure, axes = pyplot.subplots(2, 1, figsize=(6.2, 8.4), sharex=True)
    for name, points in results["ways"].items():
        for axis, column in zip(axes, (1, 2), strict=True):
            ours = WAYS[name][0] == "chunked"
            axis.plot(
                [p[0] for p in points],
                [p[column] / (1 if column == 1 else 1024) for p in points],
                "*-" if ours else "o-",
                markersize=13 if ours else 6,
                linewidth=3 if ours else 1.8,
                color=WAYS[name][1],
                label=name,
            )
    axes[0].set(ylabel="milliseconds")
    axes[1].set(ylabel="extra memory, GiB", xlabel="items in the catalogue")
    sizes = sorted({p[0] for points in results["ways"].values() for p in points})
    for axis in axes:
        axis.set(xscale="log", yscale="log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xticks(sizes, [f"{n / 1e6:g}M" if n >= 1e6 else f"{n / 1e3:g}k" for n in sizes])
        axis.xaxis.set_minor_formatter("")
        axis.grid(alpha=0.3)
    device = results["machine"]["device"].removeprefix("NVIDIA ")
    axes[0].set_title(f"forward + backward, {results['users']} users, D={WIDTH}, {device}", fontsize=13)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=11)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="N,D,V")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--scale", nargs="+", type=int, metavar="V", help="instead: all ways over these catalogues")
    parser.add_argument("--users", type=int, default=8192, help="of --scale")
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=WAYS, help="of --scale")
    parser.add_argument("--out", type=Path, help="write what --scale measured as JSON")
    parser.add_argument("--picture", type=Path, help="instead: draw such a file, beside it as PNG")
    options = parser.parse_args(arguments)
    if options.picture:
        return draw(json.loads(options.picture.read_text()), options.picture.with_suffix(".png"))
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    if options.scale:
        command = "python benchmarks/items.py " + " ".join(arguments or sys.argv[1:])
        about = {"command": command, "machine": machine(device), "users": options.users}
        for found in over_catalogues(options.scale, options.users, options.ways, device):
            if options.out:
                options.out.write_text(json.dumps({**about, "ways": found}, indent=1))
        return None
    on_gpu = device.type == "cuda"
    for shape in options.shapes:
        users, width, items = map(int, shape.split(","))
        torch.manual_seed(0)
        hidden = torch.randn(users, width, device=device).to(dtype).requires_grad_()
        weight = (0.3 * torch.randn(items, width, device=device)).to(dtype).requires_grad_()
        targets = torch.randint(items, (users,), device=device)
        seen = torch.randint(items, (users, SEEN), device=device)

        def step(hidden: Tensor = hidden, weight: Tensor = weight, targets: Tensor = targets) -> None:
            linear_cross_entropy(hidden, weight, targets)[0].backward()
            hidden.grad = weight.grad = None

        ways: dict[str, Callable[[], Any]] = {"loss and gradients": step}
        with torch.no_grad():
            ways["top_items"] = lambda h=hidden, w=weight, t=targets: top_items(h, w, K, targets=t)
            ways["top_items, some excluded"] = lambda h=hidden, w=weight, t=targets, s=seen: top_items(
                h, w, K, exclude=s, targets=t
            )
            if users * items < 10**10:
                ways["from the matrix"] = lambda h=hidden, w=weight, t=targets: ranked(h, w, t)
        for name, way in ways.items():
            print(f"{shape:<20}{name:<26}{measured(way, on_gpu)}", flush=True)


if __name__ == "__main__":
    main()
