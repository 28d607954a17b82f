"""The head with its vocabulary divided over GPUs: against the whole head on one of them, Liger's, and FSDP2's gathered.

    torchrun --nproc-per-node 2 benchmarks/vocabulary_parallel.py
    torchrun --nproc-per-node 2 benchmarks/vocabulary_parallel.py --tokens 256 --shapes 64x1000 --repeats 1   # on a CPU
    torchrun --nproc-per-node 8 benchmarks/vocabulary_parallel.py --own-tokens --shapes 8192x5376x262144

For a comparison with Liger's: ``--shapes 8192x4096x128256 4096x2048x151936 16384x4096x262144``, and ``--scores``.

Forward and backward in bfloat16 of the summed loss, or, with ``--scores``, of the tokens' log-probabilities and
entropies, as policies need them. Before a shape is timed, the divided head's gradients have to be as close to the whole
head's as two roundings to bfloat16 allow.

Without ``--own-tokens``, ranks have the same tokens, as under tensor parallelism. With it each has tokens of its own,
as under FSDP2: the weight is gathered and its gradient reduced (``gather_head=True``), or the hidden states are.
"""

import argparse
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lit_fused.ops import linear_cross_entropy, token_scores
from lit_fused.ops.vocabulary_parallel import VocabularyShard

SHAPES = ["1024x151936", "2048x151936", "2304x256000"]  # hidden size x vocabulary, perhaps after the tokens of a rank
TOLERANCE = 2**-6  # relative, in the Euclidean norm
ENTROPY_WEIGHT = 0.1
Step = Callable[[], Sequence[Tensor]]  # returns the gradients of hidden states and weight


