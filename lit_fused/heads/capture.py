"""Get hidden states from a forward pass without computing logits.

A Hugging Face causal language model calls its output layer itself. It runs its *own* forward, with everything it does
to positions, images, scales or routers, but the layer's forward is replaced by one that stores its input and returns
one row of NaN, on which the model's operations on logits (a scale, a cap, a slice) cost nothing. A plain ``nn.Module``
returns its hidden states.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.heads.adapters import base_layer
from lit_fused.heads.quantised import rounds_activations
from lit_fused.heads.spec import OutputHead


@contextmanager
def replaced_forward(layer: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Make ``layer(...)`` run ``forward`` instead of its own forward until the block ends."""
    own = layer.__dict__.get("forward")  # None unless another tool has wrapped the instance
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward
        if own is not None:
            layer.forward = own


@contextmanager
def whole_activations(layer: nn.Module) -> Iterator[None]:
    """Make an ``FP8Linear``, or the one inside LoRA, multiply hidden states in a block as the formula does."""
    base = base_layer(layer)
    with replaced_forward(base, OutputHead(base).output) if rounds_activations(base) else nullcontext():
        yield


def first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a layer is called with, ``layer(x)`` or ``layer(input=x)``."""
    return next(chain(args, kwargs.values()))


class UnsupportedHeadError(UserError):
    """The model's logits are not a function of its output layer that a fused loss can reproduce."""

    def __init__(self, model: nn.Module, reason: str) -> None:
        instead = "choose loss=standard, which uses the model's own logits"
        if not isinstance(model, PreTrainedModel):  # That loss reads the layer of a module of one's own as well.
            instead = "make it an nn.Linear, and compute the rest in the forward that returns the hidden states"
        super().__init__(f"{type(model).__name__} cannot be trained with a fused loss: {reason}; {instead}")


class InputCapture:
    """Makes calls of a head's layer, in a ``with`` block, append their input (..., D) to its list, and return NaN.

    What the ``model`` then makes of its logits costs nothing, since they have one row, and is thrown away. NaN shows if
    anything else is made of them, and an error that they raise is explained. Use one object for all steps: a compiled
    model recognises the forward that it was compiled with.
    """

    def __init__(self, head: OutputHead, model: nn.Module) -> None:
        self.head, self.layer, self._model = head, head.layer, (model,)
        self.inputs: list[Tensor] = []
        self._replacement = self._keep  # one bound method, the same in every step

    def __enter__(self) -> list[Tensor]:
        self.inputs, self._device = [], self.layer.weight.device
        self._replaced = replaced_forward(self.layer, self._replacement)
        self._replaced.__enter__()
        return self.inputs

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._replaced.__exit__(kind, error, trace)
        del self._replaced  # It is a generator, and with one a model can be neither copied nor pickled.
        inputs, self.inputs = self.inputs, []  # They have the graph, and so parameters, which could not be moved.
        a_shape_or_kind = isinstance(error, RuntimeError | IndexError | TypeError | ValueError)
        if inputs and a_shape_or_kind and not isinstance(error, UserError | torch.OutOfMemoryError):
            reason = (
                "what it does to its logits needs those of the whole batch and vocabulary, which a fused loss never "
                f"builds ({type(error).__name__}: {error})"
            )
            raise UnsupportedHeadError(self._model[0], reason) from error

    def _keep(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden_states = first_argument(args, kwargs).to(self._device)  # A model on several devices does so.
        self.inputs.append(hidden_states)
        shape = hidden_states.shape[:-1]
        logits = (*shape, 1) if self.head.is_by_position else (*(1 for _ in shape), self.head.width)
        return hidden_states.new_full(logits, torch.nan)


def graph_leaves(node: Any) -> Iterator[Tensor]:
    """Return the leaves of the graph that ends with ``node``."""
    seen, nodes = set(), [node]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [following for following, _ in node.next_functions]


def router_loss(model: nn.Module, output: Any) -> Tensor | None:
    """Return the router's loss () in a model's output, with the weight that the model's own loss gives it, or None."""
    aux_loss = getattr(output, "aux_loss", None)
    if not isinstance(aux_loss, Tensor):
        return None
    weight: Any = getattr(model, "router_aux_loss_coef", getattr(model, "aux_loss_coef", None))
    if weight is None:
        raise UserError(
            f"{type(model).__name__} returns an auxiliary loss without router_aux_loss_coef, so that its weight is "
            "unknown; switch it off (output_router_logits=False) or choose loss=model"
        )
    return weight * aux_loss


def extract_hidden_states(output: Any, backbone_name: str) -> Tensor:
    """Return the hidden states (..., D) in what a backbone's forward returned: a tensor, a tuple that begins with it,
    or a mapping or an object that has it as "last_hidden_state"."""
    named = output.get if isinstance(output, Mapping) else lambda name: getattr(output, name, None)
    found = output[0] if isinstance(output, tuple | list) and output else output
    found = found if isinstance(found, Tensor) else named("last_hidden_state")
    if not isinstance(found, Tensor) or not found.is_floating_point():
        keys = f" with {sorted(output)}" if isinstance(output, Mapping) else ""
        raise UserError(
            f"{backbone_name} returned {type(output).__name__}{keys}, in which no hidden states were found; its "
            "forward should return a tensor (..., D), a tuple whose first element is one, or an object or a dict with "
            "'last_hidden_state'"
        )
    return found
