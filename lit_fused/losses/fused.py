"""The fused loss: cross entropy from hidden states and the output layer's weight, by a backend of choice."""

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_fused.errors import UserError, check_number, checked_options
from lit_fused.heads import OutputHead
from lit_fused.heads.probe import supported_layer
from lit_fused.losses.loss import WEIGHTS, Batch, ForwardPass, Loss, LossOutput, at_least_float32
from lit_fused.ops import linear_cross_entropy
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
_FOR_CALLS = {"shift": None, "reduction": "mean", "ignore_index": IGNORE_INDEX}
_Init = TypeVar("_Init", bound=Callable[..., None])


def _operands_by_kind(init: _Init) -> _Init:
    """Take positional operands in any order, told apart by their kinds, and refuse unknown keywords by a sentence."""
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(self: Any, *operands: Any, **options: Any) -> None:
        name = type(self).__name__
        for operand in operands:
            is_layer = operand is None or isinstance(operand, nn.Module | OutputHead | Tensor)
            kind = "output_embeddings" if is_layer else "impl"
            if kind in options:
                raise UserError(f"{name} takes one {kind}, got {options[kind]!r} and {operand!r}")
            options[kind] = operand
        unknown = [option for option in options if option not in known]
        if unknown:
            raise UserError(f"{name} has no {' and no '.join(unknown)}; it takes {', '.join(known)}")
        init(self, **options)

    return checked  # type: ignore[return-value]


