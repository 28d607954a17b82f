"""A layer that is computed again in backward, from its input, which waits on the host.

Autograd's hooks take the input where ``torch.utils.checkpoint`` saves it. Other tensors that a layer is given (masks,
positions, an encoder's hidden states) are those of all layers, and stay where they are.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import Cache

from lit_fused.memory.host_inputs import HostInputs, Kept
from lit_fused.ops.operators import one_graph_break


class OffloadedLayer:
    """Runs as the ``forward`` of ``layer``, one of ``count`` layers of its kind in a model.

    Hooks of the layer, FSDP2's for instance, run around it once, and not again in backward. ``inside`` is what can be
    compiled of the layer: the hooks of autograd are outside of it.
    """

    def __init__(self, layer: nn.Module, inputs: HostInputs, count: int) -> None:
        self.layer, self.inputs, self.count = layer, inputs, count
        self.inside = CheckpointedLayer(layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _kept_on_host(self, *args, **kwargs) if _is_trained(self.layer) else self.inside(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(own_forward(self.layer))


class CheckpointedLayer(nn.Module):
    """Computes a layer that is trained again in backward. It is no part of the model, whose names stay as they are."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = own_forward(self.layer)
        if not _is_trained(self.layer):
            return own(*args, **kwargs)
        if not args:  # What is checkpointed has to be given by position.
            hidden = kwargs.pop("hidden_states")
            return checkpoint(partial(_by_name, own, kwargs), hidden, use_reentrant=False)
        return checkpoint(partial(own, **kwargs), *args, use_reentrant=False)


def _is_trained(layer: nn.Module) -> bool:
    return layer.training and torch.is_grad_enabled()


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of a module's class."""
    return type(module).forward.__get__(module)


def _by_name(own: Callable[..., Any], kwargs: dict[str, Any], hidden: Tensor) -> Any:
    return own(hidden_states=hidden, **kwargs)


@one_graph_break  # Recomputed in backward, what a compiler made of the caller's code would be something else.
def _kept_on_host(layer: OffloadedLayer, *args: Any, **kwargs: Any) -> Any:
    if getattr(layer.layer, "gradient_checkpointing", False):  # The loop has switched on what this does already.
        vars(layer.layer)["gradient_checkpointing"] = False
    # A second pass would add keys to a cache again.
    args = tuple(None if isinstance(value, Cache) else value for value in args)
    kwargs = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    storages, shape = [hidden.untyped_storage()], hidden.shape

    def pack(tensor: Tensor) -> Tensor | Kept:
        is_input = any(tensor.untyped_storage() is each for each in storages) and tensor.shape == shape
        return layer.inputs.keep(tensor, layer.count) if is_input else tensor

    def unpack(kept: Tensor | Kept) -> Tensor:
        return layer.inputs.give(kept) if isinstance(kept, Kept) else kept

    with saved_tensors_hooks(pack, unpack):
        out = layer.inside(*args, **kwargs)
    storages.clear()  # Autograd has the hooks until backward, and with them what they refer to.
    return out
