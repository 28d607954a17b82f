"""Run the spot check of heads/spot_check.py on a slice of a batch of a language model."""

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lit_fused.errors import UserError
from lit_fused.heads import OutputHead
from lit_fused.heads.capture import InputCapture, router_loss
from lit_fused.heads.slices import copied, slice_of
from lit_fused.heads.spot_check import FusedPass, Labels, OwnPass, SpotCheck
from lit_fused.losses.loss import SHIFTED_OR_COUNTED, Batch, labels_of, shift_labels

if TYPE_CHECKING:
    from lit_fused.models.language_model import LanguageModel


def spot_check(model: "LanguageModel", batch: Batch) -> set[str]:
    """Raise UserError if the spot check of a slice of a batch finds a difference. Return the names of the entries of a
    transformers model's output that are made of its logits or labels."""
    has_head = hasattr(model.loss, "cross_entropy")
    if labels_of(batch).ndim != 2 or not (model.loss.replaces_own or has_head):
        return set()
    batch = {**batch, "labels": labels_of(batch)}
    head = model.prepare_hidden_states() or model.head_for(batch) if has_head else None
    vocabulary = model.vocabulary if head is None else head.vocabulary
    return compare(model, slice_of(batch, model.targets(batch), vocabulary), head)


def compare(model: "LanguageModel", part: Batch, head: OutputHead | None) -> set[str]:
    """Run :func:`spot_check` of a slice. Without a head only the model's own loss is compared."""
    inner, targets, differs = model.transformers_model, model.targets(part), model.own_loss_differs
    if head is None and (inner is None or differs):
        return set()
    read = model.read(part) if model.loss.replaces_own and not differs else None
    labels = labels_of(part)
    kinds = {kind.__name__ for kind in type(inner).__mro__}
    may_be_other = model.shifts_labels and bool(kinds & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()})
    other_targets = labels if model.shifts_labels else shift_labels(labels)
    num_items = (read or {}).get("num_items_in_batch")
    counts = (None,) if num_items is None else (num_items,) if model.divides_as_own_loss else (num_items, None)
    as_read = Labels(targets, counts, other_targets, may_be_other)
    check = SpotCheck(model.backbone, model.name, as_read)
    if head is not None and isinstance(head.layer, nn.Embedding):  # The layer will be called with hidden states.
        layer = nn.Linear(1, 1, bias=False, device="meta")
        layer.weight = head.layer.weight
        head = replace(head, layer=layer)

    def run(inputs: dict[str, Any]) -> Any:
        return model.run_backbone(copied(inputs))

    refused: list[Exception] = []

    def own(with_labels: bool) -> OwnPass | None:
        if inner is None:
            assert head is not None
            return OwnPass(None, head.layer(model.returned_hidden_states(part)))
        if not with_labels or differs:
            output = run(model.inputs_of(part))
            if refused and output.logits.shape[:-1] == labels.shape:  # else its images precede the text
                warnings.warn(
                    f"the own loss of {model.name} is not compared, as it cannot be computed of a part of a batch "
                    f"({type(refused[0]).__name__}: {refused[0]})",
                    stacklevel=2,
                )
            return OwnPass(None, output.logits, router_loss(inner, output), _entries(output))
        try:
            output = run(model.own_inputs_of(part) | _labels(inner, part))
        except (ValueError, IndexError, RuntimeError, TypeError) as error:
            if isinstance(error, UserError | torch.OutOfMemoryError):
                raise
            refused.append(error)
            return None
        if not isinstance(getattr(output, "logits", None), Tensor):
            raise UserError(
                f"{model.name} returns no logits if it gets labels, so that its own loss cannot be compared with the "
                "one that is trained; say own_loss_differs=True if that is meant to take its place"
            )
        loss = None if read is None else getattr(output, "loss", None)
        return OwnPass(loss, output.logits, router_loss(inner, output), _entries(output))

    def fused() -> FusedPass:
        assert head is not None
        output = None
        with InputCapture(head, model.backbone) as seen:
            if inner is None:
                head.layer(model.returned_hidden_states(part))
            else:
                output = run(model.inputs_of(part))
        hidden_states, loss = model.only(seen), model.loss
        of_tokens = targets.to(hidden_states.device)
        loss_sum = partial(loss.cross_entropy, hidden_states, of_tokens, head)  # type: ignore[attr-defined]
        return FusedPass(hidden_states, loss_sum, _entries(output))

    if head is not None:
        return check.compare_head(head, own, fused)
    check.compare_own_loss(own)
    return set()


def _entries(output: Any) -> dict[str, Any]:
    return dict(output.items()) if isinstance(output, Mapping) else {}


def _labels(inner: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the arguments that make a model compute its own loss of a batch, if its forward takes labels."""
    parameters = inspect.signature(inner.forward).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "labels" not in parameters and not takes_all:
        return {}
    taken = [name for name in ("labels", *SHIFTED_OR_COUNTED) if takes_all or name in parameters]
    return {name: batch[name] for name in taken if batch.get(name) is not None}
