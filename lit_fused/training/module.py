"""The LightningModules of language models. This file is a training step, from top to bottom.

How a step runs:

1. Lightning calls :meth:`FusedLMModule.training_step` with a batch, a dict of tensors.
2. ``compute_loss`` runs the :class:`~lit_fused.models.language_model.LanguageModel`: the backbone's own forward pass,
   whose output layer only hands over its input (heads/capture.py), then the loss, from these hidden states and the
   layer's weight (losses/, ops/). It returns *sums and counts*, a :class:`~lit_fused.losses.LossOutput`.
3. :class:`~lit_fused.training.average.TokenAverage` returns the batch's mean loss, with the gradient of its sum.
4. After the last backward of an optimiser step, :meth:`~FusedLMModule.average_gradients` counts the tokens of all
   micro-batches and ranks, makes the sums the mean by one factor, and logs the step.
5. Lightning clips, steps the optimiser of ``configure_optimizers``, and the schedule.

Modules have no branch on the loss, which the LanguageModel runs, and none on the strategy, whose
:class:`~lit_fused.parallel.Placement` says how the model lies on devices.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_fused.errors import UserError, check_choice, check_number, checked_options
from lit_fused.losses import LinearCrossEntropyLoss, Loss, LossOutput
from lit_fused.losses.loss import Batch, labels_of
from lit_fused.metrics import StageMetrics
from lit_fused.models.compilation import COMPILE
from lit_fused.models.language_model import LanguageModel
from lit_fused.models.masked_language_model import MaskedLanguageModel
from lit_fused.models.seq2seq_language_model import Seq2SeqLanguageModel
from lit_fused.ops.label_checks import IGNORE_INDEX
from lit_fused.parallel import (
    HostCopy,
    clip_to_norm,
    clip_to_value,
    gradients_of,
    warn_of_repeated_rows,
)
from lit_fused.training.average import LOSS_DIVISOR, TokenAverage, warn_of_hooks
from lit_fused.training.optimizers import (
    NO_DECAY,
    build_optimizer,
    can_fuse,
    checked_no_decay,
    cosine_with_warmup,
    step_on_parts,
    weight_decay_groups,
    with_schedule,
)
from lit_fused.training.spot_checks import SpotChecks
from lit_fused.training.trained_model import TrainedModel

_NO_LABEL = (
    "no label was counted, as all of them are ignored (-100) or weigh nothing; look at the labels of the data, whose "
    "answers may be cut off"
)


class FusedLMModule(TrainedModel):
    """Trains and evaluates a :class:`LanguageModel`. A subclass names the class of its model, ``language_model``.

    It logs loss, perplexity, accuracy, entropy (of the predicted distribution, in nats), z (the mean square of the
    log-sum-exp of the logits, which a z-loss keeps small) and aux_loss under train/, val/ and test/, as far as the loss
    gives them, and train/gradient_norm, that of the mean loss before clipping. train/loss is what is trained; val/loss
    is the cross entropy, beside val/smoothed_loss and val/z_loss of label smoothing and z-loss. A loss adds the
    means of its own ``statistics``. With several loaders, val/loss is over all of their tokens, and
    val/loss/dataloader_idx_0 over those of the first, or val/loss/web where they are a dict with the key "web". Metrics
    of a step or an evaluation in which no label was counted are NaN.

    A subclass with another loss overrides :meth:`compute_loss`. A subclass that does more in a step overrides the step
    and returns what ``super().training_step(...)`` returned.

    Args:
        backbone: see :class:`LanguageModel`.
        loss: a loss strategy, or a callable of (hidden_states, labels); default ``LinearCrossEntropyLoss()``.
        optimizer: called with parameter groups; a partial's ``weight_decay`` applies to matrices, see ``no_decay``.
            An optimizer of the backbone's parameters is taken as it is, on one device and under DDP. Default:
            AdamW(lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1), with the class's ``learning_rate``.
            One that is set on the module, as a learning-rate finder does, takes the place of any optimizer's.
        scheduler: called with the optimizer, and with ``num_training_steps=`` if it has such a parameter, or a
            scheduler of the optimizer given; stepped after every optimiser step, a ``ReduceLROnPlateau`` after every
            epoch with ``val/loss`` (without validation ``train/loss``). Default: :func:`cosine_with_warmup`; a
            constant rate if an optimizer is given.
        check_every_n_steps: compare loss, logits and their gradients of a slice of a batch with the model's own, in the
            first batch with labels of training, the first of each evaluation, the first with an entry that none had
            before, and every n-th step of training; 0: never. What differs stops the run.
        own_loss_differs: the model's own loss is another one, and ``loss`` is to take its place: only logits are
            compared.
        no_decay: words of the names of parameters without weight decay, or of their modules' classes: by default
            embeddings and Mamba's A_log; (): gains and biases alone.
        compile: "regional" compiles each of the backbone's layers (``torch.compile``), "whole" all of it, "none" none,
            and "auto" each layer where a GPU trains, a compiler is there and neither model nor strategy is against it.
    """

    language_model: type[LanguageModel]
    learning_rate = 3e-4  # of the default optimizer
    loss_class: type[Loss] | None = None  # the only kind of loss that it trains with
    in_progress: tuple[str, ...] = ("loss", "perplexity")  # metrics of an evaluation that a progress bar shows
    _needs_loss = "needs another loss than {}"

    @checked_options()
    def __init__(
        self,
        backbone: nn.Module,
        loss: str | Loss | Callable[[Tensor, Tensor], Tensor] | None = None,
        optimizer: Optimizer | Callable[..., Optimizer] | None = None,
        scheduler: LRScheduler | Callable[..., LRScheduler] | None = None,
        *,
        check_every_n_steps: int = 100,
        own_loss_differs: bool = False,
        no_decay: Sequence[str] = NO_DECAY,
        compile: str = "none",
    ) -> None:
        check_choice("compile", compile, COMPILE)
        if isinstance(backbone, str):
            raise UserError(f"backbone must be a model, not its name: give lit_fused.from_pretrained({backbone!r})")
        loss = LinearCrossEntropyLoss(impl=loss) if isinstance(loss, str) else loss
        loss = (self.loss_class or LinearCrossEntropyLoss)() if loss is None else loss
        if self.loss_class is not None and not isinstance(loss, self.loss_class):
            raise UserError(f"{type(self).__name__} {self._needs_loss.format(type(loss).__name__)}")
        super().__init__(self.language_model(backbone, loss), compile)
        self.model.own_loss_differs = own_loss_differs
        default = partial(AdamW, lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=None)
        self.make_optimizer, self.no_decay = optimizer or default, checked_no_decay(no_decay, self.model)
        self.make_scheduler = cosine_with_warmup if scheduler is None and optimizer is None else scheduler
        check_number("check_every_n_steps", check_every_n_steps, "be at least 0", lambda x: x >= 0, whole=True)
        self._checks = SpotChecks(check_every_n_steps)
        self.metrics = StageMetrics(self.model.statistics)
        self.average = TokenAverage()
        self.gradient_norms: list[Tensor] = []  # of this optimiser step, by optimiser
        self._loss_for_bar: HostCopy | None = None  # of the last step
        self._started = False
        self._ends_step = True  # the present micro-batch, an optimiser step

    def setup(self, stage: str) -> None:
        self._checks.restart()
        super().setup(stage)

    # Optimisers.

    def configure_optimizers(self) -> OptimizerLRScheduler:
        groups = weight_decay_groups(self.model, self.no_decay)
        optimizer = build_optimizer(self.make_optimizer, groups, self.model, self, fused=can_fuse(self.trainer))
        if "learning_rate" in vars(self):  # A learning-rate finder has set it, or a subclass.
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate
        return with_schedule(optimizer, self.make_scheduler, self.trainer)

    def on_train_start(self) -> None:
        self.model.training = True  # What it trains differs from what it evaluates; Lightning leaves modes as they are.
        self.average = TokenAverage()
        self.gradient_norms, self._loss_for_bar = [], None
        self.largest_batch = torch.Size((0, 0))
        for optimizer in self.trainer.optimizers:
            self._hooks.append(optimizer.register_step_post_hook(self._refuse_sums))
            step_on_parts(optimizer)
        self._resume.restore(self.trainer)
        if resume_epoch := self._of_data("resume_epoch"):
            resume_epoch()
        warn_of_repeated_rows(self.trainer.train_dataloader, "training")
        warn_of_hooks(self.model)
        self._started = True

    # The training step.

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss (), with the gradient of the summed loss, of a batch: see :class:`TokenAverage`."""
        if not (self._is_set_up and self._started):
            hook = "on_train_start" if self._is_set_up else "setup"
            raise UserError(f"{type(self).__name__}.{hook} must call super().{hook}(...), which prepares exact steps")
        self.placement.check_batch(self.model, batch, batch_idx)
        accumulated = self.trainer.accumulate_grad_batches
        self._ends_step = (batch_idx + 1) % accumulated == 0 or self.trainer.is_last_batch
        if self.automatic_optimization and batch_idx % accumulated == 0:
            self._begin_step(batch_idx)
        if not self.average.batches:
            self.gradient_norms = []
            if accumulated > 1 or not self.automatic_optimization:
                self._resume.begin_step(self)
        self.largest_batch = max(self.largest_batch, labels_of(batch).shape, key=lambda shape: shape.numel())
        step = None if self.average.batches else self.trainer.global_step
        self._checks.run_if_due("training", self.model, batch, self.placement, step)
        output = self.placement.run(self.model, batch, self.compute_loss, 1 / LOSS_DIVISOR)
        return self.average.returned(output, accumulated)

    def compute_loss(self, batch: Batch) -> LossOutput:
        """Return the sums of a batch, of training and of evaluation. A subclass with another loss overrides it."""
        return self.placement.evaluate(self.model, batch)

    def _begin_step(self, batch_idx: int) -> None:
        """Forget a step that was not finished, and free the last one's gradients before forward needs the memory."""
        self.average.reset()
        callbacks: list[L.Callback] = self.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        looks = [is_overridden("on_before_zero_grad", each, L.Callback) for each in callbacks]
        looks.append(is_overridden("on_before_zero_grad", self, L.LightningModule))
        for optimizer in [] if any(looks) else self.trainer.optimizers:  # Else Lightning frees them, after forward.
            self.optimizer_zero_grad(self.trainer.current_epoch, batch_idx, optimizer)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward from what ``training_step`` returned, or, with manual optimization, from a loss of one's own."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        of_lightning = ["MulBackward0"] * (scaler is not None and scaler.is_enabled())
        of_lightning += ["DivBackward0"] * self.automatic_optimization
        of_step = self.automatic_optimization or self.average.is_pending
        if of_step and loss.requires_grad and self.average.has_changed(loss, of_lightning):
            raise UserError(
                f"{type(self).__name__}.training_step must return what super().training_step(...) returned, unchanged "
                "(with manual optimization: give it to manual_backward), because gradients are averaged over the "
                "tokens of the whole step; to change the loss itself, override compute_loss(batch)"
            )
        if not self.automatic_optimization:
            self.average.forget_dropped(gradients_of(self.trainer.optimizers))
        super().backward(loss, *args, **kwargs)
        if self.automatic_optimization and self._ends_step:
            self.average_gradients()

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        assert optimizer_closure is not None

        def closure() -> Any:
            loss = optimizer_closure()
            self.average_gradients()  # unless backward has: the last micro-batch may have had none
            return loss

        super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def average_gradients(self) -> None:
        """Turn the gradients of all backward passes since the last optimiser step, in place, into those of the mean
        over all their tokens, on all ranks together; log the step as ``train/loss`` and so on.

        Only manual optimization (``automatic_optimization = False``) has to call this, once per optimiser step: after
        the last ``self.manual_backward(loss)``, with the loss of ``super().training_step(...)`` undivided, and before
        ``self.clip_gradients`` and the steps of the optimisers. Gradients of parameters that no optimiser has stay as
        they are.
        """
        if not self.average.sums:  # No micro-batch of this step ran backward.
            return
        self.placement.finish_gradients()
        gradients = gradients_of(self.trainer.optimizers)
        metrics = self.average.scale(gradients, self.placement)
        if not self.automatic_optimization:
            scaler = getattr(self.trainer.precision_plugin, "scaler", None)
            one = torch.ones((), device=self.device)
            scale = one if scaler is None or not scaler.is_enabled() else scaler.scale(one)  # It stays on the device.
            self._log_norm(self.placement.gradient_norm(gradients) / scale)
        self.log_step(metrics)

    def log_step(self, metrics: dict[str, Tensor]) -> None:
        """Log the means of an optimiser step over all ranks, by name."""
        self._log_loss(metrics.pop("loss"))
        self.log_dict({f"train/{name}": value for name, value in metrics.items()})

    def _refuse_sums(self, optimizer: Optimizer, *_: Any) -> None:
        if self.average.sums:
            raise UserError(
                f"an optimiser of {type(self).__name__} stepped with sums for gradients; call self.average_gradients() "
                "once after the last backward of each optimiser step, before clipping and optimizer.step()"
            )

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Log the norm of an optimiser's gradients over all ranks, and clip them by it, or by value. Lightning's own
        clipping knows no distributed gradients, and refuses a fused optimiser even where there is no loss scale."""
        gradients = gradients_of([optimizer])
        norm = self.placement.gradient_norm(gradients)
        if self.automatic_optimization:  # else average_gradients has
            self._log_norm(norm)
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None and not self.is_sharded:
            super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val and gradient_clip_algorithm == "value":
            clip_to_value(gradients, gradient_clip_val)
        elif gradient_clip_val:
            clip_to_norm(gradients, norm, gradient_clip_val)

    def _log_norm(self, norm: Tensor) -> None:
        self.gradient_norms.append(norm)
        self.log("train/gradient_norm", norm)

    def _log_loss(self, loss: Tensor) -> None:
        # Lightning reads what is logged with prog_bar in every step, with or without a bar, and a GPU would have no
        # work meanwhile. So a bar gets the loss of the step before, which has come by itself.
        bar = self.trainer.progress_bar_callback
        self.log("train/loss", loss, prog_bar=not loss.is_cuda)
        if loss.is_cuda and bar is not None:
            before, self._loss_for_bar = self._loss_for_bar, HostCopy(loss.reshape(1), over_ranks=False)
            if before is not None:
                self.trainer.progress_bar_metrics["train/loss"] = before.read()[0]

    # Evaluation: sums over all tokens of an epoch.

    @property
    def _stage(self) -> str:
        """Return "val", "test" or "predict", as the trainer names what it evaluates."""
        stage = self.trainer.state.stage
        return "" if stage is None else str(stage.dataloader_prefix)

    def on_validation_start(self) -> None:
        """Forget the sums of an evaluation that was stopped before its end."""
        self.metrics.reset(self._stage)
        self._checks.first_due.add("evaluation")

    on_test_start = on_validation_start

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int | None = None) -> None:
        if not batch_idx and self.trainer.state.fn == TrainerFn.FITTING:
            warn_of_repeated_rows(self.trainer.val_dataloaders, "validation")
        self.placement.check_batch(self.model, batch, batch_idx)
        self._checks.run_if_due("evaluation", self.model, batch, self.placement)
        self.metrics.update(self._stage, dataloader_idx, self.compute_loss(batch))

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        stage = self._stage
        loaders = getattr(self.trainer, f"{stage}_dataloaders")
        names = [*loaders] if isinstance(loaders, Mapping) else None
        found = self.metrics.compute(stage, len(getattr(self.trainer, f"num_{stage}_batches")), names)
        for name, value in found.items():
            shown = name in [f"{stage}/{metric}" for metric in self.in_progress]
            self.log(name, value, prog_bar=shown, sync_dist=True, add_dataloader_idx=False)
        empty = self.metrics.without_labels
        if empty and not self.trainer.sanity_checking:
            rank_zero_warn(f"the metrics of {stage if stage in empty else ', '.join(empty)} are NaN: {_NO_LABEL}")

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Score each sequence: "log_likelihood" (B,) float32, in nats, of its "num_tokens" (B,) int64 valid targets."""
        self.placement.check_batch(self.model, batch, batch_idx)
        return {
            "log_likelihood": -self.placement.token_losses(self.model, batch).sum(-1),
            "num_tokens": (self.model.targets(batch) != IGNORE_INDEX).sum(-1),
        }

    # The end of a fit.

    def on_train_epoch_end(self) -> None:
        self._resume.end_epoch(self.trainer)

    def on_train_end(self) -> None:
        if self.average.counted is not None and not self.average.counted:
            rank_zero_warn(f"the fit has trained nothing: {_NO_LABEL}")


