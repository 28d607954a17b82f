"""``mode=fit_batch``: find the largest micro-batch and the longest sequence that fit, loss by loss, by training.

Each size is tried with real optimiser steps of the run's own trainer, on random tokens. Sizes double until one does not
fit; then the peaks of smaller ones predict the next. On a CPU, where running out of memory would take the machine down,
a size is only tried if it is predicted to stay below ``fit_batch.memory_gib``. Lightning's BatchSizeFinder knows no
sequences and no limit.
"""

import csv
import tempfile
import traceback
from bisect import bisect_right
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import torch
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Column, Table

from lit_fused.app.commands.trial_bench import Bench, FitBatchOptions, Trial
from lit_fused.app.config import check_one_device
from lit_fused.app.loggers import quiet_lightning
from lit_fused.app.reporting.run import leave
from lit_fused.errors import UserError
from lit_fused.losses import as_loss

MAX_BATCH_SIZE = 4096
_MEASURED = ("size", "peak_gib", "tokens_per_sec", "times_standard")  # the last: tokens relative to the standard loss
_COLUMNS = [f"{kind}_{key}" for kind in ("batch", "sequence") for key in _MEASURED]


def fit_batch(cfg: DictConfig) -> None:
    """Print the table, and write ``fit_batch.json`` and ``fit_batch.csv`` to the output folder."""
    options: FitBatchOptions = instantiate(cfg.fit_batch)
    block_size = cfg.data.get("block_size")
    if block_size is None:
        raise UserError(
            f"mode=fit_batch needs data.block_size, the length of a sequence, and {cfg.data._target_} has none; choose "
            "data=synthetic data.block_size=..., with the model's vocabulary: the tokens are random anyway"
        )
    check_one_device(cfg, "With strategy=ddp each device takes what one takes; mode=plan predicts fsdp2")
    chosen = options.losses or dict.fromkeys(["standard", HydraConfig.get().runtime.choices["loss"]])
    losses = {name: _loss_node(cfg, name) for name in chosen}
    console = Console()
    with quiet_lightning(), tempfile.TemporaryDirectory() as scratch:
        bench = Bench(cfg, options, scratch)
        records: list[dict[str, Any]] = []
        for name, node in losses.items():
            records.append({"loss": name, **dict.fromkeys(_COLUMNS), "sequence_is_models_limit": False, "error": None})
            try:
                bench.module.model.loss = as_loss(instantiate(node))
                _measure(bench, records[-1], block_size, lambda line: console.print(line, highlight=False))
            except UserError as error:
                records[-1]["error"] = str(error)
            except Exception as error:  # a library or a kernel of one loss raised it: others can be measured
                records[-1]["error"] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
                if isinstance(error, getattr(torch, "AcceleratorError", ())):
                    break  # the process cannot use the device any more
    _report(cfg, records, block_size, bench.limit_gib)


def _report(cfg: DictConfig, records: list[dict[str, Any]], block_size: int, limit: float | None) -> None:
    standard = next((record for record in records if record["loss"] == "standard"), {})
    for record, kind in product(records, ("batch", "sequence")):
        if record[f"{kind}_size"] and standard.get(f"{kind}_size"):
            record[f"{kind}_times_standard"] = record[f"{kind}_size"] / standard[f"{kind}_size"]
    whole = {"block_size": block_size, "limit_gib": limit, "precision": cfg.precision, "losses": records}
    names = {"memory/peak_allocated_gib": "batch_peak_gib", "throughput/tokens_per_sec": "batch_tokens_per_sec"}
    metrics = {name: records[-1][key] for name, key in names.items() if records[-1][key]}
    path = leave(cfg, whole, "measured", metrics)
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)
    console = Console()
    console.print(_table(records, "batch", f"Largest micro-batch of {block_size} tokens each", limit))
    console.print(_table(records, "sequence", "Longest sequence, one in a micro-batch", limit))
    for record in records:
        if record["sequence_is_models_limit"]:
            console.print(f"{record['loss']}: longer sequences may fit, but here the model's positions end")
        if record["error"] is not None:
            console.print(f"{record['loss']}: {record['error']}", highlight=False)
    console.print(f"written to {path} and .csv", soft_wrap=True)
    if not any(record["sequence_size"] for record in records):
        raise UserError("nothing fits: " + "; ".join(f"loss={record['loss']}: {record['error']}" for record in records))


