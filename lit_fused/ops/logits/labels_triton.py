# Kernels are typed by Triton's compiler, not by Python's rules.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
"""The message of a label outside of the vocabulary, printed by the GPU: the host does not wait for it."""

import triton
import triton.language as tl
from torch import Tensor


def print_labels_out_of_range(labels_N: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Print, from the device, the smallest and the largest label if they do not lie in [0, vocabulary)."""
    _print_labels_out_of_range[(1,)](labels_N, labels_N.numel(), vocabulary, ignore_index, BLOCK=4096)


@triton.jit(do_not_specialize=["count", "vocabulary", "ignore_index"])
def _print_labels_out_of_range(labels, count, vocabulary, ignore_index, BLOCK: tl.constexpr):
    smallest = tl.zeros((BLOCK,), tl.int64)
    largest = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        label = tl.load(labels + place, mask=place < count, other=0).to(tl.int64)
        label = tl.where(label == ignore_index, 0, label)
        smallest = tl.minimum(smallest, label)
        largest = tl.maximum(largest, label)
    low = tl.min(smallest, 0)
    high = tl.max(largest, 0)
    if (low < 0) | (high >= vocabulary):
        tl.device_print("smallest and largest label:", low, high)
