"""Columns of a weight that have no gradient, and need not exist as a whole: the base of a LoRA, a quantised matrix.

A weight (V, D + R) whose first D columns are frozen is given as its last R columns, (V, R), which may be none, with a
note of how rows of the others are made:

    weight = with_frozen_columns(up, FrozenColumns(base.__getitem__, base.shape[1], base.dtype))

The logits are ``h[..., :D] @ W.T + h[..., D:] @ up.T`` of hidden states (..., D + R). A tile of rows of W is made for
each chunk of tokens, in forward and in backward, and dropped after its product; no gradient of W is computed.

C chunk, D frozen columns, R others, T rows of a tile, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_TILE_BYTES = 32 * 2**20
_TILE_UNIT = 64  # rows: whole blocks of a quantisation, and aligned columns of the logits


@dataclass(frozen=True, eq=False)
class FrozenColumns:
    """The first columns of a weight.

    Attributes:
        rows: makes rows (T, D) of a slice, whose start is a multiple of 64.
        width: D.
        stored: the dtype in which all rows are in memory already: products in it take them at once. None if ``rows``
            makes what it returns.
    """

    rows: Callable[[slice], Tensor]
    width: int
    stored: torch.dtype | None = None

    def multiply(self, kernels: Any, hidden_CD: Tensor, weight_VR: Tensor, out_CV: Tensor) -> None:
        """Write the products of hidden states (C, D + R) with the whole weight."""
        # The smaller product comes first, so that the large sum is rounded once; without columns it is zero.
        kernels.multiply(hidden_CD[:, self.width :], weight_VR.T, out_CV)
        for rows, tile_TD in self._tiles(len(weight_VR), hidden_CD.dtype):
            kernels.multiply_add(hidden_CD[:, : self.width], tile_TD.T, out_CV[:, rows])

    def hidden_gradient(self, kernels: Any, dlogits_CV: Tensor, weight_VR: Tensor, out_CD: Tensor) -> None:
        """Write the gradient (C, D + R) of the hidden states."""
        total_CD, is_first = out_CD[:, : self.width], True
        if self.stored != dlogits_CV.dtype:  # A sum over tiles is rounded once.
            wide = torch.promote_types(out_CD.dtype, torch.float32)
            total_CD = out_CD.new_empty(len(out_CD), self.width, dtype=wide)
        for rows, tile_TD in self._tiles(len(weight_VR), dlogits_CV.dtype):
            (kernels.multiply if is_first else kernels.multiply_add)(dlogits_CV[:, rows], tile_TD, total_CD)
            is_first = False
        out_CD[:, : self.width] = total_CD
        if weight_VR.shape[1]:
            kernels.multiply(dlogits_CV, weight_VR, out_CD[:, self.width :])

    def _tiles(self, vocabulary: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        size = vocabulary
        if self.stored != dtype:
            size = max(_TILE_BYTES // (self.width * dtype.itemsize) // _TILE_UNIT, 1) * _TILE_UNIT
        for start in range(0, vocabulary, max(size, 1)):
            rows = slice(start, min(start + size, vocabulary))
            yield rows, self.rows(rows).to(dtype)


# An attribute, as of a weight with a padded gradient: nothing that is made of the weight has it.
_FROZEN = "_frozen_columns"


def with_frozen_columns(weight_VR: Tensor, frozen: FrozenColumns) -> Tensor:
    """Return the last columns (V, R) of a weight, with a note of the first ones. It stands for the whole weight
    (V, D + R) in :func:`lit_fused.ops.linear_cross_entropy`, ``token_scores`` and ``linear_distillation``."""
    setattr(weight_VR, _FROZEN, frozen)
    return weight_VR


def frozen_columns(weight: Tensor) -> FrozenColumns | None:
    return getattr(weight, _FROZEN, None)


def whole_weight(weight: Tensor) -> Tensor:
    """Return the weight (V, D + R), a copy if columns of it are frozen."""
    return weight if frozen_columns(weight) is None else _rows(weight, slice(0, len(weight)))


def row_parts(weight: Tensor, size: int) -> Iterator[Tensor]:
    """Yield a weight (V, D + R) in parts of ``size`` rows, a multiple of 64, without gradients."""
    for start in range(0, len(weight), size):
        yield _rows(weight, slice(start, min(start + size, len(weight)))).detach()


def _rows(weight: Tensor, rows: slice) -> Tensor:
    frozen, own = frozen_columns(weight), weight[rows]
    return own if frozen is None else torch.cat([frozen.rows(rows).to(weight.dtype), own], 1)
