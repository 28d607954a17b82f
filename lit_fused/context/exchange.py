"""Exchange, between ranks that share a sequence, all heads of some tokens for some heads of all tokens, and back.

B rows, T tokens of a whole row, t = ceil(T / c) tokens of each of c ranks, H heads, D numbers of a head. The last
rank's part is padded to t tokens. The padding never reaches attention.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

_groups: dict[str, dist.ProcessGroup] = {}  # An operator takes no group, but its name.


class Ranks:
    """The ranks that share each sequence, and this rank's place among them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.name = group, group.group_name
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        _groups[self.name] = group

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's positions (B, t, ...) of (B, T, ...). Behind the end the last position is repeated."""
        length, part = whole.shape[1], -(-whole.shape[1] // self.size)
        own = torch.arange(self.rank * part, (self.rank + 1) * part, device=whole.device)
        return whole.index_select(1, own.clamp(max=length - 1))

    def targets(self, whole: Tensor, ignored: int) -> Tensor:
        """Return this rank's positions (B, t) of targets (B, T), and ``ignored`` behind the end."""
        return self.part(F.pad(whole, (0, -whole.shape[1] % self.size), value=ignored))

    def whole(self, part: Tensor, length: int) -> Tensor:
        """Return the positions of all ranks, (B, T, ...) of (B, t, ...), with gradients, on each rank."""
        gathered: Any = _AllParts.apply(part, self)
        return gathered[:, :length]


class _AllParts(torch.autograd.Function):
    """Gathers dimension 1. Each rank computes the loss of the whole: the gradients of all of them are summed."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(ranks.size)]
        dist.all_gather(parts, part.contiguous(), group=ranks.group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.ranks.group)
        return ctx.ranks.part(summed), None


@torch.library.custom_op("lit_fused::exchange", mutates_args=())
def exchange(sent: Tensor, group: str) -> Tensor:
    """Send entry r of (c, ...) to rank r of a group; return what all ranks have sent to this one, (c, ...)."""
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=_groups[group])
    return received


@exchange.register_fake
def _(sent: Tensor, group: str) -> Tensor:
    return torch.empty_like(sent)


def _remember_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[1]


def _exchange_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return exchange(gradient.contiguous(), ctx.group), None


exchange.register_autograd(_exchange_back, setup_context=_remember_group)


def heads_of_all_tokens(parts: Sequence[Tensor], length: int, size: int, group: str) -> list[Tensor]:
    """Return (B, H / c, T, D), the rank's heads, of each (B, H, t, D), the rank's tokens."""
    if len({part.shape[-1] for part in parts}) > 1:  # Keys are longer than values in some models.
        return [x for part in parts for x in heads_of_all_tokens([part], length, size, group)]
    B, _, t, D = parts[0].shape
    heads = [part.shape[1] // size for part in parts]
    sent = torch.cat([part.reshape(B, size, -1, t, D) for part in parts], 2).transpose(0, 1).contiguous()
    received = exchange(sent, group).permute(1, 2, 0, 3, 4)  # (B, H / c, c, t, D)
    return [part.reshape(B, -1, size * t, D)[:, :, :length] for part in received.split(heads, 1)]


def tokens_of_all_heads(whole: Tensor, size: int, group: str) -> Tensor:
    """Return (B, t, H, D), the rank's tokens, of (B, T, H / c, D), the rank's heads."""
    B, T, heads, D = whole.shape
    padded = F.pad(whole, (0, 0, 0, 0, 0, -T % size))
    received = exchange(padded.reshape(B, size, -1, heads, D).transpose(0, 1).contiguous(), group)
    return received.permute(1, 2, 0, 3, 4).reshape(B, -1, size * heads, D)
