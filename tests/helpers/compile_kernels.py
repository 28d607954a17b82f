"""Compile every kernel that calls of the heads launch, for a card that is not here, and print them as JSON.

    TRITON_CACHE_DIR=... python tests/helpers/compile_kernels.py 90 hopper narrow logits

Triton's interpreter neither checks types nor counts shared memory: what it runs may not compile. Nothing is computed:
outputs hold what their memory held.
"""

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distillation_cases import LOSSES, answer
from distillation_cases import case as distillation_case
from head_cases import fused, make, run, scored
from kernels_of import kernels_of
from torch._C._distributed_c10d import HashStore
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lit_fused.ops import linear_cross_entropy, linear_distillation, token_scores
from lit_fused.ops.hopper.hopper_rows import GROUP_TILES, TILE_COLUMNS
from lit_fused.ops.vocabulary_parallel import VocabularyShard

OF_WAY = {
    "hopper": ["ops.hopper.hopper_kernels", "filtered.filtered_kernels"],
    "narrow": ["ops.hopper.narrow_kernels"],
    "logits": ["ops.logits.rows_triton", "ops.logits.divergence_triton"],
    "invariant": ["ops.invariant.tiles_triton"],
}
FEATURES: list[dict[str, Any]] = [
    {},
    {"bias": True, "softcap": 2.0, "scale": 1.7, "z_loss": 1e-2, "token_weights": True},
    {"label_smoothing": 0.1},
]


class Card:
    """The answers that Triton wants of a GPU before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


compiled: dict[str, list[dict[str, int | bool]]] = {}
seen = set()
launch = JITFunction.run


def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
    kernel = launch(self, *args, grid=grid, warmup=True, **constants)
    if kernel is not None and kernel.hash not in seen:
        seen.add(kernel.hash)
        found = {"shared": kernel.metadata.shared, "float64": ".f64" in kernel.asm["ptx"]}
        compiled.setdefault(_name(self), []).append(found)
    return kernel


def _name(kernel: JITFunction) -> str:
    return f"{kernel.fn.__module__.removeprefix('lit_fused.')}.{kernel.fn.__name__}"


def launched_of(way: str) -> list[str]:
    """Return the kernels that the way's modules launch, not those that other kernels call."""
    found = []
    for name in OF_WAY[way]:
        module = importlib.import_module(f"lit_fused.{name}")
        source = Path(str(module.__file__)).read_text()
        kernels = [kernel for kernel in vars(module).values() if isinstance(kernel, JITFunction)]
        found += [_name(kernel) for kernel in kernels if re.search(rf"\b{kernel.fn.__name__}\[", source)]
    return found


def heads(way: str, dtype: torch.dtype) -> None:
    assert dist.group.WORLD is not None
    shard = VocabularyShard(0, 1000, 1000, dist.group.WORLD)
    for hidden_size in (64, 128) if way == "narrow" else (64,):
        for options in FEATURES[:-1] if way == "narrow" else FEATURES:
            tensors, targets = make(300, hidden_size, 1000, dtype, bias="bias" in options)
            run(linear_cross_entropy, tensors, targets, **options)
            run(linear_cross_entropy, tensors, targets, **options, shard=shard)
            if "label_smoothing" not in options:
                run(fused, tensors, targets, **options, filter_eps=1e-4)
            of_logits = {name: option for name, option in options.items() if name in ("bias", "scale", "softcap")}
            scored(token_scores, tensors, targets, targets.clamp(min=0)[:, None], **of_logits)
        if dtype == torch.bfloat16:
            tensors, targets = make(300, hidden_size, 1000, torch.float32, bias=True)
            with torch.autocast("cpu", dtype):  # the gradients are float32
                run(linear_cross_entropy, tensors, targets)
    if way == "hopper":  # the tiles of a wide vocabulary are first joined in groups
        tensors, targets = make(64, 64, GROUP_TILES * TILE_COLUMNS + 1, dtype)
        run(linear_cross_entropy, tensors, targets)


def main() -> None:
    capability, ways = int(sys.argv[1]), sys.argv[2:]
    card: Any = Card(capability)
    driver.set_active(card)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    JITFunction.run = compile_only
    if "invariant" in ways:
        with kernels_of("hopper"), torch.no_grad():
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                for options in FEATURES[:-1]:
                    tensors, targets = make(300, 64, 1000, dtype, bias="bias" in options)
                    of_head: dict[str, Any] = {name: options[name] for name in ("scale", "softcap") if name in options}
                    of_head["bias"] = tensors[2] if len(tensors) > 2 else None
                    token_scores(tensors[0], tensors[1], targets, invariant=True, **of_head)
                    linear_cross_entropy(tensors[0], tensors[1], targets, invariant=True)
    for way in ways:
        if way == "invariant":
            continue
        with kernels_of(way):
            heads(way, torch.bfloat16)
    if "logits" in ways:
        with kernels_of("logits"):
            for dtype in (torch.float16, torch.float32):
                heads("logits", dtype)
            for loss in LOSSES.values():
                for head in ("plain", "everything"):
                    tensors, targets, teacher, options = distillation_case(head, torch.bfloat16, n=40)
                    answer(linear_distillation, tensors, targets, teacher, **options, **loss)
    launched = [name for way in ways for name in launched_of(way)]
    print(json.dumps({"launched": launched, "compiled": compiled}))


if __name__ == "__main__":
    main()
