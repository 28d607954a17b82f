"""Lightning's searches, and fits that follow another call of a trainer, train a module as a single fit does."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner.tuning import Tuner
from lightning_helpers import quiet_trainer, ragged_batches, tiny_llama
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fused import FusedCausalLMModule
from lit_fused.callbacks import WeightAverage

RATES: Any = {"min_lr": 1e-5, "max_lr": 1e-2}
SIZES: Any = {"init_val": 2, "max_trials": 2, "steps_per_trial": 2}
Weights = dict[str, Tensor]


class Rows(L.LightningDataModule):
    """Rows with ragged labels, so that a mean of means is another loss."""

    def __init__(self, batch_size: int = 2, *, shuffle: bool = False) -> None:
        super().__init__()
        self.batch_size, self.shuffle = batch_size, shuffle
        self.rows: Any = [{name: value[0] for name, value in batch.items()} for batch in ragged_batches(96, batch=1)]

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, self.batch_size, shuffle=self.shuffle)

    def val_dataloader(self) -> Any:
        return DataLoader(self.rows[:2], self.batch_size)


def trainer_of(folder: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    settings = {"max_epochs": 2, "accumulate_grad_batches": 3, "callbacks": [*callbacks]} | options
    return quiet_trainer(folder, **settings)


def weights_of(module: FusedCausalLMModule) -> Weights:
    return {name: p.detach().clone() for name, p in module.backbone.named_parameters()}


def fresh(folder: Path, like: FusedCausalLMModule, data: Rows) -> Weights:
    """The weights of one fit with the learning rate and the batch size that were found."""
    module = FusedCausalLMModule(tiny_llama())
    module.learning_rate = like.learning_rate
    torch.manual_seed(5)
    trainer_of(folder).fit(module, Rows(data.batch_size, shuffle=data.shuffle))
    return weights_of(module)


def same(found: Weights, expected: Weights) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("searches", ["rate", "rate rate", "size size", "rate size", "size rate"])
def test_a_fit_after_lightnings_searches_is_a_fresh_one_with_what_they_found(searches, tmp_path):
    module, data, trainer = FusedCausalLMModule(tiny_llama()), Rows(shuffle=True), trainer_of(tmp_path)
    for search in searches.split():
        if search == "rate":
            Tuner(trainer).lr_find(module, datamodule=data, num_training=14, **RATES)
            assert module.learning_rate > 1e-3
        else:
            Tuner(trainer).scale_batch_size(module, datamodule=data, **SIZES)
            assert data.batch_size == 4
    torch.manual_seed(5)
    trainer.fit(module, data)
    assert same(weights_of(module), fresh(tmp_path, module, data))
    assert not [*tmp_path.glob(".*")]


@pytest.mark.parametrize("order", [1, -1])
def test_both_finders_in_one_fit_and_the_schedule_goes_by_what_they_found(order, tmp_path):
    finders = [LearningRateFinder(num_training_steps=14, **RATES), BatchSizeFinder(**SIZES)][::order]
    module, data = FusedCausalLMModule(tiny_llama()), Rows()
    trainer_of(tmp_path, *finders).fit(module, data)
    assert module.learning_rate > 1e-3
    assert data.batch_size == 4
    assert same(weights_of(module), fresh(tmp_path, module, data))
    assert not [*tmp_path.glob(".*")]


class Interrupts(L.Callback):
    """Ends a fit in the middle of an optimiser step, between backward and the step."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.fit_loop.batch_idx == 4:
            raise self.error


@pytest.mark.parametrize("first", ["a fit", "another trainer's fit", "a validation", "a failed fit", "an interrupt"])
def test_a_fit_is_exact_whatever_the_module_did_before(first, tmp_path):
    module, data = FusedCausalLMModule(tiny_llama()), Rows(shuffle=True)
    trainer = trainer_of(tmp_path, *([Interrupts(RuntimeError)] if first == "a failed fit" else []))
    if first == "a failed fit":
        with pytest.raises(RuntimeError):
            trainer.fit(module, data)
    elif first == "an interrupt":
        with pytest.raises(SystemExit):
            trainer_of(tmp_path, Interrupts(KeyboardInterrupt)).fit(module, data)
    elif first == "a validation":
        trainer.fit(FusedCausalLMModule(tiny_llama(1)), data)
        trainer.save_checkpoint(tmp_path / "other.ckpt")
        trainer_of(tmp_path).validate(module, data, tmp_path / "other.ckpt", verbose=False)
    else:
        (trainer if first == "a fit" else trainer_of(tmp_path)).fit(module, data)
    module.backbone.load_state_dict(tiny_llama().state_dict())
    torch.manual_seed(5)
    trainer_of(tmp_path).fit(module, data)
    assert same(weights_of(module), fresh(tmp_path, module, data))


def hooks_of(optimizer: Any) -> int:
    return sum(len(value) for name, value in vars(optimizer).items() if name.endswith("_hooks"))


def test_an_optimizer_that_was_given_has_no_hooks_of_ours_after_its_fits(tmp_path):
    backbone = tiny_llama()
    optimizer = torch.optim.AdamW(backbone.parameters(), lr=1e-3)
    before = hooks_of(optimizer)
    module = FusedCausalLMModule(backbone, optimizer=optimizer)
    trainer_of(tmp_path, WeightAverage(0.5)).fit(module, Rows())
    assert hooks_of(optimizer) == before
    with pytest.raises(SystemExit):
        trainer_of(tmp_path, Interrupts(KeyboardInterrupt)).fit(module, Rows())
    trainer_of(tmp_path).fit(module, Rows())
    assert hooks_of(optimizer) == before
