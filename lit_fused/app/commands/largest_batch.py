"""``mode=fit_batch``: find the largest micro-batch and the longest sequence that fit, loss by loss, by training.

Each size is tried with real optimiser steps of the run's own trainer, on random tokens. The second step counts as well:
AdamW's state is allocated in the first. Sizes double until one does not fit, and are then narrowed down by what two
sizes took. Lightning's BatchSizeFinder knows neither sequences nor a limit, measures nothing, and writes a copy of the
model to the disk.

On a CPU, running out of memory would take the machine down: a size is only tried if the smaller ones predict that it
stays below ``fit_batch.memory_gib``.
"""

import csv
import json
import logging
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lit_fused.app.commands.size_search import largest
from lit_fused.app.commands.sweeps import leave_for_sweep
from lit_fused.app.commands.trial_bench import Bench, FitBatchOptions, Trial
from lit_fused.errors import UserError

MAX_BATCH_SIZE = 4096


@dataclass
class Row:
    """The largest sizes of one loss; None where nothing fits."""

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
            except Exception as error:  # a library's or a kernel's, in one loss: the others can still be measured
                row.error = f"{type(error).__name__}: {error}"
                traceback.print_exc()
                if isinstance(error, getattr(torch, "AcceleratorError", ())):
                    break  # the process cannot use the device any more
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


def _measure(bench: Bench, row: Row, block_size: int, say: Callable[[str], None]) -> None:
    """Find what fits with the bench's loss and enter it into the row."""
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
    """Return the run's own loss with its options, or another one of conf/loss with its defaults."""
    if name == HydraConfig.get().runtime.choices["loss"]:
        return cfg.loss
    try:
        return compose(f"loss/{name}").loss
    except MissingConfigException as error:
        raise UserError(f"fit_batch.losses: there is no conf/loss/{name}.yaml") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what Lightning logs about every trainer."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        try:
            yield
        finally:
            logger.setLevel(level)


def _record(row: Row, standard: Row | None) -> dict[str, Any]:
    """Return one flat record: "batch_..." of the largest micro-batch, "sequence_..." of the longest sequence.

    "..._times_standard" is the number of tokens relative to that of the standard loss.
    """
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
