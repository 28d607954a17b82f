"""WeightAverage: the average is what the formula says, is used where it should be, and survives a resume."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from checkpoint_fits import RANKS, rows_of, train, weights_of
from errors_of import relative_error
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from ranks import each
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
            self.steps.append(weights_of(trainer, pl_module))

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        self.validated.append(weights_of(trainer, pl_module))


def average_of(steps: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    average = {name: p.double() for name, p in steps[0].items()}
    for weights in steps[1:]:
        average = {name: DECAY * a + (1 - DECAY) * weights[name] for name, a in average.items()}
    return average


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert relative_error(found, expected) <= 1e-6


def exported_to(folder: Path) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


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
    module, seen, trainer = fit(tmp_path, 2, optimizer, callbacks=[ExportPretrained(tmp_path / "exported")])
    assert len(seen.steps) == 4
    assert_close(seen.validated[0], average_of(seen.steps[:2]))
    assert_close(seen.validated[1], average_of(seen.steps))
    assert_close(weights_of(trainer, module), average_of(seen.steps))
    assert_close(exported_to(tmp_path / "exported"), average_of(seen.steps))


def test_the_average_is_of_weights_that_come_late(tmp_path):
    module = FusedCausalLMModule(lit_fused.from_config(tiny_llama().config), scheduler=get_constant_schedule)
    options: Any = {"max_steps": 3, "callbacks": [WeightAverage(DECAY), seen := Weights()]}
    trainer = quiet_trainer(tmp_path, **options)
    trainer.fit(module, loader(ragged_batches(3)))
    assert_close(weights_of(trainer, module), average_of(seen.steps))


def at_once(strategy: str, folder: Path) -> dict[str, Any]:
    """Train three epochs, and save the state of the second."""
    saver = ModelCheckpoint(folder, filename=f"{strategy}-{RANKS}", every_n_epochs=2)
    callbacks = [WeightAverage(DECAY), seen := Weights(), ExportPretrained(folder / strategy), saver]
    data = rows_of(strategy), rows_of(strategy)[:1]
    trainer, module = train(strategy, folder, 3, data=data, callbacks=callbacks, enable_checkpointing=True)
    return {"steps": seen.steps, "validated": seen.validated, "average": weights_of(trainer, module)}


def go_on(item: str, folder: Path) -> dict[str, Tensor]:
    """Train the third epoch from CHECKPOINT>STRATEGY."""
    source, strategy = item.split(">")
    data, path = (rows_of(strategy), rows_of(strategy)[:1]), folder / f"{source}.ckpt"
    return weights_of(*train(strategy, folder, 3, data=data, callbacks=[WeightAverage(DECAY)], ckpt_path=path))


MOVES = {
    "context": ["auto-1>auto", "context-2>auto", "context-2>context", "auto-1>context"],
    "fsdp2": ["fsdp2-2>fsdp2", "fsdp2-2>fsdp2_rows", "fsdp2-2>tp", "fsdp2-2>ddp"],
    "fsdp2_rows": ["fsdp2_rows-2>fsdp2_rows", "fsdp2_rows-2>context", "auto-1>fsdp2_rows"],
    "tp": ["tp-2>tp", "auto-1>tp"],
    "ddp": ["ddp-2>fsdp2"],
    "pp": ["pp-2>pp", "auto-1>pp", "pp-2>auto"],
    "pp_fsdp2": ["pp_fsdp2-4>pp_fsdp2", "auto-1>pp_fsdp2"],
}


CASES = [pytest.param(name, marks=[pytest.mark.slow] if name != "context" else []) for name in MOVES]


@pytest.mark.parametrize("strategy", CASES)
def test_ranks_that_share_the_weights_have_the_average_of_one_process_and_go_on_from_any_checkpoint(strategy, tmp_path):
    here = at_once("auto", tmp_path)
    ranks = 4 if strategy == "pp_fsdp2" else 2
    found = each(at_once, ranks, [strategy], tmp_path)[strategy]
    expected = average_of(found["steps"])
    assert relative_error(found["steps"][-1], expected) > 1e-3
    for weights in (found["average"], found["validated"][-1], exported_to(tmp_path / strategy)):
        assert_close(weights, expected)
    assert_close(found["validated"][0], average_of(found["steps"][:2]))
    saved = read_weights(tmp_path / f"{strategy}-{ranks}.ckpt")
    expected = average_of(found["steps"][:4])
    expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert_close({name.removeprefix("model.backbone."): p for name, p in saved.items()}, expected)
    moved = [go_on(item, tmp_path) for item in MOVES[strategy] if item.endswith(">auto")]
    moved += each(go_on, ranks, [item for item in MOVES[strategy] if not item.endswith(">auto")], tmp_path).values()
    for average in (found["average"], *moved):
        assert relative_error(average, here["average"]) <= 1e-5


def test_an_average_in_half_precision_or_without_a_place_in_checkpoints_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"ModelParallelStrategy have no place for an average.*FSDP2Strategy\(\)"):
        fit(tmp_path, 1, strategy=ModelParallelStrategy())
    with pytest.raises(UserError, match=r"weights in bf16-true would lose.*bf16-mixed"):
        fit(tmp_path, 1, precision="bf16-true")
    with pytest.raises(UserError, match=r"decay.*\(0, 1\), got 1"):
        WeightAverage(1)
