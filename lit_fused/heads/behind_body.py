"""Watch a model that is compiled together with its output layer.

Compiled code is given one number for each position, which shows neither gradients nor what is done to some entries of
the vocabulary. So what the model does behind its body runs once more, not compiled, with zeros for hidden states.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from lit_fused.errors import UserError
from lit_fused.heads.capture import InputCapture, outputs_by_name, replaced_forward
from lit_fused.heads.probe import explained_after_layer
from lit_fused.heads.spec import OutputHead
from lit_fused.heads.watch import HeadWatch


def watch_eagerly(
    watch: HeadWatch, head: OutputHead, model: PreTrainedModel, shape: torch.Size | None, run: Callable[[], Any]
) -> None:
    """Run a model's forward pass once more, not compiled and behind its body alone, whose output has ``shape`` (None:
    as a whole), and watch it. It draws no random number. A model that does not run so is a UserError."""
    capture, devices = InputCapture(head), [model.device] if model.device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if shape is not None:
            stack.enter_context(_body_replaced(model, shape))
        inputs = stack.enter_context(capture)
        stack.enter_context(explained_after_layer(model, inputs))
        stack.enter_context(head.one_entry(0))
        stack.enter_context(outputs_by_name(model))
        try:
            output = run()
        except Exception as error:
            if inputs or shape is None or isinstance(error, UserError):
                raise
            raise UserError(
                f"what {type(model).__name__} does to its logits cannot be watched where it is compiled as a whole, "
                f"because it does not run without its body ({type(error).__name__}: {error}); compile its layers "
                "(compile=regional)"
            ) from error
        watch.compare(head, capture, output.logits)


class _Body(BaseModelOutputWithPast):
    """Stands for what the body of a model returns: the last hidden state, and None for all else that models ask for."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


@contextmanager
def body_returning(part: nn.Module, hidden_states: Any) -> Iterator[None]:
    """Let a part of a model return these hidden states, a tensor, in a block, whatever it is called with."""
    answer: Any = _Body(last_hidden_state=hidden_states)  # transformers' annotation allows a FloatTensor alone
    with replaced_forward(part, lambda *_, **__: answer):
        yield


@contextmanager
def _body_replaced(model: PreTrainedModel, shape: torch.Size) -> Iterator[None]:
    """Let zeros stand for the hidden states of a model's body. One that names no part as its body runs as a whole."""
    parts = [model.base_model] if model.base_model is not model else [model.get_encoder(), model.get_decoder()]
    width = getattr(model.config.get_text_config(), "hidden_size", shape[-1])
    zeros = torch.zeros(*shape[:-1], width, dtype=model.dtype, device=model.device)
    with ExitStack() as replaced:
        for part in parts:
            if part is not None and part is not model:
                replaced.enter_context(body_returning(part, zeros))
        yield