def _measure(bench: Bench, record: dict[str, Any], block_size: int, say: Callable[[str], None]) -> None:
    found: dict[tuple[int, int], Trial] = {}

    @cache
    def tried(batch_size: int, sequence: int) -> float | None:
        trial = bench.run(batch_size, sequence)
        size = f"{record['loss']}: {batch_size} x {sequence}"
        if trial is None:
            say(f"{size} does not fit")
            return None
        found[batch_size, sequence] = trial
        say(f"{size} fits: {trial.peak_gib:.2f} GiB, {trial.tokens_per_sec:,.0f} tokens/s")
        return trial.peak_gib

    def enter(kind: str, size: int, batch_size: int, sequence: int) -> None:
        if size:
            values = size, *found[batch_size, sequence]
            record.update({f"{kind}_{key}": value for key, value in zip(_MEASURED, values, strict=False)})

    careful = bench.device.type == "cpu"
    limits: dict[str, Any] = {"fixed_gib": bench.fixed_gib, "limit_gib": bench.limit_gib, "careful": careful}
    batch_size = largest(lambda size: tried(size, block_size), 1, MAX_BATCH_SIZE, **limits)
    enter("batch", batch_size, batch_size, block_size)
    start = min(block_size if batch_size else max(block_size // 2, 2), bench.longest)
    limits["unit"] = lambda low: max(low // 32 // 64 * 64, 1)
    sequence = largest(lambda size: tried(1, size), start, bench.longest, **limits)
    enter("sequence", sequence, 1, sequence)
    record["sequence_is_models_limit"] = sequence == bench.longest
    if not sequence:
        record["error"] = f"not even 1 x {start} fits into {bench.limit_gib or 0:.2f} GiB"


def _loss_node(cfg: DictConfig, name: str) -> DictConfig:
    if name == HydraConfig.get().runtime.choices["loss"]:
        return cfg.loss
    try:
        return compose(f"loss/{name}").loss
    except MissingConfigException as error:
        raise UserError(f"fit_batch.losses: there is no conf/loss/{name}.yaml") from error


def _table(records: list[dict[str, Any]], name: str, size: str, limit: float | None) -> Table:
    into = "" if limit is None else f" in {limit:.1f} GiB"
    headings = (Column(heading, justify="right") for heading in ("size", "x standard", "peak GiB", "tokens/s"))
    table = Table("loss", *headings, title=f"{size}{into}")
    forms = {"size": "d", "times_standard": ".2f", "peak_gib": ".2f", "tokens_per_sec": ",.0f"}
    for record in records:
        cells = [(record[f"{name}_{key}"], form) for key, form in forms.items()]
        table.add_row(record["loss"], *("-" if value is None else format(value, form) for value, form in cells))
    return table


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
    """Return the largest size from ``start`` to ``most`` that fits; 0 if ``start`` does not.

    Args:
        fits: tries a size and returns its peak in GiB; None if it does not fit.
        fixed_gib: about what a step of size zero would take.
        limit_gib: the memory there is. The next trial is where the peaks of smaller sizes predict that it is reached.
        careful: do not even try a size whose peak is expected to be beyond the limit.
        unit: the accuracy of the answer near a size.
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
        size = min(2 * low, most) if high > most else (low + high) // 2
        if limit_gib is not None and (halved or high > most):  # a guess that did not help is not followed twice
            reached = bisect_right(range(high), limit_gib, lo=low + 1, key=lambda n: _expected(peaks, n)) - 1
            if reached < high - 1:
                size = min(max(reached, low + unit(low)), size if high > most else high - 1)
        size = min(max(size // unit(low) * unit(low), low + 1), high - 1)


def _expected(peaks: dict[int, float], size: int) -> float:
    """Predict the peak of a size by a line through the last two smaller ones, or by a parabola through the last three
    if that predicts more: attention without a fused kernel grows with the square of the sequence."""
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
