"""A vocabulary that is divided over the processes of a test, each of which has a part of its entries."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lit_fused.ops.vocabulary_parallel import VocabularyShard


@cache
def group_of(ranks: int) -> dist.ProcessGroup:
    """Return the first ranks as a group, which all ranks have to ask for."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    group: Any = dist.new_group(list(range(ranks)))
    return group


def shard_of(rank: int, sizes: Sequence[int], *, tokens_differ: bool = False) -> tuple[VocabularyShard, slice]:
    """Return a rank's part of the vocabulary, for the heads and as a slice of its entries."""
    start = sum(sizes[:rank])
    shard = VocabularyShard(start, sum(sizes), max(sizes), group_of(len(sizes)), tokens_differ=tokens_differ)
    return shard, slice(start, start + sizes[rank])


def part_of(tensors: Sequence[Tensor], own: slice) -> list[Tensor]:
    """Return hidden states, and some entries' rows of a weight and a bias."""
    return [tensors[0].detach(), *(tensor.detach()[own] for tensor in tensors[1:])]


def joined(found: Sequence[tuple[Tensor, dict[str, Tensor], Sequence[Tensor]]]) -> tuple[Tensor, Any, list[Tensor]]:
    """Return (loss, statistics, gradients) of ranks with the same tokens, which must have the same bits."""
    loss, statistics, (hidden, *_) = found[0]
    for other, others, gradients in found:
        assert torch.equal(loss, other)
        assert statistics.keys() == others.keys()
        assert all(torch.equal(value, others[name]) for name, value in statistics.items())
        assert torch.equal(hidden, gradients[0])
    return (
        loss,
        dict(statistics),
        [hidden, *map(torch.cat, zip(*(gradients[1:] for *_, gradients in found), strict=True))],
    )
