"""The steps that every language-model module shares, and the optimiser step that makes accumulation token-exact.

Lightning averages: over accumulated micro-batches, over ranks. With ragged labels the mean of means is not the mean
over tokens. So ``training_step`` returns the *summed* loss over a constant, Lightning averages that as it likes, and
once per optimiser step, after the last backward and before unscaling and clipping, every gradient is multiplied by the
one factor that turns the average into the mean over all valid tokens of the step. The same all-reduce that counts the
tokens also sums loss and statistics, so that what is logged is exact as well.

An auxiliary loss (a router's) is averaged over micro-batches and ranks with their tokens as weights.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping, Set
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import lightning as L
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_cosine_schedule_with_warmup

from lit_fused.checkpoints import (
    check_numbers,
    check_same_model,
    load_by_name,
    named_optimizer_state,
    numbering,
    partial_path,
    prepare_checkpoints,
    put_in_place,
    remove,
    shapes_of,
)
from lit_fused.errors import UserError
from lit_fused.execution import check_choices, check_compile, check_kernels, compile_backbone, use_liger_kernels
from lit_fused.generation import generation_config
from lit_fused.heads import peft_model
from lit_fused.heads.probe import evaluation_mode
from lit_fused.losses.base import Batch, LossOutput, labels_of
from lit_fused.metrics import TokenMetrics, metrics_from_sums, sums_of
from lit_fused.model import LanguageModel
from lit_fused.modules.adapters import filled, merged_copy, outline
from lit_fused.modules.resuming import begin_epoch, of_all_ranks, random_state, restore_random_state, rewind
from lit_fused.ops.linear_cross_entropy.checks import IGNORE_INDEX
from lit_fused.ops.linear_cross_entropy.plan import MIN_CHUNK_ROWS
from lit_fused.parallel import (
    PipelineStrategy,
    check_copied_numbers,
    check_division,
    check_same_batch,
    check_units,
    clip_by_norm,
    data_parallel_size,
    local,
    parallelize,
    reshard,
    runs_outside_of_the_root,
    same_random_numbers,
    sum_over_data,
    tensor_parallel_mesh,
    whole_parameters,
    whole_state_dict,
)
from lit_fused.precision import check_epsilon, ordinary_defaults, prepare_precision
from lit_fused.weights import is_deferred, materialize

# Divides the summed loss so that float16 gradients of a long batch stay finite. The same on every rank and in every
# micro-batch; a power of two, so that it rounds nothing. It cancels in the optimiser step.
_LOSS_DIVISOR = 4096.0

_RANDOM_STATES = "lit_fused_random_states"  # in a checkpoint


class FusedLMModule(L.LightningModule):
    """Trains and evaluates a :class:`LanguageModel`.

    Logged: train/ and val/ (test/) loss, perplexity, accuracy, entropy, z, aux_loss, as far as the loss gives them; of
    a filtered loss also train/dropped_mass, train/kept_columns, train/exact_tokens.

    A subclass that wants another loss overrides :meth:`compute_loss`; one that wants to do more in a step overrides the
    step and returns what ``super().training_step(...)`` returned.

    Args:
        model: backbone and loss.
        optimizer: called with parameter groups; a partial's ``weight_decay`` applies to matrices and embeddings only.
            Default: AdamW(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1).
        scheduler: called with the optimizer, and with ``num_training_steps=`` if it has such a parameter; stepped after
            every optimiser step. Default: :func:`cosine_with_warmup`. For a constant rate:
            ``transformers.get_constant_schedule``.
        parity_check: on the first batch of a fit, compare the loss of a few tokens with that of the model's own logits,
            for one more forward pass; a mismatch stops the run.
        compile: "regional", each of the backbone's layers under ``torch.compile``; "whole", all of it; or "none".
        kernels: "liger", norms, rotary embeddings and gated MLPs in Liger's kernels, on a GPU; or "none".
    """

    def __init__(
        self,
        model: LanguageModel,
        optimizer: Callable[..., Optimizer] | None = None,
        scheduler: Callable[..., LRScheduler] | None = None,
        *,
        parity_check: bool = True,
        compile: str = "none",
        kernels: str = "none",
    ) -> None:
        super().__init__()
        check_choices(compile, kernels)
        self.model = model
        self._pending_compile, self._pending_kernels = compile, kernels  # "none" once that is done
        self.make_optimizer = optimizer or partial(AdamW, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
        self.make_scheduler = scheduler or cosine_with_warmup
        self.parity_check = parity_check
        self._parity_pending = False
        self._matrices: set[str] | None = None  # names of the parameters that decay
        self.val_metrics = TokenMetrics()
        self.test_metrics = TokenMetrics()
        self._outline: tuple[nn.Module, ...] = ()  # of a sharded model with adapters; in a tuple: it is no submodule
        self._window: dict[str, Tensor] = {}  # sums since the last optimiser step
        self._batches_in_window = 0  # micro-batches that they are of
        self._random_state: dict[str, Tensor] | None = None  # at the beginning of a window of several
        self._resumed_random_states: list[dict[str, Tensor]] | None = None
        self._returned: Tensor | None = None  # by the last training_step
        self._checked = False  # that what it returned is what Lightning got
        self._largest_batch = torch.Size((0, 0))  # shape of the labels

    # Set-up: whatever would fail or be wrong in training is refused here.

    def setup(self, stage: str) -> None:
        strategy = self.trainer.strategy
        if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy | FSDPStrategy | ModelParallelStrategy):
            raise UserError(
                f"{type(strategy).__name__} is not supported: the loss and its token counts are exact on a single "
                "device, under DDP, FSDP, tensor parallelism and pipelines; choose strategy=auto, ddp, fsdp, fsdp2, "
                "tp, fsdp2_tp, pp or pp_fsdp2"
            )
        check_compile(self.model, self._pending_compile, strategy)
        if self._pending_kernels == "liger":
            check_kernels(self.model, strategy)
            use_liger_kernels(self._inner_model("run in Liger's kernels"))
            self._pending_kernels = "none"
        tokenizer = self._tokenizer
        if tokenizer is not None:
            self.model.fit_vocabulary(tokenizer)
        ranks = tensor_parallel_mesh(strategy)
        if ranks is not None:
            check_division(self.model, ranks.size(), training=stage == "fit")
        if isinstance(strategy, PipelineStrategy):
            self._check_overrides()
        if strategy.root_device.type == "mps":
            raise UserError(
                "an MPS device has no float64, which exact token counts need; choose trainer.accelerator=cpu"
            )
        prepare_precision(strategy, self.backbone, training=stage == "fit")
        prepare_checkpoints(strategy)
        if self.is_sharded and peft_model(self.backbone) is not None and not self._outline:
            self._outline = (outline(self.backbone),)
        if self.model.division is not None and not isinstance(strategy, PipelineStrategy):
            raise UserError(
                "the model was divided by strategy=pp, and this process has a part of it; build it anew, and load a "
                "checkpoint of it"
            )
        self._matrices = {name for name, p in self.model.named_parameters() if p.ndim >= 2}
        if not is_deferred(self.model):
            self._prepare_model()

    def _prepare_model(self) -> None:
        """What has to run the model: in ``setup``, or, where its weights come later, as soon as they are there."""
        if self.model.division is None:
            self.model.prepare(self.trainer.strategy.root_device)
            if isinstance(self.trainer.strategy, PipelineStrategy):
                self.model.prepare_hidden_states()
        tokenizer = self._tokenizer
        if tokenizer is not None and len(tokenizer) > self.model.vocabulary:
            raise UserError(
                f"the tokenizer has {len(tokenizer)} entries but the model's vocabulary only {self.model.vocabulary}; "
                "give the model at least as many (model.config.vocab_size) or train a smaller tokenizer "
                "(data.vocab_size)"
            )

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Of the run's data; None if that is tokens already."""
        return getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)

    def _check_overrides(self) -> None:
        """Refuse what a pipeline would pass over: it runs the loss itself, in the middle of its schedule."""
        for method in ("training_step", "compute_loss", "backward"):
            if getattr(type(self), method) is not getattr(FusedLMModule, method):
                raise UserError(
                    f"{type(self).__name__} overrides {method}, which strategy=pp would not call, or call without a "
                    "loss: a pipeline runs loss and backward batch by batch itself. Give the loss as an object "
                    "(lit_fused/losses/base.py), use hooks or callbacks for the rest, or choose strategy=ddp or fsdp2"
                )

    def configure_model(self) -> None:
        """The division of the model, which Lightning leaves to the module, and weights that come late. Called after
        ``setup``, and again for every run."""
        strategy = self.trainer.strategy
        deferred = is_deferred(self.model)
        if deferred:  # has nothing to be rounded yet: its numbers are made in the dtype that the run wants
            strategy.precision_plugin.convert_module(self.model)
        if isinstance(strategy, PipelineStrategy):
            strategy.divide(self.model, "model.backbone.")
        elif isinstance(strategy, ModelParallelStrategy):
            parallelize(self.model, strategy.device_mesh, strategy.root_device)
        if deferred:  # FSDP1 divides what is whole, on the CPU
            materialize(self.model, "cpu" if isinstance(strategy, FSDPStrategy) else strategy.root_device)
            with ordinary_defaults():
                if isinstance(strategy, PipelineStrategy):
                    strategy.complete(self.model)
                elif isinstance(strategy, ModelParallelStrategy):
                    check_copied_numbers(self.model, strategy.device_mesh)
                self._prepare_model()
            reshard(self.model)
        compile_backbone(self.model, self._pending_compile)
        self._pending_compile = "none"

    def on_fit_start(self) -> None:
        self._check_units()
        load_by_name(self.trainer.optimizers, self)

    def on_validation_start(self) -> None:
        self._check_units()

    def on_test_start(self) -> None:
        self._check_units()

    def on_predict_start(self) -> None:
        self._check_units()

    def _check_units(self) -> None:
        root, head = self.trainer.strategy.model, self.model.head
        if isinstance(root, FullyShardedDataParallel) and head is not None:
            check_units(root, head.layer)

    def cpu(self) -> Self:
        """As usual, but Lightning calls it as well after a failure that came before the weights did: they stay away."""
        return self if is_deferred(self) else super().cpu()

    @property
    def can_generate(self) -> bool:
        """Whether ``generate`` works; not while a pipeline has the model's layers on different ranks."""
        return self.model.division is None

    @property
    def is_sharded(self) -> bool:
        """Whether no rank has the whole model: every rank then has to call ``generate`` and ``save_pretrained``."""
        return isinstance(self.trainer.strategy, FSDPStrategy | ModelParallelStrategy)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        begin_epoch(checkpoint["loops"]["fit_loop"])
        if self._batches_in_window:
            rewind(checkpoint["loops"]["fit_loop"], self._batches_in_window)
        state = self._random_state if self._batches_in_window else None
        checkpoint[_RANDOM_STATES] = of_all_ranks(state or random_state(self.device), self.trainer.strategy)
        states = checkpoint.get("optimizer_states", [])  # none if weights alone are saved
        for index, (state, optimizer) in enumerate(zip(states, self.trainer.optimizers, strict=False)):
            states[index] = named_optimizer_state(state, numbering(self, None if self.is_sharded else optimizer))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._resumed_random_states = checkpoint.get(_RANDOM_STATES)
        if self.is_sharded:  # the strategy has loaded it already
            check_numbers(checkpoint.get("optimizer_states", []), self.trainer.optimizers, self)
        elif "state_dict" in checkpoint:
            check_same_model(shapes_of(checkpoint["state_dict"]), shapes_of(self.state_dict()))

    # Steps.

    def compute_loss(self, batch: Batch) -> LossOutput:
        """Sums over one batch, for training and evaluation."""
        strategy = self._strategy
        return strategy.pipeline.evaluate(batch) if isinstance(strategy, PipelineStrategy) else self.model(batch)

    def _check_batch(self, batch: Batch, batch_idx: int) -> None:
        ranks = tensor_parallel_mesh(self._strategy)
        if batch_idx == 0 and ranks is not None:
            check_same_batch(batch, ranks)
        if self.model.needs_packing_check(batch):
            strategy = self._strategy
            if isinstance(strategy, PipelineStrategy):
                strategy.pipeline.check_packing(batch)
            else:
                self.model.check_packing(batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self._check_batch(batch, batch_idx)
        if not self._batches_in_window and self.trainer.accumulate_grad_batches > 1:
            self._random_state = random_state(self.device)
        self._batches_in_window += 1
        self._largest_batch = max(self._largest_batch, labels_of(batch).shape, key=lambda shape: shape.numel())
        check_parity, self._parity_pending = self._parity_pending, False
        strategy = self.trainer.strategy
        if isinstance(strategy, PipelineStrategy):  # which runs the batch in backward
            self._returned = strategy.postpone(batch, check_parity, _LOSS_DIVISOR)
            return self._returned
        if check_parity:
            self.model.check_parity(batch)
        output = self.compute_loss(batch)
        self.add_to_window(output)
        total = output.loss_sum
        if output.aux_loss is not None:
            total = total + output.aux_loss * output.num_tokens
        self._returned = total / _LOSS_DIVISOR
        return self._returned

    def add_to_window(self, output: LossOutput) -> None:
        """Add a batch's sums to those of the current optimiser step."""
        for name, value in sums_of(output).items():
            self._window[name] = self._window[name] + value if name in self._window else value

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._check_batch(batch, batch_idx)
        self.val_metrics.update(self.compute_loss(batch))

    def on_validation_epoch_end(self) -> None:
        self._log_epoch("val", self.val_metrics)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._check_batch(batch, batch_idx)
        self.test_metrics.update(self.compute_loss(batch))

    def on_test_epoch_end(self) -> None:
        self._log_epoch("test", self.test_metrics)

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Score each sequence: "log_likelihood" (B,) float32, in nats, of its "num_tokens" (B,) int64 valid targets."""
        self._check_batch(batch, batch_idx)
        strategy = self._strategy
        model = strategy.pipeline if isinstance(strategy, PipelineStrategy) else self.model
        return {
            "log_likelihood": -model.token_losses(batch).sum(-1),
            "num_tokens": (self.model.targets(batch) != IGNORE_INDEX).sum(-1),
        }

    def largest_logits(self) -> tuple[str, float]:
        """The logits of the largest micro-batch trained on: a description, and their size in GiB as float32."""
        batch, sequence = self._largest_batch
        fate = {True: "built by this loss", False: "never built", None: "if built"}[self.model.loss.builds_logits]
        if fate == "never built" and batch * sequence <= MIN_CHUNK_ROWS:
            fate = "no more than one chunk"
        size = batch * sequence * self.model.vocabulary * 4 / 2**30
        return f"logits {batch} x {sequence} x {self.model.vocabulary} in float32, {fate}", size

    # Generation and export.

    @property
    def backbone(self) -> nn.Module:
        """The model that was passed in; its parameters are stored under the prefix ``model.backbone.``"""
        return self.model.backbone

    @torch.no_grad()
    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        """The backbone's own ``generate`` for (B, T) token ids, in evaluation mode: a causal model continues them and
        returns (B, T + new), an encoder-decoder answers and returns (B, new)."""
        self._transformers_model("generate text")
        if not self.can_generate:
            raise UserError(
                "a model that is divided over a pipeline does not generate text; export it (save_pretrained), and let "
                "one device generate"
            )
        ranks = tensor_parallel_mesh(self._strategy)
        numbers = nullcontext() if ranks is None else same_random_numbers(ranks, self.device)
        eager = torch.compiler.set_stance("force_eager")  # each new length would be compiled, and soon nothing at all
        with evaluation_mode(self.backbone), runs_outside_of_the_root(self._strategy), numbers, eager:
            return self.model.generate(input_ids=input_ids, **options)

    def save_pretrained(
        self,
        folder: str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write a folder that transformers' ``from_pretrained`` loads. It appears whole or not at all.

        PEFT's adapters are merged into the weights there; the adapters alone, for ``PeftModel.from_pretrained``, lie in
        its subfolder ``adapter``. The training model stays as it is.

        Args:
            folder: replaced as a whole if it exists.
            tokenizer: written beside the model, and asked for special tokens that its generation needs.
            weights: by the names of this module's state dict, in place of those that it has: a checkpoint's, whole and
                on the CPU. Rank 0 alone needs them.
        """
        model = self._transformers_model("be saved as a Hugging Face folder")
        adapted = peft_model(self.backbone)
        own = nullcontext() if weights is not None else whole_parameters(self._strategy)
        with own:
            strategy = self._strategy
            if weights is not None:
                prefix = "model.backbone."
                given = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
                outlined = (self._outline or (outline(self.backbone),))[0] if adapted is not None else None
            else:
                divided = isinstance(strategy, PipelineStrategy)
                given = strategy.whole_state_dict(self.backbone) if divided else whole_state_dict(self.backbone)
                outlined = self._outline[0] if self._outline else None
            if self._strategy is None or self.trainer.is_global_zero:
                if adapted is not None and outlined is not None:
                    adapted = peft_model(filled(outlined, given or self._summoned()))
                self._write_folder(model, adapted, Path(folder), given, tokenizer)

    def _summoned(self) -> dict[str, Tensor]:
        """FSDP1's parameters while they are whole, and buffers, on the CPU, by the names that they have without it."""
        entries = [*self.backbone.named_parameters(), *self.backbone.named_buffers()]
        return {name.replace("_fsdp_wrapped_module.", ""): value.detach().cpu().clone() for name, value in entries}

    def _write_folder(
        self,
        model: PreTrainedModel,
        adapted: Any,
        folder: Path,
        weights: Mapping[str, Any] | None,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        partial_folder = partial_path(folder)
        remove(partial_folder)
        if adapted is None:
            model.save_pretrained(partial_folder, state_dict=None if weights is None else dict(weights))
        else:
            adapted.save_pretrained(partial_folder / "adapter")
            try:
                merged_copy(adapted).save_pretrained(partial_folder)
            except Exception as error:  # PEFT has many; what was trained is in the adapter
                warnings.warn(
                    f"the adapters could not be merged into the weights ({type(error).__name__}: {error}); {folder} "
                    "holds only the folder adapter, for PeftModel.from_pretrained",
                    stacklevel=2,
                )
        if tokenizer is not None:
            tokenizer.save_pretrained(partial_folder)
            if model.can_generate():
                generation_config(model, tokenizer).save_pretrained(partial_folder)
        put_in_place(partial_folder, folder)

    @property
    def _strategy(self) -> Strategy | None:
        """Of the trainer; None for a module that is used without one."""
        return None if self._trainer is None else self.trainer.strategy

    def _inner_model(self, purpose: str) -> PreTrainedModel:
        model = self.model.transformers_model
        if model is None:
            raise UserError(
                f"{type(self.backbone).__name__} is not a transformers model and cannot {purpose}; override this method"
            )
        return model

    def _transformers_model(self, purpose: str) -> PreTrainedModel:
        model = self._inner_model(purpose)
        if is_deferred(model):  # no trainer has come by
            materialize(model)
        return model

    # The token-exact optimiser step.

    def on_train_start(self) -> None:
        self._window = {}
        self._batches_in_window = 0
        if self._resumed_random_states is not None:
            restore_random_state(self._resumed_random_states, self.trainer.strategy)
            self._resumed_random_states = None
        resume_epoch = getattr(getattr(self.trainer, "datamodule", None), "resume_epoch", None)  # lit_fused.data's
        if resume_epoch is not None:
            resume_epoch()
        self._parity_pending = self.parity_check

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        assert optimizer_closure is not None

        def closure() -> Any:
            loss = optimizer_closure()
            self._check_returned_loss(loss)
            self._average_gradients_over_tokens()
            return loss

        super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def _check_returned_loss(self, averaged: Tensor | None) -> None:
        """Refuse a ``training_step`` that returned a loss of its own, which the factor below would scale wrongly.

        Compares values, and so waits for a GPU, in the first optimiser step only.
        """
        if self._window and self._checked and averaged is not None:
            return
        expected = self._returned / self.trainer.accumulate_grad_batches if self._returned is not None else None
        if not self._window or averaged is None or expected is None or not torch.equal(averaged, expected):
            raise UserError(
                f"{type(self).__name__}.training_step must return what super().training_step(...) returned, the summed "
                f"loss, which is averaged over the tokens of the whole step; to change the loss itself, override "
                f"compute_loss(batch)"
            )
        self._checked = True

    def _average_gradients_over_tokens(self) -> None:
        names, sums = zip(*self._window.items(), strict=True)
        self._window = {}
        self._batches_in_window = 0
        strategy = self.trainer.strategy
        total = sum_over_data(torch.stack(sums), strategy)
        sums_of_step = dict(zip(names, total, strict=True))
        averaged_over = data_parallel_size(strategy) * self.trainer.accumulate_grad_batches
        factor = averaged_over * _LOSS_DIVISOR / sums_of_step["num_tokens"].clamp(min=1)
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        torch._foreach_mul_([local(g) for g in gradients], factor)  # pyright: ignore[reportPrivateImportUsage]
        metrics = {f"train/{name}": value for name, value in metrics_from_sums(sums_of_step).items()}
        self.log("train/loss", metrics.pop("train/loss"), prog_bar=True)
        self.log_dict(metrics)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Lightning's own, but for the norm of a sharded model's gradients, which it does not know."""
        strategy = self.trainer.strategy
        if gradient_clip_val and gradient_clip_algorithm != "value":
            if isinstance(strategy, FSDPStrategy):
                assert isinstance(strategy.model, FullyShardedDataParallel)
                strategy.model.clip_grad_norm_(gradient_clip_val)
                return
            if isinstance(strategy, PipelineStrategy):
                strategy.clip_by_norm([p.grad for p in self.parameters() if p.grad is not None], gradient_clip_val)
                return
            if isinstance(strategy, ModelParallelStrategy):
                clip_by_norm([p.grad for p in self.parameters() if p.grad is not None], gradient_clip_val)
                return
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def _log_epoch(self, stage: str, metrics: TokenMetrics) -> None:
        values = metrics.compute()  # reduced over the ranks: all of them log, and sync, the same numbers
        metrics.reset()
        for name, value in values.items():
            self.log(f"{stage}/{name}", value, prog_bar=name in ("loss", "perplexity"), sync_dist=True)

    # Optimiser and schedule.

    def configure_optimizers(self) -> OptimizerLRScheduler:
        groups = weight_decay_groups(self.model, self._matrices)
        if not groups:
            raise UserError(
                f"no parameter of {type(self.backbone).__name__} is to be trained; adapters that were loaded need "
                "PeftModel.from_pretrained(..., is_trainable=True)"
            )
        optimizer = self.make_optimizer(groups)
        check_epsilon(optimizer)
        length: dict[str, int] = {}
        if "num_training_steps" in inspect.signature(self.make_scheduler).parameters:
            steps = self.trainer.estimated_stepping_batches
            if steps == float("inf"):
                raise UserError(
                    "a learning-rate schedule needs the number of steps: set trainer.max_steps or trainer.max_epochs"
                )
            length["num_training_steps"] = int(steps)
        scheduler = self.make_scheduler(optimizer, **length)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def cosine_with_warmup(optimizer: Optimizer, num_training_steps: int, warmup_fraction: float = 0.05) -> LRScheduler:
    """transformers' linear warm-up over a fraction of the steps, then cosine decay to zero."""
    return get_cosine_schedule_with_warmup(optimizer, round(warmup_fraction * num_training_steps), num_training_steps)


def weight_decay_groups(model: nn.Module, matrices: Set[str] | None = None) -> list[dict[str, Any]]:
    """Two parameter groups: matrices and embeddings, which decay; gains and biases, which do not.

    Args:
        model: whose parameters are to be trained.
        matrices: the names of those that decay; by default those of two dimensions and more, which under FSDP1 no
            shard has.
    """
    decay: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            name = name.replace("_fsdp_wrapped_module.", "")
            decay[p.ndim >= 2 if matrices is None else name in matrices].append(p)
    groups = [{"params": decay[True]}, {"params": decay[False], "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
