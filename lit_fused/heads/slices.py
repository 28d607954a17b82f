"""Parts of a spot check: the slice of a batch, the model afterwards as it was, and its graph cut before the head."""

import copy
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from lit_fused.heads.capture import first_argument
from lit_fused.ops.label_checks import IGNORE_INDEX

_LOGITS = 2**22  # of the slice: 16 MiB in float32, of which the check makes some ten copies
_TOKENS = (128, 1024)  # of the slice, at least and at most


def slice_of(batch: Mapping[str, Any], targets: Tensor, vocabulary: int) -> dict[str, Any]:
    """Return the part of a batch (B, T) that is checked: the first rows with a target or, of a long row, the positions
    around the first target. Entries that have neither the rows nor the positions of the ``targets`` stay whole."""
    rows, length = targets.shape
    most = min(max(_LOGITS // vocabulary, _TOKENS[0]), _TOKENS[1])
    if rows * length <= most:
        return dict(batch)
    valid = targets != IGNORE_INDEX
    row = int(valid.any(1).int().argmax())
    at_once = max(1, most // length)
    row = min(row, rows - at_once)
    of_rows, start = slice(row, row + at_once), 0
    if length > most:
        start = min(int(valid[row].int().argmax()), length - most)
    of_columns = slice(start, start + min(length, most))

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        if value.shape[:2] == (rows, length):
            return value[of_rows, of_columns]
        if value.shape[:2] == (1, length):
            return value[:, of_columns]
        return value[of_rows] if len(value) == rows else value

    return {name: part(value) for name, value in batch.items()}


def copied(value: Any) -> Any:
    """Return a copy of a cache, into which a forward pass writes (PEFT's prefix tuning makes one for each batch), and
    of the tensors in it. Other values are returned as they are."""
    if isinstance(value, list):
        return [copied(inner) for inner in value]
    if isinstance(value, dict):
        return {name: copied(inner) for name, inner in value.items()}
    if isinstance(value, Cache | CacheLayerMixin):
        found = copy.copy(value)
        vars(found).update({name: _cloned(inner) for name, inner in vars(value).items()})
        return found
    return value


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copied(value)


class Leaf:
    """The input of a layer, cut from the graph before it, with the random numbers that the layer then draws."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self._thread = layer, threading.get_ident()
        self.value = torch.empty(0)

    @contextmanager
    def of_calls(self) -> Iterator[None]:
        """Give the layer a leaf in place of its input, before its own hooks, in calls in a block."""
        handle = self.layer.register_forward_pre_hook(self._replace, prepend=True, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _replace(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:  # It generates, for example.
            return None
        value = first_argument(args, kwargs).detach()
        self.value = value.requires_grad_(torch.is_grad_enabled())
        self.state = torch.get_rng_state(), torch.cuda.get_rng_state(value.device) if value.is_cuda else None
        return ((self.value, *args[1:]), kwargs) if args else ((), kwargs | {next(iter(kwargs)): self.value})

    def call_again(self) -> Any:
        """Call the layer alone, with the input and the random numbers that it had."""
        self.draw_again()
        return self.layer(self.value)

    def draw_again(self) -> None:
        """Go back to the random numbers that the layer had."""
        torch.set_rng_state(self.state[0])
        if self.state[1] is not None:
            torch.cuda.set_rng_state(self.state[1], self.value.device)
