"""``PlacedLMModule``: a :class:`LanguageModel` on the devices of a trainer, without any step.

It sets the model up, generates text and exports. The strategy's :class:`~lit_fused.parallel.Placement` does everything
that depends on the strategy.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import lightning as L
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_fused.errors import UserError
from lit_fused.export.huggingface import write_folder
from lit_fused.export.merging import outline
from lit_fused.heads import peft_model
from lit_fused.heads.evaluation import evaluation_mode
from lit_fused.models.compilation import check_choices, compile_backbone
from lit_fused.models.language_model import LanguageModel
from lit_fused.models.liger_kernels import use_liger_kernels
from lit_fused.models.tokenizer_fit import fit_vocabulary
from lit_fused.parallel import Placement, is_divided, placement_of
from lit_fused.weights import is_deferred, materialize

_PREFIX = "model.backbone."  # of the names of the backbone's parameters


class PlacedLMModule(L.LightningModule):
    """A language model on the devices of a trainer.

    Args:
        model: backbone and loss.
        compile, kernels: see :class:`~lit_fused.modules.FusedLMModule`.
    """

    def __init__(self, model: LanguageModel, *, compile: str = "none", kernels: str = "none") -> None:
        super().__init__()
        check_choices(compile, kernels)
        self.model = model
        self._pending_compile, self._pending_kernels = compile, kernels  # "none" once applied
        self._outline: tuple[
            nn.Module, ...
        ] = ()  # A sharded model's with adapters. A tuple keeps it from being a submodule.

    @property
    def backbone(self) -> nn.Module:
        """The model that was passed in; its parameters are stored under the prefix ``model.backbone.``"""
        return self.model.backbone

    @property
    def placement(self) -> Placement:
        """How the trainer's strategy places the model; one device's for a module without a trainer."""
        return placement_of(None if self._trainer is None else self.trainer.strategy)

    @property
    def can_generate(self) -> bool:
        """True if ``generate`` works: no pipeline has the model's layers on different ranks."""
        return not is_divided(self.model)

    @property
    def is_sharded(self) -> bool:
        """True if no rank has the whole model. Then every rank has to call ``generate`` and ``save_pretrained``."""
        return self.placement.is_sharded

    # Set-up refuses whatever would fail or be wrong in training.

    def setup(self, stage: str) -> None:
        compile, kernels = self._pending_compile, self._pending_kernels
        self.placement.set_up(self.model, training=stage == "fit", compile=compile, kernels=kernels)
        if kernels == "liger":
            use_liger_kernels(self._inner_model("run in Liger's kernels"))
            self._pending_kernels = "none"
        tokenizer = self._tokenizer
        if tokenizer is not None and not is_divided(self.model):
            fit_vocabulary(self.model, tokenizer)
        if self.is_sharded and peft_model(self.backbone) is not None and not self._outline:
            self._outline = (outline(self.backbone),)
        if not is_deferred(self.model):
            self.placement.prepare(self.model)

    def configure_model(self) -> None:
        """Place the model on its devices. Lightning calls it after ``setup``, and again for every run."""
        self.placement.place(self.model)
        tokenizer = self._tokenizer
        if tokenizer is not None and len(tokenizer) > self.model.vocabulary:
            raise UserError(
                f"the tokenizer has {len(tokenizer)} entries but the model's vocabulary only {self.model.vocabulary}; "
                "give the model at least as many (model.config.vocab_size) or train a smaller tokenizer "
                "(data.vocab_size)"
            )
        compile_backbone(self.model, self._pending_compile)
        self._pending_compile = "none"

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer of the run's data; None if that is tokens already."""
        return getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)

    def cpu(self) -> Self:
        """Move to the CPU, but for weights that have not come: Lightning calls this after an early failure as well."""
        return self if is_deferred(self) else super().cpu()

    # Generation and export.

    @torch.no_grad()
    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        """Return what the backbone's own ``generate`` makes of (B, T) token ids, in evaluation mode.

        A causal model continues them and returns (B, T + new); an encoder-decoder answers and returns (B, new).
        """
        self._transformers_model("generate text")
        if not self.can_generate:
            raise UserError(
                "a model that is divided over a pipeline does not generate text; export it (save_pretrained), and let "
                "one device generate"
            )
        # Each new length would be compiled, and soon torch.compile would give up.
        eager = torch.compiler.set_stance("force_eager")
        with evaluation_mode(self.backbone), self.placement.generating(self.device), eager:
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
            weights: used instead of the module's own, by the names of its state dict: those of a checkpoint, whole and
                on the CPU. Only rank 0 needs them.
        """
        self._transformers_model("be saved as a Hugging Face folder")
        outlined = self._outline[0] if self._outline else None
        given = None
        if weights is not None:
            given = {n.removeprefix(_PREFIX): w for n, w in weights.items() if n.startswith(_PREFIX)}
        with nullcontext(given) if given is not None else self.placement.whole_weights(self.backbone) as whole:
            if self.placement.is_global_zero:
                write_folder(Path(folder), self.backbone, tokenizer, whole, outlined)

    def _inner_model(self, purpose: str) -> PreTrainedModel:
        model = self.model.transformers_model
        if model is None:
            raise UserError(
                f"{type(self.backbone).__name__} is not a transformers model and cannot {purpose}; override this method"
            )
        return model

    def _transformers_model(self, purpose: str) -> None:
        """Refuse any other model, and give one that no trainer has seen its weights."""
        model = self._inner_model(purpose)
        if is_deferred(model):
            materialize(model)
