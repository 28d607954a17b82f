"""``FusedCausalLMModule``: a causal language model trained on next-token prediction."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_fused.losses import LinearCrossEntropyLoss, Loss
from lit_fused.models.language_model import LanguageModel
from lit_fused.modules.fused_lm import FusedLMModule


class FusedCausalLMModule(FusedLMModule):
    """A causal language model without logits.

        module = FusedCausalLMModule(AutoModelForCausalLM.from_pretrained(...), LinearCrossEntropyLoss())
        Trainer(precision="bf16-mixed", accumulate_grad_batches=8).fit(module, loader)

    Batches are dicts with "input_ids" and "labels", integers (B, T), aligned, labels -100 where ignored, and whatever
    else the backbone's forward takes ("attention_mask", "position_ids").

    Args:
        backbone: see :class:`LanguageModel`.
        loss: a loss strategy, or a callable of (hidden_states, labels); default ``LinearCrossEntropyLoss()``.
        optimizer, scheduler, parity_check, compile, kernels: see :class:`FusedLMModule`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        loss: Loss | Callable[[Tensor, Tensor], Tensor] | None = None,
        optimizer: Callable[..., Optimizer] | None = None,
        scheduler: Callable[..., LRScheduler] | None = None,
        *,
        parity_check: bool = True,
        compile: str = "none",
        kernels: str = "none",
    ) -> None:
        model = LanguageModel(backbone, LinearCrossEntropyLoss() if loss is None else loss)
        super().__init__(model, optimizer, scheduler, parity_check=parity_check, compile=compile, kernels=kernels)
