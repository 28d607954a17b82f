"""RunCheckpoint: the newest checkpoint is that of the last step, and a longer run goes on from it exactly."""

import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning_helpers import VOCABULARY, quiet_trainer, tiny_llama
from transformers import get_constant_schedule

from lit_fused import FusedCausalLMModule
from lit_fused.callbacks import RunCheckpoint
from lit_fused.callbacks.run_checkpoint import newest_checkpoint
from lit_fused.data import SyntheticDataModule

BATCHES = 7  # an epoch


class Witness(L.Callback):
    """Writes down what is saved, and which step the last checkpoint has when samples and exports are made."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.at_end, self.saved = folder, -1, Counter[Any]()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.saved[trainer.global_step] += 1

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        last = self.folder / "last.ckpt"
        self.at_end = step_of(last) if last.exists() else -1


class Stops(L.Callback):
    """Asks the trainer to stop at a step, at the end of a batch or after a validation."""

    def __init__(self, step: int, hook: str) -> None:
        self.step = step
        setattr(self, hook, self.stop)

    def stop(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        trainer.should_stop |= trainer.global_step >= self.step


def step_of(path: Path) -> int:
    return torch.load(path)["global_step"]


def fit(folder: Path, *callbacks: Any, resume: Path | None = None, **options: Any) -> tuple[Any, L.Trainer]:
    module = FusedCausalLMModule(tiny_llama(), None, None, get_constant_schedule)
    trainer = quiet_trainer(folder, enable_checkpointing=True, callbacks=list(callbacks), **options)
    sizes = {"vocab_size": VOCABULARY, "block_size": 12, "batch_size": 2}
    data = SyntheticDataModule(**sizes, num_train_batches=BATCHES, num_val_batches=1)  # goes on where it was
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Checkpoint directory")
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")
        trainer.fit(module, data, ckpt_path=resume)
    return module, trainer


def saver(folder: Path, **options: Any) -> RunCheckpoint:
    settings: dict[str, Any] = {"every_n_train_steps": 3} | options
    return RunCheckpoint(folder, **settings)


ENDS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "max_steps": ([], {"max_steps": 5}),
    "max_steps in the second epoch": ([], {"max_steps": 10}),
    "max_steps that the interval hits": ([], {"max_steps": 6}),
    "max_epochs": ([], {"max_epochs": 1}),
    "should_stop at a batch": ([lambda: Stops(5, "on_train_batch_end")], {"max_steps": 20}),
    "should_stop among micro-batches": (
        [lambda: Stops(2, "on_train_batch_start")],
        {"max_steps": 20, "accumulate_grad_batches": 2},
    ),
    "should_stop in a validation": (
        [lambda: Stops(4, "on_validation_end")],
        {"max_steps": 20, "val_check_interval": 4, "check_val_every_n_epoch": None},
    ),
    "early stopping": (
        [lambda: EarlyStopping("val/loss", patience=1, min_delta=9.0)],
        {"max_steps": 20, "val_check_interval": 2, "check_val_every_n_epoch": None},
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights after 12 steps at once, by the number of micro-batches of a step."""
    made: dict[int, Any] = {}

    def weights(accumulated: int) -> Any:
        if accumulated not in made:
            folder = tmp_path_factory.mktemp("whole")
            made[accumulated], _ = fit(folder, saver(folder), max_steps=12, accumulate_grad_batches=accumulated)
        return made[accumulated].parameters()

    return weights


QUICK = ("max_steps", "should_stop among micro-batches", "early stopping")


@pytest.mark.parametrize("end", [pytest.param(end, marks=[pytest.mark.slow] * (end not in QUICK)) for end in ENDS])
def test_the_last_step_is_saved_once_before_anything_is_exported_and_a_longer_run_goes_on_from_it(end, whole, tmp_path):
    makers, options = ENDS[end]
    witness = Witness(tmp_path)
    _, trainer = fit(tmp_path, saver(tmp_path), witness, *(make() for make in makers), **options)
    steps = trainer.global_step
    assert witness.at_end == step_of(tmp_path / "last.ckpt") == steps > 0
    assert set(witness.saved.values()) == {1}
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert newest_checkpoint(trainer) == str(tmp_path / "last.ckpt")

    accumulated = options.get("accumulate_grad_batches", 1)
    resumed, trainer = fit(
        tmp_path,
        saver(tmp_path, every_n_train_steps=100),
        resume=tmp_path / "last.ckpt",
        max_steps=12,
        accumulate_grad_batches=accumulated,
    )
    assert trainer.global_step == 12
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 12
    assert all(torch.equal(p, other) for p, other in zip(whole(accumulated), resumed.parameters(), strict=True))


