"""How a model itself treats labels: whether it shifts them, the decoder inputs and the losses that it makes of them.

A forward pass of eight tokens finds each answer. The labels of an encoder-decoder become its decoder's inputs, one
position later. Most models put a start token first; mBART wraps the last token around.

A mixture of experts mostly returns its router's loss with every forward pass. Some models compute it only when they get
labels, or add another one; the spot check finds these.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderModel, PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.heads.model_state import probing
from lit_fused.heads.probe import probe_batch
from lit_fused.ops.label_checks import IGNORE_INDEX

_PREPARE = "prepare_decoder_input_ids_from_labels"  # a method that most encoder-decoders have


@torch.no_grad()
def ask(model: PreTrainedModel, **arguments: Any) -> Any:
    """Return what a model makes of :func:`probe_batch` with other arguments (None: left out), evaluated and eager."""
    batch = {name: value for name, value in (probe_batch(model) | arguments).items() if value is not None}
    with probing(model):
        return model(**batch)


def labels_are_shifted_by(model: PreTrainedModel) -> bool:
    """Return whether the model's own loss shifts labels: one at the first position alone then gives no number, or the
    same whatever it is."""
    ids = probe_batch(model)["input_ids"]
    ignored = torch.full_like(ids[:, 1:], IGNORE_INDEX)
    first, second = (ask(model, labels=torch.cat([label, ignored], 1)).loss for label in (ids[:, :1], ids[:, 1:2]))
    return not bool(first.isfinite()) or torch.equal(first, second)


def ignored_by_own_loss(model: PreTrainedModel) -> set[str]:
    """Return which of "shift_labels", "num_items_in_batch" and "ignore_index" a model's own loss takes no notice of."""
    labels = probe_batch(model)["input_ids"]
    others: dict[str, Any] = {
        "shift_labels": labels.flip(-1),
        "num_items_in_batch": 3,
        "ignore_index": int(labels[0, 1]),
    }
    own = ask(model, labels=labels).loss
    return {name for name, value in others.items() if torch.equal(own, ask(model, labels=labels, **{name: value}).loss)}


def decoder_inputs(model: PreTrainedModel, labels: Tensor) -> dict[str, Tensor]:
    """Return "decoder_input_ids" (B, T) int64 for labels (B, T), -100 if ignored, and a mask if the model has one."""
    ids = _shifted(model, labels)
    if isinstance(model, EncoderDecoderModel):  # its own forward masks padding, and ignored labels become padding
        return {"decoder_input_ids": ids, "decoder_attention_mask": (ids != model.config.pad_token_id).long()}
    return {"decoder_input_ids": ids}


def _shifted(model: PreTrainedModel, labels: Tensor) -> Tensor:
    try:
        if hasattr(model, _PREPARE):
            return getattr(model, _PREPARE)(labels.long().clone())  # FSMT's method writes into its argument
        start = labels.new_full((len(labels), 1), model.config.decoder_start_token_id)
        shifted = torch.cat([start, labels[:, :-1]], 1).long()
        return shifted.masked_fill(shifted == IGNORE_INDEX, model.config.pad_token_id)
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"{type(model).__name__} needs decoder_start_token_id and pad_token_id in its configuration to make "
            "decoder_input_ids from labels; set them (model.config.decoder_start_token_id), or put decoder_input_ids "
            "into the batches"
        ) from error


def makes_decoder_inputs(model: PreTrainedModel) -> bool:
    """Return whether the model says how, so that :func:`decoder_inputs` are its own."""
    return hasattr(model, _PREPARE)


def makes_no_decoder_inputs(model: PreTrainedModel) -> bool:
    """Return whether the model ignores labels when it makes its decoder's inputs, as FSMT does."""
    try:
        without = ask(model, decoder_input_ids=None).logits
    except Exception:  # It needs them, and can only make them of labels.
        return False
    labels = probe_batch(model)["input_ids"].flip(-1)
    return torch.equal(without, ask(model, decoder_input_ids=None, labels=labels).logits)
