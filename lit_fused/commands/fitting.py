"""``mode=fit_batch``: the largest micro-batch and the longest sequence that fit, loss by loss, found by training.

Each size is tried with real optimiser steps of the run's own trainer, on random tokens; the second step counts as well,
since AdamW's state comes with the first. Sizes double until one does not fit, and are then narrowed down; what two
sizes took tells where to look next. Lightning's BatchSizeFinder knows neither sequences nor a limit, measures nothing,
and keeps a copy of the model on the disk in the meantime.

Running out of memory is an answer and no failure: what the failed step still holds is let go. Anything else that fails
is reported as what it is. On a CPU nothing of the kind may happen, so there a size is only tried if what the
smaller ones took says that it stays below ``fit_batch.memory_gib``.
"""

import csv
import gc
import json
import logging
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from hydra.utils import instantiate
from omegaconf import DictConfig, open_dict
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fused.callbacks import PeakMemoryMonitor
from lit_fused.commands.sweeps import leave_for_sweep
from lit_fused.commands.training import build_module
from lit_fused.config import check_precision
from lit_fused.errors import UserError
from lit_fused.losses import as_loss
from lit_fused.modules import FusedLMModule

_GIB = 2**30
_STEPS = 3
MAX_BATCH_SIZE = 4096
_MAX_SEQUENCE = 2**20


@dataclass(frozen=True)
class FitBatchOptions:
    """What ``mode=fit_batch`` can be told.

    Args:
        losses: names of files in ``conf/loss``; None: standard and the run's own.
        memory_gib: what a step may take. None: all that is free on the GPU. Needed on a CPU, where it is the memory of
            the whole process.
    """

    losses: list[str] | None = None
    memory_gib: float | None = None

    def __post_init__(self) -> None:
        if self.memory_gib is not None and self.memory_gib <= 0:
            raise UserError(f"fit_batch.memory_gib must be positive, got {self.memory_gib}")
        if self.losses is not None and not self.losses:
            raise UserError(
                "fit_batch.losses is empty; name files of conf/loss, or null for standard and the run's own"
            )


@dataclass(frozen=True)
class Trial:
    """A size that fitted."""

    batch_size: int
    sequence: int
    peak_gib: float
    tokens_per_sec: float

    @property
    def tokens(self) -> int:
        return self.batch_size * self.sequence


@dataclass
class Row:
    """What one loss lets fit: None where nothing did."""

    loss: str
    batch: Trial | None = None
    sequence: Trial | None = None
    sequence_is_models_limit: bool = False
    error: str | None = None


def fit_batch(cfg: DictConfig) -> None:
    """Print the table, and write ``fit_batch.json`` and ``fit_batch.csv`` to the output folder."""
    options: FitBatchOptions = instantiate(cfg.fit_batch)
    block_size = cfg.data.get("block_size")
    if block_size is None:
        raise UserError(
            f"mode=fit_batch needs data.block_size, the length of a sequence, and {cfg.data._target_} has none; choose "
            "data=synthetic data.block_size=..., with the model's vocabulary: the tokens are random anyway"
        )
    _check_one_device(cfg)
    losses = {name: _loss_node(cfg, name) for name in options.losses or _default_losses()}
    console = Console()
    with _quiet(), tempfile.TemporaryDirectory() as scratch:
        bench = Bench(cfg, options, scratch)
        rows = []
        for name, node in losses.items():
            row = Row(name)
            rows.append(row)
            try:
                bench.choose(instantiate(node))
                _measure(bench, row, block_size, lambda line: console.print(line, highlight=False))
            except UserError as error:
                row.error = str(error)
            except Exception as error:  # of one loss, a library's or a kernel's: the others are worth measuring
                row.error = f"{type(error).__name__}: {error}"
                traceback.print_exc()
                if isinstance(error, getattr(torch, "AcceleratorError", ())):
                    break  # of which a process does not recover
        limit = bench.limit_gib
    standard = next((row for row in rows if row.loss == "standard"), None)
    records = [_record(row, standard) for row in rows]
    _write(cfg, records, block_size, limit)
    found = rows[-1].batch
    metrics = (
        {"memory/peak_allocated_gib": found.peak_gib, "throughput/tokens_per_sec": found.tokens_per_sec}
        if found
        else {}
    )
    leave_for_sweep(cfg, "measured", metrics)
    console.print(_table(records, "batch", f"Largest micro-batch of {block_size} tokens each", limit))
    console.print(_table(records, "sequence", "Longest sequence, one in a micro-batch", limit))
    for row in rows:
        if row.sequence_is_models_limit:
            console.print(f"{row.loss}: longer sequences may fit, but here the model's positions end")
        if row.error is not None:
            console.print(f"{row.loss}: {row.error}", highlight=False)
    console.print(f"written to {Path(cfg.output_dir, 'fit_batch.json')} and .csv", soft_wrap=True)
    if all(row.sequence is None for row in rows):
        raise UserError("nothing fits: " + "; ".join(f"loss={row.loss}: {row.error}" for row in rows))


