"""One gradient for a table that is looked up and is the output layer: autograd would make one for each, and a sum.

V items, D hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn


class _RowsAndItems(torch.autograd.Function):
    """Rows that were looked up in a table (V + 1, D), and those of its items, all but the first."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.save_for_backward(ids)
        ctx.set_materialize_grads(False)
        ctx.shape = table.shape
        return rows.view_as(rows), table[1:]

    @staticmethod
    def backward(ctx: Any, rows: Tensor | None, items_VD: Tensor | None) -> Any:  # type: ignore[override]
        given = rows if items_VD is None else items_VD
        assert given is not None
        total = given.new_empty(ctx.shape)
        total[0] = 0
        total[1:] = 0 if items_VD is None else items_VD
        if rows is not None:
            ids, rows = ctx.saved_tensors[0].flatten(), rows.reshape(-1, ctx.shape[1])
            if total.is_cuda:  # There the sum of index_add_ depends on the order of threads.
                total.index_put_((ids,), rows, accumulate=True)
            else:
                total.index_add_(0, ids, rows)
            total[0] = 0  # of the padding
        return total, None, None


class SharedTable:
    """Lets the first look-up of a forward pass and the output layer have one gradient of their table."""

    def __init__(self, table: nn.Embedding) -> None:
        self.items: Tensor | None = None  # the items' rows of the pass that runs, once it has looked up
        self.is_open = False
        table.register_forward_hook(self._look_up)

    def _look_up(self, table: nn.Embedding, inputs: tuple[Tensor, ...], rows: Tensor) -> Tensor | None:
        if torch.compiler.is_compiling() or not (self.is_open and self.items is None and inputs):
            return None
        plain = table.padding_idx == 0 and table.max_norm is None and not (table.scale_grad_by_freq or table.sparse)
        # In half precision the sum must not be rounded after each of its terms.
        if not plain or rows.grad_fn is None or rows.dtype != table.weight.dtype or rows.dtype.itemsize < 4:
            return None
        found, self.items = _RowsAndItems.apply(table.weight, rows.detach(), inputs[0])  # type: ignore[misc]
        return found

    def __enter__(self) -> None:
        self.is_open, self.items = True, None

    def __exit__(self, *_: Any) -> None:
        self.is_open, self.items = False, None