def inputs(
    tokens: int, hidden_size: int, vocabulary: int, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states that give their targets a probability of about one half, the weight, and targets of which every
    seventh is ignored. ``seed`` is that of the tokens."""
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(vocabulary, hidden_size, device=device, generator=generator) / hidden_size**0.5
    generator.manual_seed(1 + seed)
    hidden = torch.randn(tokens, hidden_size, device=device, generator=generator)
    targets = torch.randint(vocabulary, (tokens,), device=device, generator=generator)
    hidden += (math.log(vocabulary) + 0.5) * weight[targets]  # Other entries' exponentials have a mean of exp(0.5).
    targets[::7] = -100
    return hidden.bfloat16(), weight.bfloat16(), targets


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def step_of(hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabularyShard | None, scores: bool) -> Step:
    hidden, weight = leaf(hidden), leaf(weight)

    def step() -> Sequence[Tensor]:
        if scores:
            of_tokens = token_scores(hidden, weight, targets, shard=shard)
            assert of_tokens.entropy is not None
            loss = -of_tokens.log_prob.sum() - ENTROPY_WEIGHT * of_tokens.entropy.sum()
        else:
            loss, _ = linear_cross_entropy(hidden, weight, targets, reduction="sum", shard=shard)
        return torch.autograd.grad(loss, (hidden, weight))

    return step


def liger_step(hidden: Tensor, weight: Tensor, targets: Tensor, group: Any, scores: bool) -> Step | str:
    """Return a step of Liger's tensor-parallel head, or why there is none. Without NVSHMEM it is the one that Liger has
    for any card."""
    ranks = dist.get_world_size(group)
    if not hidden.is_cuda:
        return "needs GPUs"
    sizes = torch.tensor([len(weight), -len(weight)], device=weight.device)
    dist.all_reduce(sizes, dist.ReduceOp.MAX, group)
    if sizes[0] != -sizes[1]:
        return f"needs {ranks} equal parts"
    try:
        from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyTPFunction as Head
    except ImportError:
        return "not installed"
    hidden, weight = leaf(hidden), leaf(weight)

    def step() -> Sequence[Tensor]:
        found: Any = Head.apply(hidden, weight, targets, group, return_entropy=scores)
        loss = found[0].sum() - ENTROPY_WEIGHT * found[1].sum() if scores else found.sum()
        return torch.autograd.grad(loss, (hidden, weight))

    return step


class WholeHead(nn.Module):
    """The head under FSDP2, which gathers its weight for forward and backward."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, self.weight, targets, reduction="sum")[0]


def gathered_step(hidden: Tensor, weight: Tensor, targets: Tensor, device: torch.device) -> Step:
    ranks = dist.get_world_size()
    head: Any = WholeHead(weight)
    fully_shard(head, mesh=init_device_mesh(device.type, (ranks,)))
    hidden = leaf(hidden)

    def step() -> Sequence[Tensor]:
        hidden.grad = None
        head.zero_grad()
        head(hidden, targets).backward()
        assert hidden.grad is not None
        return hidden.grad, head.weight.grad.to_local() * ranks  # FSDP2's is the mean over ranks.

    return step


def measured(run: Step, repeats: int, device: torch.device) -> tuple[float, float]:
    """Return the mean time of ``repeats`` runs in ms, after two that compile and warm up, and the GiB that a run takes
    beside what was there before."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    for _ in range(2):
        run()
    wait()
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = perf_counter()
    for _ in range(repeats):
        run()
    wait()
    time = (perf_counter() - start) / repeats * 1000
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return time, (peak - before) / 2**30


def error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative error of the gradients of hidden states and weight on any rank."""
    of_each = [(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(found, expected, strict=True)]
    worst = torch.stack(of_each).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def check(found: Sequence[Tensor], expected: Sequence[Tensor], of: str) -> None:
    """End all ranks if gradients differ on one of them."""
    if not (worst := error(found, expected)) <= TOLERANCE:
        raise SystemExit(f"a gradient of {of} differs from that of the whole head by {worst:.1e}; nothing is timed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank, for shapes without them")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="hidden size x vocabulary, or tokens x both")
    parser.add_argument("--own-tokens", action="store_true", help="ranks have different tokens, as under FSDP2")
    parser.add_argument("--scores", action="store_true", help="log-probabilities and entropies, under the same tokens")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    group: Any = dist.group.WORLD
    if rank == 0 and arguments.own_tokens:
        print(f"| N x D x V on each of {ranks} | weight gathered, ms | GiB | rows kept, ms | GiB |")
        print("|---|---:|---:|---:|---:|")
    elif rank == 0:
        share = f"of 1 / {ranks} of the time"
        print(f"| N x D x V | one device, ms | GiB | {ranks} devices, ms | GiB | {share} | Liger, ms | GiB |")
        print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for shape in arguments.shapes:
        tokens, hidden_size, vocabulary = [arguments.tokens, *map(int, shape.split("x"))][-3:]
        hidden, weight, targets = inputs(
            tokens, hidden_size, vocabulary, device, seed=rank if arguments.own_tokens else 0
        )
        size = -(-vocabulary // ranks)
        start = min(rank * size, vocabulary)
        shard = VocabularyShard(start, vocabulary, size, group, tokens_differ=arguments.own_tokens)
        rows = slice(start, start + size)
        divided = step_of(hidden, weight[rows], targets, shard, arguments.scores)
        time = partial(measured, repeats=arguments.repeats, device=device)
        name = f"{tokens} x {hidden_size} x {vocabulary}"
        if arguments.own_tokens:
            whole = gathered_step(hidden, weight, targets, device)
            check(divided(), whole(), "the kept rows")
            del weight
            (ms, gib), (own_ms, own_gib) = time(whole), time(divided)
            if rank == 0:
                print(f"| {name} | {ms:.1f} | {gib:.2f} | {own_ms:.1f} | {own_gib:.2f} |", flush=True)
            continue
        whole = step_of(hidden, weight, targets, None, arguments.scores)
        of_hidden, of_weight = whole()
        expected = of_hidden, of_weight[rows]
        check(divided(), expected, "the divided head")
        liger = liger_step(hidden, weight[rows], targets, group, arguments.scores)
        if callable(liger) and not (worst := error(liger(), expected)) <= TOLERANCE:
            liger = f"wrong gradients: {worst:.0e}"
        del of_hidden, of_weight, expected
        (ms, gib), (own_ms, own_gib) = time(whole), time(divided)
        of_liger = "{:.1f} | {:.2f}".format(*time(liger)) if callable(liger) else f"{liger} |"
        if rank == 0:
            ours = f"{ms:.1f} | {gib:.2f} | {own_ms:.1f} | {own_gib:.2f} | {ms / own_ms / ranks:.0%}"
            print(f"| {name} | {ours} | {of_liger} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
