"""A run that was killed in the middle of an epoch goes on as if nothing had happened: same batches, same weights."""

import hashlib
import json
import signal
import warnings
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from commands import TINY_MODEL, text_folder, train
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.optim import lr_scheduler as schedules

from lit_fused import FusedCausalLMModule, UserError
from lit_fused.data import SyntheticDataModule
from lit_fused.data.loader import BatchLoader
from lit_fused.training import cosine_with_warmup

# --- a whole process, killed -------------------------------------------------------------------------------------

STEPS, DIES_AT = 18, 14  # of 10 batches an epoch; a checkpoint is made after every 3 steps
SMALL = [*TINY_MODEL, "data.block_size=32"]
SYNTHETIC = [*SMALL, "data=synthetic", "data.vocab_size=300", "data.num_train_batches=10", "data.num_val_batches=2"]


def run(folder: Path, name: str, *overrides: str, ranks: int = 1) -> tuple[dict[str, list[str]], dict[str, Any], int]:
    """Return what each rank trained on, the last checkpoint, and the exit status of ``python train.py``."""
    out, record = folder / name, folder / f"{name}-record"
    record.mkdir()
    done = train(
        folder,
        "data.batch_size=2",
        "~callbacks.sample_text",
        "~callbacks.export",
        "~callbacks.progress_bar",
        "callbacks.checkpoint.every_n_train_steps=3",
        "+callbacks.record._target_=batch_record.BatchRecord",
        f"+callbacks.record.folder={record}",
        f"trainer.max_steps={STEPS}",
        f"hydra.run.dir={out}",
        *overrides,
        ranks=ranks,
        status=None,
    )
    seen = {file.name: file.read_text().splitlines() for file in record.iterdir()}
    last = out / "checkpoints" / "last.ckpt"
    assert last.exists(), done.output[-4000:]
    checkpoint = torch.load(last, weights_only=False)
    assert done.status is not None
    return seen, checkpoint, done.status


