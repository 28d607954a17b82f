"""The LightningModules: set-up, training steps and optimiser.

They have no branch on the loss, which the :class:`LanguageModel` runs, and none on the strategy, whose
:class:`~lit_fused.parallel.Placement` runs the batches. Their bases evaluate, and make accumulation token-exact.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Self

import lightning as L
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_fused.checkpoints.movable import keep_own_paths
from lit_fused.checkpoints.reading import check_resumable, check_shared, is_plain
from lit_fused.checkpoints.resuming import ExactResume, load_by_name
from lit_fused.errors import UserError, check_choice, check_number, checked_options
from lit_fused.export.huggingface import outline
from lit_fused.heads import peft_model
from lit_fused.losses import LinearCrossEntropyLoss, Loss
from lit_fused.losses.loss import Batch, labels_of
from lit_fused.metrics import TokenMetrics
from lit_fused.models.compilation import COMPILE, compile_backbone
from lit_fused.models.language_model import LanguageModel
from lit_fused.models.load import is_deferred
from lit_fused.models.masked_language_model import MaskedLanguageModel
from lit_fused.models.precision import check_epsilon
from lit_fused.models.seq2seq_language_model import Seq2SeqLanguageModel
from lit_fused.models.tokenizer_fit import fit_vocabulary
from lit_fused.ops.chunks import MIN_CHUNK_ROWS
from lit_fused.parallel import SameEnd, is_divided, may_end_anywhere, warn_of_repeated_rows
from lit_fused.training.evaluation import NO_LABEL, EvaluatedModule
from lit_fused.training.frozen import FrozenModel
from lit_fused.training.optimizers import (
    build_optimizer,
    can_fuse,
    cosine_with_warmup,
    weight_decay_groups,
    with_schedule,
)


class FusedLMModule(EvaluatedModule):
    """Trains and evaluates a :class:`LanguageModel`. A subclass names the class of its model, ``language_model``.

    It logs loss, perplexity, accuracy, entropy (of the predicted distribution, in nats), z (the mean square of the
    log-sum-exp of the logits, which a z-loss keeps small) and aux_loss under train/, val/ and test/, as far as the loss
    gives them, and train/gradient_norm, that of the mean loss before clipping. train/loss is what is trained; val/loss
    is the cross entropy, beside val/smoothed_loss and val/z_loss of label smoothing and z-loss. A loss adds
    the means of its own ``statistics``. With several loaders, val/loss is over all of their
    tokens, and val/loss/dataloader_idx_0 over those of the first, or val/loss/web where they are a dict with the key
    "web". Metrics of a step or an evaluation in which no label was counted are NaN.

    A subclass with another loss overrides :meth:`compute_loss`. A subclass that does more in a step overrides the step
    and returns what ``super().training_step(...)`` returned.

    Args:
        backbone: see :class:`LanguageModel`.
        loss: a loss strategy, or a callable of (hidden_states, labels); default ``LinearCrossEntropyLoss()``.
        optimizer: called with parameter groups; a partial's ``weight_decay`` applies to matrices and embeddings only.
            An optimizer of the backbone's parameters is taken as it is, on one device and under DDP. Default:
            AdamW(lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1), with the class's ``learning_rate``.
            One that is set on the module, as a learning-rate finder does, takes the place of any optimizer's.
        scheduler: called with the optimizer, and with ``num_training_steps=`` if it has such a parameter, or a
            scheduler of the optimizer given; stepped after every optimiser step, a ``ReduceLROnPlateau`` after every
            epoch with ``val/loss`` (without validation ``train/loss``). Default: :func:`cosine_with_warmup`; a
            constant rate if an optimizer is given.
        check_every_n_steps: compare loss, logits and their gradients of a slice of a batch with the model's own, in the
            first batch with labels of training, the first of each evaluation, and every n-th step of training; 0:
            never. What differs stops the run.
        compile: "regional" compiles each of the backbone's layers (``torch.compile``), "whole" all of it, "none" none,
            and "auto" each layer where a GPU trains, a compiler is there and neither model nor strategy is against it.
    """

    language_model: type[LanguageModel]
    learning_rate = 3e-4  # of the default optimizer
    loss_class: type[Loss] | None = None  # the only kind of loss that it trains with
    _needs_loss = "needs another loss than {}"

    @checked_options()
    def __init__(
        self,
        backbone: nn.Module,
        loss: Loss | Callable[[Tensor, Tensor], Tensor] | None = None,
        optimizer: Optimizer | Callable[..., Optimizer] | None = None,
        scheduler: LRScheduler | Callable[..., LRScheduler] | None = None,
        *,
        check_every_n_steps: int = 100,
        compile: str = "none",
    ) -> None:
        super().__init__()
        check_choice("compile", compile, COMPILE)
        loss = (self.loss_class or LinearCrossEntropyLoss)() if loss is None else loss
        if self.loss_class is not None and not isinstance(loss, self.loss_class):
            raise UserError(f"{type(self).__name__} {self._needs_loss.format(type(loss).__name__)}")
        self.model = self.language_model(backbone, loss)
        self._pending_compile = compile  # "none" once applied
        default = partial(AdamW, lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=None)
        self.make_optimizer = optimizer or default
        self.make_scheduler = cosine_with_warmup if scheduler is None and optimizer is None else scheduler
        check_number("check_every_n_steps", check_every_n_steps, "be at least 0", lambda x: x >= 0, whole=True)
        self.check_every_n_steps = check_every_n_steps
        names = self.model.statistics
        self.metrics = nn.ModuleDict({stage: TokenMetrics(names) for stage in ("val", "test")})  # more for loaders
        self._resume = ExactResume()
        self._is_set_up = self._started = self._may_end_alone = False
        self._end: SameEnd | None = None
        self._largest_batch = torch.Size((0, 0))  # shape of the labels
        self.frozen: list[FrozenModel] = []

    def add_frozen(self, model: nn.Module | Literal["copy"], role: str, instead: str) -> FrozenModel:
        """Place and prepare a model that is not trained, or a copy of the backbone as it is now, with the trained one;
        return it. The arguments are those of :class:`FrozenModel`."""
        copied = copy.deepcopy(self.backbone) if model == "copy" else model
        if any(p.requires_grad for p in {*copied.parameters()}.intersection(self.backbone.parameters())):
            raise UserError(
                f"the {role} shares weights with the model that is trained, as one does that PEFT's adapters were put "
                f"into, and would freeze them; give another model as {role}, such as copy.deepcopy(model)"
            )
        self.frozen.append(FrozenModel(copied, role, instead))
        return self.frozen[-1]

    def _of_data(self, name: str) -> Any:
        """Return an attribute of the run's data module, None if it has none: those of ``lit_fused.data`` have it."""
        return getattr(getattr(self._trainer, "datamodule", None), name, None)

    def setup(self, stage: str) -> None:
        """Refuse whatever would fail or be wrong in training, and prepare the model."""
        if stage == "fit":  # An exception may have ended an earlier one anywhere.
            self._begin_fit()
        self._first_due = {"training", "evaluation"}
        # A pipeline, which runs the loss itself in the middle of its schedule, would not call these methods.
        for method in ("training_step", "compute_loss", "backward") if self.placement.forward_in_backward else ():
            if getattr(type(self), method) is not getattr(FusedLMModule, method):
                raise UserError(
                    f"{type(self).__name__} overrides {method}, which strategy=pp would not call, or call without a "
                    "loss: a pipeline runs loss and backward batch by batch itself. Give the loss as an object "
                    "(lit_fused/losses/loss.py), use hooks or callbacks for the rest, or choose strategy=ddp or fsdp2"
                )
        if getattr(self._of_data("encoding"), "masks_tokens", False) and not self.model.few_targets:
            raise UserError(
                f"mask_probability hides tokens, which {type(self).__name__} does not fill in; choose "
                "module=masked_lm, or leave mask_probability out"
            )
        if self._compiler_ctx is not None:
            raise UserError(
                f"torch.compile({type(self).__name__}(...)) would compile whole steps with their checks; compile the "
                'model instead: compile="regional" or "whole", or torch.compile(backbone)'
            )
        if not self.automatic_optimization and type(self).training_step is FusedLMModule.training_step:
            raise UserError(
                f"{type(self).__name__} has automatic_optimization = False but no training_step of its own, so nothing "
                "would be trained; write one that calls super().training_step(...), self.manual_backward(loss), "
                "self.average_gradients() and optimizer.step()"
            )
        training = stage == "fit"
        if self._pending_compile == "auto":
            self._pending_compile = self.placement.compiled_by_default(self.model, training=training)
        self.placement.set_up(self.model, training=training, compile=self._pending_compile)
        tokenizer = self._of_data("tokenizer")
        if tokenizer is not None and not is_divided(self.model):
            fit_vocabulary(self.model, tokenizer)
        for frozen in self.frozen:
            frozen.set_up(self.placement, tokenizer, compile=self._pending_compile)
        if self.is_sharded and peft_model(self.backbone) is not None and not self._outline:
            self._outline = (outline(self.backbone),)
        if not is_deferred(self.model):
            self.placement.prepare(self.model)
        self._is_set_up = True

    def _begin_fit(self) -> None:
        """Keep nothing of an earlier fit or evaluation of this module, nor of what it has loaded."""
        self.release_optimizers()
        self._resume, self._started, self._end = ExactResume(), False, None

    def teardown(self, stage: str) -> None:
        if stage == "fit":
            self.release_optimizers()

    def configure_model(self) -> None:
        """Place the model on its devices. Lightning calls it after ``setup``, and again for every run."""
        if self._trainer is None:  # load_from_checkpoint
            return
        self.placement.place(self.model)
        for frozen in self.frozen:
            frozen.place(self.placement, compile=self._pending_compile)
        entries, vocabulary = len(self._of_data("tokenizer") or ()), self.model.vocabulary
        if entries > vocabulary:
            raise UserError(
                f"the tokenizer has {entries} entries but the model's vocabulary only {vocabulary}; give the model at "
                "least as many (model.config.vocab_size) or train a smaller tokenizer (data.vocab_size)"
            )
        compile_backbone(self.model, self._pending_compile)
        self._pending_compile = "none"

    def cpu(self) -> Self:
        """Move to the CPU, but for weights that have not come: Lightning calls this after an early failure as well."""
        for frozen in self.frozen:
            frozen.cpu()
        return self if is_deferred(self) else super().cpu()

    def on_fit_start(self) -> None:
        callbacks: list[L.Callback] = self.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if any(isinstance(callback, LearningRateFinder | BatchSizeFinder) for callback in callbacks):
            # They have just found another rate or number of steps than the optimisers and schedules were made with.
            self.trainer.strategy.setup_optimizers(self.trainer)
        self._resume.options.begin(self.trainer)
        self._hooks += load_by_name(self.trainer.optimizers, self)
        self.trained.note(self, self.trainer.optimizers)

    def on_train_end(self) -> None:
        if self.average.counted is not None and not self.average.counted:
            rank_zero_warn(f"the fit has trained nothing: {NO_LABEL}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.check_finite("no checkpoint is written and the last one stays", together=True)
        given = checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY)  # of save_hyperparameters, which saves models as well
        if isinstance(given, dict):
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = {name: v for name, v in given.items() if is_plain(v)}
        self._resume.save(checkpoint, self, self.average.batches, is_sharded=self.is_sharded)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._trainer is None:  # load_from_checkpoint
            self.make_room(checkpoint["state_dict"])
            check_shared(checkpoint["state_dict"], self.state_dict())  # Lightning compares the names, if asked to.
            return
        if self.trainer.state.fn == TrainerFn.FITTING and not self.is_sharded:  # the strategy has looked already
            check_resumable(str(self.trainer.ckpt_path), "optimizer_states" in checkpoint)
        if self.trainer.precision == "64-true":  # Lightning converts after the weights have come: it rounds them
            self.double()
        if see_checkpoint := self._of_data("see_checkpoint"):
            see_checkpoint(checkpoint)
        # Whatever loads a checkpoint once training has begun goes back to where this fit was.
        self._resume.load(checkpoint, self, is_sharded=self.is_sharded, is_return=self._started)
        keep_own_paths(checkpoint.get("callbacks", {}), self.trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]

    def on_train_start(self) -> None:
        self.model.training = True  # What it trains differs from what it evaluates; Lightning leaves modes as they are.
        self.forget_steps()
        self.average.counted = None
        self._largest_batch = torch.Size((0, 0))
        self._resume.restore(self.trainer)
        if resume_epoch := self._of_data("resume_epoch"):
            resume_epoch()
        self.placement.check_lengths([self.trainer.num_training_batches], "train")
        self._may_end_alone = self.trainer.world_size > 1 and may_end_anywhere(self.trainer.train_dataloader)
        warn_of_repeated_rows(self.trainer.train_dataloader, "training")
        self.placement.tell_of_waits()
        self._started = True

    def begins_with_validation(self) -> bool:
        """Return whether a fit that is about to go on from a checkpoint begins with a validation of its step."""
        return self._resume.is_to_validate(self.trainer)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self._check_begun((0, batch_idx))

    def on_train_epoch_end(self) -> None:
        self._check_begun(None)
        self._end = None
        self._resume.end_epoch(self.trainer)

    def _check_begun(self, place: tuple[int, int] | None) -> None:
        """Refuse streams of which some have no first batch, or end before the last one that they promise."""
        if self._may_end_alone and (self._end is None or self.trainer.num_training_batches != float("inf")):
            self.placement.check_place(place, "train")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.placement.check_batch(self.model, batch, batch_idx)
        for method, has_run in (("setup", self._is_set_up), ("on_train_start", self._started)):
            if not has_run:
                raise UserError(
                    f"{type(self).__name__}.{method} must call super().{method}(...), which prepares what makes a "
                    "training step exact"
                )
        self.begin_batch()
        self._end = SameEnd(self.trainer.is_last_batch, self.device) if self._may_end_alone else None
        accumulated = self.trainer.accumulate_grad_batches
        if not self.average.batches and (accumulated > 1 or not self.automatic_optimization):
            self._resume.begin_step(self)
        self._largest_batch = max(self._largest_batch, labels_of(batch).shape, key=lambda shape: shape.numel())
        self.spot_check("training", batch)
        summed = self.placement.train(self.model, batch, self.compute_loss, self.average.add)
        is_step = self.automatic_optimization and accumulated == 1
        return self.average.returned(summed, accumulated, self.placement if is_step else None)

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        goes_on = not (self.trainer.should_stop or 0 <= self.trainer.max_steps <= self.trainer.global_step)
        if self._end is not None and goes_on:
            self._end.check()

    def largest_logits(self) -> tuple[str, float]:
        """Describe the logits of the largest micro-batch trained on, and give their size in GiB as float32."""
        batch, sequence = self._largest_batch
        fate = {True: "built by this loss", False: "never built", None: "if built"}[self.model.loss.builds_logits]
        if fate == "never built" and batch * sequence <= MIN_CHUNK_ROWS:
            fate = "no more than one chunk"
        size = batch * sequence * self.model.vocabulary * 4 / 2**30
        return f"logits {batch} x {sequence} x {self.model.vocabulary} in float32, {fate}", size

    def configure_optimizers(self) -> OptimizerLRScheduler:
        groups = weight_decay_groups(self.model)
        if not groups:
            raise UserError(
                f"no parameter of {type(self.backbone).__name__} is to be trained; adapters that were loaded need "
                "PeftModel.from_pretrained(..., is_trainable=True)"
            )
        optimizer = build_optimizer(self.make_optimizer, groups, self.model, self, fused=can_fuse(self.trainer))
        if "learning_rate" in vars(self):  # A learning-rate finder has set it, or a subclass.
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate
        check_epsilon(optimizer)
        return with_schedule(optimizer, self.make_scheduler, self.trainer)


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
    -100 where ignored, and whatever else the backbone's forward takes ("attention_mask"). Position t of the decoder
    predicts label t; "decoder_input_ids" are made from the labels as the model makes them, unless the batch has them.
    Its arguments are those of :class:`FusedLMModule`; the backbone is that of a :class:`Seq2SeqLanguageModel`.
    """

    language_model = Seq2SeqLanguageModel


class FusedMaskedLMModule(FusedLMModule):
    """A masked language model (BERT, RoBERTa, ModernBERT, DeBERTa ...) whose output layer sees masked tokens only.

        module = FusedMaskedLMModule(AutoModelForMaskedLM.from_pretrained(...), LinearCrossEntropyLoss())
        collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)  # of transformers
        Trainer().fit(module, DataLoader(examples, collate_fn=collate))

    Batches are dicts with "input_ids", of which some are masked, and "labels", integers (B, T): the tokens to be
    predicted, -100 at all other positions; and whatever else the backbone's forward takes ("attention_mask"). Position
    t predicts label t. Loss, perplexity and accuracy are of masked tokens. Its arguments are those of
    :class:`FusedLMModule`; the backbone is that of a :class:`MaskedLanguageModel`.
    """

    language_model = MaskedLanguageModel
