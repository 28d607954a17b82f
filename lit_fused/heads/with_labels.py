"""How a model itself treats labels: whether it shifts them, the decoder inputs and the losses that it makes of them.

A forward pass of eight tokens finds each answer. The labels of an encoder-decoder become its decoder's inputs, one
position later. Most models put a start token first; mBART wraps the last token around.

A mixture of experts mostly returns its router's loss with every forward pass. Some models compute it only when they get
labels, or add another one, such as a z-loss of the router or of the logits; trained on cross entropy they would lose it
silently. So a model's own loss must be cross entropy plus what it returns.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, EncoderDecoderModel, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from lit_fused.errors import UserError
from lit_fused.heads.capture import probing
from lit_fused.heads.probe import probe_batch
from lit_fused.ops.label_checks import IGNORE_INDEX

# The part of a first batch whose loss is compared with the model's own: as many tokens as have 32 MiB of logits in
# float32, or of a large vocabulary some, in less memory than the head's smallest chunk takes.
_MOST_LOGITS, _TOKENS = 2**23, 128
_PREPARE = "prepare_decoder_input_ids_from_labels"  # a method that most encoder-decoders have


@torch.no_grad()
def ask(model: PreTrainedModel, **arguments: Any) -> Any:
    """Return what a model makes of :func:`probe_batch` with other arguments (None: left out), evaluated and eager."""
    batch = {name: value for name, value in (probe_batch(model) | arguments).items() if value is not None}
    with probing(model), torch.compiler.set_stance("force_eager"):
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


def check_decoder_inputs(model: PreTrainedModel, inputs: Mapping[str, Any], rows: int) -> None:
    """Raise UserError if the model's own decoder inputs differ from those of :func:`decoder_inputs`, for a batch of so
    many ``rows``, whose ``inputs`` the encoder reads: they may be sounds or images."""
    if hasattr(model, _PREPARE):
        return
    labels = probe_batch(model, rows)["input_ids"]
    labels[:, -2:] = IGNORE_INDEX
    of_encoder = {"input_ids": None} | {n: value for n, value in inputs.items() if not n.startswith("decoder_")}
    own = ask(model, **of_encoder, decoder_input_ids=None, labels=labels).logits
    if not torch.equal(own, ask(model, **of_encoder, **decoder_inputs(model, labels)).logits):
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
def check_own_loss(model: PreTrainedModel | None) -> None:
    """Raise UserError if the model's own loss has terms besides cross entropy and :func:`router_loss`, in evaluation or
    in training, or if labels change its logits."""
    if model is None:
        return
    try:
        batch = probe_batch(model, rows=2)
        labels = _with_special_tokens(model, batch["input_ids"])
        output, labelled = ask(model, **batch), ask(model, **batch, labels=labels)
        shifts = labels_are_shifted_by(model)
    except Exception:  # The model needs more than token ids, or another number of rows.
        return
    if getattr(labelled, "loss", None) is None or not isinstance(getattr(labelled, "logits", None), Tensor):
        return
    aux_loss = router_loss(model, output)
    _check_terms(model, labels, labelled, aux_loss, shifts)
    try:
        with _traceless(model):
            model.train()
            trained = model(**batch, labels=labels)
    except Exception:  # It needs more in training, as a batch norm does.
        trained = None
    if trained is not None:
        _check_terms(model, labels, trained, None if aux_loss is None else router_loss(model, trained), shifts)
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
    labels[0, 2 : 2 + len(known)] = labels.new_tensor(known)
    labels[1, -3:] = IGNORE_INDEX
    return labels


@contextmanager
def _traceless(model: PreTrainedModel) -> Iterator[None]:
    """Run the model eagerly in a block; random numbers, buffers, settings and modes are afterwards as before."""
    devices = [model.device] if model.device.type == "cuda" else []
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices), probing(model), torch.compiler.set_stance("force_eager"):
        try:
            yield
        finally:
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # A graph may have it, and would not run backward.
                    buffer.copy_(before)


@torch.no_grad()
def check_loss_of(
    model: PreTrainedModel | None, batch: dict[str, Any], vocabulary: int, run: Callable[[dict[str, Any]], Any]
) -> None:
    """Raise UserError as :func:`check_own_loss` does, for what ``run`` returns for a real batch, or its first rows, in
    the model's modes. Eight tokens do not show what depends on a label, its place, a mask or a length."""
    part = _with_few_logits(batch, vocabulary)
    if model is None or part is None:
        return
    modes = [(module, module.training) for module in model.modules()]
    try:
        shifts = labels_are_shifted_by(model)
    except Exception:  # the model's own, of many kinds, where it needs more than token ids
        shifts = not model.config.is_encoder_decoder
    try:
        with _traceless(model):
            for module, training in modes:
                module.training = training
            output = run({name: _copied(value) if isinstance(value, Cache) else value for name, value in part.items()})
    except Exception:  # the model's own, of many kinds; what it has against the batch itself, it says when that runs
        return
    loss, logits = (getattr(output, name, None) for name in ("loss", "logits"))
    # The loss refuses another number of logits than of labels, as with an image before its text.
    if isinstance(loss, Tensor) and isinstance(logits, Tensor) and logits.shape[:-1] == part["labels"].shape:
        _check_terms(model, part["labels"], output, router_loss(model, output), shifts)


