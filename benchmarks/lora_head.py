"""LoRA on the output layer: our operators with the frozen weight where it is, beside a copy of [W, B], and logits.

    python benchmarks/lora_head.py --out docs/evidence/lora_head.json
    python benchmarks/lora_head.py --weight nf4 --out docs/evidence/lora_head_nf4.json   # or float8
    python benchmarks/lora_head.py --shapes tiny --device cpu

"in parts" is what a fused loss does with PEFT's layer: the logits are [h, s h A^T] [W, B]^T, W is read where it is and
has no gradient. "whole" copies [W, B] and computes a gradient of its size. "standard" and "torch.compile" build the
logits as PEFT's layer does. With a quantised W (bitsandbytes' 4 bits, transformers' ``FP8Linear``), "in parts"
dequantises tiles of it, and the others the whole in each step. Gradients of h, A and B are judged in float64 first,
with the numbers that W has. Rank 16; bfloat16. Time in ms, memory beyond the inputs in MiB, gradients included.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from linear_cross_entropy import SHAPES, WRONG, Bench, gradient, inputs, machine, relative_error
from torch import Tensor, nn

from lit_fused.heads.quantised import weight_of
from lit_fused.ops import linear_cross_entropy, linear_cross_entropy_reference
from lit_fused.ops.frozen_columns import FrozenColumns, frozen_columns, with_frozen_columns

RANK, SCALING, TURNS = 16, 2.0, 3
Way = Callable[[Any, Tensor, Tensor, Tensor, Tensor], Tensor]  # of W's layer, h (N, D), A (R, D), B (V, R), targets


def layer_of(weight: Tensor, kind: str) -> nn.Module:
    """Return a frozen layer with this weight (V, D), or what a quantisation leaves of it."""
    layer = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    layer.weight = nn.Parameter(weight, False)
    if kind == "nf4":
        layers = import_module("bitsandbytes.nn")
        packed = layers.Linear4bit(*reversed(weight.shape), bias=False, quant_type=kind)
        packed.load_state_dict({"weight": weight.cpu()})
        return packed.to(weight.device)  # It is quantised there.
    if kind == "float8":
        from transformers.integrations.finegrained_fp8 import FP8Linear

        with torch.device("meta"):
            small: Any = FP8Linear(*reversed(weight.shape), block_size=(128, 128))
        scale = weight.abs().max().float() / torch.finfo(torch.float8_e4m3fn).max
        small.weight = nn.Parameter((weight / scale).to(torch.float8_e4m3fn), False)
        small.weight_scale_inv = nn.Parameter(scale.expand(small.weight_scale_inv.shape).contiguous(), False)
        return small
    return layer


def frozen_of(layer: Any) -> FrozenColumns:
    weight = weight_of(layer, torch.bfloat16)
    return frozen_columns(weight) or FrozenColumns(weight.__getitem__, weight.shape[1], weight.dtype)


def weight_in(layer: Any) -> Tensor:
    """Return W as a whole."""
    return frozen_of(layer).rows(slice(0, layer.out_features))


def standard(layer: Any, hidden: Tensor, down: Tensor, up: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight_in(layer)) + SCALING * F.linear(F.linear(hidden, down), up)
    return F.cross_entropy(logits.float(), targets)


def in_parts(layer: Any, hidden: Tensor, down: Tensor, up: Tensor, targets: Tensor) -> Tensor:
    beside = torch.cat([hidden, SCALING * F.linear(hidden, down)], -1)
    return linear_cross_entropy(beside, with_frozen_columns(up * 1, frozen_of(layer)), targets, statistics=False)[0]


def whole(layer: Any, hidden: Tensor, down: Tensor, up: Tensor, targets: Tensor) -> Tensor:
    beside = torch.cat([hidden, SCALING * F.linear(hidden, down)], -1)
    return linear_cross_entropy(beside, torch.cat([weight_in(layer), up], -1), targets, statistics=False)[0]


def truth(layer: Any, hidden: Tensor, down: Tensor, up: Tensor, targets: Tensor) -> list[Tensor]:
    """Return the gradients of h, A and B in float64."""
    exact = [t.detach().double().requires_grad_() for t in (hidden, down, up)]
    wide = weight_in(layer).double()
    for rows in torch.arange(len(hidden), device=hidden.device).split(1024):
        h, a, b = exact[0][rows], exact[1], exact[2]
        beside = torch.cat([h, SCALING * F.linear(h, a)], -1)
        loss, _ = linear_cross_entropy_reference(beside, torch.cat([wide, b], -1), targets[rows], reduction="sum")
        (loss / len(hidden)).backward()
    return [gradient(t) for t in exact]


def measured(shape: tuple[int, int, int], kind: str, device: torch.device) -> dict[str, dict[str, Any]]:
    hidden, weight, targets = inputs(shape, device)
    generator = torch.Generator(device).manual_seed(1)
    down = torch.randn(RANK, shape[1], device=device, generator=generator).div(shape[1] ** 0.5).bfloat16()
    up = (torch.randn(shape[2], RANK, device=device, generator=generator) / 64).bfloat16().requires_grad_()
    trained = [hidden.requires_grad_(), down.requires_grad_(), up]
    layer = layer_of(weight, kind)
    del weight
    exact = truth(layer, hidden, down, up, targets)
    bench = Bench(hidden, torch.empty(0, device=device), targets)

    def step(way: Way) -> None:
        for tensor in trained:
            tensor.grad = None
        way(layer, hidden, down, up, targets).backward()

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
    parser.add_argument("--weight", choices=["bfloat16", "nf4", "float8"], default="bfloat16", help="W's numbers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    results: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "machine": machine(device), "shapes": {}}
    for shape in options.shapes:
        results["shapes"][shape] = measured(SHAPES[shape], options.weight, device)
        print(json.dumps({shape: results["shapes"][shape]}, indent=1), flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
