"""A module with a frozen model beside the trained one, and its fit under any strategy."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_helpers import loader, quiet_trainer
from tiny_models import VOCABULARY, tiny_model
from torch import Tensor
from transformers import get_constant_schedule

from lit_fused import FusedCausalLMModule
from lit_fused.losses import LossOutput
from lit_fused.objectives import ScoredLoss
from lit_fused.training.frozen import FrozenModel

MODEL = "qwen3"


class Pulled(ScoredLoss):
    """Half of the squared difference of the log-probabilities of each target from those of a frozen model."""

    frozen: FrozenModel

    def of_scores(self, scores, targets, batch):
        theirs = -self.frozen.run(lambda model, batch: model.token_losses(batch), batch)  # type: ignore[attr-defined]
        squares = (scores.log_prob - theirs).square() / 2
        return LossOutput(squares.sum(), (targets != -100).sum())


def other_model(dtype: torch.dtype = torch.float32) -> Any:
    """The tiny model with other weights."""
    model: Any = tiny_model(MODEL)
    generator = torch.Generator().manual_seed(2)
    for p in model.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=generator)
    return model.to(dtype)


def frozen_module(model: Any = None, frozen: Any = None, **options: Any) -> FusedCausalLMModule:
    loss = Pulled()
    optimizer = partial(torch.optim.SGD, lr=0.1)
    module = FusedCausalLMModule(
        tiny_model(MODEL) if model is None else model, loss, optimizer, get_constant_schedule, **options
    )
    beside = other_model() if frozen is None else frozen
    loss.frozen = module.add_frozen(beside, "reference", "store its log-probabilities")
    return module


def rows(count: int, seed: int) -> dict[str, Tensor]:
    """Ragged rows of tokens, (count, 10)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (count, 10), generator=generator)
    first = torch.randint(1, 8, (count, 1), generator=generator)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(10) < first, -100)}


def fitted(folder: Path, module: FusedCausalLMModule, batches: list[Any], **options: Any) -> Any:
    """Return the trainer of two epochs of steps of all of the batches."""
    trainer = quiet_trainer(folder, **({"max_epochs": 2, "use_distributed_sampler": False} | options))
    trainer.fit(module, loader(batches), loader(batches))
    return trainer
