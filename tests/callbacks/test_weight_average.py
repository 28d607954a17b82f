"""WeightAverage: the average is what the formula says, is used where it should be, and survives a resume."""

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


def assert_close(found: Any, expected: dict[str, Tensor]) -> None:
    assert relative_error(found, expected) <= 1e-6


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
def test_the_average_is_that_of_the_formula_and_of_one_process_and_goes_on_from_any_checkpoint(strategy, tmp_path):
    ranks = 4 if strategy == "pp_fsdp2" else 2
    runs = {"auto-1": at_once("auto", tmp_path)}
    runs[f"{strategy}-{ranks}"] = each(at_once, ranks, [strategy], tmp_path)[strategy]
    for name, run in runs.items():
        steps, (first, *_, last) = run["steps"], run["validated"]
        assert relative_error(steps[-1], average_of(steps)) > 1e-3
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / name.partition("-")[0])
        saved = read_weights(tmp_path / f"{name}.ckpt")
        of_backbone = {key.removeprefix("model.backbone."): p for key, p in saved.items()}
        assert torch.equal(of_backbone.pop("lm_head.weight"), of_backbone["model.embed_tokens.weight"])
        assert_close(first, average_of(steps[:2]))
        assert_close(of_backbone, average_of(steps[:4]))
        for weights in (last, run["average"], dict(exported.named_parameters())):
            assert_close(weights, average_of(steps))
    here = [item for item in MOVES[strategy] if item.endswith(">auto")]
    moved = each(go_on, ranks, [item for item in MOVES[strategy] if item not in here], tmp_path).values()
    averages = [run["average"] for run in runs.values()]
    for average in (*averages, *moved, *(go_on(item, tmp_path) for item in here)):
        assert relative_error(average, averages[0]) <= 1e-5


def test_an_average_in_half_precision_or_without_a_place_in_checkpoints_is_refused(tmp_path):
    def fit(**options: Any) -> None:
        trainer = quiet_trainer(tmp_path, max_steps=1, callbacks=[WeightAverage(DECAY)], **options)
        trainer.fit(FusedCausalLMModule(tiny_llama()), loader(ragged_batches(1)))

    with pytest.raises(UserError, match=r"ModelParallelStrategy saves no average; choose .*FSDP2Strategy\(\)"):
        fit(strategy=ModelParallelStrategy())
    with pytest.raises(UserError, match=r"weights in bf16-true would lose.*bf16-mixed"):
        fit(precision="bf16-true")
    with pytest.raises(UserError, match=r"decay.*\(0, 1\), got 1"):
        WeightAverage(1)
