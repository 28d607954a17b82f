"""Get hidden states from a forward pass without computing logits.

A Hugging Face causal language model calls its output layer itself. It runs its *own* forward, with everything it does
to positions, images, scales or routers, but the layer's forward is replaced by one that stores its input and returns a
placeholder of width one. The model's operations on logits (a scale, a cap, a slice, a broadcast sum) work on the
placeholder too, and nothing of vocabulary size is allocated. A plain ``nn.Module`` returns its hidden states.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lit_fused.errors import UserError
from lit_fused.ops.label_checks import check_one_per_position


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, and afterwards each of its modules into its own mode again."""
    modes = [(module, module.training) for module in model.modules()]  # the modes may differ, as in a frozen tower
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


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


class InputCapture:
    """Makes calls of ``layer``, in a ``with`` block, append their input (..., D) to ``inputs`` and compute nothing.

    Use one object for all steps: a compiled model recognises the forward that it was compiled with.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.inputs: list[Tensor] = []
        self._replacement = self._keep  # one bound method, the same in every step

    def __enter__(self) -> list[Tensor]:
        self.inputs = []
        self._replaced = replaced_forward(self.layer, self._replacement)
        self._replaced.__enter__()
        return self.inputs

    def __exit__(self, *error: Any) -> None:
        self._replaced.__exit__(*error)

    def _keep(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        self.inputs.append(hidden_states)
        return hidden_states.new_zeros(*hidden_states.shape[:-1], 1)


@contextmanager
def sample_output(layer: nn.Module, positions: Tensor, targets: Tensor) -> Iterator[list[Tensor]]:
    """Make calls of ``layer`` compute only n positions of the flattened leading dimensions, those of the ``targets``.

    The calls return (1, n, V), and append their input (n, D) to the yielded list.
    """
    inputs: list[Tensor] = []
    own_forward = layer.forward

    def sample(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        check_one_per_position(targets, hidden_states, "hidden states")  # on a GPU an index that is too large is fatal
        inputs.append(hidden_states.flatten(0, -2)[positions])
        return own_forward(inputs[-1][None], *args, **kwargs)

    with replaced_forward(layer, sample):
        yield inputs


def extract_hidden_states(output: Any, backbone_name: str) -> Tensor:
    """Return the hidden states (..., D) in what a backbone's forward returned; list the known forms if it has none."""
    get = output.get if isinstance(output, Mapping) else lambda name: getattr(output, name, None)
    candidates = (get("last_hidden_state"), _entry(get("hidden_states"), -1), _entry(output, 0))
    found = output if isinstance(output, Tensor) else next((c for c in candidates if c is not None), None)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        keys = f" with {sorted(output)}" if isinstance(output, Mapping) else ""
        raise UserError(
            f"{backbone_name} returned {type(output).__name__}{keys}, in which no hidden states were found; its "
            "forward should return a tensor (..., D), a tuple whose first element is one, a dict with "
            "'last_hidden_state' or 'hidden_states', or an object with one of these as attribute (of several layers' "
            "hidden_states the last is taken)"
        )
    return found


def _entry(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, tuple | list) and value else value
