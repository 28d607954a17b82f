"""Hidden states from a forward pass, without logits.

A Hugging Face causal language model calls its output layer itself. While it runs its *own* forward, so that everything
it does to positions, images, scales or routers is done, the layer's forward is replaced by one that keeps its input
and returns a placeholder of width one. What the model does to its logits (a scale, a cap, a slice, a broadcast sum)
works on the placeholder too, and nothing of vocabulary size is allocated.

A plain ``nn.Module`` returns its hidden states, in one of the forms that :func:`extract_hidden_states` knows.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lit_fused.errors import UserError


@contextmanager
def replaced_forward(layer: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Within the block, ``layer(...)`` runs ``forward`` in place of its own; afterwards it is as it was."""
    own = layer.__dict__.get("forward")  # set when some other tool has wrapped the instance already
    layer.forward = forward
    try:
        yield
    finally:
        if own is None:
            del layer.forward
        else:
            layer.forward = own


@contextmanager
def capture_input(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Within the block, calls of ``layer`` append their input (..., D) to the yielded list and compute nothing."""
    inputs: list[Tensor] = []

    def keep(hidden_states: Tensor) -> Tensor:
        inputs.append(hidden_states)
        return hidden_states.new_zeros(*hidden_states.shape[:-1], 1)

    with replaced_forward(layer, keep):
        yield inputs


_FORMS = (
    "a tensor (..., D), a tuple whose first element is one, a dict with 'last_hidden_state' or 'hidden_states', or an "
    "object with one of these as attribute (of several layers' hidden_states the last is taken)"
)


def extract_hidden_states(output: Any, backbone_name: str) -> Tensor:
    """The hidden states (..., D) that a backbone returned.

    Args:
        output: what the backbone's forward returned.
        backbone_name: named in the error.

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
