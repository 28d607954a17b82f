"""Identify a model's output head by experiment, or refuse it by name.

No table of attribute names is right for all architectures: one divides by the attribute that another multiplies by,
and some configure a softcap that they never apply. So the model runs once with eight tokens. First an ordinary forward
records the output layer's input and output and the real logits. Then known numbers replace the layer's output, and the
resulting logits show the model's operations on them, whatever its weights and dtype: zeros reveal an added buffer,
growth from 1e6 to 1e7 a cap, the slope a scale, the width a slice. The formula must reproduce both the injected and
the real logits; any other model is refused, and later ones are found by the spot check (heads/spot_check.py).
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.heads.adapters import (
    base_layer,
    full_name,
    is_adapter,
    is_lora,
    trained_copy,
    trains_tokens,
    transformers_model,
    why_not_plain_lora,
    without_wrappers,
)
from lit_fused.heads.capture import (
    InputCapture,
    UnsupportedHeadError,
    first_argument,
    graph_leaves,
    replaced_forward,
    whole_activations,
)
from lit_fused.heads.model_state import probing
from lit_fused.heads.quantised import is_quantised, settle, why_not_dequantised
from lit_fused.heads.spec import OutputHead

PLAIN_WEIGHTS = (nn.Parameter, Tensor, DTensor)  # Others may be quantised.
_PROBE_TOKENS = 8
TOLERANCE = 1e-4  # relative, of float32 numbers after a few operations
_SPREAD = 30.0  # injected logits are uniform in +-30: wide enough to see a cap, narrow enough to invert one


def output_layer(model: nn.Module) -> nn.Module:
    """Return the layer whose weight (V, D) turns hidden states into logits.

    It is an ``nn.Linear``, an ``nn.Embedding``, or PEFT's LoRA around a linear layer: the result of the model's
    ``get_output_embeddings()``, inside the wrappers of ``torch.compile`` and PEFT. If a transformers model returns its
    *input* embedding there, the layer is looked up by that weight's shape. UserError if the model has no such method,
    UnsupportedHeadError if the layer is none of these.
    """
    model = without_wrappers(model)
    getter = getattr(model, "get_output_embeddings", None)
    if getter is None:
        raise UserError(
            f"{type(model).__name__} has no get_output_embeddings(): add this method to the model and return its "
            "output layer, an nn.Linear(hidden_size, vocab_size)"
        )
    layer = getter()
    if layer is None:
        reason = (
            "its get_output_embeddings() is None (a model without output layer? try AutoModelForCausalLM, or "
            "AutoModelForMaskedLM)"
        )
        raise UnsupportedHeadError(model, reason)
    if isinstance(layer, nn.Embedding) and isinstance(model, PreTrainedModel):
        layer = _linear_layer_like(model, layer)
    return supported_layer(layer, model)


def supported_layer(layer: nn.Module, owner: nn.Module) -> nn.Module:
    """Return the layer whose operands a fused loss can read: ``layer``, or the copy of it that PEFT trains. Refuse one
    of ``owner`` that is custom, quantised or adapted in a way that no formula covers."""
    layer = trained_copy(layer)
    plain: Any = base_layer(layer)
    reason = None
    if is_lora(layer):
        reason = why_not_plain_lora(layer)
    elif trains_tokens(layer):
        plain = layer.original_module
        if getattr(plain, "bias", None) is not None:  # PEFT's own forward leaves the bias out
            reason = "has a bias beside the rows that PEFT trains (trainable_token_indices)"
    reason = reason or _why_not_plain(plain)
    if reason is not None:
        raise UnsupportedHeadError(owner, f"its output layer {reason}")
    if not isinstance(owner, PreTrainedModel) and _is_changed_by_hooks(plain):
        raise UserError(
            "a hook of the output layer makes its weight, or changes its input, its output or its gradients when the "
            f"layer runs, and in a {type(owner).__name__} it does not run: the loss applies the weight itself. Change "
            "the hidden states that the model returns, hook the weight (weight.register_hook), or make a pruned weight "
            "permanent (torch.nn.utils.prune.remove)"
        )
    settle(plain)
    return layer


def _is_changed_by_hooks(layer: nn.Module) -> bool:
    """Return whether hooks give a linear layer its weight, or another output or gradient than its own forward has.
    FSDP2's must not run here."""
    weight: Any = getattr(layer, "weight", None)
    if not isinstance(layer, nn.Linear) or isinstance(layer, FSDPModule) or type(weight) not in (nn.Parameter, Tensor):
        return False
    if "weight" not in dict(layer.named_parameters(recurse=False)):
        return True
    if weight.is_meta:
        return False
    found = []
    with torch.inference_mode(False), torch.enable_grad():
        for run in (layer, layer.forward):
            some = torch.linspace(-1, 1, layer.in_features, device=weight.device).to(weight.dtype)[None, None]
            output = run(some.requires_grad_())
            found += [output.detach(), *torch.autograd.grad(output.sum(), some)]
    return not all(torch.allclose(a, b, equal_nan=True) for a, b in zip(found[:2], found[2:], strict=True))


