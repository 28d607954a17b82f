"""Run the spot check of heads/spot_check.py on a slice of a batch of a language model."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lit_fused.errors import UserError
from lit_fused.heads import OutputHead
from lit_fused.heads.capture import InputCapture, router_loss
from lit_fused.heads.slices import copied, slice_of
from lit_fused.heads.spot_check import Labels, OwnPass, SpotCheck
from lit_fused.losses.loss import SHIFTED_OR_COUNTED, Batch, labels_of, shift_labels

if TYPE_CHECKING:
    from lit_fused.models.language_model import LanguageModel


def spot_check(model: "LanguageModel", batch: Batch) -> None:
    """Raise UserError if the spot check of a slice of a batch finds a difference."""
    has_head = hasattr(model.loss, "cross_entropy")
    if labels_of(batch).ndim != 2 or not (model.loss.replaces_own or has_head):
        return
    batch = {**batch, "labels": labels_of(batch)}
    head = model.prepare_hidden_states() or model.head_for(batch) if has_head else None
    compare(model, slice_of(batch, model.targets(batch), model.vocabulary if head is None else head.vocabulary), head)


def compare(model: "LanguageModel", part: Batch, head: OutputHead | None) -> None:
    """Run the spot check of a slice. Without a head only the model's own loss is compared."""
    inner, targets = model.transformers_model, model.targets(part)
    if head is None and inner is None:
        return
    read = model.read(part) if model.loss.replaces_own else None
    labels = labels_of(part)
    kinds = {kind.__name__ for kind in type(inner).__mro__}
    may_be_other = model.shifts_labels and bool(kinds & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()})
    other_targets = labels if model.shifts_labels else shift_labels(labels)
    as_read = Labels(targets, (read or {}).get("num_items_in_batch"), other_targets, may_be_other)
    check = SpotCheck(model.backbone, model.name, as_read)
    if head is not None and isinstance(head.layer, nn.Embedding):  # The layer will be called with hidden states.
        layer = nn.Linear(1, 1, bias=False, device="meta")
        layer.weight = head.layer.weight
        head = replace(head, layer=layer)

    def run(inputs: dict[str, Any]) -> Any:
        return model.run_backbone(copied(inputs))

    def own() -> OwnPass:
        if inner is None:
            assert head is not None
            return OwnPass(None, head.layer(model.returned_hidden_states(part)))
        inputs = model.own_inputs_of(part)
        try:
            output = run(inputs | _labels(inner, part))
        except (ValueError, IndexError, RuntimeError) as error:
            if isinstance(error, UserError | torch.OutOfMemoryError):
                raise
            output = run(inputs)  # Its own loss takes no such labels: images precede the text.
        loss = None if read is None else getattr(output, "loss", None)
        return OwnPass(loss, output.logits, router_loss(inner, output))

    def fused() -> tuple[Tensor, Callable[[], Tensor]]:
        assert head is not None
        with InputCapture(head, model.backbone) as seen:
            if inner is None:
                head.layer(model.returned_hidden_states(part))
            else:
                run(model.inputs_of(part))
        hidden_states, loss = model.only(seen), model.loss
        of_tokens = targets.to(hidden_states.device)
        return hidden_states, lambda: loss.cross_entropy(hidden_states, of_tokens, head)  # type: ignore[attr-defined]

    if head is None:
        check.compare_own_loss(own, lambda: run(model.inputs_of(part)).logits)
    else:
        check.compare_head(head, own, fused)


def _labels(inner: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the arguments that make a model compute its own loss of a batch, if its forward takes labels."""
    if "labels" not in inspect.signature(inner.forward).parameters:
        return {}
    return {name: batch[name] for name in ("labels", *SHIFTED_OR_COUNTED) if batch.get(name) is not None}
