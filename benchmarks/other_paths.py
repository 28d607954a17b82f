"""Measure what it costs to leave the fast path: dtypes, options and cards that its kernels are not for.

    python benchmarks/other_paths.py --out docs/evidence/other_paths.json
    python benchmarks/other_paths.py --shapes tiny --device cpu

"other cards" is without Hopper's own kernels: what an Ampere, Ada or Blackwell card runs, here on the same card as all
else. Every cell is judged in float64 first, and not timed if its gradients are wrong; "standard" builds the
logits in the dtype of its inputs and its loss in float32. Timing and memory are those of linear_cross_entropy.py.
"""

import argparse
import gc
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from linear_cross_entropy import SHAPES, WRONG, Bench, Loss, cce, gradient, inputs, machine, relative_error
from torch import Tensor

from lit_fused.ops import linear_cross_entropy, linear_cross_entropy_reference
from lit_fused.ops.hopper import hopper_path

TURNS = 3
CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bfloat16": (torch.bfloat16, {}),
    "float16": (torch.float16, {}),
    "float32": (torch.float32, {}),
    "label smoothing": (torch.bfloat16, {"label_smoothing": 0.1}),
    "bias": (torch.bfloat16, {"bias": True}),
    "softcap": (torch.bfloat16, {"softcap": 30.0}),
}


def standard(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Any, softcap: Any, label_smoothing: float
) -> Tensor:
    logits = F.linear(hidden, weight, bias).float()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)


def providers(options: dict[str, Any], bias: Tensor | None) -> Iterator[tuple[str, Callable[[], Loss]]]:
    """Yield every head that has these options; the standard one, whose error is the measure, first."""
    own = {name: value for name, value in options.items() if name != "bias"}
    whole = partial(standard, bias=bias, softcap=own.get("softcap"), label_smoothing=own.get("label_smoothing", 0.0))
    yield "standard", lambda: whole
    yield "torch.compile", lambda: torch.compile(whole)
    if bias is None and "label_smoothing" not in own:
        yield "cce", lambda: cce(**own)
        yield "cce, no filter", lambda: cce(filter_eps=None, **own)
    ours = partial(linear_cross_entropy, bias=bias, statistics=False, **own)
    yield "chunked", lambda: lambda *tensors: ours(*tensors)[0]
    yield "chunked, other cards", lambda: partial(without_hopper_kernels, ours)


def without_hopper_kernels(loss: Callable[..., Any], *tensors: Tensor) -> Tensor:
    supports = hopper_path.supports
    hopper_path.supports = lambda *_: False
    try:
        return loss(*tensors)[0]
    finally:
        hopper_path.supports = supports


def truth(bench: Bench, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the gradients of the mean loss in float64."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (bench.hidden, bench.weight))
    for rows in torch.arange(len(hidden), device=hidden.device).split(1024):
        loss, _ = linear_cross_entropy_reference(hidden[rows], weight, bench.targets[rows], reduction="sum", **options)
        (loss / len(hidden)).backward()
    return gradient(hidden), gradient(weight)


def measured(case: str, shape: tuple[int, int, int], device: torch.device) -> dict[str, dict[str, Any]]:
    dtype, options = CASES[case]
    hidden, weight, targets = inputs(shape, device)
    bias = torch.randn(len(weight), device=device).to(dtype) / 4 if "bias" in options else None
    bench = Bench(hidden.to(dtype), weight.to(dtype), targets)
    own = {name: value for name, value in options.items() if name != "bias"}
    exact = truth(bench, bias=None if bias is None else bias.double(), **own)
    found: dict[str, dict[str, Any]] = {}
    work: dict[str, Callable[[], object]] = {}
    limits: list[float] = []
    for name, make in providers(options, bias):
        torch._dynamo.reset()
        try:
            loss = make()
            bench.step(loss)
        except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as problem:
            found[name] = {"note": str(problem).strip().splitlines()[0][:80]}
            continue
        errors = [relative_error(gradient(bench.hidden), exact[0]), relative_error(gradient(bench.weight), exact[1])]
        limits = limits or [WRONG * error for error in errors]
        bench.hidden.grad = bench.weight.grad = None
        found[name] = {"hidden_error": errors[0], "weight_error": errors[1]}
        if not all(error <= limit for error, limit in zip(errors, limits, strict=True)):
            found[name]["note"] = "wrong gradients"
            continue
        if device.type == "cuda":
            found[name]["extra_mib"] = bench._extra(partial(bench.step, loss))[0]
        bench.hidden.grad = bench.weight.grad = None
        work[name] = partial(bench.step, loss)
    times: dict[str, list[float]] = {name: [] for name in work}
    order = list(work)
    for _ in range(TURNS):
        random.Random(0).shuffle(order)
        for name in order:
            times[name] += bench.time(work[name])
    for name in work:
        found[name]["ms"] = statistics.median(times[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3_1_7b"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    results: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "machine": machine(device), "shapes": {}}
    for shape in options.shapes:
        print(f"\n{shape}: N, D, V = {SHAPES[shape]}\n")
        print("| case | head | ms | extra MiB | dh error | dW error |", "|---|---|---:|---:|---:|---:|", sep="\n")
        results["shapes"][shape] = {}
        for case in options.cases:
            found = results["shapes"][shape][case] = measured(case, SHAPES[shape], device)
            for name, cell in found.items():
                numbers = (("ms", ".2f"), ("extra_mib", ",.0f"), ("hidden_error", ".1e"), ("weight_error", ".1e"))
                shown = [format(cell[n], form) if n in cell else "" for n, form in numbers]
                print(f"| {case} | {name} | {' | '.join(shown)} | {cell.get('note', '')}", flush=True)
            gc.collect()
            if options.out:
                options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
