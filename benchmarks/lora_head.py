"""LoRA on the output layer: our operators with the frozen weight where it is, beside a copy of [W, B], and logits.

    python benchmarks/lora_head.py --out docs/evidence/lora_head.json
    python benchmarks/lora_head.py --shapes tiny --device cpu

"in parts" is what a fused loss does with PEFT's layer: the logits are [h, s h A^T] [W, B]^T, W is read where it is and
has no gradient. "whole" copies [W, B] and computes a gradient of its size. "standard" and "torch.compile" build the
logits as PEFT's layer does. Gradients of h, A and B are judged in float64 first. Rank 16; bfloat16. Time in ms, memory
beyond the inputs in MiB, gradients included.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from linear_cross_entropy import SHAPES, WRONG, Bench, gradient, inputs, machine, relative_error
from torch import Tensor

from lit_fused.ops import linear_cross_entropy, linear_cross_entropy_reference
from lit_fused.ops.frozen_columns import FrozenColumns, with_frozen_columns

RANK, SCALING, TURNS = 16, 2.0, 3
Way = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # of h (N, D), W (V, D), A (R, D), B (V, R), targets


def standard(hidden: Tensor, weight: Tensor, down: Tensor, up: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight) + SCALING * F.linear(F.linear(hidden, down), up)
    return F.cross_entropy(logits.float(), targets)


def in_parts(hidden: Tensor, weight: Tensor, down: Tensor, up: Tensor, targets: Tensor) -> Tensor:
    frozen = FrozenColumns(weight.__getitem__, weight.shape[1], weight.dtype)
    beside = torch.cat([hidden, SCALING * F.linear(hidden, down)], -1)
    return linear_cross_entropy(beside, with_frozen_columns(up * 1, frozen), targets, statistics=False)[0]


def whole(hidden: Tensor, weight: Tensor, down: Tensor, up: Tensor, targets: Tensor) -> Tensor:
    beside = torch.cat([hidden, SCALING * F.linear(hidden, down)], -1)
    return linear_cross_entropy(beside, torch.cat([weight, up], -1), targets, statistics=False)[0]


def truth(hidden: Tensor, weight: Tensor, down: Tensor, up: Tensor, targets: Tensor) -> list[Tensor]:
    """Return the gradients of h, A and B in float64."""
    exact = [t.detach().double().requires_grad_() for t in (hidden, down, up)]
    wide = weight.double()
    for rows in torch.arange(len(hidden), device=hidden.device).split(1024):
        h, a, b = exact[0][rows], exact[1], exact[2]
        beside = torch.cat([h, SCALING * F.linear(h, a)], -1)
        loss, _ = linear_cross_entropy_reference(beside, torch.cat([wide, b], -1), targets[rows], reduction="sum")
        (loss / len(hidden)).backward()
    return [gradient(t) for t in exact]


def measured(shape: tuple[int, int, int], device: torch.device) -> dict[str, dict[str, Any]]:
    hidden, weight, targets = inputs(shape, device)
    generator = torch.Generator(device).manual_seed(1)
    down = torch.randn(RANK, shape[1], device=device, generator=generator).div(shape[1] ** 0.5).bfloat16()
    up = (torch.randn(shape[2], RANK, device=device, generator=generator) / 64).bfloat16().requires_grad_()
    trained = [hidden.requires_grad_(), down.requires_grad_(), up]
    exact = truth(hidden, weight, down, up, targets)
    bench = Bench(hidden, torch.empty(0, device=device), targets)

    def step(way: Way) -> None:
        for tensor in trained:
            tensor.grad = None
        way(hidden, weight, down, up, targets).backward()

    ways: dict[str, Way] = {"standard": standard, "torch.compile": torch.compile(standard)}
    ways |= {"whole": whole, "in parts": in_parts}
    found: dict[str, dict[str, Any]] = {}
    limits: list[float] = []
    for name, way in ways.items():
        step(way)
        errors = [relative_error(gradient(t), e) for t, e in zip(trained, exact, strict=True)]
        limits = limits or [WRONG * error for error in errors]
        if not all(error <= limit for error, limit in zip(errors, limits, strict=True)):
            raise AssertionError(f"{name} has wrong gradients: {errors}")
        found[name] = {"errors_of_h_A_B": errors}
        for tensor in trained:
            tensor.grad = None
        if device.type == "cuda":
            found[name]["extra_mib"] = bench._extra(lambda way=way: step(way))[0]
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(TURNS):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            times[name] += bench.time(lambda way=ways[name]: step(way))
    for name in ways:
        found[name]["ms"] = statistics.median(times[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3_1_7b", "llama3_8b"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    results: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "machine": machine(device), "shapes": {}}
    for shape in options.shapes:
        results["shapes"][shape] = measured(SHAPES[shape], device)
        print(json.dumps({shape: results["shapes"][shape]}, indent=1), flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
