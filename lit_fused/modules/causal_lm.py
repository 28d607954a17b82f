"""``FusedCausalLMModule``: a causal language model trained on next-token prediction, with generation and export."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.losses import LinearCrossEntropyLoss, Loss
from lit_fused.model import LanguageModel
from lit_fused.modules.base import FusedLMModule


class FusedCausalLMModule(FusedLMModule):
    """A causal language model without logits.

        module = FusedCausalLMModule(AutoModelForCausalLM.from_pretrained(...), LinearCrossEntropyLoss())
        Trainer(precision="bf16-mixed", accumulate_grad_batches=8).fit(module, loader)

    Batches are dicts with "input_ids" and "labels", integers (B, T), aligned, labels -100 where ignored, and whatever
    else the backbone's forward takes ("attention_mask", "position_ids").

    Args:
        backbone: see :class:`LanguageModel`.
        loss: a loss strategy, or a callable of (hidden_states, labels); default ``LinearCrossEntropyLoss()``.
        optimizer, scheduler: see :class:`FusedLMModule`; by default AdamW with warm-up and cosine decay.
    """

    def __init__(
        self,
        backbone: nn.Module,
        loss: Loss | Callable[[Tensor, Tensor], Tensor] | None = None,
        optimizer: Callable[..., Optimizer] | None = None,
        scheduler: Callable[..., LRScheduler] | None = None,
    ) -> None:
        super().__init__(
            LanguageModel(backbone, LinearCrossEntropyLoss() if loss is None else loss),
            optimizer,
            scheduler,
        )

    @property
    def backbone(self) -> nn.Module:
        """The model that was passed in; its parameters are stored under the prefix ``model.backbone.``"""
        return self.model.backbone

    @torch.no_grad()
    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        """Continue (B, T) token ids by the backbone's own ``generate``, in evaluation mode; returns (B, T + new)."""
        backbone = self._transformers_model("generate text")
        training = backbone.training
        backbone.eval()
        try:
            return backbone.generate(input_ids, **options)  # type: ignore[return-value, operator]
        finally:
            backbone.train(training)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a folder that ``AutoModelForCausalLM.from_pretrained`` loads. It appears whole or not at all."""
        backbone = self._transformers_model("be saved as a Hugging Face folder")
        folder = Path(folder)
        partial_folder = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial_folder, ignore_errors=True)
        backbone.save_pretrained(partial_folder)
        shutil.rmtree(folder, ignore_errors=True)
        partial_folder.rename(folder)

    def _transformers_model(self, purpose: str) -> PreTrainedModel:
        if not isinstance(self.backbone, PreTrainedModel):
            raise UserError(
                f"{type(self.backbone).__name__} is not a transformers model and cannot {purpose}; override this method"
            )
        return self.backbone
