"""How a model itself treats labels: whether it shifts them, the decoder inputs and the losses that it makes of them.

A forward pass of eight tokens finds each answer. The labels of an encoder-decoder become its decoder's inputs, one
position later. Most models put a start token first; mBART wraps the last token around.

A mixture of experts mostly returns its router's loss with every forward pass. Some models compute it only when they get
labels, or add another one, such as a z-loss of the router or of the logits; trained on cross entropy they would lose it
silently. So a model's own loss must be cross entropy plus what it returns.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import EncoderDecoderModel, PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.heads.capture import probing
from lit_fused.heads.probe import probe_batch
from lit_fused.ops.label_checks import IGNORE_INDEX

_PREPARE = "prepare_decoder_input_ids_from_labels"  # a method that most encoder-decoders have


@torch.no_grad()
def ask(model: PreTrainedModel, **arguments: Any) -> Any:
    """Return what a model makes of :func:`probe_batch` with other arguments (None: left out), evaluated and eager."""
    batch = {name: value for name, value in (probe_batch(model) | arguments).items() if value is not None}
    with probing(model), torch.compiler.set_stance("force_eager"):
        return model(**batch)


def labels_are_shifted_by(model: PreTrainedModel) -> bool:
    """Return whether the model's own loss shifts labels: with one at the first position alone it is then not finite."""
    ids = probe_batch(model)["input_ids"]
    labels = torch.cat([ids[:, :1], torch.full_like(ids[:, 1:], IGNORE_INDEX)], 1)
    return not bool(ask(model, labels=labels).loss.isfinite())


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


def check_decoder_inputs(model: PreTrainedModel) -> None:
    """Raise UserError if the model's own decoder inputs differ from those of :func:`decoder_inputs`."""
    if hasattr(model, _PREPARE):
        return
    labels = probe_batch(model)["input_ids"].clone()
    labels[:, -2:] = IGNORE_INDEX
    own = ask(model, decoder_input_ids=None, labels=labels).logits
    if not torch.equal(own, ask(model, **decoder_inputs(model, labels)).logits):
        raise UserError(
            f"{type(model).__name__} makes its decoder_input_ids from labels in a way of its own; put "
            "decoder_input_ids into the batches"
        )


def makes_no_decoder_inputs(model: PreTrainedModel) -> bool:
    """Return whether the model ignores labels when it makes its decoder's inputs, as FSMT does."""
    try:
        without = ask(model, decoder_input_ids=None).logits
    except Exception:  # It needs them, and can only make them of labels.
        return False
    labels = probe_batch(model)["input_ids"].flip(-1)
    return torch.equal(without, ask(model, decoder_input_ids=None, labels=labels).logits)


def router_loss(model: PreTrainedModel, output: Any) -> Tensor | None:
    """Return the router's loss () in a model's output, with the weight that the model's own loss gives it, or None."""
    aux_loss = getattr(output, "aux_loss", None)
    if not isinstance(aux_loss, Tensor):
        return None
    weight = getattr(model, "router_aux_loss_coef", getattr(model, "aux_loss_coef", None))
    if weight is None:
        raise UserError(
            f"{type(model).__name__} returns an auxiliary loss without router_aux_loss_coef, so that its weight is "
            "unknown; switch it off (output_router_logits=False) or choose loss=model"
        )
    return weight * aux_loss


@torch.no_grad()
def check_own_loss(model: PreTrainedModel) -> None:
    """Raise UserError if the model's own loss has terms besides cross entropy and :func:`router_loss`, in evaluation or
    in training, or if labels change its logits."""
    try:
        labels = _with_special_tokens(model, probe_batch(model)["input_ids"])
        output, labelled = ask(model), ask(model, labels=labels)
    except Exception:  # The model needs more than token ids.
        return
    if getattr(labelled, "loss", None) is None or not isinstance(getattr(labelled, "logits", None), Tensor):
        return
    aux_loss = router_loss(model, output)
    _check_terms(model, labels, labelled, aux_loss)
    try:
        trained = _ask_in_training(model, labels)
    except Exception:  # It needs more in training, as a batch norm does.
        trained = None
    if trained is not None:
        _check_terms(model, labels, trained, None if aux_loss is None else router_loss(model, trained))
    if model.config.is_encoder_decoder or labelled.logits.shape != output.logits.shape:
        return
    largest = output.logits.abs().max()
    if (labelled.logits - output.logits).abs().max() > 50 * torch.finfo(largest.dtype).eps * largest:
        raise UserError(
            f"the logits of {type(model).__name__} are others if it gets labels, and it is to run without them; make "
            "its forward compute the same with and without labels, or choose loss=model"
        )


def _with_special_tokens(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return labels like token ids, with the tokens among them that a model may want to ignore by itself."""
    config, labels = model.config.get_text_config(), ids.clone()
    special = [getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")]
    embedding: Any = model.get_input_embeddings()
    known = [token for token in special if isinstance(token, int) and 0 <= token < len(embedding.weight)]
    labels[:, 2 : 2 + len(known)] = labels.new_tensor(known)
    return labels


def _ask_in_training(model: PreTrainedModel, labels: Tensor) -> Any:
    """Return what :func:`ask` would in training mode; random numbers, buffers and modes are afterwards as before."""
    devices = [model.device] if model.device.type == "cuda" else []
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices), probing(model), torch.compiler.set_stance("force_eager"):
        model.train()
        try:
            return model(**probe_batch(model), labels=labels)
        finally:
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # A graph may have it, and would not run backward.
                    buffer.copy_(before)


def _check_terms(model: PreTrainedModel, labels: Tensor, labelled: Any, aux_loss: Tensor | None) -> None:
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX) if labels_are_shifted_by(model) else labels
    cross_entropy = F.cross_entropy(labelled.logits.flatten(0, 1).float(), targets.flatten())
    own, known = labelled.loss.float(), cross_entropy if aux_loss is None else cross_entropy + aux_loss
    more = [name for name in labelled if name.endswith("_loss") and name != "aux_loss" and labelled[name] is not None]
    more = [name for name in more if not torch.equal(labelled[name], labelled.loss)]  # LUKE names its loss twice.
    # A loss in half precision is rounded as its logits are, however small it is.
    largest = labelled.logits.abs().amax(-1).float().mean()
    tolerance = 1e-5 * own.abs() + 2 * torch.finfo(labelled.loss.dtype).eps * torch.maximum(own.abs(), largest)
    if more or (own - known).abs() > tolerance:
        term = f"a term ({', '.join(more)})" if more else "a term that its output does not show"
        raise UserError(
            f"the own loss of {type(model).__name__} has {term}: it is {own:.6g}, but cross entropy and auxiliary loss "
            f"are {known:.6g}; switch this term off (a router's: output_router_logits=False in its "
            "configuration) or choose loss=model"
        )
