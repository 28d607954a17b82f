"""Make the inputs of an encoder-decoder's decoder from its labels: the same tokens, one position later.

Most models put a start token first; mBART wraps the last token around. If the model has the method
``prepare_decoder_input_ids_from_labels``, that is used, else the common rule. In that case a small forward pass with
labels checks that the model applies the common rule too.
"""

import torch
from torch import Tensor
from transformers import EncoderDecoderModel, PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.heads.evaluation import evaluation_mode
from lit_fused.heads.probe import probe_batch
from lit_fused.ops.label_checks import IGNORE_INDEX


def decoder_inputs(model: PreTrainedModel, labels: Tensor) -> dict[str, Tensor]:
    """Return "decoder_input_ids" (B, T) int64 for labels (B, T), -100 if ignored, and a mask if the model has one."""
    ids = _shifted(model, labels)
    if isinstance(model, EncoderDecoderModel):  # its own forward masks padding, and ignored labels become padding
        return {"decoder_input_ids": ids, "decoder_attention_mask": (ids != model.config.pad_token_id).long()}
    return {"decoder_input_ids": ids}


def _shifted(model: PreTrainedModel, labels: Tensor) -> Tensor:
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        try:
            return prepare(labels.long().clone())  # FSMT's method writes into its argument
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
    """Raise UserError if the model's own decoder inputs differ from those of :func:`decoder_inputs`."""
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
