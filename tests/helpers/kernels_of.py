"""Triton's kernels of one kernel path, in its interpreter, on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

from lit_fused.ops.hopper import hopper_path, narrow_path
from lit_fused.ops.logits import logits_path


@contextmanager
def kernels_of(way: str) -> Iterator[None]:
    """Send every call in the block through the kernels of "hopper", "narrow" or "logits"; through none where empty."""
    if not way:
        yield
        return
    from lit_fused.ops.logits.rows_triton import TritonRows

    own = logits_path.row_kernels, hopper_path.supports, narrow_path.LARGEST_HIDDEN
    logits_path.row_kernels = lambda hidden: TritonRows()
    hopper_path.supports = lambda hidden, weight, call: way != "logits"
    narrow_path.LARGEST_HIDDEN = 128 if way == "narrow" else 0
    try:
        yield
    finally:
        logits_path.row_kernels, hopper_path.supports, narrow_path.LARGEST_HIDDEN = own
