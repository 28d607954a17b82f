"""``lit_fused.certify(model)``: a model's formula, and the errors of the fused loss beside those of its own head.

A few tokens run through the model once, up to the input h of its output layer. From there three ways lead to a mean
cross entropy and its gradients: the fused loss; the rest of the model's own forward, and torch's cross entropy of its
logits; and the definition (ops/reference.py) on a copy of the layer in float64, on the CPU. The certificate has the
distances of the first two from the third.

N tokens, D hidden, V vocabulary.
"""

import copy
import math
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_fused import __version__
from lit_fused.errors import UserError
from lit_fused.heads import OutputHead, identify_head, output_layer, transformers_model
from lit_fused.heads.adapters import base_layer
from lit_fused.heads.capture import UnsupportedHeadError
from lit_fused.heads.model_state import probing
from lit_fused.heads.probe import probe_batch
from lit_fused.heads.quantised import dequantised_weight
from lit_fused.heads.slices import leaf_before
from lit_fused.losses import LinearCrossEntropyLoss
from lit_fused.losses.loss import at_least_float32
from lit_fused.models.hub import config_of, read
from lit_fused.models.language_model import LanguageModel
from lit_fused.models.load import is_deferred, materialize
from lit_fused.ops.reference import linear_cross_entropy_reference

Certificate = dict[str, Any]  # of strings and numbers
_ROWS = 4  # of eight tokens
_MEASURED = {
    "loss": "loss",
    "hidden_states": "gradient of the hidden states",
    "weights": "gradient of the output layer's weights",
}


def certify(model: nn.Module, loss: Any = "chunked") -> Certificate:
    """Return what a model's head computes, and how far from float64 the fused loss and the model's own head are.

    Runs the model on 32 tokens in evaluation mode, on its device and in its dtype, and leaves it as it was.

    Args:
        model: a transformers model, or PEFT's or ``torch.compile``'s wrapper around one.
        loss: the fused loss: a :class:`lit_fused.LinearCrossEntropyLoss`, or the name of its backend.

    Returns:
        A dict of strings and numbers:

        - "model", the class; "lit_fused", "torch", "transformers", versions; "date" (UTC).
        - "refused": why no fused loss computes this model's logits. Then nothing else is there.
        - "formula" of the logits, of the layer's input h; "layer"; "vocabulary" (V) and "hidden_size" (D); "scale", 1
            where there is none; and "softcap", if there is one.
        - "backend", "dtype", "device" and "tokens": what was measured, and on how many tokens.
        - "fused/loss", "own/loss": \\|mean loss - that in float64\\|, divided by that in float64.
        - "fused/hidden_states", "own/hidden_states": the norm of the error of the gradient (N, D) at the layer's input,
            divided by the norm of the gradient in float64; "fused/weights" and "own/weights" the same of the layer's
            trained parameters together. Those of the layer are absent if it is frozen, and "fused/" of gradients if
            the backend approximates them on purpose.

    Raises:
        UserError: no transformers model, or numbers that are not finite. What the model raises on tokens alone, as one
            that needs an image may, is its own error.
    """
    inner = transformers_model(model)
    if inner is None:
        raise UserError(f"certify takes a transformers model, got {type(model).__name__}")
    if is_deferred(inner):
        materialize(inner)
    certificate: Certificate = {"model": type(inner).__name__}
    try:
        with torch.inference_mode(False), torch.enable_grad():
            output_layer(inner)  # A model that has none may have no table of tokens either.
            batch = _few_tokens(inner)
            head = identify_head(inner, batch)
            loss = LinearCrossEntropyLoss(loss) if isinstance(loss, str) else loss
            certificate |= _described(head) | _measured(inner, head, loss, batch)
    except UnsupportedHeadError as error:
        certificate["refused"] = str(error)
    return certificate | _versions()


def certify_folder(folder: str | Path) -> Certificate:
    """Return :func:`certify` of a folder of transformers, in the dtype of its weights. Nothing in it runs: no code of
    its own is imported, and weights are read from safetensors alone. UserError if it has none."""
    config = config_of(str(folder))
    return certify(read(str(folder), config, None, dtype=config.dtype or torch.float32, use_safetensors=True))


def certificate_of(model: LanguageModel, *, divided: bool) -> Certificate | None:
    """Return :func:`certify` of the backbone of a run, with the run's fused loss; None of one that is no transformers
    model. It raises nothing: "not_measured" says why the errors are missing, as where ranks have ``divided`` it."""
    inner = model.transformers_model
    if inner is None:
        return None
    loss: Any = model.loss if hasattr(model.loss, "cross_entropy") else "chunked"
    try:
        if not divided:
            return certify(inner, loss)
        reason = "ranks divided the model; lit-fused --certify FOLDER measures the exported one"
    except Exception as error:  # The model raised it, as one that does not run on tokens alone, and a run goes on.
        reason = f"{type(error).__name__}: {error}"
    described = {} if model.head is None else _described(model.head)
    return {"model": model.name} | described | {"not_measured": reason} | _versions()


def _versions() -> Certificate:
    """Return the versions and the date that every certificate has."""
    versions = {"lit_fused": __version__, "torch": version("torch"), "transformers": version("transformers")}
    return versions | {"date": f"{datetime.now(UTC):%Y-%m-%d}"}


