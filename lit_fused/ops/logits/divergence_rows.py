"""The row work of distillation in plain PyTorch: from the logits of student and teacher to divergences and, in place of
the student's products, gradients.

With z = x / T the student's logits over the temperature, p = softmax(z) and q the teacher's probabilities likewise, the
divergences of a row and their gradients are

    forward KL   sum q (log q - log p)                                 dz = p - q
    reverse KL   sum p (log p - log q)                                 dz = p (log p - log q - sum p (log p - log q))
    JSD(beta)    beta sum q (log q - log m)                            dz = (1 - beta) p (log p - log m - K)
                 + (1 - beta) sum p (log p - log m)                    K = sum p (log p - log m)

with m = beta q + (1 - beta) p: Hinton et al. (arXiv:1503.02531), Gu et al. (MiniLLM, arXiv:2306.08543) and Agarwal et
al. (GKD, arXiv:2306.13649, equation 1). A gradient that needs K, a sum over the row, is a second pass, before which
ranks that divide the vocabulary add up their sums; forward KL has one pass.

C rows of a chunk, V vocabulary, or a rank's part of it.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernel_path import LogitsGradient
from ..options import refuse_trained
from ..user_error import UserError, check_number
from .rows_of_ranks import LOWEST
from .rows_torch import Chunk, gradient_of_products_, logits_of_products, tiles


@dataclass(frozen=True)
class Divergence:
    """A token's loss, ``cross_entropy_weight * nll + divergence_weight * D``, and what it is made of.

    Attributes:
        divergence: D, from teacher to student: "forward_kl" (the mean over the teacher's probabilities), "reverse_kl"
            (over the student's) or "jsd", the generalised Jensen-Shannon divergence.
        beta: of "jsd", in (0, 1): the teacher's weight in the mixture.
        temperature: T > 0, which divides the logits of both in D, and none in the cross entropy.
        divergence_weight: >= 0. Hinton et al. multiply D by T^2, which keeps its gradients as large as those of the
            cross entropy; GKD and TRL do not.
        cross_entropy_weight: >= 0.
    """

    divergence: str = "forward_kl"
    beta: float = 0.5
    temperature: float = 1.0
    divergence_weight: float = 1.0
    cross_entropy_weight: float = 0.0

    def __post_init__(self) -> None:
        refuse_trained(self)
        kinds = ("forward_kl", "reverse_kl", "jsd")
        if self.divergence not in kinds:
            raise UserError(f"divergence must be one of {', '.join(kinds)}, got {self.divergence!r}")
        if self.divergence == "jsd":
            hint = "at its ends choose divergence=forward_kl or reverse_kl"
            check_number("beta", self.beta, "lie between 0 and 1", lambda x: 0 < x < 1, hint)
        positive = "be a positive number", lambda x: 0 < x < math.inf, "1 and 2 are usual"
        check_number("temperature", self.temperature, *positive)
        weights = {name: getattr(self, name) for name in ("divergence_weight", "cross_entropy_weight")}
        for name, weight in weights.items():
            check_number(name, weight, "be a number of at least 0", lambda x: 0 <= x < math.inf)
        if not any(weights.values()):
            raise UserError("divergence_weight and cross_entropy_weight are both 0, so there is no loss; set one")


class Pair(NamedTuple):
    """A chunk's products of student and teacher, and each row's log-sum-exps."""

    student: Chunk
    teacher: Chunk
    lse_C: Tensor  # of the student's logits
    student_lse_C: Tensor  # of the student's logits over the temperature
    teacher_lse_C: Tensor  # the teacher's, likewise
    loss: Divergence


class RowSums(NamedTuple):
    """The sums over a row that its gradient needs, or a rank's part of them, (C,) each; zero where ignored."""

    divergence: Tensor
    center: Tensor  # of the student's probabilities times the logarithm from which the gradient subtracts it
    mass: Tensor  # of the student's probabilities: one, but for the rounding of their log-sum-exp

    def of(self, rows: slice) -> "RowSums":
        """Return views of some rows."""
        return RowSums(*(sums_C[rows] for sums_C in self))

    def average_(self) -> None:
        """Divide the center by the mass: the log-sum-exp's rounding is a factor of both. Where one entry has nearly
        all of the probability, it would else be most of the gradient."""
        self.center.div_(self.mass.clamp(min=torch.finfo(self.mass.dtype).tiny))


class DivergenceRows:
    """The row work on any device."""

    def write_sums(self, pair: Pair, sums: RowSums) -> None:
        """Write the sums over these columns, a part of the vocabulary or all of it."""
        for tile in tiles(pair.student.products_CV):
            _, log_p, log_q = _logarithms(pair, tile, sums.center.dtype)
            log_m = _log_mixture(log_p, log_q, pair.loss)
            if pair.loss.divergence == "forward_kl":
                divergence = torch.linalg.vecdot(log_q.exp(), log_q - log_p)
                center = mass = torch.zeros_like(divergence)
            else:
                p = log_p.exp()
                divergence = center = torch.linalg.vecdot(p, log_p - log_m)
                mass = p.sum(-1)
            if pair.loss.divergence == "jsd":
                beta = pair.loss.beta
                divergence = beta * torch.linalg.vecdot(log_q.exp(), log_q - log_m) + (1 - beta) * center
            valid = pair.student.targets_C[tile] >= 0
            for sums_C, found_C in zip(sums.of(tile), (divergence, center, mass), strict=True):
                sums_C.copy_(found_C.where(valid, 0))

    def write_gradient(self, pair: Pair, sums: RowSums, factor_C: Tensor) -> None:
        """Overwrite the student's products by the gradient of ``(loss * factor_C).sum()``, zero where ignored; and
        write forward KL's divergence, for which ``write_sums`` is not needed."""
        chunk, loss = pair.student, pair.loss
        for tile in tiles(chunk.products_CV):
            logits, log_p, log_q = _logarithms(pair, tile, sums.center.dtype)
            targets_C = chunk.targets_C[tile]
            valid_C1 = (targets_C >= 0)[:, None]
            factor_C1 = factor_C[tile, None]
            if loss.divergence == "forward_kl":
                q = log_q.exp()
                sums.divergence[tile] = torch.linalg.vecdot(q, log_q - log_p).where(targets_C >= 0, 0)
                gradient = log_p.exp().sub_(q)
            else:
                gradient = log_p - _log_mixture(log_p, log_q, loss)
                gradient.sub_(sums.center[tile, None]).mul_(log_p.exp_())
            share = (1 - loss.beta) if loss.divergence == "jsd" else 1.0
            gradient.mul_(factor_C1 * (share * loss.divergence_weight / loss.temperature))
            weight = loss.cross_entropy_weight
            if weight:
                gradient.addcmul_((logits - pair.lse_C[tile, None]).exp_(), weight * factor_C1)
            rows = LogitsGradient(pair.lse_C[tile], None, None, None, -weight * factor_C[tile])
            columns = targets_C[:, None].clamp(min=0)
            gradient = gradient_of_products_(gradient, logits, columns, rows, chunk.call.options)
            chunk.products_CV[tile] = gradient.where(valid_C1, 0).to(chunk.products_CV.dtype)


def _logarithms(pair: Pair, tile: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the student's logits, and the log-probabilities of student and teacher over the temperature."""
    found = []
    for chunk, lse_C in ((pair.student, pair.student_lse_C), (pair.teacher, pair.teacher_lse_C)):
        logits = logits_of_products(chunk.products_CV[tile], chunk.bias_V, chunk.call.options, dtype)
        warm = logits if pair.loss.temperature == 1 else logits / pair.loss.temperature
        # A masked entry has a logarithm of minus infinity, and counts zero, not 0 * inf.
        found += [logits, (warm - lse_C[tile, None].to(dtype)).clamp_(min=LOWEST)]
    return found[0], found[1], found[3]


def _log_mixture(log_p: Tensor, log_q: Tensor, loss: Divergence) -> Tensor:
    """Return the logarithm of what the student is compared with: the teacher, or for "jsd" the mixture of both."""
    if loss.divergence != "jsd":
        return log_q
    return torch.logaddexp(log_p + math.log1p(-loss.beta), log_q + math.log(loss.beta))
