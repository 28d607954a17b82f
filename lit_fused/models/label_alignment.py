"""Check whether labels are to be shifted: position t of a causal model predicts label t + 1, if labels are input_ids.

Two mistakes would train silently on something else. A masked language model sees every token, so that it would learn to
copy labels that are shifted; a few tokens show it before training. And a data set may have shifted its labels itself;
the first batches, of training and of evaluation, show it.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lit_fused.errors import UserError
from lit_fused.heads.probe import probe_batch
from lit_fused.heads.with_labels import ask, labels_are_shifted_by
from lit_fused.losses.loss import Batch, has_shifted_labels, labels_of, shift_labels
from lit_fused.models.documents_apart import WithNoise
from lit_fused.ops.label_checks import IGNORE_INDEX, check_integers

_TELLING_TOKENS = 8  # So many labels are not all next tokens, or all left as they were by a mask, by chance.


class LabelAlignment:
    """Makes targets of labels, and refuses labels or a model for which shifting them is wrong."""

    def __init__(self) -> None:
        self._refusal: str | None = None
        self._knows_model = False
        self._knows_labels: set[bool] = set()  # False once in evaluation, True once in training

    def look_at(self, model: PreTrainedModel | None) -> None:
        """Find out whether the model would see its targets. The first call runs it with a few tokens."""
        if self._knows_model:
            return
        self._knows_model = True
        if model is None or not _learns_what_it_sees(model):
            return
        name = type(model).__name__
        text = (
            f"the own loss of {name} does not shift the labels, and each of its positions sees all tokens: trained to "
            "predict the next token it would learn to copy; for masked language modelling put the labels into the "
            "batches as 'shift_labels', which are taken as they are, or call LinearCrossEntropyLoss(layer, shift=False)"
        )
        if {kind.__name__ for kind in type(model).__mro__} & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
            warnings.warn(f"{text}; AutoModelForCausalLM counts it among the causal models", stacklevel=2)
        else:
            self._refusal = text

    def targets(self, batch: Batch, model: PreTrainedModel | None, *, training: bool) -> Tensor:
        """Return what each position predicts (B, T), int64: the batch's "shift_labels", or its labels shifted."""
        if has_shifted_labels(batch):
            return check_integers(batch["shift_labels"])
        labels = labels_of(batch)
        self.look_at(model)
        if self._refusal is not None:
            raise UserError(self._refusal)
        look_once(self._knows_labels, training, batch, labels, _refuse_next_tokens)
        return shift_labels(labels)


def look_once(
    known: set[bool], training: bool, batch: Batch, labels: Tensor, refuse: Callable[[Tensor, Tensor], None]
) -> None:
    """Show inputs and labels, both (B, T), to ``refuse``, in the first batch of training and of evaluation that has
    enough labels to tell a mistake; ``known`` notes which of the two have been seen."""
    ids = batch.get("input_ids")
    if training in known:
        return
    if isinstance(ids, Tensor) and ids.shape == labels.shape and not isinstance(labels, FakeTensor):
        if (labels != IGNORE_INDEX).sum() < _TELLING_TOKENS:
            return
        refuse(ids, labels)
    known.add(training)


@torch.no_grad()
def _learns_what_it_sees(model: PreTrainedModel) -> bool:
    """Return whether the model's own loss pairs position t with label t, while position t depends on later tokens."""
    try:
        return not labels_are_shifted_by(model) and sees_later_tokens(model) is True
    except Exception:  # The model has no loss of its own, or needs more than token ids.
        return False


@torch.no_grad()
def sees_later_tokens(model: PreTrainedModel) -> bool | None:
    """Return whether position 0 depends on later tokens, with the model's weights or with noise added to them, because
    training opens what zeros close; None if the model cannot run on token ids alone, or no position sees another."""
    try:
        ids = probe_batch(model)["input_ids"]
        others = ids[:, :1].expand_as(ids).contiguous()
        for weights in (nullcontext(), WithNoise()):
            with weights:
                first, second = (ask(model, input_ids=x).logits[:, 0] for x in (ids, others))
            limit = 1e-6 * first.abs().max().item()
            if first.isfinite().all() and not torch.allclose(first, second, rtol=1e-6, atol=limit):
                return True
        earlier = ids[:, -1:].expand_as(ids).contiguous()
        last, other = (ask(model, input_ids=x).logits[:, -1] for x in (ids, earlier))
    except Exception:  # The model needs more than token ids.
        return None
    return None if torch.equal(last, other) else False


def _refuse_next_tokens(input_ids: Tensor, labels: Tensor) -> None:
    valid = labels[..., :-1] != IGNORE_INDEX
    shifted = (labels[..., :-1] == input_ids[..., 1:])[valid].all()
    if shifted and (labels[..., :-1] != input_ids[..., :-1])[valid].any():
        raise UserError(
            "the labels of this batch are its next tokens: label t equals token t + 1, and they would be shifted a "
            "second time; pass labels that are aligned with input_ids, or name these 'shift_labels' in the batch"
        )
