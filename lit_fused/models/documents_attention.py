"""Attention within the documents of packed rows by FlexAttention, and by what the model has everywhere else.

transformers keeps documents apart by a mask (B, 1, T, T). With one, ``scaled_dot_product_attention`` takes a kernel
that also computes what the mask leaves out, and the mask itself is large. FlexAttention is given the same rule as
blocks, and skips those that are empty. But it has to be compiled, for each length anew, and what has no documents
(padded rows, generation) is faster without it. So both are one attention implementation of transformers here.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flex_attention_mask, sdpa_mask

from lit_fused.models.documents_apart import Form
from lit_fused.ops.backends import compiler_missing

NAME = "lit_fused_documents"

# Sizes of heads: FlexAttention has no smaller ones, and its backward pass of larger ones does not fit on every card.
_HEADS = range(16, 129)
_blocks_are_wanted = False


def is_possible(model: PreTrainedModel, device: torch.device) -> bool:
    """Return whether ``model`` can attend by FlexAttention in packed rows: on a GPU with a compiler, in half precision,
    without dropout, where it attends by ``scaled_dot_product_attention`` now, and has no second configuration: an
    encoder of images has no documents."""
    if model.config.is_encoder_decoder or model.config.get_text_config() is not model.config:
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else model.dtype
    settings = vars(model.config).items()
    drops = any(value and "att" in name and "drop" in name for name, value in settings)  # attn_pdrop, attention_dropout
    attends = model._supports_flex_attn and model.config._attn_implementation in ("sdpa", NAME)
    half = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    return half and attends and not drops and compiler_missing(device) is None


def forms(model: PreTrainedModel | None, device: torch.device) -> Iterator[Form]:
    """Yield each form in which ``model`` may get documents, while its attention is the one for that form."""
    if model is not None and is_possible(model, device):
        model.config._attn_implementation = NAME
        with warnings.catch_warnings():  # The caller compiles nothing yet.
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            yield "blocks"
        model.config._attn_implementation = "sdpa"
    yield from ("positions", "masks")


@contextmanager
def in_blocks(wanted: bool) -> Iterator[None]:
    """Let a forward pass build masks for FlexAttention if it is of packed rows."""
    global _blocks_are_wanted
    before, _blocks_are_wanted = _blocks_are_wanted, wanted
    try:
        yield
    finally:
        _blocks_are_wanted = before


def _mask(*arguments: Any, **named: Any) -> Tensor | BlockMask | None:
    return (flex_attention_mask if _blocks_are_wanted else sdpa_mask)(*arguments, **named)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **named: Any
) -> tuple[Tensor, Tensor | None]:
    if not isinstance(attention_mask, BlockMask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **named)
    if {query.shape[-1], value.shape[-1]} - {*_HEADS}:
        raise ValueError(f"heads of {query.shape[-1]} and {value.shape[-1]} numbers")
    return flex_attention_forward(module, query, key, value, attention_mask, **named)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
