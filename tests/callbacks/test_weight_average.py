"""WeightAverage: the average is what the formula says, is used where it should be, and survives a resume."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from errors_of import relative_error
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from torch import Tensor
from transformers import AutoModelForCausalLM, get_constant_schedule

import lit_fused
from lit_fused import FusedCausalLMModule, UserError
from lit_fused.callbacks import ExportPretrained, WeightAverage
from lit_fused.parallel.checkpoint import read_weights

DECAY = 0.6


class Weights(L.Callback):
    """Keeps the weights after every step, and those that a validation runs with."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self.validated: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.steps.append(weights_of(pl_module))

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        self.validated.append(weights_of(pl_module))


def weights_of(module: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.backbone.named_parameters()}


def average_of(steps: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    average = {name: p.double() for name, p in steps[0].items()}
    for weights in steps[1:]:
        average = {name: DECAY * a + (1 - DECAY) * weights[name] for name, a in average.items()}
    return average


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert relative_error(found, expected) <= 1e-6


def fit(
    folder: Path, epochs: int, optimizer: Any = None, ckpt_path: str | None = None, **options: Any
) -> tuple[FusedCausalLMModule, Weights, L.Trainer]:
    module, seen = FusedCausalLMModule(tiny_llama(), None, optimizer, get_constant_schedule), Weights()
    callbacks = [WeightAverage(DECAY), seen, *options.pop("callbacks", [])]
    trainer = quiet_trainer(folder, max_epochs=epochs, accumulate_grad_batches=2, callbacks=callbacks, **options)
    trainer.fit(module, loader(ragged_batches(4)), loader(ragged_batches(1)), ckpt_path=ckpt_path)
    return module, seen, trainer


@pytest.mark.parametrize("optimizer", [None, partial(torch.optim.SGD, lr=0.1)])
def test_the_average_is_the_formulas_and_what_validation_export_and_module_use(tmp_path, optimizer):
    module, seen, _ = fit(tmp_path, 2, optimizer, callbacks=[ExportPretrained(tmp_path / "exported")])
    assert len(seen.steps) == 4
    assert_close(seen.validated[0], average_of(seen.steps[:2]))
    assert_close(seen.validated[1], average_of(seen.steps))
    assert_close(weights_of(module), average_of(seen.steps))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert_close(dict(exported.named_parameters()), average_of(seen.steps))


def test_a_resumed_run_has_the_average_of_an_uninterrupted_one(tmp_path):
    _, at_once, _ = fit(tmp_path, 3)
    saver = ModelCheckpoint(tmp_path, save_last=True)
    fit(tmp_path, 2, callbacks=[saver], enable_checkpointing=True)
    resumed, _, _ = fit(tmp_path, 3, ckpt_path=saver.last_model_path)
    assert_close(weights_of(resumed), average_of(at_once.steps))


def test_a_checkpoint_has_the_average_as_its_weights(tmp_path):
    saver = ModelCheckpoint(tmp_path, save_last=True)
    _, seen, _ = fit(tmp_path, 2, callbacks=[saver], enable_checkpointing=True)
    saved = read_weights(saver.last_model_path)
    assert_close({name.removeprefix("model.backbone."): p for name, p in saved.items()}, average_of(seen.steps))


def test_the_average_is_of_weights_that_come_late(tmp_path):
    module = FusedCausalLMModule(lit_fused.from_config(tiny_llama().config), scheduler=get_constant_schedule)
    options: Any = {"max_steps": 3, "callbacks": [WeightAverage(DECAY), seen := Weights()]}
    quiet_trainer(tmp_path, **options).fit(module, loader(ragged_batches(3)))
    assert_close(weights_of(module), average_of(seen.steps))


def test_half_precision_weights_and_a_wrong_decay_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"weights in bf16-true would lose.*bf16-mixed"):
        fit(tmp_path, 1, precision="bf16-true")
    with pytest.raises(UserError, match=r"decay.*\(0, 1\), got 1"):
        WeightAverage(1)
