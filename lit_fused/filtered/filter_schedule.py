"""Decide, call by call of a training, whether the filtered backward is worth its second computation of logits.

It is where few columns are kept. So a training begins with the exact backward and tries the filter now and then; from a
trial that keeps few columns on it filters, until a call keeps many. The host reads what a call has kept two calls
later: by then the device has it, and every run of the same data decides alike.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

# This is a share of the columns of all tokens. Where none is dropped a filtered step takes 1.6 times an exact one, and
# where 7 % are kept 0.53 to 0.8: the two are equal somewhere above a third.
MOST_KEPT = 1 / 3
# A filtered backward launches some sixty kernels more, which takes the host about as long as a GPU takes for the work
# that the filter saves at this N x D x V.
LEAST_WORK_OF_A_GPU = 1e12
# Up to this hidden size the exact head is two to three times as fast as the filtered one, whatever is kept.
LARGEST_EXACT_OF_A_GPU = 128
FIRST_TRIAL, LONGEST_GAP = 16, 256  # calls
LAG = 2  # calls


@dataclass
class FilterSchedule:
    """Counts the calls of one training."""

    calls: int = 0
    filtering: bool = False
    gap: int = FIRST_TRIAL
    trial: int = FIRST_TRIAL
    _kept: deque[tuple[int, Tensor, torch.cuda.Event | None]] = field(default_factory=deque)

    def filters(self, hidden_ND: Tensor, vocabulary: int) -> bool:
        """Return whether the next call filters."""
        if _is_captured(hidden_ND):
            return True
        small = hidden_ND.shape[-1] <= LARGEST_EXACT_OF_A_GPU or hidden_ND.numel() * vocabulary < LEAST_WORK_OF_A_GPU
        if hidden_ND.is_cuda and (small or not _was_timed(hidden_ND)):
            return False
        self.calls += 1
        while self._kept and self._kept[0][0] <= self.calls - LAG:
            call, kept, copied = self._kept.popleft()
            if copied is not None:
                copied.synchronize()
            self._decide(call, kept.item())
        return self.filtering or self.calls == self.trial

    def _decide(self, call: int, kept: float) -> None:
        if self.filtering and kept >= MOST_KEPT:
            self.filtering, self.gap = False, FIRST_TRIAL
            self.trial = self.calls + self.gap
        elif call == self.trial and kept < MOST_KEPT:
            self.filtering = True
        elif call == self.trial:
            self.gap = min(2 * self.gap, LONGEST_GAP)
            self.trial = self.calls + self.gap

    def noted(self, statistics: dict[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
        """Return a call's sums over its tokens (), with those of the filter also where it was left out."""
        if "kept_columns" not in statistics:
            every = tokens.to(torch.float32)
            return statistics | {"dropped_mass": 0 * every, "kept_columns": every, "exact_tokens": every}
        kept = statistics["kept_columns"]
        if not _is_captured(kept):
            # Without a token nothing is known, and the last decision stands.
            share = (kept / tokens).where(tokens > 0, 0.0 if self.filtering else 1.0).detach()
            copy = torch.empty_like(share, device="cpu", pin_memory=share.is_cuda).copy_(share, non_blocking=True)
            copied = None
            if share.is_cuda:
                copied = torch.cuda.Event()
                copied.record()
            self._kept.append((self.calls, copy, copied))
        return statistics


def _was_timed(hidden_ND: Tensor) -> bool:
    """Return whether the call is of the kind in which a GPU's filter was timed: Hopper's kernels, in bfloat16."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else hidden_ND.dtype
    capability = torch.cuda.get_device_capability(hidden_ND.device)
    return dtype == torch.bfloat16 and torch.version.hip is None and capability[0] == 9


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
