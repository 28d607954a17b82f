"""Triton's kernels of one kernel path, in its interpreter, on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from torch import Tensor

from lit_fused.ops import cross_entropy
from lit_fused.ops.hopper.hopper_path import HopperPath
from lit_fused.ops.hopper.narrow_path import NarrowPath
from lit_fused.ops.invariant.invariant_path import InvariantPath
from lit_fused.ops.kernel_path import HeadCall, KernelPath


@contextmanager
def kernels_of(way: str) -> Iterator[None]:
    """Send every call in the block through the kernels of "hopper", "narrow" or "logits"; through none where empty."""
    if not way:
        yield
        return
    from lit_fused.ops.logits.rows_triton import TritonRows

    def exact_path(hidden_ND: Tensor, weight_VD: Tensor, call: HeadCall) -> KernelPath:
        if call.shard is not None and call.shard.tokens_differ:
            return cross_entropy.TokensOfRanks(hidden_ND, weight_VD, call, exact_path)
        if call.options.invariant:
            from lit_fused.ops.invariant.tiles_triton import TritonTiles

            options = replace(call.options, invariant=False)
            fast = exact_path(hidden_ND, weight_VD, replace(call, options=options))
            return InvariantPath(TritonTiles(call.compute_dtype), fast)
        if way == "logits" or not len(hidden_ND):
            return cross_entropy.LogitsPath(TritonRows())
        return NarrowPath() if way == "narrow" and hidden_ND.shape[1] <= 128 else HopperPath()

    with (
        mock.patch.object(cross_entropy, "exact_path", exact_path),
        mock.patch.object(cross_entropy, "row_kernels", return_value=TritonRows()),
    ):
        yield