def _copied(value: Any) -> Any:
    """Return a copy of a cache, into which a forward pass writes; PEFT's prefix tuning makes one for each batch."""
    if isinstance(value, list):
        return [_copied(inner) for inner in value]
    if isinstance(value, dict):
        return {name: _copied(inner) for name, inner in value.items()}
    if isinstance(value, Cache | CacheLayerMixin):
        found = copy.copy(value)
        vars(found).update(_copied(vars(value)))
        return found
    return value.clone() if isinstance(value, Tensor) else value


def _with_few_logits(batch: dict[str, Any], vocabulary: int) -> dict[str, Any] | None:
    """Return a batch, or if its logits are many, its first rows, or of one row the first positions; None if it cannot
    be cut, or has labels that are no entries."""
    labels: Tensor = batch["labels"]
    if labels.ndim != 2 or not ((labels == IGNORE_INDEX) | (labels >= 0) & (labels < vocabulary)).all():
        return None
    most, (rows, length) = max(_MOST_LOGITS // vocabulary, _TOKENS), labels.shape
    if rows * length <= most:
        return batch
    part = (slice(most // length),) if length <= most else (slice(1), slice(most))
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    if any(value.shape[: len(part)] != labels.shape[: len(part)] for value in tensors.values()):
        return None
    return batch | {name: value[part] for name, value in tensors.items()}


def _check_terms(model: PreTrainedModel, labels: Tensor, labelled: Any, aux_loss: Tensor | None, shifts: bool) -> None:
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX) if shifts else labels
    cross_entropy = F.cross_entropy(labelled.logits.flatten(0, 1).float(), targets.flatten())
    own, known = labelled.loss.float(), cross_entropy if aux_loss is None else cross_entropy + aux_loss
    more = [name for name in labelled if name.endswith("_loss") and name != "aux_loss" and labelled[name] is not None]
    more = [name for name in more if not torch.equal(labelled[name], labelled.loss)]  # LUKE names its loss twice.
    # A loss in half precision is rounded as its logits are, however small it is.
    largest = labelled.logits.abs().amax(-1).float().mean()
    if not known.isfinite():  # There is no label, or weights that are no numbers, which the loss names.
        return
    tolerance = 1e-5 * own.abs() + 2 * torch.finfo(labelled.loss.dtype).eps * torch.maximum(own.abs(), largest)
    if more or not (own - known).abs() <= tolerance:
        term = f"a term ({', '.join(more)})" if more else "a term that its output does not show, or weighs labels"
        raise UserError(
            f"the own loss of {type(model).__name__} has {term}: it is {own:.6g}, but cross entropy and auxiliary loss "
            f"are {known:.6g}; switch this term off (a router's: output_router_logits=False in its "
            "configuration) or choose loss=model"
        )
