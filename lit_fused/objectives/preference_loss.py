"""The loss of a batch of preferred and rejected answers, by one of the functions of ``preference.py``.

A batch has "desirable" beside "input_ids" and "labels" (-100 but on answers): (B,) integers, 1 for a chosen or
desirable answer and 0 for a rejected one. Rows of a pair are neighbours, the chosen one first. In a packed batch rows
hold several answers one after the other, with "position_ids"; then "lengths" (B, D) says of how many tokens each is
(0: there is none), and "desirable" is (B, D) as well. An answer without labels is none; a pair that lacks one has no
weight.

KTO estimates its KL from answers to other prompts. A batch of single answers may have these in "other_input_ids",
"other_labels" and so on, of the same form, in the same order; else they are taken from the batch's other rows.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_fused.errors import UserError, check_choice, check_number, checked_options
from lit_fused.losses import LossOutput
from lit_fused.losses.fused import token_losses
from lit_fused.losses.loss import Batch, Forward, at_least_float32, labels_of
from lit_fused.objectives.preference import OBJECTIVES
from lit_fused.objectives.scored import ScoredLoss
from lit_fused.ops.label_checks import IGNORE_INDEX

REFERENCE = "reference_log_prob"
OTHER = "other_"  # begins the names of answers to other prompts
_BOUNDS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "beta": ("be above 0", lambda x: 0 < x < math.inf),
    "label_smoothing": ("be in [0, 0.5)", lambda x: 0 <= x < 0.5),
    "nll_weight": ("be 0 or above", lambda x: 0 <= x < math.inf),
}


class PreferenceLoss(ScoredLoss):
    """The mean loss of pairs, or, of ``objective="kto"``, of single answers.

    Args:
        objective: a name of :data:`lit_fused.objectives.preference.OBJECTIVES`.
        average: take means over an answer's tokens for sums; None does as the objective's paper does.
        nll_weight: of the negative log-likelihood of chosen answers, which is added (its mean over tokens; without
            ``average`` its sum, but of rpo); None: 1 for rpo, orpo and cpo, else 0.
        logits_budget_mib, chunk_size, drop_ignored, float32_accumulation: as of :class:`ScoredLoss`; prompts have no
            labels, and are left out before the products.
        parameters: those of the objective's function: ``beta`` ...

    Attributes:
        reference: returns the reference model's log-probability (B, T) of each target of a batch; None: batches have
            stored sums of each answer, "reference_log_prob", of the shape of "desirable".

    Raises:
        UserError: there is no such objective, or it has no such parameter.
    """

    statistics = (
        *("reward_chosen/chosen", "reward_rejected/rejected", "reward_margin", "reward_accuracy", "kl"),
        *("log_prob_chosen/chosen", "log_prob_rejected/rejected", "chosen", "rejected"),
    )
    inputs = (
        *("desirable", "lengths", REFERENCE, OTHER + REFERENCE),
        *(OTHER + name for name in ("input_ids", "labels", "attention_mask", "position_ids", "lengths")),
    )

    @checked_options()
    def __init__(
        self,
        objective: str = "dpo",
        *,
        average: bool | None = None,
        nll_weight: float | None = None,
        logits_budget_mib: float | None = None,
        chunk_size: int | None = None,
        drop_ignored: bool = True,
        float32_accumulation: bool | None = None,
        **parameters: Any,
    ) -> None:
        super().__init__(
            logits_budget_mib=logits_budget_mib,
            chunk_size=chunk_size,
            drop_ignored=drop_ignored,
            float32_accumulation=float32_accumulation,
        )
        check_choice("objective", objective, OBJECTIVES)
        self.name, self.objective = objective, OBJECTIVES[objective]
        known = [name for name, p in inspect.signature(self.objective.function).parameters.items() if p.kind == 3]
        if "impl" in parameters:
            raise UserError(
                f"objective={objective} takes the place of a loss; choose module=preference, and no loss=..."
            )
        for name, value in parameters.items():
            if name not in known:
                raise UserError(f"objective={objective} has no {name}; it takes {', '.join(known)}")
            bounds = _BOUNDS.get(name, _BOUNDS["nll_weight"])
            check_number(f"{name} of objective={objective}", value, *bounds)
        self.average = self.objective.average if average is None else average
        self.nll_weight = self.objective.nll_weight if nll_weight is None else nll_weight
        check_number("nll_weight", self.nll_weight, *_BOUNDS["nll_weight"])
        if self.nll_weight and self.objective.single:
            raise UserError(f"objective={objective} is of single answers and has no nll_weight; choose one of pairs")
        self.parameters = parameters
        defaults = inspect.signature(self.objective.function).parameters
        self.beta: float = parameters.get("beta", defaults["beta"].default)
        self.rows_together = 1 if self.objective.single else 2
        self.reference: Callable[[Forward, Batch], Tensor] | None = None
        self._is_checked = False

    def compute(self, model: Forward, batch: Batch) -> LossOutput:
        own = model.targets(batch)
        targets = model.whole_rows(own, batch)
        desirable = self._desirable(targets, batch)
        reference, kl = None, None
        if self.objective.has_reference:
            reference = self._of_reference(model, targets, batch)
            if self.objective.single:
                kl = self._kl(model, targets, batch, torch.is_grad_enabled())
        self._is_checked = True
        hidden_states, head, aux_loss = model.hidden_states(batch)
        log_prob = model.whole_rows(self.scores(hidden_states, own, head).log_prob, batch)
        policy, counts = per_answer(at_least_float32(log_prob), targets, batch)
        output = self.of_answers(policy, reference, counts, desirable, kl)
        return replace(output, aux_loss=aux_loss)

    def of_answers(
        self, policy: Tensor, reference: Tensor | None, counts: Tensor, desirable: Tensor, kl: Tensor | None = None
    ) -> LossOutput:
        """Return the sums of answers (S,), pair by pair: their summed log-probabilities under the trained model and the
        reference, their numbers of tokens, whether they are ``desirable``, and for KTO its ``kl`` ()."""
        exists = counts > 0
        scale = counts.clamp(min=1) if self.average else torch.ones_like(counts)
        scores = policy / scale
        ratios = scores if reference is None else scores - reference.to(scores.dtype) / scale
        if self.objective.single:
            assert kl is not None
            losses = self.objective.function(ratios, desirable, kl, **self.parameters)
            valid = exists
        else:
            losses = self.objective.function(ratios[::2], ratios[1::2], **self.parameters)
            valid = exists[::2] & exists[1::2]
            exists = valid.repeat_interleave(2)
            if self.nll_weight:
                per_token = counts.clamp(min=1) if self.objective.mean_nll else scale
                losses = losses - self.nll_weight * (policy / per_token)[::2]
        num_valid = valid.sum()
        stats = self._statistics(self.beta * ratios.detach(), policy.detach(), exists, desirable)
        if kl is not None:
            stats["kl"] = kl * num_valid
        return LossOutput(losses.where(valid, 0).sum(), num_valid, stats=stats)

    def _statistics(self, rewards: Tensor, policy: Tensor, exists: Tensor, desirable: Tensor) -> dict[str, Tensor]:
        of = {"chosen": exists & desirable, "rejected": exists & ~desirable}
        found = {name: which.sum() for name, which in of.items()}
        for name, which in of.items():
            found[f"reward_{name}/{name}"] = rewards.where(which, 0).sum()
            found[f"log_prob_{name}/{name}"] = policy.where(which, 0).sum()
        if not self.objective.single:
            margins = rewards[::2] - rewards[1::2]
            found["reward_margin"] = margins.where(exists[::2], 0).sum()
            found["reward_accuracy"] = ((margins > 0) & exists[::2]).sum()
        return found

    def _of_reference(self, model: Forward, targets: Tensor, batch: Batch) -> Tensor:
        """Return the reference's summed log-probability (S,) of each answer."""
        stored = _stored(batch, REFERENCE)
        if stored is not None:
            return stored
        if self.reference is None:
            raise UserError(
                f"objective={self.name} compares with a reference model, and there is none: use "
                f"FusedPreferenceModule, or batches with {REFERENCE!r}, the sum of each answer; or choose objective="
                f"{', '.join(name for name, o in OBJECTIVES.items() if not o.has_reference)}"
            )
        with torch.no_grad():
            return per_answer(self.reference(model, batch), targets, batch)[0]

    def _desirable(self, targets: Tensor, batch: Batch) -> Tensor:
        """Return whether answers (S,) are desirable; refuse what are no pairs or answers."""
        given, lengths = batch.get("desirable"), batch.get("lengths")
        expected = targets.shape[:1] if lengths is None else lengths.shape
        if not isinstance(given, Tensor) or given.shape != expected:
            got = tuple(given.shape) if isinstance(given, Tensor) else "none"
            raise UserError(
                f"a batch of preferences needs 'desirable', integers {tuple(expected)}, 1 for each chosen answer and 0 "
                f"for each rejected one, and got {got}; choose data=preference, or make it in the dataset"
            )
        self._check_lengths(targets, batch)
        given, single = given.flatten(), self.objective.single
        desirable = given != 0
        exists = per_answer(torch.zeros_like(targets, dtype=torch.float32), targets, batch)[1] > 0
        asked = (
            "'desirable' must be 1 for each chosen answer and 0 for each rejected one, and a batch has other numbers; "
            "make it so in the dataset"
            if single
            else f"objective={self.name} compares pairs, a chosen answer followed by a rejected one, and a batch has "
            "others; choose objective=kto for single answers, or give pairs"
        )
        if not single and len(given) % 2:
            raise UserError(asked)
        expected = desirable if single else torch.arange(len(given), device=given.device) % 2 == 0
        self._expect((given == expected) | ~exists, asked)
        return desirable

    def _check_lengths(self, targets: Tensor, batch: Batch) -> None:
        """Raise a UserError unless "position_ids" (B, T) begin anew where "lengths" (B, D) say that answers do."""
        lengths, positions, mask = (batch.get(name) for name in ("lengths", "position_ids", "attention_mask"))
        if lengths is None or (positions is None and mask is not None and mask.ndim == 4):  # The mask keeps them apart.
            return
        asked = (
            "a batch with 'lengths' (B, answers) needs 'position_ids' (B, T) that begin at 0 with each answer, by "
            "which they are kept apart; make both in the same place, or choose data=preference"
        )
        rows, length = targets.shape
        if lengths.ndim != 2 or positions is None or positions.shape not in ((rows, length), (1, length)):
            raise UserError(asked)
        begin = lengths.cumsum(-1) - lengths
        begins_anew = positions.expand_as(targets).gather(1, begin.clamp(max=length - 1)) == 0
        self._expect((lengths == 0) | begins_anew & (begin + lengths <= length), asked)

    def _expect(self, are_right: Tensor, asked: str) -> None:
        """Raise a UserError unless all are right; on a GPU the host waits for that with the first batch alone."""
        if (are_right.device.type == "cpu" or not self._is_checked) and not are_right.all():
            raise UserError(asked)

    @torch.no_grad()
    def _kl(self, model: Forward, targets: Tensor, batch: Batch, trains: bool) -> Tensor:
        """Return the mean log-ratio of each prompt's answer to another prompt, at least 0 (the paper's estimate)."""
        given, stored = others_of(batch), _stored(batch, OTHER + REFERENCE)
        if stored is None and self.reference is None:
            raise UserError(
                "objective=kto estimates its KL from answers to other prompts as well, and of these the batch has no "
                f"stored {OTHER + REFERENCE}; write the scores anew with mode=score, or choose module.reference=copy"
            )
        # The last batch of an evaluation may have a single row, which is measured by a KL of 0.
        is_single = len(targets) < 2 and (trains or not self._is_checked)
        if given is None and (batch.get("lengths") is not None or batch.get("labels") is None or is_single):
            raise UserError(
                "objective=kto estimates its KL from the answers of other rows, which a packed batch, shift_labels "
                "alone and a single row do not give; choose data=preference, which adds them, or give padded batches "
                "of two rows or more (the last one too: drop_last=True)"
            )
        exists = per_answer(torch.zeros_like(targets, dtype=torch.float32), targets, batch)[1] > 0
        other = mismatched(batch) if given is None else given
        own = model.targets(other)
        targets = model.whole_rows(own, other)
        self._check_lengths(targets, other)
        hidden_states, head, _ = model.hidden_states(other)
        log_prob = model.whole_rows(self.scores(hidden_states, own, head).log_prob, other)
        policy, counts = per_answer(log_prob, targets, other)
        if stored is None:
            assert self.reference is not None
            reference = per_answer(self.reference(model, other), targets, other)[0]
        else:
            reference = stored
        ratios = (policy - reference) / (counts.clamp(min=1) if self.average else 1)
        exists = exists & (counts > 0)
        return (ratios.where(exists, 0).sum() / exists.sum().clamp(min=1)).clamp(min=0)


