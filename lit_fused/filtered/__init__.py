"""The filtered backward: the exact loss, and gradients of those entries of the vocabulary that matter.

``LinearCrossEntropyLoss(impl=Filtered())`` trains with it where it pays, as ``loss=filtered`` does;
``impl="lit_fused.filtered.linear_cross_entropy"`` filters every call. It builds on the exact paths of ``ops``, and no
other room knows it. docs/filtered.md explains the filter.
"""

from lit_fused.filtered.filtered_backend import FILTER_EPS, Filtered, linear_cross_entropy

__all__ = ["FILTER_EPS", "Filtered", "linear_cross_entropy"]
