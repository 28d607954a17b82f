"""Measure what a filtered backward costs and gives: eps and the size of a group against error, kept columns and time.

    python benchmarks/filtered_curve.py --head wide_head.pt --out docs/evidence/filtered_curve
    python benchmarks/filtered_curve.py --head wide_head.pt --device cpu --tokens 512 --eps 10 12 --groups 256

The head is a file of ``train_head.py``: hidden states of a model that has been trained, and of the same model before.
The fallback to exact groups is switched off here, so that the curve shows what it prevents. For each eps there is also
the plain filter, without the correction. Errors, times and memory are measured as in ``linear_cross_entropy.py``.

N tokens, D hidden, V vocabulary; inputs are bfloat16.
"""

import argparse
import contextlib
import json
import math
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from linear_cross_entropy import PROVIDERS, Bench, Loss, Row, filtered, machine, truth
from torch import Tensor

from lit_fused.filtered import kept_columns, linear_cross_entropy

PEERS = ["standard", "cce", "chunked"]


@dataclass
class Point:
    """One setting: errors relative to float64, shares in [0, 1], milliseconds of forward and backward."""

    name: str
    eps: float | None = None
    group: int | None = None
    correction: bool = True
    hidden_error: float = math.nan
    weight_error: float = math.nan
    kept: float | None = None
    dropped: float | None = None
    ms: float = math.nan
    times: list[float] = field(default_factory=list)


@contextlib.contextmanager
def setting(point: Point) -> Iterator[None]:
    """Groups of this size, none of which is exact but by its eps; and no correction where there is to be none."""

    def no_tail(sums_GV: Tensor, kept_GV: Tensor) -> Tensor:
        return torch.zeros_like(sums_GV)

    with contextlib.ExitStack() as patches:
        for bound in ("MAX_DROPPED", "MAX_ROW_DROPPED"):
            patches.enter_context(mock.patch.object(kept_columns, bound, 2))  # more than there is
        if point.group:
            patches.enter_context(mock.patch.object(kept_columns, "GROUP_ROWS", point.group))
        if not point.correction:
            patches.enter_context(mock.patch.object(kept_columns, "tail_distribution", no_tail))
        yield


def settings(peers: list[str], exponents: list[int], groups: list[int]) -> list[Point]:
    points = [Point(name) for name in peers]
    for exponent in exponents:
        points += [Point(f"2^-{exponent}, groups of {group}", 2.0**-exponent, group) for group in groups]
        default = kept_columns.GROUP_ROWS if kept_columns.GROUP_ROWS in groups else groups[0]
        points.append(Point(f"2^-{exponent}, groups of {default}, no correction", 2.0**-exponent, default, False))
    return points


def measure(name: str, tensors: tuple[Tensor, Tensor, Tensor], points: list[Point], turns: int) -> list[Point]:
    bench = Bench(*tensors)
    exact = truth(bench.hidden.detach(), bench.weight.detach(), bench.targets)
    losses: dict[str, Loss] = {}
    for point in points:
        loss = PROVIDERS[point.name]() if point.eps is None else filtered(filter_eps=point.eps)
        row = Row(point.name)
        with setting(point):
            try:
                point.hidden_error, point.weight_error = bench.judge(row, loss, exact)
            except (ImportError, RuntimeError) as problem:  # a peer that cannot run here
                print(f"{point.name} cannot run: {str(problem).splitlines()[0][:100]}")
                bench.hidden.grad = bench.weight.grad = None
                continue
            if point.eps is not None:
                inputs = bench.hidden, bench.weight, bench.targets
                _, sums = linear_cross_entropy(*inputs, filter_eps=point.eps, statistics=False)
                valid = (bench.targets >= 0).sum()
                point.kept = (sums["kept_columns"] / valid).item()
                point.dropped = (sums["dropped_mass"] / valid).item()
        losses[point.name] = loss
    del exact
    measured = [point for point in points if point.name in losses]
    shuffled = random.Random(0)
    for _ in range(turns):
        for point in shuffled.sample(measured, len(measured)):
            with setting(point):
                point.times += bench.time(partial(bench.step, losses[point.name]))
    for point in measured:
        point.ms = statistics.median(point.times)
    tokens, hidden_size, vocabulary = len(tensors[0]), *reversed(tensors[1].shape)
    print(f"\n{name}: N={tokens} D={hidden_size} V={vocabulary}", *table(measured), sep="\n", flush=True)
    return measured


