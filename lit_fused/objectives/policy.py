"""Policy gradients over given rollouts: completions of prompts, with rewards or advantages.

With r_i the reward of completion i of a group of G completions of one prompt, its advantage A_i is

    leave_one_out      r_i - mean of the others' rewards       RLOO: Kool et al. 2019, Ahmadian et al. (2402.14740)
    group_normalized   (r_i - mean) / (std + 1e-4)             GRPO: Shao et al., DeepSeekMath (arXiv:2402.03300)
    group_centered     r_i - mean                              Dr. GRPO: Liu et al. (arXiv:2503.20783)
    reward             r_i                                     REINFORCE: Williams 1992

unless the rollouts have advantages, a number for each completion or token. The loss of token t of completion i is

    -A_i log pi(t)                                  ratio "none": REINFORCE
    -min(w A_i, clip(w, 1 - low, 1 + high) A_i)     PPO: Schulman et al. (arXiv:1707.06347); DAPO's low and high differ
    -stop(clip(w, 1 - low, 1 + high)) A_i log pi(t) CISPO: MiniMax-M1 (arXiv:2506.13585); stop() has no gradient
    + kl_weight * KL(t)                             KL to a reference

with the importance ratio w of the token, pi / sampler; of the whole completion (the product of its tokens': RLOO); or
its geometric mean (GSPO: Zheng et al., arXiv:2507.18071). ``delta`` is the largest w, also where A is negative
(two-sided clipping: INTELLECT-2, arXiv:2505.07291). How tokens are averaged is the normalization:

    sequence      mean over the tokens of a completion, then over completions           GRPO, GSPO
    group         mean over the tokens of a group, then over groups by their sizes      DAPO (arXiv:2503.14476)
    token         mean over all tokens                                                  PPO
    length        sum over the tokens of a completion over a constant length,           Dr. GRPO
                  then mean over completions
    trajectory    sum over the tokens of a completion, then mean over completions       REINFORCE, RLOO

``entropy_weight`` subtracts the policy's entropy, which is a mean under every normalization: over all tokens ("token"),
over those of each group ("group"), else over those of each completion.

B completions, T positions.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

ADVANTAGES = ("reward", "leave_one_out", "group_normalized", "group_centered")
RATIOS = ("none", "token", "sequence", "trajectory")
NORMALIZATIONS = ("token", "sequence", "group", "length", "trajectory")
KL_ESTIMATORS = ("k1", "k2", "k3")


class Group(NamedTuple):
    """Numbers of the whole group of each completion, whatever batches it is cut into: tensors (B,)."""

    mean: Tensor  # of the rewards
    std: Tensor  # of the rewards, with G - 1 as divisor
    size: Tensor  # G
    tokens: Tensor  # of all completions


def advantage_of(reward: Tensor, group: Group, kind: str) -> Tensor:
    """Return the advantages (B,) of rewards (B,), by a name of ``ADVANTAGES``; a group of one has none."""
    if kind == "reward":
        return reward
    centered = reward - group.mean
    if kind == "group_normalized":
        return centered / (group.std + 1e-4)
    if kind == "leave_one_out":
        return centered * group.size / (group.size - 1).clamp(min=1)
    return centered


def log_ratio_of(log_prob: Tensor, sampler: Tensor, mask: Tensor, level: str) -> Tensor:
    """Return the logarithm of the importance ratio, (B, T) of tokens, or (B, 1) of completions.

    ``log_prob`` and ``sampler`` are log-probabilities (B, T) of policy and sampler, ``mask`` (B, T) says where tokens
    are.
    """
    log_ratio = (log_prob - sampler).where(mask, 0)
    if level == "token":
        return log_ratio
    total = log_ratio.sum(-1, keepdim=True)
    return total if level == "trajectory" else total / mask.sum(-1, keepdim=True).clamp(min=1)


def ratio_of(log_ratio: Tensor, advantage: Tensor, high: float | None) -> Tensor:
    """Return importance ratios for :func:`clipped_surrogate`: where it clips them, or the advantage is zero, they stay
    finite, so that a gradient of zero is not multiplied by infinity."""
    bounded = log_ratio.clamp(max=1.0 + (0.0 if high is None else math.log1p(high)))
    return torch.where(advantage != 0 if high is None else advantage < 0, log_ratio, bounded).exp()


def clipped_surrogate(ratio: Tensor, advantage: Tensor, low: float | None, high: float | None) -> Tensor:
    """Return ``-min(ratio A, clip(ratio, 1 - low, 1 + high) A)``, where None does not clip on that side."""
    if low is None and high is None:
        return -ratio * advantage
    least, most = None if low is None else 1 - low, None if high is None else 1 + high
    return -torch.min(ratio * advantage, ratio.clamp(least, most) * advantage)


def weighted_log_likelihood(
    ratio: Tensor, advantage: Tensor, log_prob: Tensor, low: float | None, high: float | None
) -> Tensor:
    """Return ``-clip(ratio, 1 - low, 1 + high) A log pi`` (B, T), with a gradient through ``log_prob`` (B, T) alone."""
    if low is not None or high is not None:
        ratio = ratio.clamp(None if low is None else 1 - low, None if high is None else 1 + high)
    return -ratio.detach() * advantage * log_prob


def is_clipped(ratio: Tensor, advantage: Tensor, low: float | None, high: float | None) -> Tensor:
    """Return where the ratio is clipped on the side that the advantage pushes it to: bool, of their common shape."""
    never = torch.zeros_like(ratio * advantage, dtype=torch.bool)
    below = never if low is None else (ratio < 1 - low) & (advantage < 0)
    return below if high is None else below | ((ratio > 1 + high) & (advantage > 0))


def kl_estimate(log_prob: Tensor, reference: Tensor, kind: str = "k3") -> Tensor:
    """Return estimates (B, T) of KL(policy, reference) from the log-probabilities of sampled tokens.

    Schulman, "Approximating KL divergence" (2020): k1 is ``log pi - log ref``, unbiased; k2 is half of its square; k3
    is ``ref / pi - log(ref / pi) - 1``, unbiased and never negative, that of GRPO. As a loss k1 has a gradient whose
    mean is zero; that of k2 is the gradient of the KL.
    """
    difference = reference - log_prob
    if kind == "k1":
        return -difference
    if kind == "k2":
        return difference.square() / 2
    return difference.expm1() - difference


def token_weights(mask: Tensor, group: Group, normalization: str, length: float | None) -> tuple[Tensor, Tensor]:
    """Return the weight (B, 1) of each token of a completion, and what the weighted sum is divided by: a count ().

    A group whose completions are in several batches needs no more than its ``group.tokens``: the weights of its tokens
    add up to the number of its completions, with those that have no labels, and are divided by their own sum.
    """
    tokens = mask.sum(-1, keepdim=True)
    completions = (tokens > 0).sum()
    ones = torch.ones_like(tokens, dtype=torch.float64)
    if normalization == "token":
        return ones, tokens.sum()
    if normalization == "sequence":
        return ones / tokens.clamp(min=1), completions
    if normalization == "group":
        weights = (group.size.double() / group.tokens.clamp(min=1))[:, None]
        return weights, (weights * tokens).sum()
    if normalization == "length":
        assert length is not None
        return ones / length, completions
    return ones, completions
