"""Look at the labels of a first batch for two mistakes that no model's own loss shows: labels that are shifted already,
and labels of a masked model that it sees."""

from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.losses.loss import Batch, has_shifted_labels, labels_of
from lit_fused.ops.label_checks import IGNORE_INDEX

_TELLING_TOKENS = 8  # So many labels are not all next tokens, or all left as they were by a mask, by chance.


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