def _stored(batch: Batch, name: str) -> Tensor | None:
    """Return the stored log-probability (S,) of each answer of a batch, or None."""
    stored, answers = batch.get(name), batch["desirable"].numel()
    if stored is None:
        return None
    if stored.numel() != answers:
        raise UserError(
            f"{name!r} must have one number for each of the {answers} answers of a batch, got shape "
            f"{tuple(stored.shape)}; sum the log-probabilities of an answer's tokens"
        )
    return stored.flatten()


def others_of(batch: Batch) -> dict[str, Tensor] | None:
    """Return the answers to other prompts that a batch has, as a batch of their own; None: it has none."""
    names = [name for name in batch if name.startswith(OTHER) and name != OTHER + REFERENCE]
    return {name.removeprefix(OTHER): batch[name] for name in names} or None


def mismatched(batch: Batch) -> dict[str, Tensor]:
    """Return a batch in which each row's prompt is followed by the answer of the row before it, padded on the right.

    The prompt is all before the first label; the answer goes on until the last. Rows without labels have no part in it,
    and no row is longer than the longest of the others.
    """
    ids, labels = batch["input_ids"], labels_of(batch)
    length = ids.shape[1]
    position, wanted = torch.arange(length, device=ids.device), labels != IGNORE_INDEX
    exists = wanted.any(-1)  # (B,)
    begin = torch.where(exists, wanted.int().argmax(-1), length)
    end = torch.where(wanted, position + 1, 0).amax(-1)
    mask = batch.get("attention_mask")
    first = torch.zeros_like(begin) if mask is None else mask.int().argmax(-1)  # behind padding on the left
    prompt = (begin - first).clamp(min=0)[:, None]
    before = (exists.cumsum(0) - 2) % exists.sum().clamp(min=1)  # among the rows with labels
    others = exists.int().argsort(descending=True, stable=True)[before]
    is_other = exists & (others != torch.arange(len(ids), device=ids.device))
    begin_of, answer = begin[others][:, None], (end - begin)[others].where(is_other, 0)[:, None]
    at = position.expand(len(ids), -1)
    source = torch.where(at < prompt, at + first[:, None], begin_of + at - prompt)
    is_answer = (at >= prompt) & (at < prompt + answer) & (at < end.amax())
    is_token = (at < prompt) | is_answer
    own, theirs = (x.gather(1, source.clamp(0, length - 1)) for x in (ids, ids[others]))
    made = torch.where(is_answer, theirs, own).where(is_token, ids[:, :1])
    made_labels = torch.where(is_answer, labels[others].gather(1, source.clamp(0, length - 1)), IGNORE_INDEX)
    return {"input_ids": made, "labels": made_labels, "attention_mask": is_token.long()}