CASES = {
    "text": [*SMALL, "data=text", "data.path={corpus}", "data.vocab_size=400"],
    "packed documents, two workers, validation in between": [
        *SMALL,
        "data=text",
        "data.path={corpus}",
        "data.vocab_size=400",
        "data.packing=documents",
        "data.num_workers=2",
        "trainer.val_check_interval=4",
        "trainer.limit_val_batches=2",
    ],
    "pairs by epochs": [
        "experiment=reverse",
        "data.path={pairs}",
        "data.batch_size=100",
        "data.vocab_size=400",
        "trainer.max_steps=-1",
        "trainer.max_epochs=2",
        "trainer.val_check_interval=1.0",
        "trainer.check_val_every_n_epoch=1",
    ],
    "two processes, accumulating": [
        *SYNTHETIC,
        "strategy=ddp",
        "trainer.devices=2",
        "trainer.accumulate_grad_batches=2",
        "data.num_train_batches=20",
        "trainer.max_steps=9",
        "callbacks.checkpoint.every_n_train_steps=2",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_killed_in_the_middle_of_an_epoch_goes_on_with_the_same_batches_to_the_same_weights(name, tmp_path):
    corpus, pairs = text_folder(tmp_path), tmp_path / "pairs.jsonl"
    lines = [line for file in sorted(corpus.iterdir()) for line in file.read_text().splitlines()]
    records = [{"source": line, "target": " ".join(reversed(line.split()))} for line in lines[:1000]]
    pairs.write_text("".join(json.dumps(record) + "\n" for record in records))
    overrides = [text.replace("{corpus}", str(corpus)).replace("{pairs}", str(pairs)) for text in CASES[name]]
    ranks = 2 if "strategy=ddp" in overrides else 1
    seen, whole, status = run(tmp_path, "whole", *overrides, ranks=ranks)
    assert status == 0
    assert len(seen) == ranks
    _, killed, status = run(tmp_path, "killed", *overrides, f"+callbacks.record.die_at={DIES_AT}", ranks=ranks)
    assert status == -signal.SIGKILL
    steps = killed["global_step"]
    assert 0 < steps < whole["global_step"]
    # The killed run's own configuration is read beside its checkpoint; the death in it is taken back.
    resume = f"ckpt_path={tmp_path / 'killed' / 'checkpoints' / 'last.ckpt'}", "+callbacks.record.die_at=null"
    left, resumed, status = run(tmp_path, "resumed", *overrides, *resume, ranks=ranks)
    assert status == 0
    for rank, batches in seen.items():
        assert left[rank] == batches[-len(left[rank]) :]
        assert 0 < len(left[rank]) < len(batches)
        assert left[rank][0].split()[1] != "0", "the checkpoint was to be made in the middle of an epoch"
    assert resumed["global_step"] == whole["global_step"]
    for weight, value in whole["state_dict"].items():
        assert torch.equal(resumed["state_dict"][weight], value), weight


# --- every moment at which a checkpoint can be made --------------------------------------------------------------


class Shuffled(SyntheticDataModule):
    """Six batches of two samples an epoch, in an order of its own for each."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            **({"vocab_size": 61, "block_size": 12, "batch_size": 2, "num_train_batches": 6} | options),
            num_val_batches=2,
        )

    def train_dataloader(self) -> BatchLoader:
        return self.training_batches(self._train)


class Record(L.Callback):
    """Return what was trained on; and, with a folder, a checkpoint at every moment, with what had been seen by then."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.seen: list[tuple[int, int, str]] = []
        self.rows: list[list[int]] = []
        self.saved: list[tuple[Path, int]] = []

    def save(self, trainer: L.Trainer, moment: str) -> None:
        if self.folder is not None:
            self.saved.append((self.folder / f"{len(self.saved)}-{moment}.ckpt", len(self.seen)))
            trainer.save_checkpoint(self.saved[-1][0])

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        self.save(trainer, "epoch start")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        digest = hashlib.sha256(batch["input_ids"].numpy().tobytes()).hexdigest()
        self.seen.append((trainer.current_epoch, batch_idx, digest))
        self.rows += batch["input_ids"].tolist()
        self.save(trainer, "batch end")

    def on_validation_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        self.save(trainer, "validation end")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        self.save(trainer, "epoch end")


def fit(folder: Path, record: Record, ckpt_path: Path | None = None, data: Any = None, **options: Any) -> Tensor:
    """The weights after a run of a model with dropout."""
    L.seed_everything(1)
    module = FusedCausalLMModule(tiny_llama(attention_dropout=0.2))
    schedule = options.pop("schedule", None)
    callbacks = [record] if schedule is None else [GradientAccumulationScheduler(schedule), record]
    trainer = quiet_trainer(folder, callbacks=callbacks, **options)
    trainer.fit(module, data or Shuffled(), ckpt_path=ckpt_path)
    return parameters_to_vector(module.parameters()).detach()


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 2, "val_check_interval": 0.5},
        pytest.param({"max_epochs": 2, "limit_val_batches": 0, "accumulate_grad_batches": 4}, marks=pytest.mark.slow),
        pytest.param({"max_epochs": 2, "val_check_interval": 0.5, "schedule": {0: 2, 1: 4}}, marks=pytest.mark.slow),
        pytest.param(
            {"max_steps": 15, "max_epochs": -1, "val_check_interval": 4, "check_val_every_n_epoch": None},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_checkpoint_of_any_moment_goes_on_exactly(options, tmp_path):
    record = Record(tmp_path)
    whole = fit(tmp_path, record, **options)
    assert len(record.saved) > len(record.seen) > 10
    for path, count in record.saved:
        again = Record()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*dataloader is not resumable")
            weights = fit(tmp_path, again, path, **options)
        expected = record.seen[count:]
        # among the micro-batches of a step, the first of them comes again: their gradients are in no checkpoint
        repeated = len(again.seen) - len(expected)
        accumulated = max(options.get("schedule", {0: options.get("accumulate_grad_batches", 1)}).values())
        assert 0 <= repeated < accumulated, path.name
        assert again.seen == record.seen[count - repeated :], path.name
        assert torch.equal(weights, whole), path.name


class Stateful:
    """Three batches an epoch, in an order that goes on from a state that was loaded, once."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        rows = torch.randperm(6, generator=self.generator).view(3, 2, 1).expand(-1, -1, 12) + torch.arange(12)
        return iter([{"input_ids": part, "labels": part} for part in rows])

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def test_a_loader_with_a_state_of_its_own_goes_on_from_it(tmp_path):
    record, again = Record(tmp_path), Record()
    whole = fit(tmp_path, record, data=Stateful(), max_epochs=3)
    path = next(path for path, count in record.saved if count == 3 and "epoch end" in path.name)
    weights = fit(tmp_path, again, path, Stateful(), max_epochs=3)
    assert again.seen == record.seen[3:]
    assert torch.equal(weights, whole)


class Options(L.Callback):
    """Notes the options of all groups with which each step was made."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        wanted = ("lr", "initial_lr", "betas", "weight_decay")
        self.seen.append([[group.get(name) for name in wanted] for group in optimizer.param_groups])


SCHEDULES: dict[str, Any] = {
    "cosine": partial(cosine_with_warmup, warmup_fraction=0.2),
    "none": None,
    "of torch": partial(schedules.StepLR, step_size=1, gamma=0.5),
}


def options_of_steps(
    folder: Path, schedule: Any, count: int, ckpt_path: Path | None = None, *, lr: float = 0.25, **options: Any
) -> list[Any]:
    """Train ``count`` steps in all, and return the options of each of this call's steps."""
    optimizer = partial(torch.optim.AdamW, lr=lr, **options)
    module, record = FusedCausalLMModule(tiny_llama(), optimizer=optimizer, scheduler=schedule), Options()
    trainer = quiet_trainer(folder, max_steps=count, callbacks=[record])
    trainer.fit(module, loader(ragged_batches(8)), ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / "last.ckpt")
    return record.seen


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_options_of_the_optimizer_and_the_length_of_its_schedule_are_those_of_the_run_that_goes_on(schedule, tmp_path):
    steps = partial(options_of_steps, tmp_path, SCHEDULES[schedule])
    other: dict[str, Any] = {"lr": 0.125, "weight_decay": 0.5, "betas": (0.5, 0.75)}
    undisturbed = steps(5, **other)
    steps(2)
    assert steps(5, tmp_path / "last.ckpt", **other) == undisturbed[2:]


def warmed_up(optimizer: torch.optim.Optimizer, gamma: float) -> Any:
    parts = schedules.LinearLR(optimizer, 0.5, total_iters=2), schedules.ExponentialLR(optimizer, gamma)
    return schedules.SequentialLR(optimizer, [*parts], [2])


def in_parts_of_functions(optimizer: torch.optim.Optimizer) -> Any:
    parts = [schedules.LambdaLR(optimizer, lambda step: 0.5**step) for _ in range(3)]
    return schedules.SequentialLR(optimizer, [*parts], [2, 4])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (partial(schedules.CosineAnnealingLR, T_max=20), partial(schedules.CosineAnnealingLR, T_max=5)),
        (partial(warmed_up, gamma=0.5), partial(warmed_up, gamma=0.75)),
        (
            partial(schedules.OneCycleLR, max_lr=1.0, total_steps=20),
            partial(schedules.OneCycleLR, max_lr=1.0, total_steps=9),
        ),
        (partial(warmed_up, gamma=0.5), in_parts_of_functions),
        (SCHEDULES["cosine"], SCHEDULES["of torch"]),
        (SCHEDULES["of torch"], SCHEDULES["cosine"]),
        (schedules.ReduceLROnPlateau, in_parts_of_functions),
    ],
    ids=["length", "gamma", "momentum", "parts", "to torch's", "to functions", "from plateaus"],
)
def test_the_schedule_is_that_of_the_run_that_goes_on(before, after, tmp_path):
    undisturbed = options_of_steps(tmp_path, after, 5)
    options_of_steps(tmp_path, before, 3)
    assert options_of_steps(tmp_path, after, 5, tmp_path / "last.ckpt") == undisturbed[3:]


