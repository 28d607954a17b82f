"""An attention implementation of transformers that makes no mask of T x T where it can do without one.

transformers keeps the documents of a packed row apart by a mask (B, 1, T, T). With one,
``scaled_dot_product_attention`` takes a kernel that also computes what the mask leaves out, and the mask itself is
large. FlexAttention is given the same rule as blocks, and skips those that are empty. But it has to be compiled, for
each length anew, and what has no documents (padded rows, generation) is faster without it. So both are one
implementation here, registered as transformers documents it.

A model that is compiled as a whole also gets a mask for rows of one document, since a graph cannot look at positions to
see that they are. Here the batch says it.

In a batch without positions and masks, transformers counts the positions itself, searches them for documents all the
same, and waits for the GPU to see that there are none: 2 % of a step of Qwen3-0.6B on an H100 (96.4k tokens/s without,
94.7k with). It does not search beside a cache, so such batches bring one that keeps nothing.
"""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flex_attention_mask, sdpa_mask

from lit_fused.heads.model_state import probing
from lit_fused.heads.probe import probe_batch
from lit_fused.models.documents_apart import Form
from lit_fused.ops.backends import compiler_missing

NAME = "lit_fused_documents"

# Sizes of heads: FlexAttention has no smaller ones, and its backward pass of larger ones does not fit on every card.
_HEADS = range(16, 129)
_rows: Literal["masks", "blocks", "whole"] = "masks"  # how the forward pass that runs is to keep documents apart


class EmptyCache(Cache):
    """A cache that keeps nothing."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


@torch.no_grad()
def empty_cache_for(model: PreTrainedModel | None) -> EmptyCache | None:
    """Return a cache beside which a model's logits stay as they are to the last bit, or None."""
    if model is None or not _is_decoder_of_text(model):
        return None
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):  # It warns of any cache.
        return None
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return None
    cache, batch = EmptyCache(), probe_batch(model, 2)
    try:
        with probing(model):
            usual, beside = (model(**batch, **more).logits for more in ({}, {"past_key_values": cache}))
    except Exception:  # The model needs more than token ids, or a cache of its own kind, and raises what it likes.
        return None
    return cache if torch.equal(usual, beside) else None


def _is_decoder_of_text(model: PreTrainedModel) -> bool:
    """Return whether a model has rows of documents alone: an encoder of images has none."""
    return not model.config.is_encoder_decoder and model.config.get_text_config() is model.config


def takes_its_place(model: PreTrainedModel | None) -> bool:
    """Let a model attend by the implementation of this file, if it is a decoder of text that attends by
    ``scaled_dot_product_attention`` now; return whether it does."""
    if model is None or not _is_decoder_of_text(model):
        return False
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)
    return model.config._attn_implementation == NAME


def is_possible(model: PreTrainedModel, device: torch.device) -> bool:
    """Return whether ``model`` can attend by FlexAttention in packed rows: on a GPU with a compiler, in half precision,
    without dropout."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else model.dtype
    settings = vars(model.config).items()
    drops = any(value and "att" in name and "drop" in name for name, value in settings)  # attn_pdrop, attention_dropout
    half = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    return half and not drops and compiler_missing(device) is None


def forms(model: PreTrainedModel | None, device: torch.device) -> Iterator[Form]:
    """Yield each form in which ``model`` may get documents."""
    # The model's attention changes here and not with the first form: who tries it gives back what changes meanwhile.
    return _forms(model is not None and is_possible(model, device) and takes_its_place(model))


def _forms(in_blocks: bool) -> Iterator[Form]:
    if in_blocks:
        with warnings.catch_warnings():  # The caller compiles nothing yet.
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            yield "blocks"
    yield from ("positions", "masks")


@contextmanager
def told(inputs: Mapping[str, Any], packing: Any) -> Iterator[None]:
    """Tell a forward pass with these inputs, in a block, how the documents of its rows are to be kept apart."""
    global _rows
    before, _rows = _rows, "masks"
    if inputs.get("attention_mask") is None:
        positions = inputs.get("position_ids")
        _rows = "whole" if positions is None else "blocks" if packing == "blocks" and positions.ndim == 2 else "masks"
    try:
        yield
    finally:
        _rows = before


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool = False,
    **named: Any,
) -> Tensor | BlockMask | None:
    if _rows == "whole" and torch.compiler.is_compiling():
        causal = not use_vmap and not allow_is_bidirectional_skip and q_length == kv_length
        if causal and (local_size is None or kv_length < local_size):
            return None  # scaled_dot_product_attention(is_causal=True)
    named |= {"local_size": local_size, "use_vmap": use_vmap}
    named |= {"allow_is_bidirectional_skip": allow_is_bidirectional_skip}
    return (flex_attention_mask if _rows == "blocks" else sdpa_mask)(batch_size, q_length, kv_length, **named)


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
