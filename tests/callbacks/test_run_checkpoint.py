"""RunCheckpoint: the newest checkpoint is that of the last step, and a longer run goes on from it exactly."""

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
from lit_fused.app.run_folder import metric_rows
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
    settings: dict[str, Any] = {"filename": "step-{step:06d}", "save_last": True, "every_n_train_steps": 3}
    settings |= {"auto_insert_metric_name": False, "enable_version_counter": False}
    return RunCheckpoint(folder, **(settings | options))


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
    assert set(witness.saved.values()) == {2}  # step-*.ckpt and last.ckpt
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", f"step-{steps:06d}.ckpt"]
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


@pytest.mark.parametrize("kind", [pytest.param(RunCheckpoint, marks=pytest.mark.slow), ModelCheckpoint])
def test_the_last_checkpoint_is_newer_than_the_best_one(kind, tmp_path):
    best = kind(tmp_path, monitor="val/loss", filename="best-{step}", save_on_train_epoch_end=False)
    seen: list[tuple[int, int]] = []

    class Sees(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
            if best.best_model_path:
                seen.append((step_of(Path(best.best_model_path)), step_of(tmp_path / "last.ckpt")))

    options = {"max_steps": 6, "val_check_interval": 4, "check_val_every_n_epoch": None}
    _, trainer = fit(tmp_path, saver(tmp_path), best, Sees(), **options)
    assert seen == [(4, 4), (4, 4)]
    assert step_of(Path(newest_checkpoint(trainer))) == 6


@pytest.mark.parametrize("changes", [{"save_last": False}, {"save_last": "link"}, {"save_top_k": 0}], ids=str)
def test_what_is_saved_at_the_end_follows_the_options(changes, tmp_path):
    _, trainer = fit(tmp_path, saver(tmp_path, **changes), max_steps=5)
    names = {path.name for path in tmp_path.iterdir()}
    expected = {"last.ckpt", "step-000005.ckpt"}
    assert names == expected - ({"last.ckpt"} if changes.get("save_last") is False else set()) - (
        {"step-000005.ckpt"} if "save_top_k" in changes else set()
    )
    assert step_of(Path(newest_checkpoint(trainer))) == 5


def test_a_resumed_run_removes_what_a_kill_left_of_its_own_files_and_nothing_else(tmp_path):
    fit(tmp_path, saver(tmp_path), max_steps=5)
    whole = (tmp_path / "last.ckpt").read_bytes()
    strays = ["step-000002.ckpt", "step-000003-v1.ckpt"]
    others = ["step-2.txt", "best-000002.ckpt", "my-step-000003.ckpt", "step-000002.ckpt.bak", "step-000009.ckpt"]
    for name in [*strays, *others]:
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "step-000001.ckpt").mkdir()  # a folder of a sharded run
    fit(tmp_path, saver(tmp_path), resume=tmp_path / "last.ckpt", max_steps=7)
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "step-000007.ckpt", *others}


def test_a_run_resumed_elsewhere_or_from_an_older_class_keeps_what_it_finds(tmp_path):
    old = ModelCheckpoint(tmp_path / "old", monitor="val/loss", filename="{step}", save_top_k=2, every_n_train_steps=2)
    options = {"val_check_interval": 2, "check_val_every_n_epoch": None}
    fit(tmp_path, old, max_steps=4, **options)
    new = RunCheckpoint(tmp_path / "old", monitor="val/loss", filename="{step}", save_top_k=2, every_n_train_steps=2)
    fit(tmp_path, new, resume=tmp_path / "old" / "step=4.ckpt", max_steps=4, **options)
    assert new.best_model_score == old.best_model_score
    assert set(new.best_k_models) == set(old.best_k_models)
    names = {path.name for path in (tmp_path / "old").iterdir()}
    elsewhere = saver(tmp_path / "new")
    fit(tmp_path, elsewhere, resume=tmp_path / "old" / "step=4.ckpt", max_steps=6)
    assert {path.name for path in (tmp_path / "old").iterdir()} == names


@pytest.mark.parametrize(
    ("kind", "path"),
    [(RunCheckpoint, "/../../precious"), (ModelCheckpoint, "/link")]
    + [pytest.param(ModelCheckpoint, path, marks=pytest.mark.slow) for path in ("", "/..", "/../../precious")],
)
def test_a_path_in_a_checkpoint_never_leads_out_of_the_folder_of_checkpoints(path, kind, tmp_path):
    folder, precious = tmp_path / "run" / "checkpoints", tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    name = {"filename": "{step}", "every_n_train_steps": 2, "save_last": True}
    fit(tmp_path, kind(folder, **name), max_steps=2)
    (folder / "link").symlink_to(precious)
    checkpoint = torch.load(folder / "last.ckpt")
    (state,) = checkpoint["callbacks"].values()
    hostile = f"{folder}{path}" if path else str(precious)
    state.update(best_model_path=hostile, last_model_path=hostile, kth_best_model_path=hostile)
    state["best_k_models"] = {hostile: torch.tensor(0.0)}
    torch.save(checkpoint, folder / "last.ckpt")
    resumed = kind(folder, **name)
    _, trainer = fit(tmp_path, resumed, resume=folder / "last.ckpt", max_steps=4)
    assert trainer.global_step == 4
    assert (precious / "thesis.txt").read_text() == "years of work"
    for value in (resumed.best_model_path, resumed.last_model_path, *resumed.best_k_models):
        assert Path(value).resolve().parent == folder.resolve()


def test_the_scores_of_a_run_whose_folder_was_moved_are_still_known(tmp_path):
    options = {"max_steps": 4, "val_check_interval": 2, "check_val_every_n_epoch": None}
    best = {"monitor": "val/loss", "filename": "{step}", "save_top_k": 2, "save_last": True}
    fit(tmp_path, RunCheckpoint(tmp_path / "a", **best), **options)
    (tmp_path / "a").rename(tmp_path / "b")
    moved = RunCheckpoint(tmp_path / "b", **best)
    fit(tmp_path, moved, resume=tmp_path / "b" / "last.ckpt", **options)
    assert Path(moved.best_model_path).parent == tmp_path / "b"
    assert len(moved.best_k_models) == 2


def test_metrics_of_the_saved_step_are_logged_by_the_resumed_run(tmp_path):
    """A kill between the two would lose them: Lightning gives them to the loggers after the step is saved."""
    options = {"log_every_n_steps": 1, "val_check_interval": 1.0}
    loggers = [CSVLogger(tmp_path / name, name="", version="") for name in ("killed", "resumed")]
    fit(tmp_path, saver(tmp_path, every_n_train_steps=2), max_steps=2, logger=loggers[0], **options)
    fit(tmp_path, saver(tmp_path), resume=tmp_path / "last.ckpt", max_steps=3, logger=loggers[1], **options)
    (before,), (after,) = (
        [row["train/loss"] for row in metric_rows(tmp_path / name) if row["step"] == "1" and row["train/loss"]]
        for name in ("killed", "resumed")
    )
    assert float(before) == pytest.approx(float(after))