def text_of(certificate: Certificate) -> str:
    """Return a certificate in Markdown, as it stands in a model card and as the command prints it."""
    found = certificate
    formula = f"`logits = {found['formula']}`, {found['layer']}" if "formula" in found else "no formula of its logits"
    lines = [f"{found['model']}: {formula}", ""]
    for reason in ("refused", "not_measured"):
        if reason in found:
            lines += [f"{reason.replace('_', ' ')}: {found[reason]}", ""]
    if "tokens" in found:
        what = f"error against float64, {found['tokens']} tokens in {found['dtype']} on {found['device']}"
        lines += [f"| {what} | fused loss ({found['backend']}) | the model's own head |", "|---|---|---|"]
        for name, of in _MEASURED.items():
            if f"own/{name}" in found:
                fused = f"{found[f'fused/{name}']:.1e}" if f"fused/{name}" in found else "approximate on purpose"
                lines.append(f"| {of} | {fused} | {found[f'own/{name}']:.1e} |")
        lines.append("")
    by = ", ".join(f"{name} {found[name]}" for name in ("lit_fused", "torch", "transformers"))
    return "\n".join([*lines, f"{by}; {found['date']}"])


def _few_tokens(model: PreTrainedModel) -> dict[str, Any]:
    """Return a batch like :func:`probe_batch`, whose rows have different tokens."""
    batch = probe_batch(model, rows=_ROWS)
    ids, vocabulary = batch["input_ids"], model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr]
    ids = (ids + ids.shape[1] * torch.arange(_ROWS, device=ids.device)[:, None]) % vocabulary
    return batch | {name: ids for name in ("input_ids", "decoder_input_ids") if name in batch}


def _described(head: OutputHead) -> Certificate:
    product = "h W^T + b" if getattr(head.layer, "bias", None) is not None else "h W^T"
    if head.scale != 1.0:
        product = f"{head.scale:.6g} ({product})"
    if head.offset is not None:
        product = f"{product} + {head.offset[1]}"
    formula = product if head.softcap is None else f"{head.softcap:.6g} tanh(({product}) / {head.softcap:.6g})"
    if head.n_out is not None:
        formula = f"({formula})[:{head.n_out}]"
    described: Certificate = {"formula": formula, "layer": str(head), "vocabulary": head.vocabulary}
    described |= {"scale": head.scale} if head.softcap is None else {"scale": head.scale, "softcap": head.softcap}
    return described


def _measured(model: PreTrainedModel, head: OutputHead, loss: Any, batch: dict[str, Any]) -> Certificate:
    parameters = [p for p in head.layer.parameters() if p.requires_grad]
    with probing(model), torch.autocast(model.device.type, enabled=False):
        with leaf_before(head.layer) as leaves:
            logits = model(**batch).logits
        (leaf,) = leaves
        targets = _targets(logits)
        own = F.cross_entropy(at_least_float32(logits).flatten(0, -2), targets.flatten())
        of_own = _compared(own, [leaf, *parameters])
        hidden_states = leaf.detach().requires_grad_()
        fused = loss.cross_entropy(hidden_states, targets, head) / targets.numel()
        of_fused = _compared(fused, [hidden_states, *parameters])
        exact = _compared(*_in_float64(head, leaf, targets))
    measured: Certificate = {"hidden_size": leaf.shape[-1], "backend": loss.ran, "tokens": targets.numel()}
    measured |= {"dtype": str(leaf.dtype).removeprefix("torch."), "device": leaf.device.type}
    for who, found in {"fused": of_fused, "own": of_own}.items():
        measured |= {f"{who}/{name}": _relative(numbers, exact[name]) for name, numbers in found.items()}
    return measured


def _targets(logits: Tensor) -> Tensor:
    """Return random entries of the vocabulary as targets (B, T), the same in each run."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(logits.shape[-1], logits.shape[:-1], generator=generator, device="cpu")
    return drawn.to(logits.device)


def _compared(loss: Tensor, inputs: list[Tensor]) -> dict[str, list[Tensor]]:
    """Return a loss and its gradients by what they are called; none of a loss without."""
    found = {"loss": [loss]}
    if loss.requires_grad:
        of_hidden_states, *of_weights = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        found |= {"hidden_states": [of_hidden_states]} | ({"weights": of_weights} if of_weights else {})
    return {name: [t.detach() for t in tensors] for name, tensors in found.items()}


def _in_float64(head: OutputHead, hidden_states: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the loss by its definition, and the hidden states and parameters that it was computed of."""

    def exact(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", torch.float64)

    base = base_layer(head.layer)
    weight = dequantised_weight(base)
    inputs = [p for p in head.layer.parameters() if weight is None or p is not base.weight]
    memo: dict[int, Any] = {id(p): nn.Parameter(exact(p), p.requires_grad) for p in inputs}
    if weight is not None:
        memo[id(base)] = plain = nn.Linear(1, 1, device="meta")
        plain.weight, plain.bias = nn.Parameter(exact(weight), False), memo.get(id(base.bias), base.bias)
    layer = copy.deepcopy(head.layer, memo)
    leaf = exact(hidden_states).requires_grad_()
    operands = replace(head, layer=layer, offset=None).operands(leaf)
    bias = operands[2]
    if head.offset is not None:
        added = exact(getattr(*head.offset)).flatten()
        bias = added if bias is None else bias + added
    options: Any = {"bias": bias, "scale": head.scale, "softcap": head.softcap}
    loss, _ = linear_cross_entropy_reference(operands[0], operands[1], targets.cpu(), **options)
    return loss, [leaf, *(p for p in layer.parameters() if p.requires_grad)]


def _relative(found: list[Tensor], truth: list[Tensor]) -> float:
    """Return the norm of the error of some tensors together, divided by that of the truth, if it is not zero."""
    pairs = zip(found, truth, strict=True)
    error = math.hypot(*(torch.dist(ours.to("cpu", torch.float64), exact).item() for ours, exact in pairs))
    size = math.hypot(*(exact.norm().item() for exact in truth))
    return error / size if size else error
