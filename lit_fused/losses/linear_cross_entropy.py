"""The fused loss: cross entropy straight from hidden states and the output layer's weight, by a backend of choice.

The same object serves two users. Inside a :class:`lit_fused.LanguageModel` the model's own output head is identified
and handed over at every call. On its own, given ``output_embeddings``, it is a function of hidden states and labels:

    loss = LinearCrossEntropyLoss(output_embeddings=model.get_output_embeddings())
    loss(hidden_states, labels).backward()
    loss.forward_logits(hidden_states)
"""

from typing import Any

import torch
from torch import Tensor, nn

from lit_fused.errors import UserError
from lit_fused.heads import OutputHead
from lit_fused.losses.base import (
    Batch,
    ForwardPass,
    Loss,
    LossOutput,
    at_least_float32,
    labels_of,
    shift_labels,
)
from lit_fused.ops.linear_cross_entropy import linear_cross_entropy
from lit_fused.ops.linear_cross_entropy.backends import (
    Backend,
    backend_builds_logits,
    backend_by_name,
    backend_name,
    supported_options,
    usable_backend,
)
from lit_fused.ops.linear_cross_entropy.checks import IGNORE_INDEX, check_budget, check_inputs, check_weights


class LinearCrossEntropyLoss(Loss):
    """Linear cross-entropy, exact unless the backend says otherwise, without logits.

    Args:
        impl: "chunked" (our own, the default), "cce", "liger", "torch_native" or "torch_compile"; the dotted path of a
            function; or a function ``f(hidden_states, weight, targets, *, ...)`` that returns the summed loss.
        output_embeddings: the output layer, for use outside of a LanguageModel. A model that scales, caps or slices
            its logits needs more than its layer: pass ``lit_fused.identify_head(model)``.
        label_smoothing: in [0, 1].
        z_loss: weight of the squared log-sum-exp, >= 0.
        logits_budget_mib: size of the chunk of logits in MiB; None is the backend's default.
        recompute: compute the logits again in backward instead of holding gradients from forward on.
        drop_ignored: on a GPU, take ignored tokens out before the products, for one wait for the device per step.
        float32_accumulation: sum a bfloat16 weight's gradient in float32; None does so where its precision needs it.

    Raises:
        UserError: an unknown ``impl``, an option that it does not have, or a value out of range.
    """

    def __init__(
        self,
        impl: str | Backend = "chunked",
        output_embeddings: nn.Linear | nn.Embedding | OutputHead | None = None,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logits_budget_mib: float | None = None,
        recompute: bool = False,
        drop_ignored: bool = False,
        float32_accumulation: bool | None = None,
    ) -> None:
        check_weights(label_smoothing, z_loss)
        check_budget(logits_budget_mib)
        self.backend = backend_by_name(impl) if isinstance(impl, str) else impl
        self.head = OutputHead(output_embeddings) if isinstance(output_embeddings, nn.Module) else output_embeddings
        asked = {
            "label_smoothing": label_smoothing or None,
            "z_loss": z_loss or None,
            "logits_budget_mib": logits_budget_mib,
            "recompute": recompute or None,
            "drop_ignored": drop_ignored or None,
            "float32_accumulation": float32_accumulation,
        }
        self.options: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        self._refuse_unsupported(self.options)
        self._usable: dict[torch.device, Backend] = {}

    def __call__(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Mean loss over the valid targets; zero, and still part of the graph, when there are none.

        Args:
            hidden_states: (B, T, D), the output layer's input.
            labels: (B, T) integers aligned with the inputs: position t is trained to predict ``labels[:, t + 1]``.
                -100 is ignored.

        Returns:
            () float32 (float64 for float64 inputs).
        """
        return self._sums(hidden_states, labels, self._own_head()).loss

    def forward_logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V) logits, for inference."""
        return self._own_head().logits(hidden_states)

    @property
    def builds_logits(self) -> bool:
        return any(backend_builds_logits(backend) for backend in self._usable.values())

    def prepare(self, model: ForwardPass, device: torch.device) -> None:
        self._refuse_unsupported(_head_options(model.prepare_hidden_states()))
        self._backend_on(device)

    def compute(self, model: ForwardPass, batch: Batch) -> LossOutput:
        labels = labels_of(batch)
        hidden_states, head, aux_loss = model.hidden_states(batch)
        output = self._sums(hidden_states, labels, head)
        output.aux_loss = aux_loss
        return output

    def token_losses(self, model: ForwardPass, batch: Batch) -> Tensor:
        labels = labels_of(batch)
        hidden_states, head, _ = model.hidden_states(batch)
        losses, _ = linear_cross_entropy(
            hidden_states,
            head.weight,
            shift_labels(labels),
            bias=head.bias,
            scale=head.scale,
            softcap=head.softcap,
            reduction="none",
            statistics=False,
        )
        return losses

    def _sums(self, hidden_states: Tensor, labels: Tensor, head: OutputHead) -> LossOutput:
        targets, weight = shift_labels(labels), head.weight
        check_inputs(hidden_states, weight, targets, head.bias)
        backend = self._backend_on(hidden_states.device)
        options = _head_options(head) | self.options
        if "scale" in options and "scale" not in supported_options(backend):
            hidden_states = hidden_states * options.pop("scale")
        self._refuse_unsupported(options)
        result = backend(hidden_states.reshape(-1, hidden_states.shape[-1]), weight, targets.reshape(-1), **options)
        loss_sum, stats = result if isinstance(result, tuple) else (result, {})
        if not stats and not self.options.keys() & {"label_smoothing", "z_loss"}:
            stats = {"nll": loss_sum.detach()}
        return LossOutput(at_least_float32(loss_sum), (targets != IGNORE_INDEX).sum(), stats=stats)

    def _own_head(self) -> OutputHead:
        if self.head is None:
            raise UserError(
                "this LinearCrossEntropyLoss has no output layer: pass "
                "output_embeddings=model.get_output_embeddings(), or use it inside a LanguageModel, which hands over "
                "its own"
            )
        return self.head

    def _backend_on(self, device: torch.device) -> Backend:
        if device not in self._usable:
            self._usable[device] = usable_backend(self.backend, device)
        return self._usable[device]

    def _refuse_unsupported(self, options: dict[str, Any]) -> None:
        supported = supported_options(self.backend) | {"scale"}  # which can act on the hidden states as well
        lacking = sorted(options.keys() - supported)
        if lacking:
            raise UserError(
                f"loss={backend_name(self.backend)} has no {' and no '.join(lacking)}, which the output layer or the "
                f"configuration asks for; choose loss=chunked, which has every option"
            )


def _head_options(head: OutputHead) -> dict[str, Any]:
    options = {"bias": head.bias, "softcap": head.softcap, "scale": None if head.scale == 1.0 else head.scale}
    return {name: value for name, value in options.items() if value is not None}
