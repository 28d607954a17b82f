"""Objectives of preferences, as functions of the log-probabilities of whole answers.

log pi(y|x), in nats, is the sum of the log-probabilities of an answer's tokens under the trained model, or their mean
("average"); log pi_ref(y|x) is the reference model's. The ratio of an answer is log pi(y|x) - log pi_ref(y|x), and its
reward beta times that. Each function takes tensors (P,) of P pairs and returns the loss (P,) of each pair; kto takes
and returns (N,) of N single answers. Gradients pass to the arguments. Arguments without a reference are called
``chosen`` and ``rejected``, those with one ``chosen_ratio`` and ``rejected_ratio``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def dpo(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return -log sigmoid(beta (r_c - r_r)): direct preference optimization (arXiv:2305.18290, equation 7)."""
    return -F.logsigmoid(beta * (chosen_ratio - rejected_ratio))


def rpo(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return DPO's loss, to which iterative reasoning preference optimization (arXiv:2404.19733, equation 1) adds the
    mean negative log-likelihood of the chosen answer's tokens (``nll_weight``, the paper's alpha)."""
    return dpo(chosen_ratio, rejected_ratio, beta=beta)


def cdpo(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """Return DPO's loss where a share of the labels, ``label_smoothing``, is taken for swapped: conservative DPO (Eric
    Mitchell, "A note on DPO with noisy preferences", 2023)."""
    logits = beta * (chosen_ratio - rejected_ratio)
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def robust(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """Return the loss whose mean under labels that are swapped with probability ``label_smoothing`` < 0.5 is DPO's
    without (robust DPO, arXiv:2403.00409, equation 9)."""
    logits, e = beta * (chosen_ratio - rejected_ratio), label_smoothing
    return (-(1 - e) * F.logsigmoid(logits) + e * F.logsigmoid(-logits)) / (1 - 2 * e)


def ipo(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return (r_c - r_r - 1 / (2 beta))^2: identity preference optimization (arXiv:2310.12036, equation 17), whose tau
    is ``beta``; its authors take averages over tokens."""
    return (chosen_ratio - rejected_ratio - 1 / (2 * beta)).square()


def hinge(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return max(0, 1 - beta (r_c - r_r)): the hinge of SLiC (arXiv:2305.10425) on normalised likelihoods (RSO,
    arXiv:2309.06657, equation 6)."""
    return (1 - beta * (chosen_ratio - rejected_ratio)).relu()


def apo_zero(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return (1 - sigmoid(beta r_c)) + sigmoid(beta r_r): anchored preference optimization (arXiv:2408.06266), for
    chosen answers that are better than the model's."""
    return (1 - (beta * chosen_ratio).sigmoid()) + (beta * rejected_ratio).sigmoid()


def apo_down(chosen_ratio: Tensor, rejected_ratio: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return sigmoid(beta r_c) + (1 - sigmoid(beta (r_c - r_r))): anchored preference optimization (arXiv:2408.06266),
    for chosen answers that are worse than the model's."""
    return (beta * chosen_ratio).sigmoid() + (1 - (beta * (chosen_ratio - rejected_ratio)).sigmoid())


def cpo(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return -log sigmoid(beta (log pi_c - log pi_r)): contrastive preference optimization (arXiv:2401.08417, equation
    3), which adds the negative log-likelihood of the chosen answer (``nll_weight``)."""
    return -F.logsigmoid(beta * (chosen - rejected))


def simpo(chosen: Tensor, rejected: Tensor, *, beta: float = 2.0, margin: float = 1.0) -> Tensor:
    """Return -log sigmoid(beta (log pi_c - log pi_r) - margin) of averages over tokens (arXiv:2405.14734, equation 6);
    ``margin`` is the paper's gamma, in units of rewards."""
    return -F.logsigmoid(beta * (chosen - rejected) - margin)


def orpo(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return -beta log sigmoid(log odds_c - log odds_r), odds p / (1 - p), of averages over tokens (arXiv:2403.07691,
    equations 3 to 7); the paper's lambda is ``beta``, and it adds the mean negative log-likelihood of the chosen
    answer (``nll_weight``). A probability counts as at most 1 - 6e-8, float32's largest below one."""

    def log_odds(log_p: Tensor) -> Tensor:
        return log_p - torch.log(-torch.expm1(log_p.clamp(max=-(2.0**-24))))

    return -beta * F.logsigmoid(log_odds(chosen) - log_odds(rejected))


def kto(
    ratio: Tensor,
    desirable: Tensor,
    kl: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return the loss (N,) of single answers, each ``desirable`` (N,) bool or not: w (1 - sigmoid(+-(beta ratio - beta
    kl))), Kahneman-Tversky optimization (arXiv:2402.01306, equation 8).

    ``kl`` () is the paper's z_0 / beta: the mean ratio of answers to other prompts, at least 0, without a gradient.
    """
    gain = beta * (ratio - kl)
    weight = torch.where(desirable, gain.new_full((), desirable_weight), gain.new_full((), undesirable_weight))
    return weight * (1 - torch.where(desirable, gain, -gain).sigmoid())


@dataclass(frozen=True)
class Objective:
    """Say what :class:`lit_fused.objectives.PreferenceLoss` has to know of one of the functions above.

    Attributes:
        function: of the log-probabilities of pairs, or of single answers.
        has_reference: its arguments are ratios.
        average: it is of averages over tokens, as its paper has it.
        nll_weight: of the chosen answer's negative log-likelihood, as its paper has it.
        mean_nll: that is a mean over tokens, also where ``average`` is False.
        single: it is of single answers.
    """

    function: Callable[..., Tensor]
    has_reference: bool = True
    average: bool = False
    nll_weight: float = 0.0
    mean_nll: bool = False
    single: bool = False


OBJECTIVES = {
    "dpo": Objective(dpo),
    "rpo": Objective(rpo, nll_weight=1.0, mean_nll=True),
    "cdpo": Objective(cdpo),
    "robust": Objective(robust),
    "ipo": Objective(ipo, average=True),
    "hinge": Objective(hinge),
    "apo_zero": Objective(apo_zero),
    "apo_down": Objective(apo_down),
    "cpo": Objective(cpo, has_reference=False, nll_weight=1.0),
    "simpo": Objective(simpo, has_reference=False, average=True),
    "orpo": Objective(orpo, has_reference=False, average=True, nll_weight=1.0),
    "kto": Objective(kto, single=True),
}