def table(points: list[Point]) -> list[str]:
    lines = ["| | kept columns | dropped mass | dh error | dW error | ms |", "|---|---:|---:|---:|---:|---:|"]
    for p in points:
        kept, dropped = ("" if share is None else f"{100 * share:.1f} %" for share in (p.kept, p.dropped))
        lines.append(f"| {p.name} | {kept} | {dropped} | {p.hidden_error:.2e} | {p.weight_error:.2e} | {p.ms:.2f} |")
    return lines


def plot(points: list[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8.5), sharey="row")
    groups = sorted({p.group for p in points if p.group})
    for axis_row, error in zip(axes, ("hidden_error", "weight_error"), strict=True):
        for axis, across in zip(axis_row, ("kept", "ms"), strict=True):
            for group in groups:
                some = [p for p in points if p.group == group and p.correction]
                axis.plot(*_curve(some, across, error), "o-", label=f"groups of {group}")
                for p in some if group == kept_columns.GROUP_ROWS else []:
                    assert p.eps is not None
                    axis.annotate(f"$2^{{{round(math.log2(p.eps))}}}$", _place(p, across, error), fontsize=8)
            if across == "kept":  # it takes the same time
                plain = [p for p in points if not p.correction]
                axis.plot(*_curve(plain, across, error), "x--", color="grey", label="without the correction")
            for p, style in zip([p for p in points if p.eps is None], (":", "-.", "--"), strict=False):
                axis.axhline(getattr(p, error), color="black", linestyle=style, linewidth=1, label=p.name)
                if across == "ms":
                    axis.plot(p.ms, getattr(p, error), "k*")
                    axis.annotate(p.name, _place(p, across, error), fontsize=8, va="bottom", ha="center")
            axis.set(xscale="log", yscale="log")
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter("{x:g}" if across == "ms" else "")
            axis.grid(alpha=0.3, which="both")
    axes[0][0].set_ylabel("error of the hidden states' gradient")
    axes[1][0].set_ylabel("error of the weight's gradient")
    axes[1][0].set_xlabel("kept columns, share of the vocabulary")
    axes[1][1].set_xlabel("forward + backward, ms")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _place(point: Point, across: str, error: str) -> tuple[float, float]:
    return getattr(point, across), getattr(point, error)


def _curve(points: list[Point], across: str, error: str) -> tuple[list[float], list[float]]:
    places = [_place(p, across, error) for p in points]
    return [x for x, _ in places], [y for _, y in places]


def main(arguments: list[str] | None = None) -> dict[str, list[Point]]:
    parser = argparse.ArgumentParser(description="The filtered backward over its range.")
    parser.add_argument("--head", type=Path, required=True, help="a file of train_head.py")
    parser.add_argument("--eps", type=int, nargs="+", default=[6, 8, 10, 11, 12, 13, 14, 16], help="exponents of 2^-x")
    parser.add_argument("--groups", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--peers", nargs="+", choices=PROVIDERS, default=PEERS, help="to compare with")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="write NAME.json and NAME.png")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)

    results: dict[str, list[Point]] = {}
    for name, (hidden, weight, targets) in torch.load(options.head, map_location=device).items():
        if name in ("trained", "initial"):
            tensors = hidden[: options.tokens], weight, targets[: options.tokens]
            results[name] = measure(name, tensors, settings(options.peers, options.eps, options.groups), options.turns)
    if options.out:
        command = "python benchmarks/filtered_curve.py " + " ".join(arguments or sys.argv[1:])
        records = {
            name: [{k: v for k, v in asdict(p).items() if k != "times"} for p in points]
            for name, points in results.items()
        }
        everything = {"command": command, "machine": machine(device), "points": records}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".json").write_text(json.dumps(everything, indent=1))
        plot(results["trained"], options.out.with_suffix(".png"))
    return results


if __name__ == "__main__":
    main()
