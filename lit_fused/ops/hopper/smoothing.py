"""Label smoothing for ``hopper_path``: products of single vectors in place of a term in every logit's gradient.

With smoothing e, a token's loss is ``nll + e (logit[target] - mean(logits))``. The mean of ``scale * h W^T + b`` over
the vocabulary is ``scale * h . mean(W) + mean(b)``, so that what the plain loss lacks is

    dh: e f (scale W[target] - scale mean(W))              f = the factor of the token's loss
    dW: e f scale h at the target's row, and at every row minus the sum of e f scale h over the tokens, divided by V

The target's part is one more term of its factor; the mean's is here. Where the vocabulary is divided over ranks, each
has its part of the mean.

C chunk, D hidden, F frequent targets, N tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernel_path import HeadCall, Inputs, RowResults
from .hopper_rows import RowFactors, empty_float32

_COLUMNS = 8  # of a product of one vector: the least that the vendor's products are fast with


@dataclass
class Smoothing:
    """The smoothing of one call.

    Attributes:
        smoothing: e.
        share_N: e times the factor of each token's loss, float32; zero where it is ignored.
        valid_N: whether a token counts.
        mean_D: this rank's part of the mean row of the weight, float32.
        mean_logit_N: of each token, nats, float32.
        vocabulary: entries of all ranks together.
    """

    smoothing: float
    share_N: Tensor
    valid_N: Tensor
    mean_D: Tensor
    mean_logit_N: Tensor
    vocabulary: int

    @classmethod
    def of(
        cls, inputs: Inputs, own: Inputs, factor_N: Tensor | None, call: HeadCall, kernels: Any
    ) -> "Smoothing | None":
        """Return the smoothing of a call that has one."""
        e = call.options.label_smoothing
        if not e:
            return None
        hidden_ND, weight_VD, bias_V, _ = own
        valid_N = inputs.targets_N >= 0
        share_N = e * (valid_N.float() if factor_N is None else factor_N.where(valid_N, 0))
        mean_D = weight_VD.sum(0, dtype=torch.float32) / call.vocabulary
        mean_bias = mean_D.new_zeros(1) if bias_V is None else bias_V.sum(dtype=torch.float32)[None] / call.vocabulary
        means = torch.cat([mean_D, mean_bias])
        if call.shard is not None:
            dist.all_reduce(means, group=call.shard.group)
        products_N8 = empty_float32(len(hidden_ND), _COLUMNS, like=hidden_ND)
        kernels.multiply(hidden_ND, _in_parts(means[:-1], hidden_ND), products_N8)
        mean_logit_N = call.options.scale * products_N8.sum(1) + means[-1]
        return cls(e, share_N, valid_N, mean_D, mean_logit_N, call.vocabulary)

    def add_to(self, results: RowResults, factors: RowFactors, chunk: slice) -> None:
        """Add the smoothing to the losses of a chunk, and to the factors of its targets."""
        of_chunk = results.of(chunk)
        excess_C = of_chunk.lse - of_chunk.nll - self.mean_logit_N[chunk]
        of_chunk.loss.add_(excess_C.where(self.valid_N[chunk], 0), alpha=self.smoothing)
        factors.of(chunk).target_N.sub_(self.share_N[chunk])

    def of_hidden(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Return two vectors, (C,) and (D,), whose outer product is the mean's term of dh / scale."""
        return -self.share_N[chunk], self.mean_D

    def begin(
        self,
        hidden_ND: Tensor,
        scale: float,
        weight_VD: Tensor | None,
        exact_FD: Tensor | None,
        bias_V: Tensor | None,
        kernels: Any,
    ) -> None:
        """Write the mean's term, the same in every row, as the gradients to which the chunks are added."""
        if weight_VD is not None:
            products_8D = empty_float32(_COLUMNS, hidden_ND.shape[1], like=hidden_ND)
            kernels.multiply(_in_parts(self.share_N, hidden_ND).T, hidden_ND, products_8D)
            row_D = products_8D.sum(0) * (-scale / self.vocabulary)
            for sums in (weight_VD, exact_FD):
                if sums is not None:
                    kernels.fill_rows(row_D, sums)
        if bias_V is not None:
            bias_V.fill_(0).sub_(self.share_N.sum() / self.vocabulary)


def _in_parts(vector_K: Tensor, like: Tensor) -> Tensor:
    """Return a float32 vector as columns (K, 8) in the dtype of the products, whose sum it is: its head, and what that
    lacks."""
    columns_K8 = like.new_zeros(len(vector_K), _COLUMNS)
    columns_K8[:, 0] = vector_K
    columns_K8[:, 1] = vector_K - columns_K8[:, 0]
    return columns_K8
