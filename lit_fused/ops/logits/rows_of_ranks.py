"""Losses of rows whose logits are divided over ranks.

Every rank has the hidden states and targets of all tokens, but only its own rows of the weight, and so only its own
columns of the logits. So each rank writes six numbers per token about its own columns, all ranks gather them, and each
makes the same result of the same numbers by the same operations: losses agree to the last bit, and no logit travels.

C rows of a chunk, R ranks, V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernel_path import HeadCall, RowResults
from ..vocabulary_parallel import VocabularyShard

# This number is less than any logit and finite after any shift, and its exponential is zero.
LOWEST = -1e30


class PartialRows(NamedTuple):
    """Sums and maxima (C,) over a rank's own columns x of each row; ``empty`` if ignored, or of a rank without any."""

    maximum: Tensor  # of x, and a finite number in any case
    total: Tensor  # sum of exp(x - maximum)
    weighted: Tensor  # sum of exp(x - maximum) (x - maximum)
    plain: Tensor  # sum of x
    target: Tensor  # the target's logit on the rank that has it, else zero
    rival: Tensor  # the largest x but the target's
    place: Tensor  # int64, the first column of the maximum; only what is wanted is exchanged

    @classmethod
    def empty(cls, rows: int, dtype: torch.dtype, device: torch.device) -> "PartialRows":
        maximum, total, weighted, plain, target, rival = torch.zeros(6, rows, dtype=dtype, device=device)
        place = torch.zeros(rows, dtype=torch.int64, device=device)
        partial = cls(maximum, total, weighted, plain, target, rival, place)
        partial.maximum.fill_(LOWEST)
        partial.rival.fill_(LOWEST)
        return partial


def combine(
    partial: PartialRows, targets_C: Tensor, call: HeadCall, shard: VocabularyShard, results: RowResults
) -> None:
    """Write losses and statistics of every row into ``results`` (C,), the same on every rank, zero for a negative
    target: by one collective, and one more for the largest logits' entries. Equal largest ones are not correct."""
    options = call.options
    numbers = torch.stack(partial[:-1])
    gathered = numbers.new_empty(dist.get_world_size(shard.group), *numbers.shape)
    dist.all_gather(list(gathered), numbers, group=shard.group)
    maximum_RC, total_RC, weighted_RC, plain_RC, target_RC, rival_RC = gathered.unbind(1)

    top_C = maximum_RC.amax(0)
    rescale_RC = torch.exp(maximum_RC - top_C)
    normalizer_C = (total_RC * rescale_RC).sum(0)
    lse_C = top_C + normalizer_C.log()
    logit_C = target_RC.sum(0)
    nll_C = normalizer_C.log() - (logit_C - top_C)  # has the digits of a confident row's 1 - p
    loss_C = nll_C
    if options.label_smoothing:
        smooth_C = lse_C - plain_RC.sum(0) / call.vocabulary
        loss_C = (1 - options.label_smoothing) * nll_C + options.label_smoothing * smooth_C
    if options.z_loss:
        loss_C = loss_C + options.z_loss * lse_C**2

    valid_C = targets_C >= 0
    found = [(results.loss, loss_C), (results.lse, lse_C), (results.nll, nll_C)]
    if options.statistics:
        below_RC = (maximum_RC - top_C).clamp(min=-1e4)
        weighted_C = ((weighted_RC + total_RC * below_RC) * rescale_RC).sum(0)
        entropy_C = lse_C - top_C - weighted_C / normalizer_C  # of the rounded lse: gradients subtract it as well
        found.append((results.entropy, entropy_C))
        torch.logical_and(valid_C, logit_C > rival_RC.amax(0), out=results.correct)
    for result, value_C in found:
        result.copy_(value_C.where(valid_C, 0))
    if results.top1 is not None:
        results.top1.copy_(top1_of_ranks(partial.place, maximum_RC, shard).where(valid_C, -1))


def top1_of_ranks(place_C: Tensor, maximum_RC: Tensor, shard: VocabularyShard) -> Tensor:
    """Return the entries (C,) of the largest logits, given each rank's own column of its maximum, and the maxima."""
    places_RC = place_C.new_empty(maximum_RC.shape)
    dist.all_gather(list(places_RC), place_C + shard.start, group=shard.group)
    return places_RC.gather(0, maximum_RC.argmax(0, keepdim=True))[0]
