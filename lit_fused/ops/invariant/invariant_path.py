"""Scores with the same bits whatever else is computed with them: other tokens, chunks, packing, order, ranks.

A sum of floating point numbers depends on its order, and libraries choose the order by the shape: a BLAS has another
kernel for one row than for many. Here the order is fixed. The vocabulary is cut into tiles of one width; a kernel of
one shape computes a tile's logits of some rows and, of each row, their maximum and sums; one fixed tree joins the
tiles' numbers. Rows do not mix, so a row's scores depend on the row, the weight and the options alone.

Backward is that of the fast path, given these scores.

C rows of a chunk, D hidden, N tokens, T tiles, V vocabulary.
"""

from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernel_path import (
    ForwardResult,
    Gradients,
    HeadCall,
    Inputs,
    KernelPath,
    KnownRows,
    RowResults,
    own_columns,
)
from ..logits.logits_path import LogitsPath
from ..options import LossOptions, chunks
from ..triton_available import kernels_can_be_built
from ..user_error import UserError
from .tile_sums import Part, TileSums, parts_of

CHUNK_ROWS = 4096  # no logits are stored; the tiles' sums of a chunk take 12 bytes per row and tile


class TileKernels(Protocol):
    """The kernels of a device."""

    handles_ignored: bool
    width: int  # of a tile

    def aligned(self, matrix: Tensor) -> Tensor:
        """Return the matrix, or a copy that ``write`` can read."""
        ...

    def write(self, hidden_CD: Tensor, part: Part, columns_C: Tensor, sums: TileSums, options: LossOptions) -> None:
        """Write the sums of a part's tiles, and the logits of the targets that are columns of it, the others' being
        negative."""
        ...

    def join(self, sums: TileSums, targets_C: Tensor, results: RowResults) -> None:
        """Write log-sum-exp, nll, entropy, correctness and top1 of each row whose target is not negative."""
        ...

    def logits_of(self, columns: Tensor, inputs: Inputs, options: LossOptions, logits: Tensor) -> None:
        """Write the logits of K columns (N, K) of each row, zero where negative, in nats."""
        ...


def tile_kernels(hidden_ND: Tensor, call: HeadCall) -> TileKernels:
    """Return the kernels for this device and dtype, or raise a UserError where there are none."""
    if hidden_ND.is_cpu:
        from .tiles_torch import TorchTiles

        return TorchTiles()
    is_hopper = hidden_ND.is_cuda and torch.version.hip is None
    is_hopper = is_hopper and torch.cuda.get_device_capability(hidden_ND.device)[0] == 9
    if not is_hopper or call.compute_dtype == torch.float64 or not kernels_can_be_built():
        found = torch.cuda.get_device_name(hidden_ND.device) if hidden_ND.is_cuda else hidden_ND.device.type
        raise UserError(
            "invariant=True needs a CPU, or a Hopper GPU with Triton and float32, bfloat16 or float16, got "
            f"{call.compute_dtype} on {found}; leave it out"
        )
    from .tiles_triton import TritonTiles

    return TritonTiles(call.compute_dtype)


class InvariantPath(KernelPath):
    """The path whose results of a row depend on that row alone."""

    kernels: TileKernels

    def __init__(self, kernels: Any, fast: KernelPath) -> None:
        """Take ``fast``, whose backward it has."""
        super().__init__(kernels)
        self.fast, self.rows_have_factors = fast, fast.rows_have_factors

    def forward(self, inputs: Inputs, factor_N: Tensor | None, call: HeadCall) -> ForwardResult:
        hidden_ND, weight_VD, bias_V, targets_N = inputs
        results = RowResults.zeros(len(targets_N), hidden_ND.device, call)
        width, group = self.kernels.width, None if call.shard is None else call.shard.group
        parts = [
            part._replace(weight_VD=self.kernels.aligned(part.weight_VD))
            for part in parts_of(weight_VD, bias_V, call.shard, width)
        ]
        hidden_ND = self.kernels.aligned(hidden_ND)
        for chunk in chunks(len(targets_N), CHUNK_ROWS):
            targets_C, tiles = targets_N[chunk], -(-call.vocabulary // width)
            sums = TileSums.zeros(tiles, len(targets_C), call.result_dtype, hidden_ND.device)
            for part in parts:
                columns_C = targets_C - part.tiles.start * width
                columns_C = columns_C.where((columns_C >= 0) & (columns_C < len(part.weight_VD)), -1)
                self.kernels.write(hidden_ND[chunk], part, columns_C, sums.of(part.tiles), call.options)
            if group is not None:
                sums.exchange(group)
            self.kernels.join(sums, targets_C, results.of(chunk))
        results.loss.copy_(results.nll)
        if call.options.z_loss:
            results.loss.add_(call.options.z_loss * results.lse**2)
        return ForwardResult(results)

    def backward(self, inputs: Inputs, known: KnownRows, saved: tuple[Tensor, ...], call: HeadCall) -> Gradients:
        if isinstance(self.fast, LogitsPath) and call.compute_dtype != call.result_dtype:
            # It would round its logits to half precision, and these scores are not those of rounded ones.
            hidden_ND, weight_VD, bias_V, targets_N = inputs
            wide = hidden_ND.to(call.result_dtype), weight_VD.to(call.result_dtype)
            inputs, call = Inputs(*wide, bias_V, targets_N), replace(call, compute_dtype=call.result_dtype)
        return self.fast.backward(inputs, known, saved, call)

    def logits_of(self, entries_NK: Tensor, inputs: Inputs, call: HeadCall) -> Tensor:
        columns_NK = own_columns(entries_NK, inputs, call)
        columns_NK = columns_NK.where(columns_NK < len(inputs.weight_VD), -1).contiguous()
        logits_NK = torch.zeros(entries_NK.shape, dtype=call.result_dtype, device=entries_NK.device)
        self.kernels.logits_of(columns_NK, inputs, call.options, logits_NK)
        if call.shard is not None:
            dist.all_reduce(logits_NK, group=call.shard.group)  # one rank alone has other numbers than zero
        return logits_NK
