"""The head with its vocabulary divided over GPUs, against the whole head on one of them.

    torchrun --nproc-per-node 2 benchmarks/vocabulary_parallel.py
    torchrun --nproc-per-node 2 benchmarks/vocabulary_parallel.py --tokens 256 --shapes 64x1000 --repeats 1   # on a CPU

Forward and backward of the summed loss in bfloat16. Before a shape is timed, the divided head's gradients have to be as
close to the whole head's as two roundings to bfloat16 allow.
"""

import argparse
import os
from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from lit_fused.ops import linear_cross_entropy
from lit_fused.ops.vocabulary_parallel import VocabularyShard

SHAPES = ["1024x151936", "2048x151936", "2304x256000"]  # hidden size x vocabulary
TOLERANCE = 2**-6  # relative, in the Euclidean norm


def inputs(tokens: int, hidden_size: int, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states that know their targets, the weight, and targets of which every seventh is ignored."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, device=device, generator=generator)
    weight = torch.randn(vocabulary, hidden_size, device=device, generator=generator) / hidden_size**0.5
    targets = torch.randint(vocabulary, (tokens,), device=device, generator=generator)
    hidden += hidden_size**0.5 * weight[targets]
    targets[::7] = -100
    return hidden.bfloat16(), weight.bfloat16(), targets


def step(hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabularyShard | None) -> None:
    hidden.grad = weight.grad = None
    linear_cross_entropy(hidden, weight, targets, reduction="sum", shard=shard)[0].backward()


def milliseconds(run: Callable[[], None], repeats: int, device: torch.device) -> float:
    """The mean of ``repeats`` runs, after two that compile and warm up."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    for _ in range(2):
        run()
    wait()
    start = perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return (perf_counter() - start) / repeats * 1000


def check(found: Tensor | None, expected: Tensor | None, what: str) -> None:
    assert found is not None
    assert expected is not None
    error = ((found.float() - expected.float()).norm() / expected.float().norm()).item()
    if not error <= TOLERANCE:
        raise SystemExit(f"the gradient of {what} differs by {error:.1e} from that of the whole head: nothing is timed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="hidden size x vocabulary")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if rank == 0:
        print(f"| D x V | one device (ms) | {ranks} devices (ms) | of 1 / {ranks} of the time |\n|---|---:|---:|---:|")
    for shape in arguments.shapes:
        hidden_size, vocabulary = map(int, shape.split("x"))
        hidden, weight, targets = inputs(arguments.tokens, hidden_size, vocabulary, device)
        rows = -(-vocabulary // ranks)
        start = min(rank * rows, vocabulary)
        shard = VocabularyShard(start, vocabulary, rows, dist.group.WORLD)  # type: ignore[arg-type]
        part = weight[start : start + rows].clone().requires_grad_()
        whole_hidden, hidden = hidden.clone().requires_grad_(), hidden.requires_grad_()
        weight.requires_grad_()

        step(whole_hidden, weight, targets, None)
        step(hidden, part, targets, shard)
        assert weight.grad is not None
        check(hidden.grad, whole_hidden.grad, "the hidden states")
        check(part.grad, weight.grad[start : start + rows], "the weight")
        whole = milliseconds(lambda h=whole_hidden, w=weight, t=targets: step(h, w, t, None), arguments.repeats, device)
        divided = milliseconds(lambda h=hidden, w=part, t=targets, s=shard: step(h, w, t, s), arguments.repeats, device)
        if rank == 0:
            print(f"| {shape} | {whole:.1f} | {divided:.1f} | {whole / divided / ranks:.0%} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
