"""Run the spot check of heads/spot_check.py on a slice of a batch of a language model."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lit_fused.errors import UserError
from lit_fused.heads import OutputHead
from lit_fused.heads.capture import InputCapture, outputs_by_name, router_loss, weights_here
from lit_fused.heads.slices import copied, slice_of
from lit_fused.heads.spot_check import FusedResult, OwnResult, SpotCheck
from lit_fused.losses.loss import SHIFTED_OR_COUNTED, Batch, labels_of, shift_labels

if TYPE_CHECKING:
    from lit_fused.models.language_model import LanguageModel


def spot_check(model: "LanguageModel", batch: Batch, *, thorough: bool) -> None:
    """Raise UserError if the spot check of a slice of a batch finds a difference."""
    has_head = hasattr(model.loss, "cross_entropy")
    if labels_of(batch).ndim != 2 or not (model.loss.replaces_own or has_head):
        return
    batch = {**batch, "labels": labels_of(batch)}
    head = model.prepare_hidden_states() or model.head_for(batch) if has_head else None
    part = slice_of(batch, model.targets(batch), model.vocabulary if head is None else head.vocabulary)
    fault = difference(model, part, head, thorough=thorough)
    if fault is not None:
        raise UserError(fault)


def difference(model: "LanguageModel", part: Batch, head: OutputHead | None, *, thorough: bool) -> str | None:
    """Return what the spot check of a slice finds, or None. Without a head only the model's own loss is compared."""
    inner, targets = model.transformers_model, model.targets(part)
    read = model.read(part) if model.loss.replaces_own else None
    check = SpotCheck(
        model.backbone, model.name, targets, (read or {}).get("num_items_in_batch"), **_others(model, part)
    )
    if head is not None and isinstance(head.layer, nn.Embedding):  # The layer will be called with hidden states.
        layer = nn.Linear(1, 1, bias=False, device="meta")
        layer.weight = head.layer.weight
        head = replace(head, layer=layer)

    def own() -> OwnResult:
        if inner is None:
            assert head is not None
            return OwnResult(None, head.layer(model.returned_hidden_states(part)))
        inputs = model.own_inputs_of(part)
        try:
            output = model.run_backbone(copied(inputs | _labels(inner, part)))
        except (ValueError, IndexError, RuntimeError) as error:
            if isinstance(error, UserError | torch.OutOfMemoryError):
                raise
            output = model.run_backbone(copied(inputs))  # Its own loss takes no such labels: images precede the text.
        return OwnResult(
            None if read is None else getattr(output, "loss", None), output.logits, router_loss(inner, output)
        )

    def fused(call_layer: Callable[[], Any] | None) -> FusedResult:
        assert head is not None
        with InputCapture(head, model.backbone) as seen, outputs_by_name(model.backbone):
            if call_layer is not None:
                call_layer()
            elif inner is None:
                head.layer(model.returned_hidden_states(part))
            else:
                model.run_backbone(copied(model.inputs_of(part)))
        hidden_states, loss = model.only(seen), model.loss
        with weights_here(head.layer, hidden_states):
            return FusedResult(loss.cross_entropy(hidden_states, targets.to(hidden_states.device), head), hidden_states)  # type: ignore[attr-defined]

    if head is None:
        if inner is None:
            return None
        again = (lambda: model.run_backbone(copied(model.inputs_of(part))).logits) if thorough else None
        return check.of_own_loss(own, again)
    return check.of_head(head, own, fused, thorough=thorough)


def _labels(inner: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the arguments that make a model compute its own loss of a batch, if its forward takes labels."""
    if "labels" not in inspect.signature(inner.forward).parameters:
        return {}
    return {name: batch[name] for name in ("labels", *SHIFTED_OR_COUNTED) if batch.get(name) is not None}


def _others(model: "LanguageModel", batch: Batch) -> dict[str, Any]:
    """Return what a model's own loss may predict instead, and whether that is no fault."""
    labels = labels_of(batch)
    kinds = {kind.__name__ for kind in type(model.transformers_model).__mro__}
    may_be = model.shifts_labels and bool(kinds & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()})
    return {"other_targets": labels if model.shifts_labels else shift_labels(labels), "may_be_other": may_be}