def _why_not_plain(layer: Any) -> str | None:
    """Return why a layer does not compute ``h W^T + b`` with a matrix of numbers W; None if it does."""
    if is_adapter(layer):
        return (
            f"has an adapter of a kind that is not plain LoRA ({full_name(layer)}); leave the output layer out of it "
            "(exclude_modules=['lm_head'] in most of PEFT's configurations)"
        )
    if is_parametrized(layer):  # A loss reads the weight several times, and a spectral norm iterates at each of them.
        return "computes its weight at every use (torch.nn.utils.parametrize)"
    if is_quantised(layer):
        return why_not_dequantised(layer)
    if getattr(type(layer), "forward", None) not in (nn.Linear.forward, nn.Embedding.forward):
        return f"is a {full_name(layer)}, not a plain linear layer"
    if len(list(layer.parameters())) > 1 + (getattr(layer, "bias", None) is not None):
        return "has parameters besides weight and bias"
    if type(layer.weight) not in PLAIN_WEIGHTS:
        return f"has a weight of type {full_name(layer.weight)}, not a plain tensor (quantised?)"
    return None


def _linear_layer_like(model: nn.Module, embedding: nn.Embedding) -> nn.Module:
    """Return the one linear layer of the embedding's shape; the embedding itself if there is none, or more than one."""
    inside_adapters = {m.base_layer for m in model.modules() if is_adapter(m) and hasattr(m, "base_layer")}
    candidates = [m for m in model.modules() if (type(m) is nn.Linear or is_adapter(m)) and m not in inside_adapters]
    found = [m for m in candidates if getattr(getattr(m, "weight", None), "shape", None) == embedding.weight.shape]
    return found[0] if len(found) == 1 else embedding


