"""Time the full softmax over a catalogue, and its rankings: milliseconds and extra memory.

    python benchmarks/items.py
    python benchmarks/items.py --shapes 256,16,5000 --device cpu --dtype float32

Of each shape (users N, D hidden, items V): forward and backward of ``linear_cross_entropy``, ``top_items`` with the
rank of each target, the same with 50 items excluded, and both from the matrix of scores, where it has less than 10^10
entries. Medians of five turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_fused import linear_cross_entropy, top_items

SHAPES = ["8192,64,1000000", "8192,128,1000000", "4096,64,10000000", "4096,128,10000000"]
TURNS, K, SEEN = 5, 10, 50


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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="N,D,V")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args(arguments)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
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
