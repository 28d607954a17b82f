"""Identify a model's output head by experiment, or refuse it by name.

No table of attribute names is right for all architectures: one divides by the attribute that another multiplies by,
and some configure a softcap that they never apply. So the model itself is asked, once, with eight tokens. First an
honest forward shows the output layer's input and output and the real logits. Then known numbers are injected in place
of the layer's output, and what comes out as logits tells what the model does to them, whatever its weights and dtype:
zeros reveal an added vector, growth from 1e6 to 1e7 a cap, the slope a scale, the width a slice. The formula so found
must reproduce both the injected and the real logits; anything else is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.heads.capture import replaced_forward
from lit_fused.heads.spec import OutputHead

_PROBE_TOKENS = 8
_SPREAD = 30.0  # injected logits are uniform in +-30: wide enough to see a cap, narrow enough to invert one


class UnsupportedHeadError(UserError):
    """The model's logits are not a function of its output layer that a fused loss can reproduce."""

    def __init__(self, model: nn.Module, reason: str) -> None:
        super().__init__(
            f"{type(model).__name__} cannot be trained with a fused loss: {reason}; choose loss=standard, which uses "
            "the model's own logits"
        )


def output_layer(model: nn.Module) -> nn.Linear | nn.Embedding:
    """The layer whose weight (V, D) turns hidden states into logits, from the model's ``get_output_embeddings()``.

    Raises:
        UserError: the model offers no such method.
        UnsupportedHeadError: the layer is not a plain linear layer (adapters, quantised and custom layers are refused
            by type).
    """
    getter = getattr(model, "get_output_embeddings", None)
    if getter is None:
        raise UserError(
            f"{type(model).__name__} has no get_output_embeddings(): add this method to the model and return its "
            "output layer, an nn.Linear(hidden_size, vocab_size)"
        )
    layer = getter()
    if layer is None:
        raise UnsupportedHeadError(
            model, "its get_output_embeddings() is None (a model without output layer? try AutoModelForCausalLM)"
        )
    plain = isinstance(layer, nn.Linear | nn.Embedding) and type(layer).forward in (
        nn.Linear.forward,
        nn.Embedding.forward,
    )
    if not plain:
        raise UnsupportedHeadError(
            model, f"its output layer is a {type(layer).__module__}.{type(layer).__name__}, not a plain linear layer"
        )
    if len(list(layer.parameters())) > 1 + (getattr(layer, "bias", None) is not None):
        raise UnsupportedHeadError(model, "its output layer has parameters besides weight and bias")
    return layer


@torch.no_grad()
def identify_head(model: PreTrainedModel) -> OutputHead:
    """The output head of a Hugging Face causal language model: its layer, scale, softcap and slice.

    Runs three forward passes of eight tokens on the model's device, in evaluation mode, and leaves the model as it was.

    Raises:
        UnsupportedHeadError: with the class and the reason.
    """
    layer = output_layer(model)
    if not isinstance(layer, nn.Linear):
        raise UnsupportedHeadError(model, f"its output layer is an {type(layer).__name__}, not a linear layer")
    batch = _probe_batch(model)
    with _evaluation_mode(model):
        hidden, raw, real = _honest_forward(model, layer, batch)
        injected = _known_numbers(raw)
        with replaced_forward(layer, lambda *_, **__: injected.clone()):
            answer = model(**batch).logits.float()
            with torch.enable_grad():
                if model(**batch).logits.requires_grad:
                    raise UnsupportedHeadError(model, "a trainable parameter acts on its logits after the output layer")
    head = _fit(model, layer, injected, answer)

    if not _close(head.transform(injected), answer, 1e-4):
        raise UnsupportedHeadError(model, "what it does to its logits is not a scale, a softcap or a slice")
    rounding = 50 * max(torch.finfo(raw.dtype).eps, torch.finfo(torch.float32).eps)
    if not _close(F.linear(hidden, layer.weight, layer.bias), raw, rounding):
        raise UnsupportedHeadError(model, "its output layer does not compute h W^T + b (hooks or adapters?)")
    if not _close(head.logits(hidden).float(), real, max(rounding, 1e-4)):
        raise UnsupportedHeadError(model, f"the logits rebuilt from its output layer ({head}) differ from its own")
    return head