# --- what would not be the same ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Path:
    """A checkpoint after two of the six batches of the first epoch."""
    folder = tmp_path_factory.mktemp("interrupted")
    record = Record(folder)
    fit(folder, record, max_steps=2)
    return next(path for path, count in record.saved if count == 2)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"batch_size": 3, "num_train_batches": 4}, "data.batch_size times devices 2 there and 3 here"),
        ({"batch_size": 12, "num_train_batches": 1}, "data.batch_size times devices 2 there and 12 here"),
        ({"num_train_batches": 7}, "number of samples 12 there and 14 here"),
        ({"seed": 5}, "checksum of the order .* there and .* here"),
    ],
)
def test_a_run_whose_other_batches_would_not_come_is_refused_in_the_middle_of_an_epoch(
    change, difference, interrupted, tmp_path
):
    with pytest.raises(UserError, match=f"made after 2 batches of epoch 0, .* would not give: .*{difference}.*Resume"):
        fit(tmp_path, Record(), interrupted, Shuffled(**change), max_steps=4)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_in_the_middle_of_an_epoch_smaller_and_larger_batches_have_the_samples_that_were_to_come(
    batch_size, interrupted, tmp_path
):
    whole, again = Record(), Record()
    fit(tmp_path, whole, max_epochs=2)
    data = Shuffled(batch_size=batch_size, num_train_batches=12 // batch_size)
    fit(tmp_path, again, interrupted, data, max_epochs=2)
    assert again.rows == whole.rows[4:]
    assert [batch for epoch, batch, _ in again.seen if epoch == 0] == [*range(4 // batch_size, 12 // batch_size)]


def test_another_batch_size_is_fine_at_the_end_of_an_epoch(tmp_path):
    record = Record(tmp_path)
    fit(tmp_path, record, max_steps=6)
    path = next(path for path, count in record.saved if count == 6 and "epoch end" in path.name)
    again = Record()
    fit(tmp_path, again, path, Shuffled(batch_size=4, num_train_batches=3), max_steps=8)
    assert [(epoch, batch) for epoch, batch, _ in again.seen] == [(1, 0), (1, 1)]


# --- orders ------------------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([index]), "labels": torch.tensor([index])}


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 12), (2, 6), (4, 3)])
def test_the_batches_of_all_ranks_together_depend_on_seed_and_epoch_alone(ranks, batch_size):
    def epoch_of(rank: int, number: int) -> list[list[int]]:
        torch.manual_seed(rank + number)  # the seed must not matter
        loader = BatchLoader(
            Numbers(50),
            batch_size,
            shuffle=True,
            seed=7,
            drop_last=True,
            num_replicas=ranks,
            rank=rank,
            position=lambda: (number, 0),
        )
        return [batch["labels"].flatten().tolist() for batch in loader]

    for number in (0, 3):
        order = np.random.default_rng([7, number]).permutation(50)[:48].reshape(4, 12).tolist()
        together = [
            list(chain(*parts)) for parts in zip(*(epoch_of(rank, number) for rank in range(ranks)), strict=True)
        ]
        assert together == order


@pytest.mark.parametrize("count", [1, 5, 12, 13, 14])
def test_ranks_evaluate_every_sample_once_in_as_many_batches_of_as_many_rows(count):
    loaders = [BatchLoader(Numbers(count), 4, num_replicas=3, rank=rank) for rank in range(3)]
    batches = [list(loader) for loader in loaders]
    assert len({len(loader) for loader in loaders} | {len(of_rank) for of_rank in batches}) == 1
    for together in zip(*batches, strict=True):
        assert len({len(batch["labels"]) for batch in together}) == 1
    labels = torch.cat([batch["labels"].flatten() for of_rank in batches for batch in of_rank])
    assert sorted(labels[labels != -100].tolist()) == list(range(count))