def test_every_state_stays_if_it_is_asked_for_and_the_newest_is_that_of_the_last_step(tmp_path):
    best = ModelCheckpoint(tmp_path, monitor="val/loss", filename="best", save_on_train_epoch_end=False)
    options = {"max_steps": 7, "val_check_interval": 5, "check_val_every_n_epoch": None}
    _, trainer = fit(tmp_path, saver(tmp_path, keep_all=True), best, **options)
    kept = {path.name: step_of(path) for path in tmp_path.iterdir()}
    assert kept == {f"step-{step:06d}.ckpt": step for step in (3, 6, 7)} | {"best.ckpt": 5, "last.ckpt": 7}
    assert newest_checkpoint(trainer) == str(tmp_path / "last.ckpt")


@pytest.mark.parametrize(
    "path", ["/link", *(pytest.param(path, marks=pytest.mark.slow) for path in ("", "/..", "/../../precious"))]
)
def test_a_path_in_a_checkpoint_never_leads_out_of_the_folder_of_checkpoints(path, tmp_path):
    folder, precious = tmp_path / "run" / "checkpoints", tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    name = {"filename": "{step}", "every_n_train_steps": 2, "save_last": True}
    fit(tmp_path, ModelCheckpoint(folder, **name), max_steps=2)
    (folder / "link").symlink_to(precious)
    checkpoint = torch.load(folder / "last.ckpt")
    (state,) = checkpoint["callbacks"].values()
    hostile = f"{folder}{path}" if path else str(precious)
    state.update(best_model_path=hostile, last_model_path=hostile, kth_best_model_path=hostile)
    state["best_k_models"] = {hostile: torch.tensor(0.0)}
    torch.save(checkpoint, folder / "last.ckpt")
    resumed = ModelCheckpoint(folder, **name)
    _, trainer = fit(tmp_path, resumed, resume=folder / "last.ckpt", max_steps=4)
    assert trainer.global_step == 4
    assert (precious / "thesis.txt").read_text() == "years of work"
    for value in (resumed.best_model_path, resumed.last_model_path, *resumed.best_k_models):
        assert Path(value).resolve().parent == folder.resolve()


def test_the_scores_of_a_run_whose_folder_was_moved_are_still_known(tmp_path):
    options = {"max_steps": 4, "val_check_interval": 2, "check_val_every_n_epoch": None}
    best = {"monitor": "val/loss", "filename": "{step}", "save_top_k": 2, "save_last": True}
    fit(tmp_path, ModelCheckpoint(tmp_path / "a", **best), **options)
    (tmp_path / "a").rename(tmp_path / "b")
    moved = ModelCheckpoint(tmp_path / "b", **best)
    fit(tmp_path, moved, resume=tmp_path / "b" / "last.ckpt", **options)
    assert Path(moved.best_model_path).parent == tmp_path / "b"
    assert len(moved.best_k_models) == 2


def test_a_checkpoint_appears_once_the_loggers_have_the_metrics_of_its_step(tmp_path):
    """A kill between the two would lose them: Lightning gives them to the loggers after the step is saved."""
    seen: list[tuple[int, bool]] = []

    class Notes(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            if "train/loss" in metrics:
                time.sleep(0.2)  # The thread that writes has time to finish.
                seen.append((step or 0, (tmp_path / "last.ckpt").exists()))

    logger = Notes(tmp_path / "logs", name="", version="")
    fit(tmp_path, saver(tmp_path, every_n_train_steps=2), max_steps=3, logger=logger, log_every_n_steps=1)
    assert seen == [(0, False), (1, False), (2, True)]


def test_a_state_whose_metrics_an_error_has_lost_is_not_the_last_one(tmp_path):
    """A run that goes on from it would leave a step out of its metrics."""

    class Fails(FusedCausalLMModule):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:  # between the save and the loggers
            if self.trainer.global_step == 4:
                raise RuntimeError("another rank is dead")

    logger = CSVLogger(tmp_path / "logs", name="", version="")
    options: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1, "max_steps": 6, "enable_checkpointing": True}
    trainer = quiet_trainer(tmp_path, callbacks=[saver(tmp_path, every_n_train_steps=2)], **options)
    data = SyntheticDataModule(VOCABULARY, block_size=12, batch_size=2, num_train_batches=6, num_val_batches=1)
    with pytest.raises(RuntimeError, match="another rank is dead"):
        trainer.fit(Fails(tiny_llama()), data)
    assert step_of(tmp_path / "last.ckpt") == 2
    assert [path.name for path in tmp_path.glob("*.partial")] == []
