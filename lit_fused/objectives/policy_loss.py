"""The loss of a policy gradient over given rollouts, from one pass over the scores of their tokens."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lit_fused.errors import UserError, check_choice, check_number
from lit_fused.losses import LossOutput
from lit_fused.losses.loss import Batch, Forward, Head
from lit_fused.objectives import policy, score_causes
from lit_fused.objectives.score_watch import ScoreReport, compare_scores
from lit_fused.objectives.scored import ScoredLoss
from lit_fused.ops import TokenScores
from lit_fused.ops.label_checks import IGNORE_INDEX

GROUP = ("reward", "group_mean", "group_std", "group_size", "group_tokens")
THIRDS = ("begin", "middle", "end")  # of a completion
# Rollouts whose log-probabilities are this far from the model's, in nats per token, are hardly its own.
_FAR = 0.05


@dataclass(frozen=True)
class PolicyObjective:
    """The parts of an objective, in the words of :mod:`lit_fused.objectives.policy`."""

    advantage: str
    ratio: str
    normalization: str
    clip_low: float | None = None
    clip_high: float | None = None
    ratio_is_weight: bool = False  # of the log-likelihood, without a gradient of its own

    def __post_init__(self) -> None:
        known = {"advantage": policy.ADVANTAGES, "ratio": policy.RATIOS, "normalization": policy.NORMALIZATIONS}
        for name, choices in known.items():
            check_choice(name, getattr(self, name), choices)
        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            if value is not None:
                check_number(name, value, "be above 0", lambda x: x > 0, "0.2 is a usual value, and null does not clip")

    @property
    def needs_groups(self) -> bool:
        """Return whether a completion is compared with others of its prompt."""
        return self.advantage != "reward"


OBJECTIVES = {
    "reinforce": PolicyObjective("reward", "none", "trajectory"),
    "rloo": PolicyObjective("leave_one_out", "trajectory", "trajectory", 0.2, 0.2),
    "grpo": PolicyObjective("group_normalized", "token", "sequence", 0.2, 0.2),
    "dr_grpo": PolicyObjective("group_centered", "token", "length", 0.2, 0.2),
    "dapo": PolicyObjective("group_normalized", "token", "group", 0.2, 0.28),
    "cispo": PolicyObjective("group_normalized", "token", "token", None, 4.0, ratio_is_weight=True),
    "ppo": PolicyObjective("reward", "token", "token", 0.2, 0.2),
}


def _never() -> bool:
    return False


def _always() -> bool:
    return True


class PolicyLoss(ScoredLoss):
    """A policy gradient over given rollouts: REINFORCE, RLOO, GRPO, Dr. GRPO, DAPO, CISPO or PPO's clip.

    :mod:`lit_fused.objectives.policy` has the formulas and the papers. A batch has besides its tokens, whose labels are
    the completions': "reward", "group_mean", "group_std", "group_size" and "group_tokens" (B,), or "advantages" (B, T)
    of what each position predicts; and, if they are known, "sampler_log_probs" (B, T) and "reference_log_probs" (B, T),
    in nats and of the same positions. Without the sampler's, the rollouts are taken for the policy's own.

    Args:
        objective: "reinforce", "rloo", "grpo", "dr_grpo", "dapo", "cispo" or "ppo": sets the five options that follow,
            each of which can be another.
        advantage: of rewards: "reward", "leave_one_out", "group_normalized" or "group_centered".
        ratio: "none", or the importance ratio of a "token", a "sequence" (GSPO) or a "trajectory".
        normalization: "token", "sequence", "group", "length" or "trajectory".
        clip_low, clip_high: the ratio is clipped to [1 - low, 1 + high]; "none" does not clip.
        delta: the largest ratio, also where the advantage is negative; None: there is none.
        length: of normalization "length": the constant, such as the most tokens that a completion may have.
        kl_weight: of the estimated KL to the reference.
        kl_estimator: "k1", "k2" or "k3".
        kl_bias_correction: multiply each estimate by the importance ratio: unbiased where the sampler is not the
            policy (DeepSeek-V3.2, arXiv:2512.02556).
        entropy_weight: of the policy's mean entropy per token, which is to grow.
        temperature: that the rollouts were sampled with; it divides the logits.
        logits_budget_mib, chunk_size, drop_ignored, float32_accumulation, invariant: as of :class:`ScoredLoss`; prompts
            have no labels, and are left out before the products.

    Attributes:
        reference: returns the reference's log-probabilities (B, T) for a batch without them; or None.
        is_due: called with each batch that has the sampler's log-probabilities; where it returns True, the cause of
            their differences from the policy's is looked for, told in a warning the first time, and in ``report``.
        largest_log_ratio: () of any trained token since it was set to None.
    """

    needs_entropy = True
    inputs = (*GROUP, "advantages", "sampler_log_probs", "reference_log_probs")
    statistics = ("tokens", "rows", "length/rows", "reward/rows", "advantage/tokens", "entropy/tokens", "kl/tokens")
    statistics += (
        "sampler_kl/tokens",
        "sampler_k1/tokens",
        "sampler_beyond_2x/tokens",
        *(f"tokens_{t}" for t in THIRDS),
    )
    statistics += (*(f"sampler_kl_{third}/tokens_{third}" for third in THIRDS), "ratio/tokens", "clipped/tokens")

    def __init__(
        self,
        objective: str = "grpo",
        *,
        advantage: str | None = None,
        ratio: str | None = None,
        normalization: str | None = None,
        clip_low: float | str | None = None,
        clip_high: float | str | None = None,
        delta: float | None = None,
        length: float | None = None,
        kl_weight: float = 0.0,
        kl_estimator: str = "k3",
        kl_bias_correction: bool = False,
        entropy_weight: float = 0.0,
        temperature: float = 1.0,
        logits_budget_mib: float | None = None,
        chunk_size: int | None = None,
        drop_ignored: bool = True,
        float32_accumulation: bool | None = None,
        invariant: bool = False,
    ) -> None:
        super().__init__(
            logits_budget_mib=logits_budget_mib,
            chunk_size=chunk_size,
            drop_ignored=drop_ignored,
            float32_accumulation=float32_accumulation,
            invariant=invariant,
        )
        check_choice("objective", objective, OBJECTIVES)
        given = {"advantage": advantage, "ratio": ratio, "normalization": normalization}
        given |= {"clip_low": clip_low, "clip_high": clip_high}
        changes: Any = {name: value for name, value in given.items() if value is not None}
        changes |= {name: None for name in ("clip_low", "clip_high") if changes.get(name) == "none"}
        self.objective, self.parts = objective, replace(OBJECTIVES[objective], **changes)
        check_choice("kl_estimator", kl_estimator, policy.KL_ESTIMATORS)
        positive = "be a positive number", lambda x: 0 < x < math.inf
        check_number("temperature", temperature, *positive, "1 changes nothing")
        for name, weight in {"kl_weight": kl_weight, "entropy_weight": entropy_weight}.items():
            check_number(name, weight, "be a number of at least 0", lambda x: 0 <= x < math.inf)
        for name, value in {"length": length, "delta": delta}.items():
            if value is not None:
                check_number(name, value, *positive)
        if self.parts.normalization == "length" and length is None:
            raise UserError(
                f"objective={objective} divides by a constant length, got length={length}; give loss.length=..., the "
                "most tokens that a completion may have"
            )
        self.length, self.delta = length, delta
        self.kl_weight, self.kl_estimator, self.kl_bias_correction = kl_weight, kl_estimator, kl_bias_correction
        self.entropy_weight, self.temperature = entropy_weight, temperature
        self.reference: Callable[[Batch], Tensor] | None = None
        self.is_due: Callable[[], bool] = _never
        self.report: ScoreReport | None = None
        self.largest_log_ratio: Tensor | None = None
        self._told: set[str] = set()

    def compute(self, model: Forward, batch: Batch) -> LossOutput:
        if self.kl_weight and batch.get("reference_log_probs") is None and self.reference is not None:
            batch = {**batch, "reference_log_probs": self.reference(batch)}
        return super().compute(model, batch)

    def of_scores(self, scores: TokenScores, targets: Tensor, batch: Batch) -> LossOutput:
        mask, log_prob = targets != IGNORE_INDEX, scores.log_prob
        self._check_needed(batch)
        self._check_shapes(targets, batch)
        numbers: Any = [batch.get(name) for name in GROUP[1:]]  # None: the objective does not read it.
        group = policy.Group(*numbers)
        advantages = self._advantages(batch, group, log_prob)
        sampler = batch.get("sampler_log_probs")
        sampler = log_prob.detach() if sampler is None else sampler.to(log_prob)
        parts, sums = self.parts, {}
        level = "token" if parts.ratio == "none" else parts.ratio
        log_ratio = policy.log_ratio_of(log_prob, sampler, mask, level)
        limited = log_ratio if self.delta is None else log_ratio.clamp(max=math.log(self.delta))
        ratio = policy.ratio_of(limited, advantages, parts.clip_high)
        clip = parts.clip_low, parts.clip_high
        if parts.ratio == "none":
            per_token = -advantages * log_prob
        elif parts.ratio_is_weight:
            per_token = policy.weighted_log_likelihood(ratio, advantages, log_prob, *clip)
        else:
            per_token = policy.clipped_surrogate(ratio, advantages, *clip)
            if parts.ratio != "token" and parts.normalization == "trajectory":  # one number for each completion
                per_token = per_token / mask.sum(-1, keepdim=True).clamp(min=1)
        if self.kl_weight:
            kl = policy.kl_estimate(log_prob, self._reference_of(batch, log_prob), self.kl_estimator)
            kl = kl * log_ratio.exp() if self.kl_bias_correction else kl
            per_token, sums["kl/tokens"] = per_token + self.kl_weight * kl, kl
        weights, count = policy.token_weights(mask, group, parts.normalization, self.length)
        loss_sum = (per_token * weights.to(log_prob.dtype)).where(mask, 0).sum()
        if self.entropy_weight:
            by = "sequence" if parts.normalization in ("length", "trajectory") else parts.normalization
            of_mean, _ = policy.token_weights(mask, group, by, None)
            loss_sum = loss_sum - self.entropy_weight * (scores.entropy * of_mean.to(log_prob)).where(mask, 0).sum()
        with torch.no_grad():
            clipped = policy.is_clipped(ratio, advantages, *clip) | (limited < log_ratio) & (advantages < 0)
            sums |= {"entropy/tokens": scores.entropy, "ratio/tokens": log_ratio.exp(), "advantage/tokens": advantages}
            sums["clipped/tokens"] = clipped.to(log_prob.dtype)
            if batch.get("sampler_log_probs") is not None:
                sums |= self._watched(log_prob, sampler, mask)
            stats = {name: value.expand_as(log_prob).where(mask, 0).sum().detach() for name, value in sums.items()}
            tokens, rows = mask.sum(), mask.any(-1)
            stats |= {"tokens": tokens, "rows": rows.sum(), "length/rows": tokens}
            if batch.get("reward") is not None:
                stats["reward/rows"] = batch["reward"].where(rows, 0).sum()
        return LossOutput(loss_sum, count, stats=stats)

    def _watched(self, log_prob: Tensor, sampler: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return how far the sampler's log-probabilities are from the policy's: numbers of each token (B, T)."""
        log_ratio = (log_prob - sampler).where(mask, 0).detach()
        largest, kl = log_ratio.abs().max(), policy.kl_estimate(sampler, log_prob)
        if log_prob.requires_grad:  # A validation between micro-batches is no part of their step.
            self.largest_log_ratio = largest if self.largest_log_ratio is None else largest.max(self.largest_log_ratio)
        beyond = log_ratio.abs() > math.log(2)
        numbers = {"sampler_kl/tokens": kl, "sampler_k1/tokens": -log_ratio, "sampler_beyond_2x/tokens": beyond.to(kl)}
        place, length = mask.cumsum(-1) - 1, mask.sum(-1, keepdim=True).clamp(min=1)
        for index, third in enumerate(THIRDS):
            inside = (place * 3 // length == index).to(kl)
            numbers |= {f"sampler_kl_{third}/tokens_{third}": kl * inside, f"tokens_{third}": inside}
        return numbers

    def watch_anew(self) -> None:
        """Look for the cause of differences in the next batch, and tell each cause once more."""
        self._told, self.is_due, self.report = set(), _always, None

    def has_moved(self, kl: float) -> bool:
        """Return whether the KL of a step, in nats per token, is beyond that of the last report."""
        return not kl <= max(1e-4, 0.0 if self.report is None else 2 * self.report.k3)

    def look_at(
        self, scores: TokenScores, hidden_states: Tensor, targets: Tensor, head: Head, model: Forward, batch: Batch
    ) -> None:
        sampler = batch.get("sampler_log_probs")
        if sampler is None or not self.is_due():
            return
        layer: dict[str, Any] = {}
        if head.shard is None:  # else no rank has the whole output layer, and scores alone say less
            hidden_states, weight, bias = head.operands(hidden_states)
            layer = {"hidden_states": hidden_states, "weight": weight, "targets": targets, "bias": bias}
            layer |= {"scale": head.scale, "softcap": head.softcap, "temperature": self.temperature}
        own, self.is_due = model.own_positions(sampler), _never
        self.report = compare_scores(scores.log_prob, own, targets != IGNORE_INDEX, **layer)
        cause = self.report.cause
        # A policy that has gone on from its rollouts, step by step, differs from their sampler and should.
        tells = cause != score_causes.NONE and (cause != score_causes.WEIGHTS or self.report.k3 > _FAR)
        if tells and cause not in self._told:
            self._told.add(cause)
            warnings.warn(str(self.report), stacklevel=2)

    def _check_needed(self, batch: Batch) -> None:
        """Raise a UserError unless a batch has what the objective reads."""
        given = batch.get("advantages") is not None
        needed = ["advantages" if given else "reward", *(GROUP[1:4] if self.parts.needs_groups and not given else ())]
        needed += [name for name in GROUP[3:] if self.parts.normalization == "group" and name not in needed]
        if any(batch.get(name) is None for name in needed):
            raise UserError(
                f"objective={self.objective} needs {', '.join(needed)}{'' if given else ', or advantages'}; this batch "
                f"has {', '.join(sorted(batch))}. data=rollouts makes them"
            )

    def _check_shapes(self, targets: Tensor, batch: Batch) -> None:
        """Raise a UserError unless there is a number for each completion or position of a batch."""
        rows, shape = targets.shape[:1], targets.shape
        for name in self.inputs:
            value, fits = batch.get(name), (rows,) if name in GROUP else (shape,)
            fits += ((*rows, 1),) * (name == "advantages")
            if value is not None and value.shape not in fits:
                raise UserError(
                    f"{name!r} must have one number for each {'completion' if name in GROUP else 'position'}, "
                    f"{tuple(fits[0])}, got {tuple(value.shape)}; make it so in the dataset or its collate function"
                )

    def _advantages(self, batch: Batch, group: policy.Group, log_prob: Tensor) -> Tensor:
        """Return the advantages of a batch, (B, T) or (B, 1)."""
        if batch.get("advantages") is not None:
            return batch["advantages"].to(log_prob)
        return policy.advantage_of(batch["reward"], group, self.parts.advantage).to(log_prob)[:, None]

    def _reference_of(self, batch: Batch, log_prob: Tensor) -> Tensor:
        if batch.get("reference_log_probs") is None:
            raise UserError(
                f"kl_weight={self.kl_weight} needs a reference, and there is neither a model nor stored "
                "log-probabilities; give reference=..., or kl_weight=0"
            )
        return batch["reference_log_probs"].to(log_prob)

    @torch.no_grad()
    def check(self, model: Forward, batch: Batch) -> None:
        targets = model.targets(batch)
        self._check_shapes(targets, batch)
        for name in (*GROUP, "advantages"):
            if batch.get(name) is not None and not batch[name].isfinite().all():
                raise UserError(
                    f"{name!r} of the first batch has numbers that are not finite (NaN or infinity), and so would the "
                    "loss; look at what rewards the completions"
                )
        numbers: Any = [batch.get(name) for name in GROUP[1:]]
        trained = targets != IGNORE_INDEX
        self._check_needed(batch)
        advantages = self._advantages(batch, policy.Group(*numbers), torch.zeros_like(targets, dtype=torch.float32))
        if trained.any() and not advantages.where(trained, 0).any():
            warnings.warn(
                "all advantages of a batch are zero, so it trains nothing; are all rewards of a prompt equal?",
                stacklevel=2,
            )