@torch.no_grad()
def labels_are_shifted_by(model: PreTrainedModel) -> bool:
    """Whether the model's own loss pairs position t with label t + 1.

    Asked with a label at the first position only: a loss that shifts has no target left and is not a number.
    """
    batch = _probe_batch(model)
    labels = torch.full_like(batch["input_ids"], -100)
    labels[:, 0] = batch["input_ids"][:, 0]
    with _evaluation_mode(model):
        loss = model(**batch, labels=labels).loss
    return not bool(loss.isfinite())


def _probe_batch(model: PreTrainedModel) -> dict[str, Any]:
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr]
    tokens = torch.arange(10, 10 + _PROBE_TOKENS, device=model.device) % vocabulary
    return {"input_ids": tokens[None], "use_cache": False}


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]  # they may differ: a frozen tower, say
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _honest_forward(model: nn.Module, layer: nn.Linear, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """(the layer's input, the layer's output, the model's logits) of one ordinary forward pass."""
    calls: list[tuple[Tensor, Tensor]] = []
    own_forward = layer.forward

    def recording(hidden_states: Tensor) -> Tensor:
        output = own_forward(hidden_states)
        calls.append((hidden_states, output))
        return output

    with replaced_forward(layer, recording):
        logits = getattr(model(**batch), "logits", None)
    if not isinstance(logits, Tensor):
        raise UnsupportedHeadError(model, "its output has no logits")
    if len(calls) != 1:
        raise UnsupportedHeadError(model, f"its output layer ran {len(calls)} times in one forward pass, not once")
    hidden, raw = calls[0]
    if logits.shape[:-1] != raw.shape[:-1] or logits.shape[-1] > raw.shape[-1]:
        raise UnsupportedHeadError(
            model, f"its output layer gives {tuple(raw.shape)} but its logits are {tuple(logits.shape)}"
        )
    return hidden, raw, logits.float()


def _known_numbers(raw: Tensor) -> Tensor:
    """Float32 logits to inject, shaped like the layer's output: rows of 0, 1e6 and 1e7, then uniform noise."""
    generator = torch.Generator().manual_seed(0)
    numbers = (2 * torch.rand(raw.shape, generator=generator) - 1) * _SPREAD
    rows = numbers.view(-1, raw.shape[-1])
    rows[0], rows[1], rows[2] = 0.0, 1e6, 1e7
    return numbers.to(raw.device)


def _fit(model: nn.Module, layer: nn.Linear, injected: Tensor, answer: Tensor) -> OutputHead:
    width = answer.shape[-1]
    x, y = injected.reshape(-1, injected.shape[-1])[:, :width].double(), answer.reshape(-1, width).double()
    zeros, million, ten_millions = y[:3].abs().amax(-1)
    if zeros > 0:
        raise UnsupportedHeadError(model, "it adds numbers to its logits after the output layer")
    softcap = None
    x, y = x[3:], y[3:]
    usable = torch.ones_like(y, dtype=torch.bool)
    if ten_millions < 2 * million:  # ten times the input gave no more: capped
        softcap = ten_millions.item()
        usable = y.abs() < 0.9 * softcap
        y = softcap * torch.atanh((y / softcap).clamp(-1 + 1e-6, 1 - 1e-6))
    x, y = x[usable], y[usable]
    scale = ((x * y).sum() / (x * x).sum()).item()
    return OutputHead(
        layer=layer,
        scale=1.0 if abs(scale - 1) < 1e-5 else scale,
        softcap=softcap,
        n_out=width if width < layer.weight.shape[0] else None,
    )


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether, in every row, the largest difference is small against the row's largest value."""
    found, expected = found.float(), expected.float()
    if found.shape != expected.shape:
        return False
    limit = tolerance * expected.abs().amax(-1, keepdim=True).clamp(min=1e-6)
    return bool(((found - expected).abs() <= limit).all())
