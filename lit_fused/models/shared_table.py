"""One gradient for a table that is looked up and is the output layer: autograd would make one for each, and a sum.

V items, D hidden; the table has V + 1 rows, the first of the padding.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lit_fused.ops.kernel_path import with_padded_gradient


class _RowsAndItems(torch.autograd.Function):
    """Rows that were looked up in a table (V + 1, D), and those of its items."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.set_materialize_grads(False)
        ctx.shape = table.shape
        return rows.view_as(rows), table[1:]

    @staticmethod
    def backward(ctx: Any, rows: Tensor | None, items_VD: Tensor | None) -> Any:  # type: ignore[override]
        given = rows if items_VD is None else items_VD
        assert given is not None
        total = None if items_VD is None else _within_padding(items_VD)
        if total is None:
            total = given.new_empty(ctx.shape)
            total[1:] = 0 if items_VD is None else items_VD
        total[0] = 0  # of the padding
        if rows is not None:
            ids, rows = ctx.saved_tensors[0].flatten(), rows.reshape(-1, ctx.shape[1])
            counted = ids > 0
            # Zeros for different rows: many of one row would be added one after the other.
            others = torch.arange(len(ids), device=ids.device) % len(total)
            ids, rows = ids.where(counted, others), rows.masked_fill(~counted[:, None], 0)
            if total.is_cuda:  # There the sum of index_add_ depends on the order of threads.
                total.index_put_((ids,), rows, accumulate=True)
            else:
                total.index_add_(0, ids, rows)
        return total, None, None


def _within_padding(items_VD: Tensor) -> Tensor | None:
    """Return the gradient of a table, written around that of its items if a row is free before it, or None."""
    storage, (items, size) = items_VD.untyped_storage(), items_VD.shape
    with_free_row = (items + 1) * size * items_VD.element_size()
    if not items_VD.is_contiguous() or (items_VD.storage_offset(), storage.nbytes()) != (size, with_free_row):
        return None
    return items_VD.new_empty(0).set_(storage, 0, (items + 1, size), (size, 1))


class SharedTable:
    """Lets the first look-up of a forward pass and the output layer have one gradient of their table."""

    def __init__(self, table: nn.Embedding) -> None:
        self.items: Tensor | None = None  # the items' rows of the pass that runs, once it has looked up
        self.is_open = False
        table.register_forward_hook(self._look_up)

    def _look_up(self, table: nn.Embedding, inputs: tuple[Tensor, ...], rows: Tensor) -> Tensor | None:
        """Return rows that were looked up, to be used in their place, and note the items' rows; or None."""
        if torch.compiler.is_compiling() or not (inputs and self.is_open and self.items is None):
            return None
        plain = table.padding_idx == 0 and table.max_norm is None and not (table.scale_grad_by_freq or table.sparse)
        # In half precision the sum must not be rounded after each of its terms.
        if not plain or rows.grad_fn is None or rows.dtype != table.weight.dtype or rows.dtype.itemsize < 4:
            return None
        joined: Any = _RowsAndItems.apply(table.weight, rows.detach(), inputs[0])
        self.items = with_padded_gradient(joined[1])
        return joined[0]

    def __enter__(self) -> None:
        self.is_open, self.items = True, None

    def __exit__(self, *_: Any) -> None:
        self.is_open, self.items = False, None
