"""What an encoder-decoder's decoder reads in training: its labels, one position later.

Each model has its own way: most put a start token first, mBART wraps the last one around. A model says so itself, by
``prepare_decoder_input_ids_from_labels`` or inside its forward when it is given labels. The first is used; where it is
missing, the common rule is, and one small forward pass with labels shows whether that is the model's as well.
"""

import torch
from torch import Tensor
from transformers import EncoderDecoderModel, PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.heads.probe import evaluation_mode, probe_batch
from lit_fused.ops.linear_cross_entropy.checks import IGNORE_INDEX


def decoder_inputs(model: PreTrainedModel, labels: Tensor) -> dict[str, Tensor]:
    """(B, T) labels, -100 where ignored -> "decoder_input_ids" (B, T) int64, and what else a model makes of labels."""
    ids = _shifted(model, labels)
    if isinstance(model, EncoderDecoderModel):  # by itself it masks padding, and ignored labels become padding
        return {"decoder_input_ids": ids, "decoder_attention_mask": (ids != model.config.pad_token_id).long()}
    return {"decoder_input_ids": ids}


def _shifted(model: PreTrainedModel, labels: Tensor) -> Tensor:
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        try:
            return prepare(labels.long().clone())  # FSMT's writes into what it is given
        except (AttributeError, TypeError, ValueError) as error:
            raise _no_start_or_padding(model) from error
    start, padding = (getattr(model.config, name, None) for name in ("decoder_start_token_id", "pad_token_id"))
    if start is None or padding is None:
        raise _no_start_or_padding(model)
    shifted = torch.cat([labels.new_full((len(labels), 1), start), labels[:, :-1]], 1).long()
    return shifted.masked_fill(shifted == IGNORE_INDEX, padding)


def _no_start_or_padding(model: PreTrainedModel) -> UserError:
    return UserError(
        f"{type(model).__name__} needs decoder_start_token_id and pad_token_id in its configuration to make "
        "decoder_input_ids from labels; set them (model.config.decoder_start_token_id), or put decoder_input_ids into "
        "the batches"
    )


@torch.no_grad()
def check_decoder_inputs(model: PreTrainedModel) -> None:
    """Refuse a model that would make other decoder inputs of its labels than :func:`decoder_inputs` does.

    Raises:
        UserError: with the class and what to do.
    """
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return
    inputs = {name: value for name, value in probe_batch(model).items() if name != "decoder_input_ids"}
    labels = inputs["input_ids"].clone()
    labels[:, -2:] = IGNORE_INDEX
    with evaluation_mode(model), torch.compiler.set_stance("force_eager"):
        own = model(**inputs, labels=labels).logits
        ours = model(**inputs, **decoder_inputs(model, labels)).logits
    if not torch.equal(own, ours):
        raise UserError(
            f"{type(model).__name__} makes its decoder_input_ids from labels in a way of its own; put "
            "decoder_input_ids into the batches"
        )
