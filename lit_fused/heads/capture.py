"""Get hidden states from a forward pass without computing logits.

A Hugging Face causal language model calls its output layer itself. It runs its *own* forward, with everything it does
to positions, images, scales or routers, but the layer's forward is replaced by one that stores its input and returns a
placeholder of width one. The model's operations on logits (a scale, a cap, a slice, a broadcast sum) work on the
placeholder too, and nothing of vocabulary size is allocated.

A plain ``nn.Module`` returns its hidden states, in one of the forms that :func:`extract_hidden_states` knows.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from lit_fused.errors import UserError
from lit_fused.ops.label_checks import check_one_per_position


@contextmanager
def replaced_forward(layer: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Make ``layer(...)`` run ``forward`` instead of its own forward until the block ends."""
    own = layer.__dict__.get("forward")  # None unless another tool has wrapped the instance
    layer.forward = forward
    try:
        yield
    finally:
        if own is None:
            del layer.forward
        else:
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
        self._restore = ExitStack()
        self._restore.enter_context(replaced_forward(self.layer, self._replacement))
        return self.inputs

    def __exit__(self, *error: Any) -> None:
        self._restore.close()

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


_FORMS = (
    "a tensor (..., D), a tuple whose first element is one, a dict with 'last_hidden_state' or 'hidden_states', or an "
    "object with one of these as attribute (of several layers' hidden_states the last is taken)"
)


def extract_hidden_states(output: Any, backbone_name: str) -> Tensor:
    """Return the hidden states (..., D) in a backbone's output.

    Args:
        output: the return value of the backbone's forward.
        backbone_name: the name for the error message.

    Raises:
        UserError: ``output`` has none of the known forms; the message lists them.
    """
    found: Any = output
    if not isinstance(output, Tensor):
        for name in ("last_hidden_state", "hidden_states"):
            found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
            if found is not None:
                found = found[-1] if name == "hidden_states" and isinstance(found, tuple | list) and found else found
                break
        else:
            found = output[0] if isinstance(output, tuple | list) and output else None
    if not isinstance(found, Tensor) or not found.is_floating_point():
        keys = f" with {sorted(output)}" if isinstance(output, Mapping) else ""
        raise UserError(
            f"{backbone_name} returned {type(output).__name__}{keys}, in which no hidden states were found; "
            f"its forward should return {_FORMS}"
        )
    return found
