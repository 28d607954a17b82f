"""Distillation: a student learns the probabilities of a teacher, which runs beside it or has been stored.

Beside it, both output layers are computed chunk by chunk (:func:`lit_fused.linear_distillation`). Stored are the K most
probable entries of each token with their log-probabilities, and the target's. All other entries are then one more, the
tail: with q_k stored and p_k the student's, q_0 = 1 - sum q_k and p_0 = 1 - sum p_k, the divergence is that of
(q_0, q_1 .. q_K) and (p_0, p_1 .. p_K). It is exact where the K entries are all that have a probability, and never more
than the divergence over the whole vocabulary (the data processing inequality).

Or stored are the input of the teacher's output layer, D numbers of each token, and the layer once: from them every
divergence is that of a teacher beside the student.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_fused.errors import UserError, check_number, checked_options
from lit_fused.losses import LossOutput
from lit_fused.losses.loss import PREVIOUS, Batch, Forward, Head, at_least_float32
from lit_fused.objectives.scored import ScoredLoss, at_temperature
from lit_fused.ops import TeacherHead, linear_distillation, token_scores, top_items
from lit_fused.ops.label_checks import IGNORE_INDEX
from lit_fused.ops.logits.divergence_rows import Divergence
from lit_fused.ops.logits.rows_of_ranks import LOWEST

# A tail of less probability counts as this much: float32 cannot subtract from one what is closer to it.
LEAST_TAIL = 2.0**-20
NO_TEACHER = (
    "module=distillation has neither a teacher nor stored scores; give teacher=..., such as "
    "teacher=pretrained teacher.path=NAME_OR_FOLDER, or data.scores=FILE of mode=score"
)
STORED = ("teacher_entries", "teacher_log_probs", "teacher_target_log_prob")
HIDDEN_STATES = "teacher_hidden_states"  # stored in their place, (B, T, D)


class DistillationLoss(ScoredLoss):
    """A student's loss, ``cross_entropy_weight * nll + divergence_weight * D(teacher, student)``, without logits.

    Args:
        divergence: D, "forward_kl" (the mean over the teacher's probabilities), "reverse_kl" (over the student's) or
            "jsd", the generalised Jensen-Shannon divergence (GKD, arXiv:2306.13649).
        beta: of "jsd", in (0, 1): the teacher's weight in the mixture.
        temperature: T > 0, which divides the logits of both in D, and none in the cross entropy.
        divergence_weight: Hinton et al. (arXiv:1503.02531) take T^2, which keeps gradients as large as those of the
            cross entropy.
        cross_entropy_weight: of the cross entropy with the labels.
        hidden_weight: of the smooth L1 distance, a mean over D, of the output layers' inputs, both of width D. A
            drafter (:func:`lit_fused.drafter_for`), which goes on from its own, needs it.
        recompute: compute the logits again in backward instead of holding gradients from forward on.
        logits_budget_mib, chunk_size, drop_ignored, float32_accumulation: as of :class:`ScoredLoss`. With a teacher
            beside it a chunk is that of both logits.

    Attributes:
        teacher: returns the teacher's output layer and its input for a batch; None: batches have stored scores.
        output_layer: of a teacher whose hidden states are stored, whole; it moves to where it is needed. Its own
            ``hidden_states`` are not read.
        drafts: the student also gets the teacher's hidden states of the tokens before (models/drafter.py).
    """

    statistics = ("divergence", "teacher_nll")
    inputs = (*STORED, HIDDEN_STATES)

    @checked_options()
    def __init__(
        self,
        divergence: str = "forward_kl",
        *,
        beta: float = 0.5,
        temperature: float = 1.0,
        divergence_weight: float = 1.0,
        cross_entropy_weight: float = 0.0,
        hidden_weight: float = 0.0,
        recompute: bool = False,
        logits_budget_mib: float | None = None,
        chunk_size: int | None = None,
        drop_ignored: bool = False,
        float32_accumulation: bool | None = None,
    ) -> None:
        super().__init__(
            logits_budget_mib=logits_budget_mib,
            chunk_size=chunk_size,
            drop_ignored=drop_ignored,
            float32_accumulation=float32_accumulation,
        )
        self.of_loss = Divergence(divergence, beta, temperature, divergence_weight, cross_entropy_weight)
        check_number("hidden_weight", hidden_weight, "be at least 0", lambda x: x >= 0)
        self.hidden_weight, self.recompute = hidden_weight, recompute
        self.teacher: Callable[[Batch], TeacherHead] | None = None
        self.output_layer: TeacherHead | None = None
        self.drafts = False

    def check_stored(self, vocabulary: int, temperature: float, entries: int) -> None:
        """Raise a UserError unless scores of a vocabulary and a temperature can train a student with ``entries``."""
        if vocabulary != entries:
            raise UserError(
                f"the stored scores are of a vocabulary of {vocabulary} entries and the student has {entries}, so "
                "their probabilities cannot be compared; score the data with a teacher of the student's vocabulary"
            )
        if temperature != self.of_loss.temperature:
            raise UserError(
                f"the stored scores are of temperature {temperature:g} and the student is to be trained with "
                f"{self.of_loss.temperature:g}; choose loss.temperature={temperature:g}, or score the data anew with "
                f"score.temperature={self.of_loss.temperature:g}"
            )

    def compute(self, model: Forward, batch: Batch) -> LossOutput:
        targets, teacher, states = model.targets(batch), None, batch.get(HIDDEN_STATES)
        if self.teacher is not None:  # Its activations are free before the student has its own.
            with torch.no_grad():
                teacher = self.teacher(batch)
            states = model.whole_rows(teacher.hidden_states, batch) if self.drafts else None
        elif states is None and (self.drafts or self.hidden_weight):
            raise UserError("the student needs hidden states of its teacher; give teacher=..., or score.hidden=true")
        inputs = batch if states is None or not self.drafts else {**batch, PREVIOUS: _of_tokens_before(states, batch)}
        hidden_states, head, aux_loss = model.hidden_states(inputs)
        if teacher is None and states is not None:
            teacher = self._of_hidden_states(model.own_positions(states), hidden_states, head)
        if teacher is not None:
            found = self._beside(hidden_states, targets, head, teacher)
            if self.hidden_weight:
                own, theirs = at_least_float32(head.operands(hidden_states)[0]), teacher.hidden_states
                distance = F.smooth_l1_loss(own, theirs.to(own.dtype), reduction="none").mean(-1)
                added = self.hidden_weight * distance.where(targets != IGNORE_INDEX, 0).sum()
                found = replace(found, loss_sum=found.loss_sum + added)
        else:
            stored = [None if batch.get(name) is None else model.own_positions(batch[name]) for name in STORED]
            found = self._from_stored(hidden_states, targets, head, stored)
        return replace(found, aux_loss=aux_loss)

    def _beside(self, hidden_states: Tensor, targets: Tensor, head: Head, teacher: TeacherHead) -> LossOutput:
        hidden_states, weight, bias = head.operands(hidden_states, in_parts=True)
        loss_sum, stats = linear_distillation(
            hidden_states,
            weight,
            targets,
            teacher,
            bias=bias,
            scale=head.scale,
            softcap=head.softcap,
            reduction="sum",
            recompute=self.recompute,
            shard=head.shard,
            **vars(self.of_loss),
            **self.options,
        )
        return LossOutput(loss_sum, (targets != IGNORE_INDEX).sum(), stats=stats)

    def _of_hidden_states(self, stored: Tensor, hidden_states: Tensor, head: Head) -> TeacherHead:
        """Return the teacher of stored hidden states (B, T, D), with the entries of the vocabulary that the student has
        here."""
        if self.output_layer is None:
            raise UserError(f"a batch has {HIDDEN_STATES} without the teacher's output layer; {NO_TEACHER}")
        layer, device = self.output_layer, stored.device
        if head.shard is not None and len(layer.weight) == head.shard.vocabulary:
            own = slice(head.shard.start, head.shard.start + len(head.operands(hidden_states)[1]))
            layer = layer._replace(weight=layer.weight[own], bias=None if layer.bias is None else layer.bias[own])
        if layer.weight.device != device:
            bias = None if layer.bias is None else layer.bias.to(device)
            layer = self.output_layer = layer._replace(weight=layer.weight.to(device), bias=bias)
        return layer._replace(hidden_states=stored)

    def _from_stored(self, hidden_states: Tensor, targets: Tensor, head: Head, stored: list[Any]) -> LossOutput:
        of_loss, stats = self.of_loss, {}
        if stored[0] is None:
            raise UserError(NO_TEACHER)
        shapes = [None if numbers is None else tuple(numbers.shape) for numbers in stored]
        if shapes != [(*targets.shape, *stored[0].shape[-1:])] * 2 + [tuple(targets.shape)]:
            raise UserError(
                f"stored scores of {tuple(targets.shape)} tokens must be {STORED[0]} and {STORED[1]} (B, T, K) and "
                f"{STORED[2]} (B, T), got {', '.join(map(str, shapes))}; make them of the same rows as the labels"
            )
        entries, log_q = stored_entries(targets, *stored)
        scores = self.scores(hidden_states, targets, head, entries, of_loss.temperature)
        divergence = divergence_with_tail(scores.selected, log_q, entries >= 0, of_loss)
        loss = of_loss.divergence_weight * divergence.where(targets != IGNORE_INDEX, 0).sum()
        stats["divergence"] = divergence.detach().where(targets != IGNORE_INDEX, 0).sum()
        if of_loss.cross_entropy_weight and of_loss.temperature != 1:
            scores = self.scores(hidden_states, targets, head)
        if of_loss.cross_entropy_weight or of_loss.temperature == 1:
            nll = -scores.log_prob.sum()
            stats["nll"] = nll.detach()
            loss = loss + of_loss.cross_entropy_weight * nll
        return LossOutput(loss, (targets != IGNORE_INDEX).sum(), stats=stats)


def _of_tokens_before(states: Tensor, batch: Batch) -> Tensor:
    """Return the hidden states (B, T, D) of the tokens before, zeros at the first of a row or of a document in it."""
    before = F.pad(states[:, :-1], (0, 0, 1, 0))
    positions = batch.get("position_ids")
    return before if positions is None else before.masked_fill((positions == 0)[..., None], 0)


def teacher_head(model: Forward, batch: Batch) -> TeacherHead:
    """Return a model's output layer and its input (B, T, D) for a batch, as those of a teacher."""
    hidden_states, head, _ = model.hidden_states(batch)
    return TeacherHead(*head.operands(hidden_states, in_parts=True), head.scale, head.softcap)


