"""Parts of a spot check: the slice of a batch, and the graph of a model cut before its output layer."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from lit_fused.heads.capture import first_argument, whole_activations
from lit_fused.ops.label_checks import IGNORE_INDEX

_LOGITS = 2**22  # of the slice: 16 MiB in float32, of which the check makes some ten copies
_TOKENS = (128, 1024)  # of the slice, at least and at most


def slice_of(batch: Mapping[str, Any], targets: Tensor, vocabulary: int) -> dict[str, Any]:
    """Return the part of a batch (B, T) that is checked: the first rows with a target, at least two, and of long rows
    the positions around the first target. A mean of the rows' means differs from that of all tokens in two rows only.
    Entries that have neither the rows nor the positions of the ``targets`` stay whole."""
    rows, length = targets.shape
    most = min(max(_LOGITS // vocabulary, _TOKENS[0]), _TOKENS[1])
    if rows * length <= most:
        return dict(batch)
    valid = targets != IGNORE_INDEX
    row = int(valid.any(1).int().argmax())
    at_once = min(rows, max(2, most // length))
    row = min(row, rows - at_once)
    of_rows, longest = slice(row, row + at_once), min(length, most // at_once)
    start = min(int(valid[of_rows].any(0).int().argmax()), length - longest)
    of_columns = slice(start, start + longest)

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        if value.shape[:2] == (rows, length):
            return value[of_rows, of_columns].contiguous()  # as a model's own loss may view labels
        if value.shape[:2] == (1, length):
            return value[:, of_columns]
        return value[of_rows] if len(value) == rows else value

    return {name: part(value) for name, value in batch.items()}


def copied(value: Any) -> Any:
    """Return a copy of a cache: a forward pass writes into it, and PEFT's prefix tuning makes one for each batch. Other
    values are returned as they are."""
    if isinstance(value, list):
        return [copied(inner) for inner in value]
    if isinstance(value, dict):
        return {name: copied(inner) for name, inner in value.items()}
    if not isinstance(value, Cache | CacheLayerMixin):
        return value
    found = copy.copy(value)
    vars(found).update({name: copied(inner) for name, inner in vars(value).items()})
    return found


@contextmanager
def leaf_before(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Cut the graph before a layer in a block: its calls get a leaf in place of their input, before the layer's own
    hooks. The list has these leaves. The layer rounds none of its input to 8 bits."""
    leaves: list[Tensor] = []

    def replace(_: nn.Module, args: Any, kwargs: Any) -> Any:
        leaf = first_argument(args, kwargs).detach().requires_grad_(torch.is_grad_enabled())
        leaves.append(leaf)
        return ((leaf, *args[1:]), kwargs) if args else ((), kwargs | {next(iter(kwargs)): leaf})

    handle = layer.register_forward_pre_hook(replace, prepend=True, with_kwargs=True)
    try:
        with whole_activations(layer):
            yield leaves
    finally:
        handle.remove()