def per_answer(log_prob: Tensor, targets: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the sum (S,) of the log-probabilities (B, T) of each answer, and its number of tokens (S,)."""
    valid = targets != IGNORE_INDEX
    lengths = batch.get("lengths")
    log_prob = log_prob.where(valid, 0)
    if lengths is None:
        return log_prob.sum(-1), valid.sum(-1)
    ends = lengths.cumsum(-1)
    positions = torch.arange(targets.shape[1], device=targets.device).expand(targets.shape).contiguous()
    answer = torch.searchsorted(ends, positions, right=True)  # (B, T); padding comes behind the last one
    sums = log_prob.new_zeros(len(targets), lengths.shape[1] + 1).scatter_add(1, answer, log_prob)
    counts = torch.zeros_like(sums, dtype=torch.int64).scatter_add(1, answer, valid.long())
    return sums[:, :-1].flatten(), counts[:, :-1].flatten()


def log_probs(model: Forward, batch: Batch) -> Tensor:
    """Return the log-probability (B, T) of each target of a batch of preferences."""
    inputs = {name: value for name, value in batch.items() if name not in PreferenceLoss.inputs}
    return -model.whole_rows(token_losses(model, inputs), batch)


@torch.no_grad()
def answers_to_store(model: Forward, batch: Batch) -> tuple[Tensor]:
    """Return the summed log-probabilities (preferences, 2) of a batch, for "reference_log_prob": of both answers of a
    pair, or of a single answer and of the one to another prompt."""
    other = others_of(batch)
    own, *others = (
        per_answer(log_probs(model, rows), model.targets(rows), rows)[0] for rows in (batch, other) if rows is not None
    )
    return (torch.stack([own, *others], -1) if others else own.view(-1, 2),)
