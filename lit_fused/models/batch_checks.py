"""Look at a first batch for mistakes that would be silent, or that end in an error which does not name them."""

import inspect
import warnings
from collections.abc import Iterable

from torch import Tensor
from transformers import PreTrainedModel

from lit_fused.errors import UserError, did_you_mean
from lit_fused.losses.loss import Batch, has_shifted_labels, labels_of
from lit_fused.ops.label_checks import IGNORE_INDEX

_OTHER_NAMES = {"loss_mask": "token_weights", "loss_weights": "token_weights"}  # of Megatron's batches, and others'
_TELLING_TOKENS = 8  # So many labels are not all next tokens, or all left as they were by a mask, by chance.


def warn_of_unread(model: PreTrainedModel | None, batch: Batch, read: Iterable[str]) -> None:
    """Warn of an entry that neither a loss, which reads some, nor the model's forward has by name, and whose name is
    near to one that the batch lacks: transformers' models take any name without a word."""
    if model is None:
        return
    known = {*inspect.signature(model.forward).parameters, *read}
    has = {name for name, value in batch.items() if value is not None}
    for name in sorted(has - known):
        meant = did_you_mean(_OTHER_NAMES.get(name, name), known - has)
        if meant:
            warnings.warn(f"a batch has {name}, which neither the model nor the loss reads{meant}", stacklevel=2)


def warn_of_zero_weights(weights: Tensor, targets: Tensor) -> None:
    """Warn if the weights (B, T) of all targets of a batch are zero. Waits for a GPU."""
    counts = targets != IGNORE_INDEX
    if counts.any() and not weights[counts].any():
        warnings.warn("token_weights of a batch are all zero at its labels: nothing is learned from it", stacklevel=2)


def check_mask(batch: Batch) -> None:
    """Raise a UserError for an "attention_mask" (B, T) of another shape than the ids, to which transformers adds what
    it lacks as padding; and if positions begin anew where it lets tokens attend to those before: beside a mask,
    transformers does not look for documents. Waits for a GPU if a batch has both."""
    positions, mask, ids = batch.get("position_ids"), batch.get("attention_mask"), batch.get("input_ids")
    if isinstance(ids, Tensor) and isinstance(mask, Tensor) and ids.ndim == mask.ndim == 2 and ids.shape != mask.shape:
        raise UserError(
            f"attention_mask of shape {tuple(mask.shape)} does not fit input_ids of shape {tuple(ids.shape)}; make "
            "both in the same place, the tokenizer or the collate function"
        )
    if not (isinstance(positions, Tensor) and isinstance(mask, Tensor) and positions.ndim == mask.ndim == 2):
        return
    if positions.shape[1] == mask.shape[1] and len(positions) in (1, len(mask)):
        attended = mask != 0
        if ((positions.diff(dim=-1) <= 0) & attended[:, 1:] & attended[:, :-1]).any():
            raise UserError(
                "position_ids begin anew within a row, as documents do that are packed into it, and an attention_mask "
                "beside them lets each document attend to those before; leave attention_mask out of the batch, or "
                "position_ids if a row is one document"
            )


def _compared(batch: Batch) -> tuple[Tensor, Tensor] | None:
    ids, labels = batch.get("input_ids"), labels_of(batch)
    if not isinstance(ids, Tensor) or ids.shape != labels.shape or (labels != IGNORE_INDEX).sum() < _TELLING_TOKENS:
        return None
    return ids, labels


def refuse_shifted_twice(batch: Batch) -> None:
    """Raise UserError if labels (B, T), which will be shifted, are those of the next tokens already."""
    compared = None if has_shifted_labels(batch) else _compared(batch)
    if compared is None:
        return
    ids, labels = compared
    valid = labels[..., :-1] != IGNORE_INDEX
    shifted = (labels[..., :-1] == ids[..., 1:])[valid].all()
    if shifted and (labels[..., :-1] != ids[..., :-1])[valid].any():
        raise UserError(
            "the labels of this batch are its next tokens: label t equals token t + 1, and they would be shifted a "
            "second time; pass labels that are aligned with input_ids, or name these 'shift_labels' in the batch"
        )


def refuse_seen(batch: Batch) -> None:
    """Raise UserError if every label (B, T) of a masked model is the token that it sees there."""
    compared = _compared(batch)
    if compared is not None and (compared[0] == compared[1])[compared[1] != IGNORE_INDEX].all():
        raise UserError(
            "every label of this batch is the token that the model sees at the same position, so that it would learn "
            "to copy; mask tokens of input_ids, and set labels to -100 where nothing is to be predicted: "
            "transformers' DataCollatorForLanguageModeling does both, and so does data=text"
        )