class LinearCrossEntropyLoss(Loss):
    """Linear cross-entropy, exact unless the backend says otherwise, without logits.

    Inside a :class:`lit_fused.LanguageModel` it gets the model's own output head at every call. On its own, given
    ``output_embeddings``, it is a function: ``loss(hidden_states, labels).backward()``. Both first arguments may be
    positional, in either order.

    Args:
        output_embeddings: the output layer, or its weight (V, D), for use outside of a LanguageModel. A model that
            scales, caps or slices its logits needs more than its layer: pass ``lit_fused.identify_head(model)``.
            transformers' ``resize_token_embeddings`` gives an untied model another layer: make the loss after it.
        impl: "chunked" (our own, the default; also "auto" and "pytorch"), "cce", "liger", "torch_native" or
            "torch_compile"; the dotted path of a function; or a function ``f(hidden_states, weight, targets, *, ...)``
            that returns the summed loss.
        shift: of calls: whether position t predicts label t + 1. None shifts labels (B, T), but not labels (N,), in
            which no one knows where a sequence ends.
        reduction: of calls: "mean" over valid targets, "sum", or "none" (the shape of the labels).
        ignore_index: of calls: labels that are ignored, beside -100.
        label_smoothing: in [0, 1].
        z_loss: weight of the squared log-sum-exp, >= 0.
        logits_budget_mib: size of the chunk of logits in MiB; None is the backend's default.
        chunk_size: rows of that chunk, instead of its MiB. Ignored by a backend with blocks of its own, such as "cce".
        recompute: compute the logits again in backward instead of holding gradients from forward on.
        drop_ignored: on a GPU, take ignored tokens out before the products, for one wait for the device per step.
        float32_accumulation: sum a bfloat16 weight's gradient in float32; None does so where its precision needs it.

    Raises:
        UserError: an unknown keyword or ``impl``, an option that it does not have, or a value out of range.
    """

    inputs = (WEIGHTS,)
    replaces_own = True

    @_operands_by_kind
    @checked_options()
    def __init__(
        self,
        output_embeddings: nn.Module | OutputHead | Tensor | str | Backend | None = None,
        impl: str | Backend | nn.Module | OutputHead | Tensor | None = "chunked",
        *,
        shift: bool | None = None,
        reduction: str = "mean",
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logits_budget_mib: float | None = None,
        chunk_size: int | None = None,
        recompute: bool = False,
        drop_ignored: bool = False,
        float32_accumulation: bool | None = None,
    ) -> None:
        options = LossOptions(
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            logits_budget_mib=logits_budget_mib,
            chunk_size=chunk_size,
            recompute=recompute,
            drop_ignored=drop_ignored,
            float32_accumulation=float32_accumulation,
        )
        LossOptions(reduction=reduction)  # checks it
        check_number("ignore_index", ignore_index, "be a whole number", lambda x: True, whole=True)
        self.shift, self.reduction, self.ignore_index = shift, reduction, ignore_index
        self.backend: Backend = backend_by_name(impl) if isinstance(impl, str) else impl  # type: ignore[assignment]
        self.head = _as_head(output_embeddings)
        self.options = options.changed()
        self._refuse_unsupported(self.options | ({"reduction": reduction} if reduction == "none" else {}))
        self.statistics = (*type(self).statistics, *(backend_attribute(self.backend, "statistics") or ()))
        self._usable: dict[torch.device, Backend] = {}
        self._known = set[frozenset[str]]()  # names of options that the backend has taken

    def __repr__(self) -> str:
        settings = {"impl": backend_name(self.backend)} | self._settings_of_calls() | self.options
        shown = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return f"{type(self).__name__}(output_embeddings={self.head}, {shown})"

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
        the graph, when there are none. With ``reduction``, their sum or each of them, 0 where ignored.

        Args:
            hidden_states: (B, T, D) or (N, D), the output layer's input.
            labels: (B, T) integers aligned with the inputs: position t is trained to predict ``labels[:, t + 1]``.
                -100 is ignored. Or (N,), which are not shifted; ``shift`` says otherwise.
            shift_labels: what each position predicts, instead of labels; of their shape.
            num_items_in_batch: what the summed loss is divided by, instead of the number of valid targets.
            token_weights: a factor on each label's loss, of the labels' shape; the mean is divided by their sum.
        """
        if not isinstance(hidden_states, Tensor):
            raise UserError(
                f"hidden states must be a tensor (B, T, D), got {type(hidden_states).__name__}; of what a model of "
                "transformers returns, pass last_hidden_state"
            )
        shift = shift_labels is None and (self.shift or (self.shift is None and getattr(labels, "ndim", 0) > 1))
        labels = check_integers(labels if shift_labels is None else shift_labels)
        targets = _successors(labels, IGNORE_INDEX) if shift else labels
        targets = targets.masked_fill(targets == self.ignore_index, IGNORE_INDEX)
        if self.reduction == "none" and num_items_in_batch is not None:
            raise UserError("num_items_in_batch divides a sum, and reduction='none' makes none; leave out one of them")
        factors = None
        if token_weights is not None:
            check_one_per_position(token_weights, hidden_states, "hidden states", "token_weights")
            factors = at_least_float32(_successors(token_weights, 0) if shift else token_weights)
        weighs = factors is None or (not factors.requires_grad and "token_weights" in supported_options(self.backend))
        if self.reduction == "none" or not weighs:
            losses, valid, _ = self._run(hidden_states, targets, self._own_head(), reduction="none")
            factors = valid if factors is None else factors.where(valid, 0)
            losses = losses.view(targets.shape) * factors
            if self.reduction == "none":
                return losses
            loss_sum, count = losses.sum(), factors.sum()
        elif factors is not None:
            weights = {"token_weights": factors.reshape(-1)}
            loss_sum, valid, _ = self._run(hidden_states, targets, self._own_head(), **weights)
            count = factors.where(valid, 0).sum()
        else:
            output = self._sums(hidden_states, targets, self._own_head())
            loss_sum, count = output.loss_sum, output.num_tokens
        if num_items_in_batch is not None:
            return loss_sum / num_items_in_batch
        return loss_sum if self.reduction == "sum" else loss_sum / count.masked_fill(count == 0, 1)

    def forward_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., D), for inference."""
        return self._own_head().logits(hidden_states)

    @property
    def builds_logits(self) -> bool:
        return any(backend_attribute(backend, "builds_logits") for backend in self._usable.values())

    def prepare(self, model: ForwardPass, device: torch.device) -> None:
        self._refuse_settings_of_calls()
        head = model.prepare_hidden_states()
        if head is not None:
            self._refuse_unsupported(_head_options(head) | ({"bias": True} if head.has_bias else {}))
        self.backend_on(device)

    def check_vocabulary_parallel(self) -> None:
        if "shard" not in supported_options(self.backend):
            raise UserError(
                f"loss={backend_name(self.backend)} has no vocabulary-parallel form, for an output layer that ranks "
                "divide; choose loss=chunked or loss=standard, or strategy=fsdp2"
            )

    def compute(self, model: ForwardPass, batch: Batch) -> LossOutput:
        self._refuse_settings_of_calls()
        targets, weights = model.targets(batch), model.token_weights(batch)
        hidden_states, head, aux_loss = model.hidden_states(batch)
        if model.few_targets:
            check_one_per_position(targets, hidden_states, "hidden states")
            valid = targets.flatten() != IGNORE_INDEX  # On a GPU, the next line waits for it.
            hidden_states, targets = hidden_states.flatten(0, -2)[valid], targets.flatten()[valid]
            weights = None if weights is None else weights.flatten()[valid]
        if weights is None:
            return replace(self._sums(hidden_states, targets, head), aux_loss=aux_loss)
        loss_sum, valid, _ = self._run(hidden_states, targets, head, token_weights=weights.reshape(-1))
        return LossOutput(loss_sum, (weights * valid).sum(), aux_loss)

    def measure(self, model: ForwardPass, batch: Batch) -> LossOutput:
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

    def token_losses(self, model: ForwardPass, batch: Batch) -> Tensor:
        targets = model.targets(batch)
        hidden_states, head, _ = model.hidden_states(batch)
        hidden_states, weight, bias = head.operands(hidden_states)
        options: dict[str, Any] = {"scale": head.scale, "softcap": head.softcap, "reduction": "none"}
        options |= {"drop_ignored": model.few_targets or "drop_ignored" in self.options, "statistics": False}
        return linear_cross_entropy(hidden_states, weight, targets, bias=bias, shard=head.shard, **options)[0]

    def cross_entropy(self, hidden_states: Tensor, targets: Tensor, head: OutputHead) -> Tensor:
        """Return the summed cross entropy () for a spot check: without what options add to it, and without a gradient
        where the backend's is approximate by intention."""
        is_exact = not backend_attribute(self.backend_on(hidden_states.device), "approximate_backward")
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_exact):
            return self._plain()._sums(hidden_states, targets, head).loss_sum

    def _plain(self) -> "LinearCrossEntropyLoss":
        """Return the loss without what options add to the cross entropy."""
        plain = copy.copy(self)
        plain.options = {name: value for name, value in self.options.items() if name not in _ADDED}
        return plain

    def _sums(self, hidden_states: Tensor, targets: Tensor, head: OutputHead) -> LossOutput:
        loss_sum, valid, stats = self._run(hidden_states, targets, head)
        if not stats and not self.options.keys() & {*_ADDED}:
            stats = {"nll": loss_sum.detach()}
        return LossOutput(loss_sum, valid.sum(), stats=stats)

    def _run(
        self, hidden_states: Tensor, targets: Tensor, head: OutputHead, **more: Any
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the backend's summed loss (or, flat, each token's), which targets are valid, and its statistics."""
        hidden_states, weight, bias = head.operands(hidden_states)
        valid = check_inputs(hidden_states, weight, targets, bias, vocabulary=head.vocabulary)
        backend = self.backend_on(hidden_states.device)
        options, shard = _head_options(head) | self.options | more, head.shard
        if shard is not None:
            self.check_vocabulary_parallel()
            options["shard"] = shard
        if bias is not None:
            options["bias"] = bias
        supported = supported_options(backend)
        if "scale" in options and "scale" not in supported:
            hidden_states = hidden_states * options.pop("scale")
        if "chunk_size" not in supported:
            options.pop("chunk_size", None)
        if (names := frozenset(options)) not in self._known:
            self._refuse_unsupported(options)
            self._known.add(names)
        hidden_ND = hidden_states.reshape(-1, hidden_states.shape[-1])
        if "reduction" in supported:
            options.setdefault("reduction", "sum")
        result = backend(hidden_ND, weight, targets.reshape(-1), **options)
        loss, stats = result if isinstance(result, tuple) else (result, {})
        return at_least_float32(loss), valid, stats

    def _settings_of_calls(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name, default in _FOR_CALLS.items() if getattr(self, name) != default}

    def _refuse_settings_of_calls(self) -> None:
        changed = self._settings_of_calls()
        if changed:
            raise UserError(
                f"{' and '.join(f'{name}={value!r}' for name, value in changed.items())} is for calls of the loss with "
                "hidden states and labels; a LanguageModel averages over its tokens, ignores -100 and shifts labels "
                "itself: leave it out, and put labels that are not to be shifted into the batch as 'shift_labels'"
            )

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
        supported = supported_options(self.backend) | {"scale", "chunk_size"}
        names = sorted(options.keys() - supported)
        lacking = ["reduction='none'" if name == "reduction" else name for name in names]
        if lacking:
            raise UserError(
                f"loss={backend_name(self.backend)} has no {' and no '.join(lacking)}, which the output layer or the "
                f"configuration asks for; choose loss=chunked, which has every option"
            )


def _as_head(given: Any) -> OutputHead | None:
    """Return the output head of what was passed as ``output_embeddings``."""
    if hasattr(given, "get_output_embeddings"):
        name = type(given).__name__
        raise UserError(
            f"output_embeddings must be an output layer, got the whole {name}; pass model.get_output_embeddings(), or "
            "lit_fused.identify_head(model) if it scales, caps or slices its logits"
        )
    if isinstance(given, Tensor):
        if given.ndim != 2 or not given.is_floating_point():
            raise UserError(
                f"an output layer's weight must be floating point (V, D), got {given.dtype} of shape "
                f"{tuple(given.shape)}"
            )
        layer = nn.Module()
        layer.weight = given
        return OutputHead(layer)
    return OutputHead(supported_layer(given, given)) if isinstance(given, nn.Module) else given


def _successors(values: Tensor, last: float) -> Tensor:
    """Return for each position what stands at the next one."""
    return F.pad(values[..., 1:], (0, 1), value=last)


def _head_options(head: OutputHead) -> dict[str, Any]:
    """Return the options that the head asks for, but for its bias, which is one of its operands."""
    options = {} if head.scale == 1.0 else {"scale": head.scale}
    return options if head.softcap is None else options | {"softcap": head.softcap}


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Return the relative error of one product: TF32's where torch may use it, else the dtype's."""
    tf32 = device.type == "cuda" and dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return 2**-10 if tf32 else torch.finfo(dtype).eps
