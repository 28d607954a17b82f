"""Write a model as a folder that transformers' ``from_pretrained`` loads."""

import warnings
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_fused.checkpoints.whole_or_not import partial_path, put_in_place, remove
from lit_fused.export.merging import filled, merged_copy, outline
from lit_fused.heads import peft_model, transformers_model
from lit_fused.models.generation import generation_config


def write_folder(
    folder: Path,
    backbone: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    weights: Mapping[str, Tensor] | None,
    outlined: nn.Module | None,
) -> None:
    """Write a transformers model, or PEFT's wrapper around one, to ``folder``, which appears whole or not at all.

    PEFT's adapters are merged into the weights of the folder; the adapters alone lie in its subfolder ``adapter``.

    Args:
        folder: replaced as a whole if it exists.
        backbone: only read.
        tokenizer: written beside the model, and asked for the special tokens of its generation.
        weights: by their names in ``backbone``, whole and on the CPU; None for the backbone's own.
        outlined: the outline of a backbone with adapters, if the backbone itself has been sharded since.
    """
    model, adapted = transformers_model(backbone), peft_model(backbone)
    assert model is not None
    partial = partial_path(folder)
    remove(partial)
    if adapted is None:
        model.save_pretrained(partial, state_dict=None if weights is None else dict(weights))
    else:
        if weights is not None:
            adapted = peft_model(filled(outline(backbone) if outlined is None else outlined, weights))
        assert adapted is not None
        adapted.save_pretrained(partial / "adapter")
        _write_merged(adapted, partial, folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
        if model.can_generate():
            generation_config(model, tokenizer).save_pretrained(partial)
    put_in_place(partial, folder)


def _write_merged(adapted: PreTrainedModel, partial: Path, folder: Path) -> None:
    try:
        merged_copy(adapted).save_pretrained(partial)
    except Exception as error:  # PEFT raises many kinds; the trained numbers are in the adapter
        warnings.warn(
            f"the adapters could not be merged into the weights ({type(error).__name__}: {error}); {folder} holds only "
            "the folder adapter, for PeftModel.from_pretrained",
            stacklevel=2,
        )