def largest(
    fits: Callable[[int], float | None],
    start: int,
    most: int,
    *,
    fixed_gib: float,
    limit_gib: float | None,
    careful: bool,
    unit: Callable[[int], int] = lambda low: 1,
) -> int:
    """The largest size that fits; 0 if ``start`` does not.

    Args:
        fits: tries a size and returns its peak in GiB; None if it does not fit.
        start: the smallest size.
        most: the largest size to be tried.
        fixed_gib: about what a step of size zero would take.
        limit_gib: what there is. Where a line through two sizes' peaks reaches it is where to look.
        careful: do not even try a size whose peak is expected to be beyond the limit.
        unit: how exact the answer need be, near a size.
    """
    peaks = {0: fixed_gib}
    low, high = 0, most + 1  # fits, does not fit
    size, width = start, high
    while True:
        beyond = careful and limit_gib is not None and _expected(peaks, size) > limit_gib
        peak = None if beyond else fits(size)
        if peak is None:
            high = size
        else:
            peaks[size], low = peak, size
        if not low or high - low <= unit(low):
            return low
        halved, width = high - low <= width // 2, high - low
        guess = limit_gib if halved or high > most else None  # one that has not helped is not followed twice
        size = _next_size(peaks, low, high, most, guess, unit(low))


def _next_size(peaks: dict[int, float], low: int, high: int, most: int, limit_gib: float | None, unit: int) -> int:
    """Twice the size, or the middle, unless a straight line through the two largest sizes says better."""
    size = min(2 * low, most) if high > most else (low + high) // 2
    a, b = sorted(peaks)[-2:]
    slope = (peaks[b] - peaks[a]) / (b - a)
    if limit_gib is not None and slope > 0:
        reached = int(b + (limit_gib - peaks[b]) / slope)
        size = min(max(reached, low + unit), size if high > most else high - 1)
    size = max(size // unit * unit, low + 1)
    return min(size, high - 1)


def _expected(peaks: dict[int, float], size: int) -> float:
    """The peak of a size, from those of smaller ones: a line through the last two, or a parabola through the last three
    where that is more (attention without a fused kernel grows with the square of the sequence)."""
    if len(peaks) < 2:
        return peaks[0]
    *before, a, b = sorted(peaks)
    slope = (peaks[b] - peaks[a]) / (b - a)
    line = peaks[b] + slope * (size - b)
    if not before:
        return line
    z = before[-1]
    bend = (slope - (peaks[a] - peaks[z]) / (a - z)) / (b - z)
    return line + max(bend, 0.0) * (size - a) * (size - b)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: the device's, or on a CPU the machine's.

    A kernel that wants more *shared* memory than a GPU has is no such error, though Triton calls it "out of resource".
    """
    found: BaseException | None = error
    while found is not None:  # a compiler wraps what happened
        if isinstance(found, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(found, RuntimeError) and any(words in str(found) for words in _OUT_OF_MEMORY):
            return True
        found = found.__cause__
    return False


_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


@dataclass
class Bench:
    """Runs optimiser steps of given sizes with one model, whose loss can be exchanged."""

    cfg: DictConfig
    options: FitBatchOptions
    folder: str
    module: FusedLMModule = field(init=False)

    def __post_init__(self) -> None:
        trainer = self._trainer([])
        check_precision(self.cfg.precision, trainer)
        self.device = trainer.strategy.root_device
        self.limit_gib = self._limit()
        L.seed_everything(self.cfg.seed, workers=True, verbose=False)
        self.module = build_module(self.cfg, instantiate(self.cfg.loss))
        self.module.parity_check = False
        weights = sum(p.numel() * p.element_size() for p in self.module.parameters())
        trained = sum(p.numel() * p.element_size() for p in self.module.parameters() if p.requires_grad)
        before = _process_gib() if self.device.type == "cpu" else 0.0
        self.fixed_gib = before + (weights + 3 * trained) / _GIB  # gradients, and two numbers for each as AdamW has

    def choose(self, loss: Any) -> None:
        self.module.model.loss = as_loss(loss)

    @property
    def longest(self) -> int:
        """What the model's positions end with."""
        model = self.module.model.transformers_model
        config = None if model is None else model.config.get_text_config()
        return getattr(config, "max_position_embeddings", None) or _MAX_SEQUENCE

    def run(self, batch_size: int, sequence: int) -> Trial | None:
        """Some optimiser steps; None if memory ran out."""
        monitor, clock = PeakMemoryMonitor(summary=False), _Clock()
        trainer = self._trainer([monitor, clock])
        try:
            trainer.fit(self.module, self._random_batches(batch_size, sequence, trainer))
        except Exception as error:  # running out of memory has several types
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # which hold the tensors of the failed step
            return None
        finally:
            del trainer
            self._let_go()
        if not monitor.peaks:
            raise UserError("mode=fit_batch cannot measure memory here: it needs CUDA, or Linux")
        peak = max(monitor.peaks.values())
        if self.limit_gib is not None and peak > self.limit_gib and self.device.type == "cpu":
            return None
        return Trial(batch_size, sequence, peak, batch_size * sequence / clock.fastest)

    def _limit(self) -> float | None:
        wanted = self.options.memory_gib
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            if wanted is not None:
                if wanted * _GIB > total:
                    raise UserError(f"fit_batch.memory_gib={wanted}, but this GPU has {total / _GIB:.1f} GiB")
                torch.cuda.set_per_process_memory_fraction(wanted * _GIB / total, self.device)
            return free / _GIB if wanted is None else wanted
        if wanted is None:
            raise UserError(
                "mode=fit_batch on a CPU needs a limit, fit_batch.memory_gib=..., the GiB that the process may take: "
                "memory that runs out there takes the machine down"
            )
        available = _available_gib()
        if wanted > available:
            raise UserError(
                f"fit_batch.memory_gib={wanted} is more than the {available:.1f} GiB that are available here; give less"
            )
        return wanted

    def _trainer(self, callbacks: list[L.Callback]) -> L.Trainer:
        node = self.cfg.trainer.copy()
        with open_dict(node):
            node.callbacks, node.logger = None, False
            node.accumulate_grad_batches = min(node.accumulate_grad_batches, 2)
            node.max_steps, node.max_epochs, node.val_check_interval = _STEPS, -1, None
            node.limit_val_batches = node.num_sanity_val_steps = 0
            node.limit_train_batches = None
            node.enable_checkpointing = node.enable_model_summary = node.enable_progress_bar = False
            node.default_root_dir = self.folder
        build = instantiate(node, _partial_=True)
        return build(callbacks=callbacks)

    def _random_batches(self, batch_size: int, sequence: int, trainer: L.Trainer) -> DataLoader[Any]:
        vocabulary = self.module.model.vocabulary
        tokens: Tensor = torch.randint(vocabulary, (batch_size, sequence), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": tokens, "labels": tokens}
        return DataLoader([batch] * (_STEPS * trainer.accumulate_grad_batches), batch_size=None)  # type: ignore[arg-type]

    def _let_go(self) -> None:
        """Free what a step leaves behind, above all one that failed in its middle."""
        module = self.module
        module.zero_grad(set_to_none=True)
        module._window, module._returned = {}, None
        if module.model.head is not None:
            module.model.replace_head(module.model.head)  # and with it the hidden states that were captured
        module.trainer = None
        gc.collect()
        if self.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


class _Clock(L.Callback):
    """The shortest time of a micro-batch, with its share of the optimiser step, in seconds; the first step is left
    out."""

    def __init__(self) -> None:
        self.fastest = float("inf")
        self._start = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            _wait_for(trainer.strategy.root_device)
            self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > 1 and not trainer.fit_loop._should_accumulate():
            _wait_for(trainer.strategy.root_device)
            took = (time.perf_counter() - self._start) / trainer.accumulate_grad_batches
            self.fastest = min(self.fastest, took)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measure(bench: Bench, row: Row, block_size: int, say: Callable[[str], None]) -> None:
    """Fill in what fits with the bench's loss."""
    found: dict[tuple[int, int], Trial] = {}

    def tried(batch_size: int, sequence: int) -> float | None:
        trial = bench.run(batch_size, sequence)
        size = f"{row.loss}: {batch_size} x {sequence}"
        if trial is None:
            say(f"{size} does not fit")
            return None
        found[batch_size, sequence] = trial
        say(f"{size} fits: {trial.peak_gib:.2f} GiB, {trial.tokens_per_sec:,.0f} tokens/s")
        return trial.peak_gib

    careful = bench.device.type == "cpu"
    limits: dict[str, Any] = {"fixed_gib": bench.fixed_gib, "limit_gib": bench.limit_gib, "careful": careful}
    batch_size = largest(lambda size: tried(size, block_size), 1, MAX_BATCH_SIZE, **limits)
    row.batch = found.get((batch_size, block_size))

    def of_length(size: int) -> float | None:
        known = found.get((1, size))
        return tried(1, size) if known is None else known.peak_gib

    longest = bench.longest
    start = min(block_size if row.batch else max(block_size // 2, 2), longest)
    sequence = largest(of_length, start, longest, **limits, unit=lambda low: max(low // 32 // 64 * 64, 1))
    row.sequence = found.get((1, sequence))
    row.sequence_is_models_limit = sequence == longest
    if row.sequence is None:
        row.error = f"not even 1 x {start} fits into {bench.limit_gib or 0:.2f} GiB"


def _check_one_device(cfg: DictConfig) -> None:
    devices, strategy = cfg.trainer.devices, cfg.trainer.strategy
    if devices != 1 or cfg.trainer.num_nodes != 1 or strategy != "auto":
        raise UserError(
            "mode=fit_batch runs on one device: choose strategy=auto trainer.devices=1 trainer.num_nodes=1. With "
            "strategy=ddp each device takes what one takes; what fsdp and fsdp2 take, mode=plan predicts"
        )


def _default_losses() -> list[str]:
    chosen = HydraConfig.get().runtime.choices["loss"]
    return ["standard"] if chosen == "standard" else ["standard", chosen]


def _loss_node(cfg: DictConfig, name: str) -> DictConfig:
    """The run's own loss with its options, or another one of conf/loss with its defaults."""
    if name == HydraConfig.get().runtime.choices["loss"]:
        return cfg.loss
    try:
        return compose(f"loss/{name}").loss
    except MissingConfigException as error:
        raise UserError(f"fit_batch.losses: there is no conf/loss/{name}.yaml") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what Lightning says of every trainer."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        try:
            yield
        finally:
            logger.setLevel(level)


def _process_gib() -> float:
    return _kib(Path("/proc/self/status"), "VmRSS") / 2**20


def _available_gib() -> float:
    """What the machine has free, and what this process has already."""
    return _kib(Path("/proc/meminfo"), "MemAvailable") / 2**20 + _process_gib()


def _kib(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(f"mode=fit_batch on a CPU needs Linux, which says what memory is free ({error})") from error
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _record(row: Row, standard: Row | None) -> dict[str, Any]:
    """One flat record: "batch_" is the largest micro-batch's, "sequence_" the longest sequence's; "times_standard" is
    how many times the tokens of the standard loss."""
    record: dict[str, Any] = {"loss": row.loss}
    for name in ("batch", "sequence"):
        trial: Trial | None = getattr(row, name)
        of_standard: Trial | None = None if standard is None else getattr(standard, name)
        size = None if trial is None else trial.batch_size if name == "batch" else trial.sequence
        record |= {
            f"{name}_size": size,
            f"{name}_peak_gib": None if trial is None else trial.peak_gib,
            f"{name}_tokens_per_sec": None if trial is None else trial.tokens_per_sec,
            f"{name}_times_standard": None if not trial or not of_standard else trial.tokens / of_standard.tokens,
        }
    return record | {"sequence_is_models_limit": row.sequence_is_models_limit, "error": row.error}


def _write(cfg: DictConfig, records: list[dict[str, Any]], block_size: int, limit: float | None) -> None:
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"block_size": block_size, "limit_gib": limit, "precision": cfg.precision, "losses": records}
    (folder / "fit_batch.json").write_text(json.dumps(whole, indent=2) + "\n")
    with (folder / "fit_batch.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def _table(records: list[dict[str, Any]], name: str, size: str, limit: float | None) -> Table:
    into = "" if limit is None else f" in {limit:.1f} GiB"
    table = Table(title=f"{size}{into}")
    for column in ("loss", "size", "x standard", "peak GiB", "tokens/s"):
        table.add_column(column, justify="left" if column == "loss" else "right")
    for record in records:
        forms = {"size": "d", "times_standard": ".2f", "peak_gib": ".2f", "tokens_per_sec": ",.0f"}
        cells = [(record[f"{name}_{key}"], form) for key, form in forms.items()]
        table.add_row(record["loss"], *("-" if value is None else format(value, form) for value, form in cells))
    return table
