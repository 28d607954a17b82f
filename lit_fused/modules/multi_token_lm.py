"""The module of a model that learns several tokens ahead."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers.modeling_layers import MtpModel

from lit_fused.losses import Loss
from lit_fused.models.multi_token_language_model import MultiTokenLanguageModel
from lit_fused.modules.fused_lm import FusedCausalLMModule


class FusedMultiTokenModule(FusedCausalLMModule):
    """A causal language model that also learns the tokens after the next one, each by a head and without logits.

        module = FusedMultiTokenModule(AutoModelForCausalLM.from_pretrained(...), heads=3)
        module = FusedMultiTokenModule(model, heads=MtpModel.from_pretrained(model))  # transformers.modeling_layers

    Beside what a :class:`~lit_fused.modules.fused_lm.FusedLMModule` logs there is loss_of_token_2 and so on, of the
    heads. train/loss is the sum that is trained; val/loss is that of the next token, as of any causal module. An export
    has the backbone alone, and a checkpoint the heads too.

    Args:
        heads, weight: those of :class:`~lit_fused.models.multi_token_language_model.MultiTokenLanguageModel`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        loss: Loss | Callable[[Tensor, Tensor], Tensor] | None = None,
        optimizer: Optimizer | Callable[..., Optimizer] | None = None,
        scheduler: LRScheduler | Callable[..., LRScheduler] | None = None,
        *,
        heads: int | MtpModel = 1,
        weight: float = 0.3,
        parity_check: bool = True,
        compile: str = "none",
    ) -> None:
        make: Any = partial(MultiTokenLanguageModel, heads=heads, weight=weight)
        self.language_model = make
        options: dict[str, Any] = {"parity_check": parity_check, "compile": compile}
        super().__init__(backbone, loss, optimizer, scheduler, **options)