@torch.no_grad()
def identify_head(model: nn.Module, batch: Mapping[str, Any] | None = None) -> OutputHead:
    """Identify the output head of a Hugging Face model: its layer, scale, softcap, slice and the buffer it adds.

    Runs three forward passes on the model's device, in evaluation mode, and does not change the model, except that
    bitsandbytes' layers of 4 bits keep the form that can be trained.

    Args:
        model: a transformers model that returns logits, or PEFT's or ``torch.compile``'s wrapper around one.
        batch: arguments of the model's forward, with at least four tokens; default two rows of :func:`probe_batch`.

    Raises:
        UnsupportedHeadError: with the class and the reason.
    """
    layer = output_layer(model)
    inner = transformers_model(model)
    assert inner is not None, "only a transformers model computes its own logits"
    if isinstance(layer, nn.Embedding):
        raise UnsupportedHeadError(inner, f"its output layer is an {type(layer).__name__}, not a linear layer")
    inputs = dict(probe_batch(inner, rows=2) if batch is None else batch)
    with probing(inner), torch.autocast(inner.device.type, enabled=False):
        with whole_activations(layer):
            hidden, raw, real, behind = _honest_forward(inner, layer, inputs)
        if not raw.isfinite().all():
            raise UserError(
                f"the output layer of {type(inner).__name__} gives NaN or infinity for the tokens that it is tried "
                "with; look for them in the model's weights"
            )
        injected = _known_numbers(raw)
        with _noise_in(behind, {raw.shape[-1], real.shape[-1]}):
            with replaced_forward(layer, lambda *_, **__: injected.clone()), torch.enable_grad():
                answer = inner(**inputs).logits.float()
            head = _fit(inner, layer, injected, answer.detach(), behind)
            offset = None if head.offset is None else getattr(*head.offset)
            if any(leaf is not offset for leaf in graph_leaves(answer.grad_fn)):
                raise UnsupportedHeadError(inner, "a trainable parameter acts on its logits after the output layer")
            if not _close(head.transform(injected), answer.detach(), TOLERANCE):
                raise UnsupportedHeadError(inner, "what it does to its logits is not a scale, a softcap or a slice")
        # A quantised layer may multiply in another dtype than the model's.
        dtypes = raw.dtype, head.operands(hidden, in_parts=True)[0].dtype
        own, float32 = max(torch.finfo(dtype).eps for dtype in dtypes), torch.finfo(torch.float32).eps
        rounding = 50 * max(own, float32)
        output, logits = head.output(hidden), head.logits(hidden)
        # Rounding differs from entry to entry; its norm shows a factor that single entries would hide.
        if (
            not _close(output, raw, rounding)
            or (output - raw).float().norm() > max(own, 50 * float32) * raw.float().norm()
        ):
            raise UnsupportedHeadError(inner, "its output layer does not compute h W^T + b (hooks or adapters?)")
        if not _close(logits.float(), real, max(rounding, TOLERANCE)):
            raise UnsupportedHeadError(inner, f"the logits rebuilt from its output layer ({head}) differ from its own")
        return _with_stand_in(inner, head, inputs)


def _with_stand_in(model: nn.Module, head: OutputHead, inputs: dict[str, Any]) -> OutputHead:
    """Return a head with the kind of numbers on which the model's forward runs in place of its logits."""
    try:
        with InputCapture(head, model):
            model(**inputs)
        return head
    except UnsupportedHeadError:
        head = replace(head, is_by_position=True)
    with InputCapture(head, model):
        model(**inputs)
    return head


