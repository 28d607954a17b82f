"""A model beside the trained one that is not trained: the reference of preferences, the teacher of a distillation.

It is no part of the module's tree. So it has no gradients, is in no optimiser, no checkpoint and no export, and stays
in evaluation mode. The strategy's placement puts it on devices as it puts the trained model there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lit_fused.losses import LinearCrossEntropyLoss
from lit_fused.losses.loss import Batch, Forward
from lit_fused.models.compilation import compile_backbone
from lit_fused.models.language_model import LanguageModel
from lit_fused.models.load import is_deferred
from lit_fused.models.tokenizer_fit import fit_vocabulary
from lit_fused.parallel import Placement, reshard

Result = TypeVar("Result")


def _of_forward(forward_pass: Callable[..., Forward], function: Any, model: LanguageModel, batch: Batch) -> Any:
    return function(forward_pass(model), batch)


class FrozenModel:
    """A causal language model that runs without gradients beside the trained one.

    :meth:`FusedLMModule.add_frozen` makes it.

    Args:
        backbone: as of :class:`LanguageModel`; its parameters no longer require gradients.
        role: what messages call it: "reference".
        instead: what messages advise where it cannot run beside the trained model.
    """

    def __init__(self, backbone: nn.Module, role: str, instead: str) -> None:
        self.model = LanguageModel(backbone, LinearCrossEntropyLoss()).requires_grad_(False).eval()
        self.role, self.instead = role, instead
        self._placement = Placement(None)

    def run(self, function: Callable[[Forward, Batch], Result], batch: Batch, *, free: bool = True) -> Result:
        """Return ``function(model, batch)``, computed without gradients, where the model's weights are whole.

        With ``free=False`` FSDP2 leaves those outside of its layers whole until the next call, for a result that
        contains them: the output layer's weight.
        """
        reshard(self.model)
        with torch.no_grad():
            result = self.model.run_with(partial(_of_forward, self._placement.forward_pass, function), batch)
        if free:
            reshard(self.model)
        return result

    def set_up(self, placement: Placement, tokenizer: PreTrainedTokenizerBase | None, *, compile: str) -> None:
        """Refuse, by a UserError, what cannot work under a placement; fit the vocabulary, and find the output head."""
        placement.check_frozen(self.model, f"{self.role} model", self.instead, compile=compile)
        if tokenizer is not None:
            fit_vocabulary(self.model, tokenizer)
        if not is_deferred(self.model):
            placement.prepare(self.model)

    def place(self, placement: Placement, *, compile: str) -> None:
        """Put the model on the devices of a placement that :meth:`set_up` has checked."""
        self._placement = placement
        placement.place_frozen(self.model)
        compile_backbone(self.model, compile)

    def cpu(self) -> None:
        """Free the memory of a device after a run."""
        if not is_deferred(self.model):
            self.model.cpu()
