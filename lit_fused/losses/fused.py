"""The fused loss: cross entropy from hidden states and the output layer's weight, by a backend of choice."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lit_fused.errors import UserError
from lit_fused.heads import OutputHead, evaluation_mode
from lit_fused.heads.probe import supported_layer
from lit_fused.losses.loss import Batch, ForwardPass, Loss, LossOutput, at_least_float32, shift_labels
from lit_fused.losses.standard import cross_entropy_of_logits
from lit_fused.ops import linear_cross_entropy
from lit_fused.ops.backends import (
    Backend,
    backend_attribute,
    backend_by_name,
    backend_name,
    supported_options,
    usable_backend,
)
from lit_fused.ops.label_checks import IGNORE_INDEX, check_inputs
from lit_fused.ops.options import LossOptions

_PARITY_TOKENS = 64


class LinearCrossEntropyLoss(Loss):
    """Linear cross-entropy, exact unless the backend says otherwise, without logits.

    Inside a :class:`lit_fused.LanguageModel` it gets the model's own output head at every call. On its own, given
    ``output_embeddings``, it is a function: ``loss(hidden_states, labels).backward()``.

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
        filter_eps: in [0, 1), or None for the exact backward. Otherwise backward is computed for vocabulary entries to
            which at least one token of the group gives a probability above it, and a correction replaces the rest, or
            for all where too much would be replaced. The loss itself is exact. It implies ``recompute``. Statistics of
            training: the mean "dropped_mass", the share of "kept_columns" and of "exact_tokens".

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
        options = LossOptions(
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            logits_budget_mib=logits_budget_mib,
            recompute=recompute,
            drop_ignored=drop_ignored,
            float32_accumulation=float32_accumulation,
            filter_eps=filter_eps,
        )
        self.backend = backend_by_name(impl) if isinstance(impl, str) else impl
        if isinstance(output_embeddings, nn.Module):
            output_embeddings = OutputHead(supported_layer(output_embeddings, output_embeddings))
        self.head = output_embeddings
        self.options = options.changed()
        self._refuse_unsupported(self.options)
        self._usable: dict[torch.device, Backend] = {}

    def __call__(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss over the valid targets, () float32 (float64 for float64 inputs); zero, and still part of
        the graph, when there are none.

        Args:
            hidden_states: (B, T, D), the output layer's input.
            labels: (B, T) integers aligned with the inputs: position t is trained to predict ``labels[:, t + 1]``.
                -100 is ignored.
        """
        if not isinstance(hidden_states, Tensor):
            raise UserError(
                f"hidden states must be a tensor (B, T, D), got {type(hidden_states).__name__}; of what a model of "
                "transformers returns, pass last_hidden_state"
            )
        return self._sums(hidden_states, shift_labels(labels), self._own_head()).loss

    def forward_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., D), for inference."""
        return self._own_head().logits(hidden_states)

    @property
    def builds_logits(self) -> bool:
        return any(backend_attribute(backend, "builds_logits") for backend in self._usable.values())

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
        return replace(self._sums(hidden_states, targets, head), aux_loss=aux_loss)

    def token_losses(self, model: ForwardPass, batch: Batch) -> Tensor:
        targets = model.targets(batch)
        hidden_states, head, _ = model.hidden_states(batch)
        hidden_states, weight, bias = head.operands(hidden_states)
        options = {"scale": head.scale, "softcap": head.softcap, "reduction": "none", "statistics": False}
        return linear_cross_entropy(hidden_states, weight, targets, bias=bias, shard=head.shard, **options)[0]

    def check_parity(self, model: ForwardPass, batch: Batch) -> None:
        targets = model.targets(batch).flatten()
        valid = (targets != IGNORE_INDEX).nonzero().flatten()
        if not len(valid):  # other ranks run the model, and this rank has parts of its parameters
            model.hidden_states_and_logits(batch, targets.new_zeros(1))
            return
        chosen = torch.linspace(0, len(valid) - 1, min(len(valid), _PARITY_TOKENS), dtype=torch.float64)
        positions = valid[chosen.long()]
        targets = targets[positions]
        hidden_states, logits, head = model.hidden_states_and_logits(batch, positions)
        options = {name: value for name, value in self.options.items() if name in ("label_smoothing", "z_loss")}
        expected = cross_entropy_of_logits(logits, targets, **options).loss.item()
        with evaluation_mode(head.layer):  # the logits were made so; LoRA's dropout would draw another mask
            found = self._sums(hidden_states, targets, head).loss.item()
        largest = head.output(hidden_states).abs().amax(-1).float().mean().item() * abs(head.scale)
        tolerance = 2 * rounding(logits.dtype, logits.device) * largest + 1e-4 * abs(expected)
        if not abs(found - expected) <= tolerance:
            raise UserError(
                f"loss={backend_name(self.backend)} is {found:.6g} for {len(positions)} tokens of the first batch, but "
                f"the model's own logits give {expected:.6g}; in {logits.dtype} they may differ by {tolerance:.2g}. "
                "The model does something to its logits in training that it did not do when it was asked, or the "
                "backend is wrong: choose loss=standard, and please report this"
            )

    def _sums(self, hidden_states: Tensor, targets: Tensor, head: OutputHead) -> LossOutput:
        hidden_states, weight, bias = head.operands(hidden_states)
        valid = check_inputs(hidden_states, weight, targets, bias, vocabulary=head.vocabulary)
        backend = self._backend_on(hidden_states.device)
        options = _head_options(head) | self.options
        if head.shard is not None:
            self.check_vocabulary_parallel()
            options["shard"] = head.shard
        if bias is not None:
            options["bias"] = bias
        if "scale" in options and "scale" not in supported_options(backend):
            hidden_states = hidden_states * options.pop("scale")
        self._refuse_unsupported(options)
        result = backend(hidden_states.reshape(-1, hidden_states.shape[-1]), weight, targets.reshape(-1), **options)
        loss_sum, stats = result if isinstance(result, tuple) else (result, {})
        if not stats and not self.options.keys() & {"label_smoothing", "z_loss"}:
            stats = {"nll": loss_sum.detach()}
        return LossOutput(at_least_float32(loss_sum), valid.sum(), stats=stats)

    def _own_head(self) -> OutputHead:
        if self.head is None:
            raise UserError(
                "this LinearCrossEntropyLoss has no output layer: pass output_embeddings=model.get_output_embeddings() "
                "or use it inside a LanguageModel, which hands over its own"
            )
        return self.head

    def _backend_on(self, device: torch.device) -> Backend:
        if device not in self._usable:
            self._usable[device] = usable_backend(self.backend, device)
        return self._usable[device]

    def _refuse_unsupported(self, options: dict[str, Any]) -> None:
        supported = supported_options(self.backend) | {"scale"}  # a scale can act on the hidden states as well
        lacking = sorted(options.keys() - supported)
        if lacking:
            raise UserError(
                f"loss={backend_name(self.backend)} has no {' and no '.join(lacking)}, which the output layer or the "
                f"configuration asks for; choose loss=chunked, which has every option"
            )


def _head_options(head: OutputHead) -> dict[str, Any]:
    """Return the options that the head asks for; the bias itself is read with the operands."""
    options = LossOptions(scale=head.scale, softcap=head.softcap).changed()
    return options | ({"bias": True} if head.has_bias else {})


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Return the relative error of one product: TF32's where torch may use it, else the dtype's."""
    tf32 = device.type == "cuda" and dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return 2**-10 if tf32 else torch.finfo(dtype).eps