def probe_batch(model: PreTrainedModel, rows: int = 1) -> dict[str, Any]:
    """Return a batch whose rows are the same eight tokens, for the decoder of an encoder-decoder as well."""
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr]
    tokens = torch.arange(10, 10 + _PROBE_TOKENS, device=model.device) % vocabulary
    tokens = tokens.repeat(rows, 1)
    batch = {"input_ids": tokens} | without_cache(model)
    return batch | {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else batch


def without_cache(model: nn.Module) -> dict[str, bool]:
    """Return the argument that makes the model's forward build no cache, if its forward takes it."""
    parameters = inspect.signature(model.forward).parameters.values()
    takes = any(p.name == "use_cache" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return {"use_cache": False} if takes else {}


def _honest_forward(
    model: nn.Module, layer: nn.Module, batch: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, list[tuple[nn.Module, str]]]:
    """Run one ordinary forward pass; return the layer's input, the layer's output, the model's logits, and the buffers
    and parameters, frozen or like a bias, that it used after the layer, as module and name."""
    calls: list[tuple[Tensor, Tensor]] = []
    own_forward = layer.forward
    owners: dict[int, tuple[nn.Module, str]] = {}
    for module in model.modules():
        for name, tensor in (*module.named_buffers(recurse=False), *module.named_parameters(recurse=False)):
            owners[id(tensor)] = module, name
    may_be_bias = torch.Size([OutputHead(layer).width])
    tensors = [*model.buffers(), *model.parameters()]
    use = _Used(t for t in tensors if not t.requires_grad or t.shape == may_be_bias)
    with ExitStack() as after_the_layer:

        def recording(*args: Any, **kwargs: Any) -> Tensor:
            output = own_forward(*args, **kwargs)
            calls.append((first_argument(args, kwargs), output.clone()))  # The model may write into its own.
            if len(calls) == 1:
                after_the_layer.enter_context(use)
            return output

        with replaced_forward(layer, recording):
            logits = getattr(model(**batch), "logits", None)
    behind = list(dict.fromkeys(owners[id(tensor)] for tensor in use.used))
    if not isinstance(logits, Tensor):
        raise UnsupportedHeadError(model, "its output has no logits")
    if len(calls) != 1:
        raise UnsupportedHeadError(model, f"its output layer ran {len(calls)} times in one forward pass, not once")
    hidden, raw = calls[0]
    if logits.shape[:-1] != raw.shape[:-1] or logits.shape[-1] > raw.shape[-1]:
        shapes = f"gives {tuple(raw.shape)} but its logits are {tuple(logits.shape)}"
        raise UnsupportedHeadError(model, f"its output layer {shapes}")
    return hidden, raw, logits.float(), behind


class _Used(TorchFunctionMode):
    """Lists, in a ``with`` block, which of some tensors torch's functions take."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.tensors, self.used = {id(tensor): tensor for tensor in tensors}, list[Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))

    def _note(self, values: Iterable[Any]) -> None:
        for value in values:
            if id(value) in self.tensors:
                self.used.append(self.tensors[id(value)])
            elif isinstance(value, tuple | list):
                self._note(value)


def _known_numbers(raw: Tensor) -> Tensor:
    """Return float32 logits to inject, shaped like the layer's output: rows of 0, 1e6 and 1e7, then uniform noise."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(raw.shape, generator=generator, dtype=torch.float32, device="cpu")
    numbers = (2 * drawn - 1) * _SPREAD
    rows = numbers.view(-1, raw.shape[-1])
    rows[0], rows[1], rows[2] = 0.0, 1e6, 1e7
    return numbers.to(raw.device)


@contextmanager
def _noise_in(behind: Iterable[tuple[nn.Module, str]], sizes: set[int]) -> Iterator[None]:
    """Fill the tensors of a vocabulary's size with noise in a block: zeros of a fresh model (BART) may change later."""
    generator = torch.Generator().manual_seed(1)
    tensors = [getattr(module, name) for module, name in behind]
    saved = [(t, t.clone()) for t in tensors if t.is_floating_point() and t.numel() in sizes]
    for buffer, _ in saved:
        buffer.copy_(torch.randn(buffer.shape, generator=generator, dtype=torch.float32, device="cpu"))
    try:
        yield
    finally:
        for buffer, numbers in saved:
            buffer.copy_(numbers)


def _fit(
    model: nn.Module, layer: nn.Module, injected: Tensor, answer: Tensor, behind: list[tuple[nn.Module, str]]
) -> OutputHead:
    width = answer.shape[-1]
    x, y = injected.reshape(-1, injected.shape[-1])[:, :width].double(), answer.reshape(-1, width).double()
    zeros, million, ten_millions = y[:3].abs().amax(-1)
    offset = _equal_to(y[0], behind) if zeros > 0 else None
    softcap = ten_millions.item() if ten_millions < 2 * million else None  # a tenfold input gave the same output
    if zeros > 0 and (offset is None or softcap is not None):
        raise UnsupportedHeadError(model, "it adds numbers to its logits that are none of its buffers")
    x, y = x[3:].flatten(), (y[3:] - y[0]).flatten()
    if softcap is not None:
        usable = y.abs() < 0.9 * softcap
        x, y = x[usable], softcap * torch.atanh(y[usable] / softcap)
    scale = ((x * y).sum() / (x * x).sum()).item()
    n_out = width if width < OutputHead(layer).width else None
    return OutputHead(layer, 1.0 if abs(scale - 1) < 1e-5 else scale, softcap, n_out, offset)


def _equal_to(vector: Tensor, behind: list[tuple[nn.Module, str]]) -> tuple[nn.Module, str] | None:
    as_long = (place for place in behind if getattr(*place).numel() == len(vector))
    return next((place for place in as_long if torch.equal(getattr(*place).flatten().double(), vector)), None)


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether, in every row, the largest difference is small compared to the row's largest value."""
    limit = tolerance * expected.float().abs().amax(-1, keepdim=True).clamp(min=1e-6)
    return found.shape == expected.shape and bool(((found.float() - expected.float()).abs() <= limit).all())
