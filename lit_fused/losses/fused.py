"""The fused loss: cross entropy from hidden states and the output layer's weight, by a backend of choice."""

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_fused.errors import UserError
from lit_fused.heads import OutputHead, identify_head, transformers_model
from lit_fused.heads.probe import supported_layer
from lit_fused.losses.loss import (
    WEIGHTS,
    Batch,
    Forward,
    Head,
    Loss,
    LossOutput,
    at_least_float32,
    has_shifted_labels,
    labels_of,
    shift_labels,
)
from lit_fused.ops import TokenScores, token_scores
from lit_fused.ops.backends import (
    Backend,
    backend_attribute,
    backend_by_name,
    backend_name,
    supported_options,
    usable_backend,
)
from lit_fused.ops.label_checks import IGNORE_INDEX, check_inputs, check_integers, check_one_per_position
from lit_fused.ops.options import LossOptions

_ADDED = ("label_smoothing", "z_loss")  # to the cross entropy


class LinearCrossEntropyLoss(Loss):
    """Linear cross-entropy, exact unless the backend says otherwise, without logits.

    Inside a :class:`lit_fused.LanguageModel` it gets the model's own output head at every call. On its own, given
    ``output_embeddings``, it is a function: ``loss(hidden_states, labels).backward()``.

    Args:
        impl: "chunked" (our own, the default; also "auto" and "pytorch"), "cce", "liger", "torch_native" or
            "torch_compile"; the dotted path of a function; or a function ``f(hidden_states, weight, targets, *, ...)``
            that returns the summed loss.
        output_embeddings: for use outside of a LanguageModel: the output layer, or its weight (V, D); or a transformers
            model, whose head is identified: some scale, cap or slice their logits. transformers'
            ``resize_token_embeddings`` gives an untied model another layer: make the loss after it.
        label_smoothing: in [0, 1].
        z_loss: weight of the squared log-sum-exp, >= 0.
        logits_budget_mib: size of the chunk of logits in MiB; None is the backend's default.
        chunk_size: rows of that chunk, instead of its MiB. Ignored by a backend with blocks of its own, such as "cce".
        recompute: compute the logits again in backward instead of holding gradients from forward on.
        drop_ignored: on a GPU, take ignored tokens out before the products, for one wait for the device per step.
        float32_accumulation: sum a bfloat16 weight's gradient in float32; None does so where its precision needs it.

    Raises:
        UserError: an unknown ``impl``, an option that it does not have, or a value out of range.
    """

    inputs = (WEIGHTS,)
    replaces_own = True
    divides_rows = True

    def __init__(
        self,
        impl: str | Backend = "chunked",
        output_embeddings: nn.Module | OutputHead | Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logits_budget_mib: float | None = None,
        chunk_size: int | None = None,
        recompute: bool = False,
        drop_ignored: bool = False,
        float32_accumulation: bool | None = None,
    ) -> None:
        self.options = LossOptions(
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            logits_budget_mib=logits_budget_mib,
            chunk_size=chunk_size,
            recompute=recompute,
            drop_ignored=drop_ignored,
            float32_accumulation=float32_accumulation,
        ).changed()
        self.backend: Backend = backend_by_name(impl) if isinstance(impl, str) else impl
        self.head = _as_head(output_embeddings)
        self._refuse_unsupported(self.options)
        self.statistics = (*type(self).statistics, *(backend_attribute(self.backend, "statistics") or ()))
        self._usable: dict[torch.device, Backend] = {}

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"{type(self).__name__}(impl={backend_name(self.backend)!r}, output_embeddings={self.head}{options})"

    def __call__(
        self,
        hidden_states: Tensor,
        labels: Tensor | None = None,
        *,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        token_weights: Tensor | None = None,
    ) -> Tensor:
        """Return the mean loss over the valid targets, () float32 (float64 for float64 inputs); zero, and still part of
        the graph, when there are none. :func:`lit_fused.linear_cross_entropy` has other reductions.

        Args:
            hidden_states: (B, T, D) or (N, D), the output layer's input.
            labels: (B, T) integers aligned with the inputs: position t is trained to predict ``labels[:, t + 1]``.
                -100 is ignored. Or (N,), which are not shifted: no one knows where a sequence ends there.
            shift_labels: what each position predicts, instead of labels; of their shape.
            num_items_in_batch: what the summed loss is divided by, instead of the number of valid targets.
            token_weights: a factor on each label's loss, of the labels' shape; the mean is divided by their sum.
        """
        batch = {"labels": labels, "shift_labels": shift_labels, WEIGHTS: token_weights}
        output = self.compute(_Given(hidden_states, self._own_head()), batch)
        return replace(output, num_items=num_items_in_batch).loss

    def forward_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., D), for inference."""
        return self._own_head().logits(hidden_states)

    @property
    def builds_logits(self) -> bool:  # type: ignore[override]
        return any(backend_attribute(backend, "builds_logits") for backend in self._usable.values())

    @property
    def divides_vocabulary(self) -> bool:  # type: ignore[override]
        return "shard" in supported_options(self.backend)

    def prepare(self, model: Any, device: torch.device) -> None:
        head = model.prepare_hidden_states()
        if head is not None:
            self._refuse_unsupported(_head_options(head) | ({"bias": True} if head.has_bias else {}))
        self.backend_on(device)

    def compute(self, model: Forward, batch: Batch) -> LossOutput:
        targets, weights = model.targets(batch), model.token_weights(batch)
        hidden_states, head, aux_loss = model.hidden_states(batch)
        if model.few_targets:
            check_one_per_position(targets, hidden_states, "hidden states")
            valid = targets.flatten() != IGNORE_INDEX  # On a GPU, the next line waits for it.
            hidden_states, targets = hidden_states.flatten(0, -2)[valid], targets.flatten()[valid]
            weights = None if weights is None else weights.flatten()[valid]
        if weights is None:
            return replace(self.sums(hidden_states, targets, head), aux_loss=aux_loss)
        loss_sum, valid, _ = self._run(hidden_states, targets, head, token_weights=weights.reshape(-1))
        return LossOutput(loss_sum, weights.where(valid, 0).sum(), aux_loss)

    def measure(self, model: Forward, batch: Batch) -> LossOutput:
        smoothing, z_loss = (self.options.get(name, 0.0) for name in _ADDED)
        if not smoothing and not z_loss:
            return self.compute(model, batch)
        if model.token_weights(batch) is not None or "statistics" not in supported_options(self.backend):
            return self._plain().compute(model, batch)  # One pass gives one sum there.
        output = self.compute(model, batch)
        stats = dict(output.stats)
        added = z_loss * stats["lse_squared"]
        stats |= {"smoothed_loss": output.loss_sum.detach() - added} if smoothing else {}
        stats |= {"z_loss": added} if z_loss else {}
        return replace(output, loss_sum=stats["nll"], stats=stats)

    def cross_entropy(self, hidden_states: Tensor, targets: Tensor, head: Head) -> Tensor:
        """Return the summed cross entropy () for a spot check: without what options add to it, and without a gradient
        where the backend's is approximate by intention."""
        is_exact = not backend_attribute(self.backend_on(hidden_states.device), "approximate_backward")
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_exact):
            return self._plain().sums(hidden_states, targets, head).loss_sum

    def _plain(self) -> "LinearCrossEntropyLoss":
        """Return the loss without what options add to the cross entropy."""
        plain = copy.copy(self)
        plain.options = {name: value for name, value in self.options.items() if name not in _ADDED}
        return plain

    def sums(self, hidden_states: Tensor, targets: Tensor, head: Head) -> LossOutput:
        """Return the sums over targets (...) of hidden states (..., D)."""
        loss_sum, valid, stats = self._run(hidden_states, targets, head)
        if not stats and not self.options.keys() & {*_ADDED}:
            stats = {"nll": loss_sum.detach()}
        return LossOutput(loss_sum, valid.sum(), stats=stats)

    def _run(
        self, hidden_states: Tensor, targets: Tensor, head: Head, **more: Any
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the backend's summed loss (), which targets are valid (...), and its statistics."""
        backend = self.backend_on(hidden_states.device)
        in_parts = bool(backend_attribute(backend, "takes_frozen_columns"))
        hidden_states, weight, bias = head.operands(hidden_states, in_parts)
        valid = check_inputs(hidden_states, weight, targets, bias, vocabulary=head.vocabulary)
        options, supported = _head_options(head) | self.options | more, supported_options(backend)
        options |= {} if bias is None else {"bias": bias}
        if "scale" in options and "scale" not in supported:
            hidden_states = hidden_states * options.pop("scale")
        if "chunk_size" not in supported:
            options.pop("chunk_size", None)
        self._refuse_unsupported(options)
        options |= {"reduction": "sum"} if "reduction" in supported else {}
        result = backend(hidden_states.reshape(-1, hidden_states.shape[-1]), weight, targets.reshape(-1), **options)
        loss, stats = result if isinstance(result, tuple) else (result, {})
        return at_least_float32(loss), valid, stats

    def _own_head(self) -> OutputHead:
        if self.head is None:
            raise UserError(
                "this LinearCrossEntropyLoss has no output layer: pass output_embeddings=model.get_output_embeddings() "
                "or use it inside a LanguageModel, which hands over its own"
            )
        return self.head

    @property
    def ran(self) -> str | None:
        """The implementation that computed the loss, which may be a stand-in; None before any did."""
        return ", ".join(dict.fromkeys(backend_name(backend) for backend in self._usable.values())) or None

    def backend_on(self, device: torch.device) -> Backend:
        """Return the backend, or its stand-in on this device."""
        if device not in self._usable:
            self._usable[device] = usable_backend(self.backend, device)
        return self._usable[device]

    def _refuse_unsupported(self, options: dict[str, Any]) -> None:
        # A scale can act on the hidden states as well, and a backend that chooses its own chunks needs no size of them.
        lacking = options.keys() - supported_options(self.backend) - {"scale", "chunk_size"}
        if lacking:
            raise UserError(
                f"loss={backend_name(self.backend)} has no {' and no '.join(sorted(lacking))}, which the output layer "
                "or the configuration asks for; choose loss=chunked, which has every option"
            )


class _Given:
    """The :class:`~lit_fused.losses.loss.Forward` of a loss on its own: hidden states that its caller has made."""

    few_targets = False

    def __init__(self, hidden_states: Tensor, head: OutputHead) -> None:
        self.output = hidden_states, head, None

    def targets(self, batch: Batch) -> Tensor:
        labels = labels_of(batch)
        if has_shifted_labels(batch):
            return check_integers(batch["shift_labels"])
        return shift_labels(labels) if labels.ndim > 1 else labels

    def token_weights(self, batch: Batch) -> Tensor | None:
        weights = batch.get(WEIGHTS)
        if weights is None:
            return None
        check_one_per_position(weights, self.output[0], "hidden states", WEIGHTS)
        shifted = weights.ndim > 1 and not has_shifted_labels(batch)
        return at_least_float32(F.pad(weights[..., 1:], (0, 1)) if shifted else weights)

    def hidden_states(self, batch: Batch) -> tuple[Tensor, OutputHead, None]:
        return self.output

    def logits(self, batch: Batch) -> tuple[Tensor, None]:
        return self.output[1].logits(self.output[0]), None

    def whole_rows(self, numbers: Tensor, batch: Batch) -> Tensor:
        return numbers

    def own_positions(self, numbers: Tensor) -> Tensor:
        return numbers


def token_losses(model: Forward, batch: Batch) -> Tensor:
    """Return the negative log-likelihood (B, T), float32, of each target, 0 where ignored, without logits."""
    hidden_states, head, _ = model.hidden_states(batch)
    return -scores_of_targets(hidden_states, head, model.targets(batch), drop_ignored=True).log_prob


def scores_of_targets(hidden_states: Tensor, head: Head, targets: Tensor, **options: Any) -> TokenScores:
    """Return the scores (...) of targets (...) at hidden states (..., D), without entropies: what evaluations, scores
    of texts and the references of preferences are made of."""
    hidden_states, weight, bias = head.operands(hidden_states, in_parts=True)
    options |= {"bias": bias, "scale": head.scale, "softcap": head.softcap, "shard": head.shard}
    return token_scores(hidden_states, weight, targets, entropy=False, **options)


def _as_head(given: Any) -> OutputHead | None:
    """Return the output head of what was passed as ``output_embeddings``."""
    if isinstance(given, Tensor):
        layer = nn.Module()
        layer.weight = given
        return OutputHead(layer)
    if not isinstance(given, nn.Module):
        return given
    return OutputHead(supported_layer(given, given)) if transformers_model(given) is None else identify_head(given)


def _head_options(head: Head) -> dict[str, Any]:
    """Return the options that the head asks for, but for its bias, which is one of its operands."""
    options: dict[str, Any] = {} if head.scale == 1.0 else {"scale": head.scale}
    options |= {} if head.softcap is None else {"softcap": head.softcap}
    return options if head.shard is None else options | {"shard": head.shard}
