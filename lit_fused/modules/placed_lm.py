"""A LightningModule around a language model: how the strategy places it, how it generates, and its export."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lit_fused.errors import UserError
from lit_fused.export.huggingface import write_folder
from lit_fused.heads import evaluation_mode
from lit_fused.models.language_model import LanguageModel
from lit_fused.parallel import Placement, is_divided, placement_of
from lit_fused.weights import is_deferred, materialize


class PlacedLMModule(L.LightningModule):
    """Owns a :class:`LanguageModel`, and knows how the strategy places it."""

    model: LanguageModel
    _outline: tuple[nn.Module, ...] = ()  # a sharded model's with adapters, in a tuple as it is no submodule

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

    @torch.no_grad()
    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        """Return what the backbone's own ``generate`` makes of (B, T) token ids, in evaluation mode: (B, T + new) of a
        causal model, (B, new) of an encoder-decoder."""
        self._refuse_unless_transformers("generate text")
        if not self.can_generate:
            otherwise = "export it (save_pretrained), and let one device generate"
            raise UserError(f"a model that is divided over a pipeline does not generate text; {otherwise}")
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
            folder: replaced as a whole if this method wrote it and nothing else is in it.
            tokenizer: written beside the model, and asked for special tokens that its generation needs.
            weights: used instead of the module's own, by the names of its state dict: those of a checkpoint, whole and
                on the CPU. Only rank 0 needs them.
        """
        self._refuse_unless_transformers("be saved as a Hugging Face folder")
        prefix = "model.backbone."
        given = {n.removeprefix(prefix): w for n, w in (weights or {}).items() if n.startswith(prefix)}
        with self.placement.whole_weights(self.backbone) if weights is None else nullcontext(given) as whole:
            if self.placement.is_global_zero:
                write_folder(Path(folder), self.backbone, tokenizer, whole, *self._outline)

    def _refuse_unless_transformers(self, purpose: str) -> None:
        """Refuse any other model, and give one that no trainer has seen its weights."""
        model = self.model.transformers_model
        if model is None:
            raise UserError(
                f"{type(self.backbone).__name__} is not a transformers model and cannot {purpose}; override this method"
            )
        if is_deferred(model):
            materialize(model)