class FusedCausalLMModule(FusedLMModule):
    """A causal language model without logits, with the arguments of :class:`FusedLMModule`.

        module = FusedCausalLMModule(AutoModelForCausalLM.from_pretrained(...), LinearCrossEntropyLoss())
        Trainer(precision="bf16-mixed", accumulate_grad_batches=8).fit(module, loader)

    Batches are dicts with "input_ids" and "labels", integers (B, T), aligned, labels -100 where ignored, and whatever
    else the backbone's forward takes ("attention_mask", "position_ids").
    """

    language_model = LanguageModel


class FusedSeq2SeqLMModule(FusedLMModule):
    """An encoder-decoder (T5, BART, Pegasus, Marian, LED ...) without logits, trained on input and answer.

        module = FusedSeq2SeqLMModule(AutoModelForSeq2SeqLM.from_pretrained(...), LinearCrossEntropyLoss())
        collate = DataCollatorForSeq2Seq(tokenizer)  # of transformers: pads inputs, and labels with -100
        Trainer().fit(module, DataLoader(examples, collate_fn=collate))

    Batches are dicts with "input_ids" (B, S), what the encoder reads, and "labels" (B, T), what the decoder is to say,
    -100 where ignored, and whatever else the backbone's forward takes. Position t of the decoder predicts label t;
    "decoder_input_ids" are made from the labels as the model makes them, unless the batch has them.
    """

    language_model = Seq2SeqLanguageModel


class FusedMaskedLMModule(FusedLMModule):
    """A masked language model (BERT, RoBERTa, ModernBERT, DeBERTa ...) whose output layer sees masked tokens only.

        module = FusedMaskedLMModule(AutoModelForMaskedLM.from_pretrained(...), LinearCrossEntropyLoss())
        collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)  # of transformers
        Trainer().fit(module, DataLoader(examples, collate_fn=collate))

    Batches are dicts with "input_ids", of which some are masked, and "labels", integers (B, T): the tokens to be
    predicted at their own positions, -100 at all others; and whatever else the backbone's forward takes.
    """

    language_model = MaskedLanguageModel
