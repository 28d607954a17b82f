"""Let layers of a planned model keep for backward what they keep once ``torch.compile`` has compiled them.

A layer of each kind is compiled on the meta device, at the size of the plan, and hooks of autograd say what it saves.
Its planned forward then saves tensors of these sizes, and its backward frees them one by one, as it needs them.
"""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import FunctionType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import Cache

from lit_fused.models.blocks import blocks
from lit_fused.planning.ledger import HOST, MemoryLedger, run_backward

Call = Callable[..., Any]


@contextmanager
def layers_compiled(
    model: nn.Module, ledger: MemoryLedger, context: Callable[[], AbstractContextManager[Any]]
) -> Iterator[None]:
    """Plan a model's layers as compiled in a block. ``context`` is the one in which forward runs."""
    counted: dict[Any, list[int] | None] = {}

    def compiled(own: Call, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (layer.training and torch.is_grad_enabled()):
            return own(layer, *args, **kwargs)
        if not args:
            args = (kwargs.pop("hidden_states"),)
        # Backward runs the layer again, and would add to a cache again.
        hidden: Any
        hidden, *rest = (None if isinstance(value, Cache) else value for value in args)
        kwargs = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
        others = _tensors_in((rest, kwargs))
        shapes = tuple((t.shape, t.dtype) for t in (hidden, *others, *layer.parameters()))
        trained = tuple(p.requires_grad for p in layer.parameters())
        kind = type(layer), shapes, trained
        if kind not in counted:
            dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
            counted[kind] = None
            # A layer that cannot be compiled on the meta device is planned as it is, which takes more.
            with suppress(Exception), ThreadPoolExecutor(1) as thread:  # A thread has none of the modes that are on.
                if not any(t.requires_grad for t in others):
                    call = thread.submit(kept_when_compiled, own, layer, dtype, hidden, rest, kwargs)
                    counted[kind] = call.result()
        sizes = counted[kind]

        def run(hidden: Tensor) -> Any:
            return own(layer, hidden, *rest, **kwargs)

        def again(hidden: Tensor) -> Tensor:
            with context(), ledger.under(HOST):
                return run(hidden)

        def planned(hidden: Tensor) -> Any:
            if sizes is None:
                return run(hidden)
            # The layer is trained also where its input needs no gradient.
            return _CompiledLayer.apply(hidden, torch.empty(0, requires_grad=True), run, again, sizes)

        # From 5.23 on transformers checkpoints in the forward that is replaced here.
        if getattr(layer, "gradient_checkpointing", False):
            return checkpoint(planned, hidden, use_reentrant=False)
        return planned(hidden)

    with ExitStack() as patches:
        for kind in {type(layer) for layer in blocks(model)}:
            own = kind.forward
            patches.enter_context(mock.patch.object(kind, "forward", _method(compiled, own)))
        yield


def _method(compiled: Call, own: Call) -> Call:
    return lambda layer, *args, **kwargs: compiled(own, layer, *args, **kwargs)


class _CompiledLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, _: Tensor, run: Call, again: Call, sizes: list[int]) -> Tensor:  # type: ignore[override]
        ctx.again = again
        # In a compiled layer weights are cast where they are needed, and no cast is kept.
        with torch.autocast("cpu", torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"), False):
            out = run(hidden)
        ctx.save_for_backward(hidden, *(torch.empty(size, dtype=torch.uint8) for size in sizes))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        hidden, *kept = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()
        needed: list[list[Tensor]] = []

        def pack(tensor: Tensor) -> list[Tensor]:
            needed.append([tensor])
            return needed[-1]

        leaf = hidden.detach().requires_grad_(hidden.requires_grad)
        del hidden
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda held: held[0]):
            out = ctx.again(leaf)
        for index, tensor in enumerate(kept):
            needed[index * len(needed) // len(kept)].append(tensor)
        del kept, needed[:]
        ctx.again = None
        run_backward(out, grad)
        return leaf.grad, None, None, None, None


def kept_when_compiled(
    own: Call, layer: nn.Module, dtype: torch.dtype | None, hidden: Tensor, rest: Any, kwargs: Any
) -> list[int] | None:
    """Return the bytes of each tensor that a compiled layer keeps for backward, beside its input and its weights; None
    if it cannot be known: a layer that does not return one tensor."""
    layer = copy.deepcopy(layer, {id(t): _on_meta(t) for t in (*layer.parameters(), *layer.buffers())})
    hidden, rest, kwargs = apply_to_collection((hidden, rest, kwargs), Tensor, _on_meta)
    given = [t.untyped_storage() for t in (hidden, *_tensors_in((rest, kwargs)), *layer.parameters())]
    known = set(map(id, given))
    saved: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in known:
            saved[id(storage)] = storage
        return tensor

    def cast(tensor: Any) -> Any:
        return tensor if tensor is None or dtype is None else tensor.to(dtype)

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return product(cast(input), cast(weight), cast(bias))

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
    ) -> Tensor:
        return _planned_attention(cast(query), cast(key), cast(value), attn_mask)[0]

    def run(layer: nn.Module, hidden: Tensor, rest: Any, kwargs: Any) -> Any:
        return own(layer, hidden, *rest, **kwargs)

    # Dynamo compiles a function for a few sizes, and then no more: neither for the next plan nor for training. So each
    # size has code of its own.
    once = FunctionType(run.__code__.replace(), globals(), closure=run.__closure__)
    product = F.linear
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention))
        stack.enter_context(mock.patch.object(F, "linear", linear))
        stack.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))
        call = torch.compile(once, backend="aot_eager_decomp_partition", dynamic=False)
        out = call(layer, hidden, rest, kwargs)
    return [storage.nbytes() for storage in saved.values()] if isinstance(out, Tensor) else None


def _tensors_in(collection: Any) -> list[Tensor]:
    found: list[Tensor] = []
    apply_to_collection(collection, Tensor, found.append, allow_frozen=True)
    return found


def _on_meta(tensor: Tensor) -> Tensor:
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, tensor.requires_grad)
    return new.requires_grad_(tensor.requires_grad)


# A compiler takes an operator for one kernel, as attention is on a GPU.
@torch.library.custom_op("lit_fused::planned_attention", mutates_args=())
def _planned_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    return _attention_results(query, key, value, mask)


@_planned_attention.register_fake
def _attention_results(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = query.shape
    out = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
    return out, query.new_empty(batch, heads, tokens, dtype=torch.float32)


@torch.library.custom_op("lit_fused::planned_attention_backward", mutates_args=())
def _planned_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@_planned_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, grad: Tensor, _: Any) -> Any:
    return *_planned_backward(grad, *ctx.saved_tensors), None


_planned_attention.register_autograd(_gradients, setup_context=_keep)
