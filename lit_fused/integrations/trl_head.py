"""The head that TRL's trainers ask a model for: scores of the labels, here by :func:`lit_fused.token_scores`.

TRL replaces the ``forward`` of the model that it is given, and asks it by ``fused_lm_head=True`` for log-probabilities,
entropies and whether the label is the most probable entry, instead of a loss. Its own head reads the output layer's
weight, and what it knows of a model's configuration; this one has the head that was identified, adapters included.
"""

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lit_fused.heads import OutputHead
from lit_fused.losses.loss import IGNORE_INDEX, Batch, has_shifted_labels, labels_of
from lit_fused.ops import TokenScores, token_scores
from lit_fused.ops.label_checks import check_integers

_VARIABLES = {"original_forward", "outputs", "temperature", "cast_lm_head_to_fp32", "text_config"}


def trl_settings(forward: Any) -> dict[str, Any] | None:
    """Return the variables of a forward of TRL, and the class of what it returns; None for any other forward."""
    if not inspect.ismethod(forward):
        return None
    found = inspect.getclosurevars(forward.__func__)
    if not found.nonlocals.keys() >= _VARIABLES or "FusedCausalLMOutput" not in found.globals:
        return None
    return {**found.nonlocals, "answer": found.globals["FusedCausalLMOutput"]}


def can_score(head: OutputHead, settings: dict[str, Any]) -> bool:
    """Return whether every number that is asked for is one of token scores: the mean of capped logits is none."""
    return "mean_logits" not in settings["outputs"] or (head.softcap is None and head.shard is None)


def scored(hidden_states: Tensor, head: OutputHead, batch: Batch, aux_loss: Any, settings: dict[str, Any]) -> Any:
    """Return TRL's output, whose tensors are (B, T - 1), or (B, T) for shifted labels, of hidden states (B, T, D)."""
    if has_shifted_labels(batch):
        targets = check_integers(batch["shift_labels"])
    else:
        targets, hidden_states = labels_of(batch)[:, 1:], hidden_states[:, :-1]
    reads_weight = settings["cast_lm_head_to_fp32"] or "mean_logits" in settings["outputs"]
    hidden_states, weight, bias = head.operands(hidden_states, in_parts=not reads_weight)
    targets, precision = targets.to(hidden_states.device), nullcontext()
    if settings["cast_lm_head_to_fp32"]:
        hidden_states, weight = hidden_states.float(), weight.float()
        precision = torch.autocast(hidden_states.device.type, enabled=False)

    def at(factor: float, entropy: bool = False) -> TokenScores:
        offset = None if bias is None else bias * factor
        cap = None if head.softcap is None else head.softcap * factor
        scale = head.scale * factor
        return token_scores(hidden_states, weight, targets, offset, scale, cap, entropy=entropy, shard=head.shard)

    outputs, factor, mask = settings["outputs"], 1 / settings["temperature"], targets != IGNORE_INDEX
    with precision:
        scores = at(factor, entropy="entropy" in outputs)
    numbers: dict[str, Tensor] = {}
    with torch.no_grad(), precision:
        if "log_sum_sq_probs" in outputs:
            numbers["log_sum_sq_probs"] = at(2 * factor).lse - 2 * scores.lse
        if "mean_logits" in outputs:
            mean = hidden_states.float() @ weight.float().mean(0) * (head.scale * factor)
            numbers["mean_logits"] = (mean if bias is None else mean + bias.float().mean() * factor).where(mask, 0)
        if "is_top1" in outputs:
            numbers["is_top1"] = scores.top1 == targets
    num_items = batch.get("num_items_in_batch")
    loss = -scores.log_prob.sum() / (mask.sum().clamp(min=1) if num_items is None else num_items)
    if aux_loss is not None:
        loss = loss + getattr(settings["text_config"], "router_aux_loss_coef", 0.0) * aux_loss
    known = {"log_probs": scores.log_prob, "entropy": scores.entropy, "label_mask": mask, "aux_loss": aux_loss}
    return settings["answer"](loss=loss, **known, **numbers)
