"""``lit_fused.plan``: what a run takes of a GPU, from Lightning's trainer, transformers' arguments or TRL's.

Each way in gives the same planner (``planned_step``) a module, options and batches by their shape. For arguments, a
transformers model gets the module of lit_fused that computes the same loss.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from lit_fused.errors import UserError
from lit_fused.heads import transformers_model
from lit_fused.integrations.fuse import FusedForward
from lit_fused.losses import Loss
from lit_fused.models.generation import positions
from lit_fused.objectives import PolicyLoss, PreferenceLoss
from lit_fused.parallel import FSDP2Strategy
from lit_fused.planning.planned_step import PlannedStep, PlanOptions, predicted
from lit_fused.training import (
    FusedCausalLMModule,
    FusedMaskedLMModule,
    FusedPolicyModule,
    FusedPreferenceModule,
    FusedSeq2SeqLMModule,
)

_GIB = 2**30
_USABLE = 0.95  # The rest is for the CUDA context, the kernels and fragmentation.
_MOST_ROWS, _MOST_TOKENS = 4096, 2**24
_TOKENS = 128  # The longest sequence is a multiple of it.


@dataclass
class Plan(PlannedStep):
    """Says what a device needs at the peak of each phase of a step, and what fits. ``print`` shows it as a table.

    Attributes:
        batch_size, sequence_length: rows of a device's micro-batch, and tokens of a row; 0 of a batch that was given.
        device_gib: of one GPU; None: unknown.
        positions: the most tokens that the model has positions for.
    """

    batch_size: int = 0
    sequence_length: int = 0
    device_gib: float | None = None
    positions: int = _MOST_TOKENS
    predict: Callable[[int, int], PlannedStep] | None = None

    @property
    def usable_gib(self) -> float:
        """Return the GPU's memory without what a plan does not count."""
        return _USABLE * (self.device_gib or 0)

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable_gib * _GIB

    @cached_property
    def largest_batch_size(self) -> int:
        """The most rows of this length that fit, to a 256th. It runs the planner some times."""
        predict, length = self.predict, self.sequence_length
        assert predict is not None
        return self._largest(lambda rows: predict(rows, length), self.batch_size, _MOST_ROWS)

    @cached_property
    def longest_sequence(self) -> int:
        """The most tokens of a row, likewise, in as many rows as planned; no more than the model has positions for."""
        predict, rows, unit = self.predict, self.batch_size, 1 if self.sequence_length % _TOKENS else _TOKENS
        assert predict is not None
        most = max(self.positions, self.sequence_length) // unit
        return unit * self._largest(lambda units: predict(rows, units * unit), self.sequence_length // unit, most)

    def _largest(self, predict: Callable[[int], PlannedStep], size: int, most: int) -> int:
        """Return a size whose peak fits, where the next, or one that is a 256th larger, does not.

        Memory grows about linearly: a line through the last two sizes guesses the largest. A guess outside of what is
        open, or at its ends, becomes a step into it, and each step is twice the last."""
        usable, step, peak = self.usable_gib * _GIB, 1, self.peak
        before, peak_before = 0, self.between_steps
        low, high = (size, most + 1) if self.fits else (0, size)  # fits, does not fit
        while high - low > (tolerance := max(low // 256, 1)):
            slope = (peak - peak_before) / (size - before)
            guess = size + int((usable - peak) // slope) if slope > 0 else 2 * size
            before, peak_before = size, peak
            step = max(step, tolerance)
            size = min(max(guess, low + step), high - step)
            if size != guess:
                step *= 2
            if not low < size < high:
                size = (low + high) // 2
            peak = predict(size).peak
            if peak <= usable:
                low = size
            else:
                high = size
        return low

    def lines(self) -> Iterator[str]:
        """Yield the parts of the table, the last ones when the planner has found what fits."""
        yield super().__str__()
        yield f"peak {self.peak / _GIB:.3f} GiB"
        if self.device_gib is None:
            return
        yield f"of {self.device_gib:.1f} GiB: {'fits' if self.fits else 'does not fit'}"
        if self.predict is not None:
            most, rows = (f"{n} row{'s' * (n != 1)}" for n in (self.largest_batch_size, self.batch_size))
            yield f"the largest batch: {most} of {self.sequence_length:,} tokens"
            yield f"the longest sequence: {self.longest_sequence:,} tokens in {rows}"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def plan(
    run: L.Trainer | TrainingArguments | PlanOptions,
    model: nn.Module,
    batch: Any = None,
    *,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    packing: str | None = None,
    memory_gib: float | None = None,
    devices: int | None = None,
    loss: Loss | None = None,
) -> Plan:
    """Predict the memory that a training step takes of a GPU, which need not be there.

        trainer = L.Trainer(accelerator="cpu", precision="bf16-mixed")
        print(lit_fused.plan(trainer, module, batch_size=8, sequence_length=2048, memory_gib=80))
        arguments = DPOConfig("out", use_cpu=True)  # or SFTConfig, GRPOConfig, TrainingArguments
        print(lit_fused.plan(arguments, model, memory_gib=80))

    The model's weights may be on the meta device; it keeps its tensors and its mode. Nothing is computed.

    Args:
        run: a trainer, whose precision, accumulation, strategy and devices are planned; arguments of transformers'
            Trainer or of TRL's for SFT, DPO or GRPO, also with their optimizer and checkpointing; or
            :class:`PlanOptions`.
        model: with arguments, a transformers model, fused or not. Else a LightningModule of lit_fused; one of your own,
            whose ``training_step`` runs without a trainer; or any module that returns a loss, or an output with a
            ``loss``.
        batch: of one device, as the model takes it. Only shapes and dtypes are looked at. None: token ids and labels of
            the sizes that follow.
        batch_size: rows of a device's micro-batch, of preferences pairs; None: the arguments'.
        sequence_length: tokens of a row, for policies a prompt with its completion; None: TRL's ``max_length``.
        packing: "stream": rows are full. "padded": they have a mask. "packed": all answers of a batch are one row.
            None: as the arguments say; else "padded" for policies and "stream" for others.
        memory_gib: of one GPU, to say what fits; None: of the GPU that is here, if there is one.
        devices: None: the trainer's, or those of the arguments' environment.
        loss: that arguments train with; None: the fused cross entropy (with ``label_smoothing_factor`` the Trainer's
            own, of logits), or TRL's objective.

    Raises:
        UserError: a loss, a precision, a strategy or a trainer is unknown, a size is missing, or the model or the
            optimizer asks for the numbers of fake tensors.
    """
    checkpointed: Callable[[], Any] | None = None
    if isinstance(run, TrainingArguments):
        hugging_face = _transformers_model(model)
        batch_size = run.per_device_train_batch_size if batch_size is None else batch_size
        sequence_length = getattr(run, "max_length", None) if sequence_length is None else sequence_length
        packing = packing or _packing_of(run)
        options, model = _options_of(run, hugging_face, devices), _module_of(run, model, loss)
        checkpointed = partial(_checkpointing, hugging_face) if run.gradient_checkpointing else None
    else:
        options = run if isinstance(run, PlanOptions) else PlanOptions.of(run)
    options = replace(
        options,
        devices=options.devices if devices is None else devices,
        memory_gib=options.memory_gib if memory_gib is None else memory_gib,
    )

    def predict(given: Any) -> PlannedStep:
        if checkpointed is None:
            return predicted(model, options, given)
        with checkpointed():
            return predicted(model, options, given)

    if batch is not None:
        return Plan(**vars(predict(batch)), device_gib=options.device_gib)
    if not batch_size or not sequence_length:
        raise UserError(
            f"a plan needs the shape of a batch, got batch_size={batch_size} and sequence_length={sequence_length}; "
            "give both (of policies the tokens of a prompt with its completion), or a batch"
        )
    found = getattr(getattr(model, "model", None), "loss", None)
    of_shape = partial(_batch, found, packing or ("padded" if isinstance(found, PolicyLoss) else "stream"))
    backbone = getattr(model, "model", model)
    inner = transformers_model(getattr(backbone, "backbone", backbone))
    return Plan(
        **vars(predict(of_shape(batch_size, sequence_length))),
        batch_size=batch_size,
        sequence_length=sequence_length,
        device_gib=options.device_gib,
        positions=_MOST_TOKENS if inner is None else min(positions(inner), _MOST_TOKENS),
        predict=lambda rows, length: predict(of_shape(rows, length)),
    )


def _transformers_model(model: nn.Module) -> PreTrainedModel:
    found = transformers_model(model)
    if found is None:
        raise UserError(
            f"arguments plan a transformers model, got {type(model).__name__}; give a module with a Lightning trainer, "
            "or with PlanOptions"
        )
    return found


def _kind_of(arguments: TrainingArguments) -> str:
    """Return the name of the configuration of TRL that arguments are; "TrainingArguments" for transformers' own."""
    names = [each.__name__ for each in type(arguments).__mro__]
    known = next((name for name in ("SFTConfig", "DPOConfig", "GRPOConfig") if name in names), None)
    if known is None and type(arguments).__module__.startswith("trl."):
        raise UserError(
            f"a plan does not know what TRL's trainer of {names[0]} takes; it knows SFTConfig, DPOConfig and "
            "GRPOConfig, and transformers' TrainingArguments"
        )
    return known or "TrainingArguments"


def _packing_of(arguments: Any) -> str | None:
    kind = _kind_of(arguments)
    padded = kind == "DPOConfig" or (kind == "SFTConfig" and not (arguments.packing or arguments.padding_free))
    return "padded" if padded else None


def _options_of(arguments: TrainingArguments, model: PreTrainedModel, devices: int | None) -> PlanOptions:
    optimizer, settings = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    strategy: Any = "ddp"
    if arguments.deepspeed:
        strategy = "deepspeed"
    elif arguments.fsdp:  # Accelerate reduces the gradients of a step's last micro-batch.
        strategy = FSDP2Strategy(reduce_every_micro_batch=False, reshard_after_forward=True)
    count = arguments.world_size if devices is None else devices
    return PlanOptions(
        precision="bf16-mixed" if arguments.bf16 else "16-mixed" if arguments.fp16 else "32-true",
        accumulate_grad_batches=arguments.gradient_accumulation_steps,
        strategy="auto" if count == 1 and not isinstance(strategy, FSDP2Strategy) else strategy,
        devices=count,
        optimizer=partial(optimizer, **settings),
    )


def _module_of(arguments: Any, model: nn.Module, loss: Any) -> nn.Module:
    """Return the module of lit_fused with the loss of arguments' trainer, which takes no step here. Its layers are
    compiled as those of a fused model are, unless ``fuse(model, compile="none")`` said otherwise."""
    kind, inner = _kind_of(arguments), _transformers_model(model)
    compile = inner.forward.compile if isinstance(inner.forward, FusedForward) else "auto"
    if kind == "DPOConfig":
        reference = "stored" if arguments.precompute_ref_log_probs else None
        loss = loss or PreferenceLoss("dpo", beta=arguments.beta)
        return FusedPreferenceModule(model, loss, reference=reference, compile=compile)
    if kind == "GRPOConfig":
        loss = loss or PolicyLoss("grpo", kl_weight=arguments.beta, temperature=arguments.temperature)
        return FusedPolicyModule(model, loss, reference="copy" if arguments.beta else None, compile=compile)
    if arguments.label_smoothing_factor and loss is None:
        return _Smoothed(model, arguments.label_smoothing_factor)
    if inner.config.is_encoder_decoder:
        return FusedSeq2SeqLMModule(model, loss, compile=compile)
    of_language = FusedMaskedLMModule if "MaskedLM" in type(inner).__name__ else FusedCausalLMModule
    return of_language(model, loss, compile=compile)


class _Smoothed(nn.Module):
    """Computes the loss of ``label_smoothing_factor`` as transformers' Trainer does: from logits, which Accelerate has
    made float32."""

    def __init__(self, model: nn.Module, factor: float) -> None:
        super().__init__()
        self.model, self.smoother = model, LabelSmoother(factor)

    def forward(self, labels: Tensor, **inputs: Tensor) -> Tensor:
        is_seq2seq = _transformers_model(self.model).config.is_encoder_decoder
        logits = self.model(**inputs, **({"decoder_input_ids": labels} if is_seq2seq else {})).logits.float()
        with torch.autocast(logits.device.type, enabled=False):
            return self.smoother({"logits": logits}, labels, shift_labels=not is_seq2seq)


@contextmanager
def _checkpointing(model: PreTrainedModel) -> Iterator[None]:
    """Let a model's layers be checkpointed in the block, as arguments have a trainer do it."""
    # From 5.23 on transformers calls it activation checkpointing.
    kind = "activation" if hasattr(model, "is_activation_checkpointing") else "gradient"
    was_on = getattr(model, f"is_{kind}_checkpointing")
    getattr(model, f"{kind}_checkpointing_enable")()
    try:
        yield
    finally:
        if not was_on:
            getattr(model, f"{kind}_checkpointing_disable")()


def _batch(loss: Any, packing: str, size: int, sequence: int) -> dict[str, Tensor]:
    """Return a batch without numbers, of the shape that the data would have."""
    answers = size * loss.rows_together if isinstance(loss, PreferenceLoss) else 0
    if isinstance(loss, PreferenceLoss) and loss.objective.single:
        raise UserError(f"a plan does not know what objective={loss.name} takes; mode=fit with callbacks=measure does")
    rows, length = (1, answers * sequence) if answers and packing == "packed" else (answers or size, sequence)
    integers = partial(torch.empty, dtype=torch.int64, device="meta")
    made = {key: integers(rows, length) for key in ("input_ids", "labels")}
    if packing != "stream":  # transformers makes one for padding and for positions that begin anew
        made["attention_mask"] = torch.empty(rows, 1, length, length, dtype=torch.bool, device="meta")
    if answers:
        parts = {"desirable": True, "lengths": packing == "packed", "reference_log_prob": loss.reference is None}
        names = (name for name, is_there in parts.items() if is_there)
        made |= {name: integers(rows, answers // rows).squeeze(1) for name in names}
    if isinstance(loss, PolicyLoss):
        made |= {name: torch.empty(rows, length, device="meta") for name in ("advantages", "sampler_log_probs")}
    return made
