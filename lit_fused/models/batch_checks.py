"""Check a batch's inputs before a model runs with them."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.losses.loss import Batch
from lit_fused.models import documents_apart


def check_inputs_of(model: PreTrainedModel | None, batch: Batch) -> None:
    """Raise UserError, with what to change in the data, for inputs of a wrong type, shape, device or, on a CPU, value:
    on a GPU the embedding asserts it. A backbone that is no transformers model (None) is not asked."""
    ids, embeds, mask = (batch.get(name) for name in ("input_ids", "inputs_embeds", "attention_mask"))
    if model is None:
        return
    if isinstance(embeds, Tensor) and embeds.dtype != model.dtype:
        converted = torch.is_autocast_enabled(embeds.device.type) and embeds.dtype != torch.float64  # Autocast does it.
        if not converted:
            raise UserError(
                f"inputs_embeds are {embeds.dtype} but the model is {model.dtype}; convert them where the batch is "
                f"made: inputs_embeds.to({model.dtype})"
            )
    if not isinstance(ids, Tensor):
        return
    if ids.dtype.is_floating_point or ids.ndim < 2:
        raise UserError(
            f"input_ids must be integers (B, T), got {ids.dtype} of shape {tuple(ids.shape)}; make them so in the "
            "dataset or its collate function: torch.stack the sequences, .long() their values"
        )
    if not ids.numel():
        raise UserError(
            f"input_ids of shape {tuple(ids.shape)} have no token; leave such a batch out or, where each rank needs "
            "one, give it a row whose labels are all -100"
        )
    table = getattr(model.get_input_embeddings(), "weight", None)
    if not isinstance(table, Tensor):  # The model has several tables, one for each codebook.
        return
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape != ids.shape:
        raise UserError(
            f"attention_mask of shape {tuple(mask.shape)} does not fit input_ids of shape {tuple(ids.shape)}; make "
            "both in the same place, the tokenizer or the collate function"
        )
    documents_apart.check_mask(batch)
    if ids.device != table.device:
        raise UserError(
            f"input_ids are on {ids.device} but the model is on {table.device}; Lightning moves a batch and its "
            "module by itself, outside of it call .to(device) on the batch and the model"
        )
    check_entries(ids, len(table))


def check_entries(ids: Tensor, entries: int) -> None:
    """Raise UserError for token ids, on a CPU, that an embedding of so many entries does not have."""
    if ids.device.type == "cpu" and ids.numel() and (ids.min() < 0 or ids.max() >= entries):
        raise UserError(
            f"input_ids must lie in [0, {entries}), the entries of the model's embedding, got values from "
            f"{ids.min().item()} to {ids.max().item()}; does the tokenizer have more entries than the model?"
        )
