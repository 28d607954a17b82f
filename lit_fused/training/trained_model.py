"""A model in a LightningModule, but for its steps: set-up, checkpoints, generation, export."""

import copy
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, Self

import lightning as L
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle
from transformers import LogitsProcessorList, PreTrainedTokenizerBase

from lit_fused.errors import UserError
from lit_fused.export.huggingface import outline, write_folder
from lit_fused.heads import evaluation_mode, peft_model
from lit_fused.models.certificate import Certificate, certificate_of
from lit_fused.models.compilation import compile_backbone
from lit_fused.models.hub import auto_class
from lit_fused.models.language_model import LanguageModel
from lit_fused.models.load import grow_vocabulary, is_deferred, materialize, origin_of
from lit_fused.models.tokenizer_fit import fit_vocabulary
from lit_fused.ops.options import MIN_CHUNK_ROWS
from lit_fused.parallel import Placement, are_finite, local, placement_of
from lit_fused.parallel.checkpoint import check_same_model, read_checkpoint, shapes_of
from lit_fused.training.average import TokenAverage
from lit_fused.training.frozen import FrozenModel
from lit_fused.training.resume import ExactResume, keep_own_paths, order_states


def _refuse_non_finite(input_ids: Tensor, scores: Tensor) -> Tensor:
    if bool((scores.isnan() | scores.isposinf()).any()):
        raise UserError(
            "the model's logits are not finite, so no token can be chosen; its weights may not be finite, or "
            "float16 too narrow for it: try precision=bf16-mixed or 32-true"
        )
    return scores


def _is_plain(value: Any) -> bool:
    """Return whether ``torch.load`` reads a value with ``weights_only=True``."""
    if isinstance(value, Mapping):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | Tensor | torch.dtype)


