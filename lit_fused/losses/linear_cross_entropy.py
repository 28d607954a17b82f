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
from lit_fused.heads import OutputHead, supported_layer
from lit_fused.heads.probe import evaluation_mode
from lit_fused.losses.base import (
    Batch,
    ForwardPass,
    Loss,
    LossOutput,
    at_least_float32,
    shift_labels,
)
from lit_fused.losses.cross_entropy import cross_entropy_of_logits
from lit_fused.ops.linear_cross_entropy import linear_cross_entropy
from lit_fused.ops.linear_cross_entropy.backends import (
    Backend,
    backend_builds_logits,
    backend_by_name,
    backend_name,
    supported_options,
    usable_backend,
)
from lit_fused.ops.linear_cross_entropy.checks import (
    IGNORE_INDEX,
    check_budget,
    check_filter,
    check_inputs,
    check_weights,
)

_PARITY_TOKENS = 64


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
        filter_eps: in [0, 1), or None for the exact backward. Otherwise backward computes the vocabulary's entries that
            some token nearby gives a probability above it, and replaces the others by a correction that keeps the sums
            over tokens and over entries; where too much would be replaced it computes all. The loss itself is exact.
            It always recomputes, with ``recompute`` and without. Statistics of training: the mean "dropped_mass", the
            share of "kept_columns" and of "exact_tokens".

    Raises:
        UserError: an unknown ``impl``, an option that it does not have, a value out of range, or ``label_smoothing``
            together with ``filter_eps``: its gradient is nowhere small.
    """

    def __init__(
        self,
        impl: str | Backend = "chunked",
        output_embeddings: nn.Module | OutputHead | None = None,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logits_budget_mib: float | None = None,
        recompute: bool = False,
        drop_ignored: bool = False,
        float32_accumulation: bool | None = None,
        filter_eps: float | None = None,
    ) -> None:
        check_weights(label_smoothing, z_loss)
        check_filter(filter_eps, label_smoothing)
        check_budget(logits_budget_mib)
        self.backend = backend_by_name(impl) if isinstance(impl, str) else impl
        if isinstance(output_embeddings, nn.Module):
            output_embeddings = OutputHead(supported_layer(output_embeddings, output_embeddings))
        self.head = output_embeddings
        asked = {
            "label_smoothing": label_smoothing or None,
            "z_loss": z_loss or None,
            "logits_budget_mib": logits_budget_mib,
            "recompute": recompute or None,
            "drop_ignored": drop_ignored or None,
            "float32_accumulation": float32_accumulation,
            "filter_eps": filter_eps,
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
        if not isinstance(hidden_states, Tensor):
            raise UserError(
                f"hidden states must be a tensor (B, T, D), got {type(hidden_states).__name__}; of what a model of "
                "transformers returns, pass last_hidden_state"
            )
        return self._sums(hidden_states, shift_labels(labels), self._own_head()).loss

    def forward_logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V) logits, for inference."""
        return self._own_head().logits(hidden_states)

    @property
    def builds_logits(self) -> bool:
        return any(backend_builds_logits(backend) for backend in self._usable.values())

    def prepare(self, model: ForwardPass, device: torch.device) -> None:
        head = model.prepare_hidden_states()
        if head is not None:
            self._refuse_unsupported(_head_options(head))
        self._backend_on(device)

    def check_vocabulary_parallel(self) -> None:
        if "shard" not in supported_options(self.backend):
            raise UserError(
                f"loss={backend_name(self.backend)} has no vocabulary-parallel form, for an output layer that tensor "
                "parallelism divides over ranks; choose loss=chunked or loss=standard, or strategy=fsdp2"
            )

    def compute(self, model: ForwardPass, batch: Batch) -> LossOutput:
        targets = model.targets(batch)
        hidden_states, head, aux_loss = model.hidden_states(batch)
        output = self._sums(hidden_states, targets, head)
        output.aux_loss = aux_loss
        return output

    def token_losses(self, model: ForwardPass, batch: Batch) -> Tensor:
        targets = model.targets(batch)
        hidden_states, head, _ = model.hidden_states(batch)
        hidden_states, weight, bias = head.operands(hidden_states)
        losses, _ = linear_cross_entropy(
            hidden_states,
            weight,
            targets,
            bias=bias,
            scale=head.scale,
            softcap=head.softcap,
            reduction="none",
            statistics=False,
            shard=head.shard,
        )
        return losses

    def check_parity(self, model: ForwardPass, batch: Batch) -> None:
        targets = model.targets(batch).flatten()
        valid = (targets != IGNORE_INDEX).nonzero().flatten()
        if not len(valid):  # on this rank: the others run the model, and this one has parts of its parameters
            model.hidden_states_and_logits(batch, targets.new_zeros(1))
            return
        positions = valid[
            torch.linspace(0, len(valid) - 1, min(len(valid), _PARITY_TOKENS), dtype=torch.float64).long()
        ]
        targets = targets[positions]
        hidden_states, logits, head = model.hidden_states_and_logits(batch, positions)
        options = {name: value for name, value in self.options.items() if name in ("label_smoothing", "z_loss")}
        expected = cross_entropy_of_logits(logits, targets, **options).loss.item()
        with evaluation_mode(head.layer):  # as its logits were made: LoRA's dropout would draw another mask
            found = self._sums(hidden_states, targets, head).loss.item()
        largest = head.output(hidden_states).abs().amax(-1).float().mean().item() * abs(head.scale)
        tolerance = 2 * _rounding(logits) * largest + 1e-4 * abs(expected)
        if not abs(found - expected) <= tolerance:
            raise UserError(
                f"loss={backend_name(self.backend)} is {found:.6g} for {len(positions)} tokens of the first batch, but "
                f"the model's own logits give {expected:.6g}; in {logits.dtype} they may differ by {tolerance:.2g}. "
                "The model does something to its logits in training that it did not do when it was asked, or the "
                "backend is wrong: choose loss=standard, and please report this"
            )

    def _sums(self, hidden_states: Tensor, targets: Tensor, head: OutputHead) -> LossOutput:
        hidden_states, weight, bias = head.operands(hidden_states)
        shard = head.shard
        check_inputs(hidden_states, weight, targets, bias, vocabulary=head.vocabulary)
        backend = self._backend_on(hidden_states.device)
        options = _head_options(head) | self.options
        if shard is not None:
            self.check_vocabulary_parallel()
            options["shard"] = shard
        if bias is not None:
            options["bias"] = bias
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
    bias = True if head.has_bias else None  # the vector itself is read with the operands
    options = {"bias": bias, "softcap": head.softcap, "scale": None if head.scale == 1.0 else head.scale}
    return {name: value for name, value in options.items() if value is not None}


def _rounding(logits: Tensor) -> float:
    """Relative error of a logit as the run computes it: its dtype's, or TF32's where that is allowed."""
    tf32 = logits.is_cuda and logits.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return 2**-10 if tf32 else torch.finfo(logits.dtype).eps
