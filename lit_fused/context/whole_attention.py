"""Attention of a divided sequence: a rank has some tokens of each row, and computes some heads of all of them (Ulysses,
arXiv:2309.14509).

transformers makes a model's masks, and calls its attention, by functions that are registered under the name of an
implementation ("sdpa"). Each of the two is wrapped here. In a divided forward pass the mask's function makes the mask
of the whole rows, and gives it on as a :class:`WholeMask`; attention that gets one exchanges tokens for heads, calls
the implementation with whole rows, and exchanges back. Attention without one is the implementation's own: the wrappers
stay, and change nothing beside a divided pass. All that attention has to know comes with its mask, so it is the same
when activation checkpointing runs a layer anew in backward.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import (
    AttentionMaskInterface,
    and_masks,
    eager_mask,
    find_packed_sequence_indices,
    packed_sequence_mask_function,
)

from lit_fused.context.exchange import Ranks, heads_of_all_tokens, tokens_of_all_heads
from lit_fused.errors import UserError
from lit_fused.losses.loss import Batch, labels_of
from lit_fused.models import documents_attention
from lit_fused.models.documents_apart import may_be_packed, varlen_arguments

EAGER = "lit_fused_context"  # a model's own eager attention, which transformers registers under no name

_wrappers: set[Any] = set()


@dataclass(eq=False)
class WholeMask:
    """The mask of whole rows, as an implementation takes it, in place of the mask of a part."""

    mask: Any
    length: int  # T
    size: int
    rank: int
    group: str
    arguments: dict[str, Any]  # of the implementation, about whole rows


@dataclass(frozen=True, eq=False)
class Rows:
    """The whole rows of a divided forward pass."""

    ranks: Ranks
    length: int
    is_padded: bool  # The batch has an attention_mask; without one, masks can be left out.
    documents: Tensor | None = None  # (B, T): the number of the document that a token of a packed row belongs to
    packing: Any = None
    positions: Tensor | None = None  # (B, T), of packed rows
    arguments: dict[str, Any] = field(default_factory=dict)


_present: Rows | None = None  # of the divided forward pass that runs


@contextmanager
def attending(model: PreTrainedModel, ranks: Ranks, batch: Batch, length: int, packing: Any) -> Iterator[None]:
    """Make the forward passes of a block those of parts of the rows of ``batch``, (B, T)."""
    global _present
    _wrap(model)
    rows = Rows(ranks, length, batch.get("attention_mask") is not None)
    if may_be_packed(batch):
        positions = batch["position_ids"].expand(len(labels_of(batch)), -1)
        documents = find_packed_sequence_indices(positions)
        if documents is not None:
            rows = Rows(ranks, length, False, documents, packing, positions, varlen_arguments(model, positions))
    _present = rows
    try:
        yield
    finally:
        _present = None


def _wrap(model: PreTrainedModel) -> None:
    """Wrap the attention implementation of a model, and what makes its masks."""
    name = model.config._attn_implementation
    if name == "eager":
        model.set_attn_implementation(EAGER)
        name = EAGER
    assert name is not None  # The model has been built.
    attention, mask = AttentionInterface(), AttentionMaskInterface()
    if name not in attention or name not in mask:
        raise UserError(
            f"{type(model).__name__} attends by {name}, which transformers makes no masks for; choose another "
            "attn_implementation, such as sdpa or flash_attention_2"
        )
    for interface, wrapped_by in ((AttentionInterface, _attention_by), (AttentionMaskInterface, _mask_by)):
        registered = interface()[name]
        if registered not in _wrappers:
            _wrappers.add(wrapper := wrapped_by(registered))
            interface.register(name, wrapper)


def _own_eager_attention(module: nn.Module, *arguments: Any, **named: Any) -> Any:
    whole: Any = module.module if isinstance(module, _ForHeads) else module
    return sys.modules[type(whole).__module__].eager_attention_forward(module, *arguments, **named)


AttentionInterface.register(EAGER, _own_eager_attention)
AttentionMaskInterface.register(EAGER, eager_mask)


def _mask_by(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def mask(*arguments: Any, **named: Any) -> Any:
        rows = _present
        if rows is None:
            return original(*arguments, **named)
        named |= dict(zip(("batch_size", "q_length", "kv_length", "q_offset", "kv_offset"), arguments, strict=False))
        named |= {"q_length": rows.length, "kv_length": rows.length, "q_offset": 0, "kv_offset": 0}
        if not rows.is_padded:
            named["attention_mask"] = None
        if rows.documents is not None:
            apart = packed_sequence_mask_function(rows.documents)
            named |= {"mask_function": and_masks(apart, named["mask_function"]), "allow_is_causal_skip": False}
        told: Any = {"position_ids": rows.positions} if not rows.is_padded else {"attention_mask": named}
        with documents_attention.told(told, rows.packing):
            made = original(**named)
        return WholeMask(made, rows.length, rows.ranks.size, rows.ranks.rank, rows.ranks.name, rows.arguments)

    return mask


def _attention_by(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **named: Any
    ) -> Any:
        if isinstance(attention_mask, WholeMask):
            return _divided(original, module, query, key, value, attention_mask, named), None
        if _present is not None:
            raise UserError(f"{type(module).__name__} attends without a mask that transformers has made for it")
        return original(module, query, key, value, attention_mask, **named)

    return attention


class _ForHeads:
    """An attention module with numbers for a part of its heads."""

    def __init__(self, module: nn.Module, **own: Any) -> None:
        self.module = module
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _divided(
    original: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    whole: WholeMask,
    named: dict[str, Any],
) -> Tensor:
    """Return this rank's tokens (B, t, H, D) of attention over whole rows."""
    heads, key_heads, size = query.shape[1], key.shape[1], whole.size
    if heads % size:
        raise UserError(
            f"context_parallel_size={size} does not divide the {heads} heads of {type(module).__name__}; choose a "
            f"divisor of {heads}"
        )
    part = -(-whole.length // size)
    if {x.shape[2] for x in (query, key, value)} != {part}:
        raise UserError(f"{type(module).__name__} attends to other tokens than those of its rows")
    own: dict[str, Any] = {}
    repeat = size // math.gcd(key_heads, size)  # Each rank needs the keys of its heads, and the same number of them.
    if repeat > 1:
        key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
        if hasattr(module, "num_key_value_groups"):
            own["num_key_value_groups"] = module.num_key_value_groups // repeat
    mine = slice(whole.rank * (heads // size), (whole.rank + 1) * (heads // size))
    for name, sinks in (("sinks", getattr(module, "sinks", None)), ("s_aux", named.get("s_aux"))):
        if isinstance(sinks, Tensor) and sinks.shape == (heads,):
            (own if name == "sinks" else named)[name] = sinks[mine]
    query, key, value = heads_of_all_tokens([query, key, value], whole.length, size, whole.group)
    named = {name: given for name, given in named.items() if name != "position_ids"} | whole.arguments
    attending_module = _ForHeads(module, **own) if own else module
    found = original(attending_module, query, key, value, whole.mask, **named)[0]
    return tokens_of_all_heads(found, size, whole.group)