@torch.no_grad()
def scores_to_store(model: Forward, batch: Batch, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ``STORED`` scores of a batch (B, T), under logits over a temperature: the k most probable entries of
    each position, (B, T, k), the most probable first, their log-probabilities in nats, and the target's, (B, T); -1 and
    zeros where there is no target."""
    targets = model.targets(batch)
    hidden_states, head, _ = model.hidden_states(batch)
    hidden_states, weight, bias = head.operands(hidden_states)
    formula = at_temperature(head, bias, temperature)
    # A softcap grows with what it caps, so that it leaves the order of the entries as it is.
    options = {"bias": formula["bias"], "scale": formula["scale"], "shard": head.shard}
    entries = top_items(hidden_states, weight, k, **options).items
    entries = entries.where((targets != IGNORE_INDEX)[..., None], -1)
    scores = token_scores(hidden_states, weight, targets, selected=entries, entropy=False, shard=head.shard, **formula)
    return entries, scores.selected, scores.log_prob


def stored_entries(targets: Tensor, entries: Tensor, log_q: Tensor, target_log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Return stored entries (..., K + 1) of the vocabulary, -1 where there is none, and their log-probabilities.

    The target is the last one, unless it is among the K ``entries`` (..., K) of ``log_q``. Where ``targets`` (...) is
    ignored there is no entry.
    """
    valid = (targets != IGNORE_INDEX)[..., None]
    among = (entries == targets[..., None]).any(-1, keepdim=True)
    last = targets[..., None].where(valid & ~among, -1)
    return (
        torch.cat([entries.long().where(valid, -1), last], -1),
        torch.cat([log_q, target_log_q[..., None].to(log_q.dtype)], -1),
    )


def divergence_with_tail(log_p: Tensor, log_q: Tensor, exists: Tensor, loss: Divergence) -> Tensor:
    """Return the divergence (...), in nats, of log-probabilities (..., K) of student and teacher at the same entries,
    where they ``exist``, with all other entries as one more: the formula at the top of this file."""
    with_tail = []
    for log in (log_p, log_q.to(log_p.dtype)):
        log = log.where(exists, 0).clamp(min=LOWEST)  # A masked entry counts zero, not 0 * inf.
        tail = (1 - log.exp().where(exists, 0).sum(-1, keepdim=True)).clamp(min=LEAST_TAIL)
        with_tail.append((torch.cat([log, tail.log()], -1), torch.cat([log.exp().where(exists, 0), tail], -1)))
    (log_p, p), (log_q, q) = with_tail
    if loss.divergence == "forward_kl":
        return (q * (log_q - log_p)).sum(-1)
    if loss.divergence == "reverse_kl":
        return (p * (log_p - log_q)).sum(-1)
    log_m = (loss.beta * log_q.exp() + (1 - loss.beta) * log_p.exp()).log()
    of_teacher, of_student = (q * (log_q - log_m)).sum(-1), (p * (log_p - log_m)).sum(-1)
    return loss.beta * of_teacher + (1 - loss.beta) * of_student