class TrainedModel(L.LightningModule):
    """A :class:`LanguageModel` in a LightningModule: how the strategy places it, and what it does but for steps."""

    model_card: str | None = None  # the README.md that save_pretrained writes
    average: TokenAverage
    _outline: tuple[nn.Module, ...] = ()  # a sharded model's with adapters, in a tuple as it is no submodule
    _started = False  # on_train_start of this fit has run

    def __init__(self, model: LanguageModel, compile: str) -> None:
        super().__init__()
        self.model = model
        self.frozen: list[FrozenModel] = []
        self._compile = compile  # "none" once the model is compiled
        self._is_set_up = False
        self._hooks: list[RemovableHandle] = []  # of optimisers, which a project may have given and keeps
        self.largest_batch = torch.Size((0, 0))  # that was trained on, the shape of the labels
        self._resume = ExactResume()
        self._certificate: Certificate | None = None  # of the first checkpoint of this fit

    @property
    def _run(self) -> L.Trainer | None:
        """The trainer; None without one."""
        with suppress(RuntimeError):
            return self.trainer
        return None

    # Set-up: what is found out, refused and placed before the first batch.

    def setup(self, stage: str) -> None:
        """Refuse what would be wrong in training, and prepare the model."""
        training = stage == "fit"
        if training:  # Nothing is kept of an earlier fit, which an exception may have ended anywhere.
            self._release_optimizers()
            self._resume, self._started, self._certificate = ExactResume(), False, None
        if "training_step" in vars(self):  # Lightning has put the compiled one here.
            raise UserError(
                f"torch.compile({type(self).__name__}(...)) cannot compile whole steps with their checks; "
                'compile the model instead: compile="regional" or "whole", or torch.compile(backbone)'
            )
        if getattr(self._of_data("encoding"), "mask_probability", None) and not self.model.few_targets:
            raise UserError(
                f"mask_probability hides tokens, which {type(self).__name__} does not fill in; choose "
                "module=masked_lm, or leave mask_probability out"
            )
        if self._compile == "auto":
            self._compile = self.placement.compiled_by_default(self.model, training=training)
        self.placement.set_up(self.model, training=training, compile=self._compile)
        tokenizer = self._of_data("tokenizer")
        if tokenizer is not None:
            fit_vocabulary(self.model, tokenizer)
        for frozen in self.frozen:
            frozen.set_up(self.placement, tokenizer, compile=self._compile)
        if self.is_sharded and peft_model(self.backbone) is not None and not self._outline:
            self._outline = (outline(self.backbone),)
        if not is_deferred(self.model):
            self.placement.prepare(self.model)
        self._is_set_up = True

    def configure_model(self) -> None:
        """Place the model on its devices. Lightning calls it after ``setup``, and again for every run."""
        if self._run is None:  # load_from_checkpoint
            return
        self.placement.place(self.model)
        for frozen in self.frozen:
            frozen.place(self.placement, compile=self._compile)
        entries, vocabulary = len(self._of_data("tokenizer") or ()), self.model.vocabulary
        if entries > vocabulary:
            raise UserError(
                f"the tokenizer has {entries} entries but the model's vocabulary only {vocabulary}; give the model at "
                "least as many (model.config.vocab_size) or train a smaller tokenizer (data.vocab_size)"
            )
        compile_backbone(self.model, self._compile)
        self._compile = "none"  # once compiled

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

    def cpu(self) -> Self:
        """Move to the CPU, but for weights that have not come: Lightning calls this after an early failure as well."""
        for frozen in self.frozen:
            frozen.cpu()
        return self if is_deferred(self) else super().cpu()

    def _of_data(self, name: str) -> Any:
        """Return an attribute of the run's data module, None if it has none: those of ``lit_fused.data`` have it."""
        return getattr(getattr(self._run, "datamodule", None), name, None)

    # Checkpoints.

    def on_fit_start(self) -> None:
        callbacks: list[L.Callback] = self.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if any(isinstance(callback, LearningRateFinder | BatchSizeFinder) for callback in callbacks):
            # They have just found another rate or number of steps than the optimisers and schedules were made with.
            self.trainer.strategy.setup_optimizers(self.trainer)
        self._resume.begin_fit(self)

    def _release_optimizers(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def teardown(self, stage: str) -> None:
        if stage == "fit":
            self._release_optimizers()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.check_finite("no checkpoint is written and the last one stays", together=True)
        given = checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY)  # of save_hyperparameters, which saves models as well
        if isinstance(given, dict):
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = {name: v for name, v in given.items() if _is_plain(v)}
        self._resume.save(checkpoint, self, self.average.batches, is_sharded=self.is_sharded)
        if self._certificate is None and self.placement.is_global_zero:
            self._certificate = self.certify()
        if self._certificate is not None:
            checkpoint["certificate"] = self._certificate

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._run is None:  # load_from_checkpoint
            self.make_room(checkpoint["state_dict"])
            return
        if self.trainer.precision == "64-true":  # Lightning converts after the weights have come: it rounds them
            self.double()
        if see_checkpoint := self._of_data("see_checkpoint"):
            see_checkpoint(checkpoint)
        if not self.is_sharded:  # else the strategy has looked
            check_same_model(shapes_of(checkpoint["state_dict"]), shapes_of(self.state_dict()))
        if self._started:  # A callback goes back to where this fit was, as Lightning's search of a learning rate does.
            order_states(checkpoint, self)
        elif self.trainer.state.fn == TrainerFn.FITTING:
            self._resume.load(checkpoint, self)
            keep_own_paths(checkpoint.get("callbacks", {}), self.trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]

    def begins_with_validation(self) -> bool:
        """Return whether a fit that is about to go on from a checkpoint begins with a validation of its step."""
        return self._resume.begins_with_validation

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: Any, *args: Any, weights_only: bool | None = None, **options: Any
    ) -> Self:
        """Load as Lightning does: a file, or the folder of a strategy that shards the model. Arguments that are no
        plain values (``backbone``, ``loss`` ...) and were not saved by ``save_hyperparameters`` go here."""
        if isinstance(checkpoint_path, str | Path) and Path(checkpoint_path).is_dir():
            content, checkpoint_path = read_checkpoint(checkpoint_path, optimizers=False), BytesIO()
            torch.save(content, checkpoint_path)
            checkpoint_path.seek(0)
        return super().load_from_checkpoint(checkpoint_path, *args, weights_only=weights_only, **options)  # type: ignore[misc]

    def make_room(self, weights: Mapping[str, Tensor]) -> None:
        """Make a model that no trainer has seen ready to load ``weights``: with parameters, and with the vocabulary of
        the run, in which that of a pretrained model grows if the tokenizer has more entries."""
        model: Any = self.model.transformers_model
        if origin_of(model) is not None:
            table = getattr(model.get_input_embeddings(), "weight", None)
            names = [name for name, p in self.named_parameters(remove_duplicate=False) if p is table]
            rows = max((len(weights[name]) for name in names if name in weights), default=0)
            if table is not None and rows > len(table):
                grow_vocabulary(model, rows)
        if is_deferred(self.model):
            materialize(self.model)

    # Beside training.

    def certify(self) -> Certificate | None:
        """Return :func:`lit_fused.certify` of the backbone, with the loss of this module; None of one that is no
        transformers model. Where ranks divide it, errors are not measured."""
        return certificate_of(self.model, divided=self.is_sharded)

    def largest_logits(self) -> tuple[str, float]:
        """Describe the logits of the largest micro-batch trained on, and give their size in GiB as float32."""
        batch, sequence = self.largest_batch
        fate = {True: "built by this loss", False: "never built", None: "if built"}[self.model.loss.builds_logits]
        if fate == "never built" and batch * sequence <= MIN_CHUNK_ROWS:
            fate = "no more than one chunk"
        size = batch * sequence * self.model.vocabulary * 4 / 2**30
        return f"logits {batch} x {sequence} x {self.model.vocabulary} in float32, {fate}", size

    @property
    def backbone(self) -> nn.Module:
        """The model that was passed in; its parameters are stored under the prefix ``model.backbone.``"""
        return self.model.backbone

    @property
    def placement(self) -> Placement:
        """How the trainer's strategy places the model; one device's for a module without a trainer."""
        return placement_of(None if self._run is None else self._run.strategy)

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh of a strategy that divides or shards the model."""
        return getattr(self.trainer.strategy, "device_mesh", None)

    @property
    def is_sharded(self) -> bool:
        """True if no rank has the whole model. Then every rank has to call ``generate`` and ``save_pretrained``."""
        return self.placement.is_sharded

    @property
    def auto_class(self) -> str:
        """The name of transformers' class that loads what is exported: an auto class, or the model's own."""
        model = self.model.transformers_model
        with suppress(UserError):
            return type(self.backbone).__name__ if model is None else auto_class(model.config).__name__
        return type(model).__name__

    @torch.no_grad()
    def check_finite(self, consequence: str, *, together: bool) -> None:
        """Raise UserError, which names the ``consequence``, unless every weight that is trained is finite; on every
        rank if they call it ``together``."""
        weights = {name: local(p) for name, p in self.named_parameters() if p.requires_grad and p.is_floating_point()}
        finite = are_finite(weights.values()) if weights else torch.ones(1, device=self.device, dtype=torch.bool)
        if bool((self.placement.from_all_ranks(finite.all().int()) if together else finite).all()):
            return
        names = [name for name, is_finite in zip(weights, finite.tolist(), strict=False) if not is_finite]
        which = f" ({names[0]} is the first of {len(names)})" if names else ""
        step = "" if self._run is None else f" after step {self._run.global_step}"
        raise UserError(
            f"the weights are not finite{step}{which}, so {consequence}; go on from an earlier checkpoint, with a "
            "smaller optimizer.lr or a larger scheduler.warmup_fraction"
        )

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Return what the backbone's own forward returns: ``module(input_ids=...)`` has logits, ``(B, T, V)``."""
        return self.model.run_with(
            lambda model, *given, **options: model.backbone(*given, **options), *arguments, **named
        )

    @torch.no_grad()
    def generate(self, input_ids: Tensor | None = None, **options: Any) -> Tensor:
        """Return what the backbone's own ``generate`` makes of (B, T) token ids, in evaluation mode: (B, T + new) of a
        causal model, (B, new) of an encoder-decoder; or of other inputs, by name."""
        self._refuse_unless_transformers("generate text")
        # Each new length would be compiled, and soon torch.compile would give up.
        eager = torch.compiler.set_stance("force_eager")
        with evaluation_mode(self.backbone), self.placement.generating(self.device), eager:
            processors = LogitsProcessorList([_refuse_non_finite, *(options.pop("logits_processor", None) or ())])
            given = options if input_ids is None else options | {"input_ids": input_ids}
            given |= {"logits_processor": processors}
            return self.model.run_with(lambda model, **arguments: model.backbone.generate(**arguments), **given)

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
            folder: replaced as a whole if this method wrote it and nothing else is in it.
            tokenizer: written beside the model, and asked for special tokens that its generation needs.
            weights: used instead of the module's own, by the names of its state dict: those of a checkpoint, whole and
                on the CPU. Only rank 0 needs them.
        """
        self._refuse_unless_transformers("be saved as a Hugging Face folder")
        prefix = "model.backbone."
        if weights is None:
            self.check_finite("nothing is exported", together=self.is_sharded)
        elif weights and not are_finite(w for w in weights.values() if w.is_floating_point()).all():
            raise UserError("the weights of the checkpoint are not finite, so nothing is exported; export another one")
        given = {n.removeprefix(prefix): w for n, w in (weights or {}).items() if n.startswith(prefix)}
        with self.placement.whole_weights(self.backbone) if weights is None else nullcontext(given) as whole:
            if self.placement.is_global_zero:
                write_folder(Path(folder), self.backbone, tokenizer, whole, *self._outline, card=self.model_card)

    def _refuse_unless_transformers(self, purpose: str) -> None:
        """Refuse any other model, and give one that no trainer has seen its weights."""
        model = self.model.transformers_model
        if model is None:
            raise UserError(
                f"{type(self.backbone).__name__} is not a transformers model and cannot {purpose}; override this method"
            )
        if is_deferred(model):
            materialize(model)
