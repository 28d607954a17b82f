"""Try whether training with a filtered head is as good: a small model from scratch, every head, the same seeds.

    python benchmarks/filtered_training.py --text FOLDER_OF_SOURCES --minutes 8 --jobs 4 \
        --out docs/evidence/filtered_training
    python benchmarks/filtered_training.py --out docs/evidence/filtered_training  # tables and picture of the .json
    python benchmarks/filtered_training.py --text FOLDER --losses exact recompute --seeds 0 --steps 20 --device cpu \
        --vocabulary 2048 --hidden-size 64 --layers 1 --tokens 1024 --length 128 --out tiny

A Llama is trained in bf16-mixed with the project itself, by default on 8192 tokens a step (four groups of the filter):

    exact       loss=chunked
    filtered    loss=filtered: columns below filter_eps = 2^-12 are left out, and the tail correction stands for them
    cce         loss=cce with its own filter
    plain       filtered without its correction; groups that would drop more than the bound are exact here too

and, where ``--losses`` names them,

    bare        the filter with neither correction nor bound
    recompute   exact as well, but rounded otherwise: how far rounding alone leads apart

A seed decides the initial weights and the order of the data, so runs of one seed differ by their heads only, and are
compared as pairs. How far the exact runs of different seeds lie apart is what a difference has to be seen against.
Validation is by the exact head for all, on the same held-out tokens.

Runs go seed by seed, so that what a time limit leaves is a fair comparison, ``--jobs`` of them at once: a model of this
size does not fill a GPU. ``--out`` is written after every run, and finished runs are not repeated. Nothing waits for
the device between two validations. On a GPU torch is asked for deterministic kernels.

R blocks of T tokens, B of them a step, S steps.
"""

import argparse
import json
import logging
import math
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Trainer, seed_everything
from linear_cross_entropy import machine
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from lit_fused import FusedCausalLMModule, LinearCrossEntropyLoss, filtered
from lit_fused.app.reporting.page import PALETTE
from lit_fused.data import TextEncoding, TokenDataModule, load_records
from lit_fused.data.token_data_module import PreparedTokens
from lit_fused.data.tokens import Tokens
from lit_fused.heads import evaluation_mode
from lit_fused.losses import LossOutput
from lit_fused.losses.loss import Batch
from lit_fused.ops.backends import usable_backend
from lit_fused.training import cosine_with_warmup

FILTER_EPS = 2**-12
# The filter is compared, not when it pays: it filters every call.
FILTERED = {"impl": partial(filtered.linear_cross_entropy, filter_eps=FILTER_EPS)}
LOSSES: dict[str, dict[str, Any]] = {
    "exact": {"impl": "chunked"},
    "filtered": FILTERED,
    "cce": {"impl": "cce"},
    "plain": FILTERED,
    "bare": FILTERED,
    "recompute": {"impl": "chunked", "recompute": True},
}
DEFAULT_LOSSES = ["exact", "filtered", "cce", "plain"]
FILTER = "lit_fused.filtered.kept_columns"
STATISTICS = ("dropped_mass", "kept_columns", "exact_tokens")  # of LossOutput.stats: sums over the step's tokens
VALIDATED_AT = (0, 0.01, 0.025, 0.0625, 0.125, 0.25, 0.5, 0.75, 1)  # of the steps
VALIDATION_BATCHES = 32
LAST = 100  # steps whose mean is shown
SINGLE_STEPS = 50  # at the beginning of a stored curve; then means of several
CURVE_POINTS = 250


@dataclass(frozen=True)
class Settings:
    """Return what decides a run, but for its loss and its seed."""

    vocabulary: int
    hidden_size: int
    layers: int
    length: int
    tokens: int
    steps: int
    learning_rate: float
    train_tokens: int
    val_tokens: int
    filter_eps: float = FILTER_EPS


# --- one run --------------------------------------------------------------------------------------------------------


class Batches:
    """``steps`` batches of blocks that are on the device, in an order that the seed decides, anew in each epoch."""

    def __init__(self, blocks_RT: Tensor, rows: int, steps: int, seed: int) -> None:
        self.blocks_RT = blocks_RT
        generator = torch.Generator().manual_seed(seed)
        epochs = -(-steps * rows // len(blocks_RT))
        order = torch.cat([torch.randperm(len(blocks_RT), generator=generator) for _ in range(epochs)])
        self.order_SB = order[: steps * rows].view(steps, rows).to(blocks_RT.device)

    def __len__(self) -> int:
        return len(self.order_SB)

    def __iter__(self) -> Iterator[Batch]:
        for rows in self.order_SB:
            ids = self.blocks_RT[rows].long()
            yield {"input_ids": ids, "labels": ids}


def blocks(split: Tokens, length: int, device: str) -> Tensor:
    """(R, T) int32, all whole blocks of a split."""
    count = split.num_tokens // length
    tokens, _ = split.read(0, count * length)
    return torch.from_numpy(tokens).to(torch.int32).view(count, length).to(device)


class Recorded(FusedCausalLMModule):
    """Keeps the loss and the statistics of every step on the device, and validates with the exact head."""

    curves: Tensor

    def __init__(self, *args: Any, steps: int, validation: list[Batch], **options: Any) -> None:
        super().__init__(*args, **options)
        self.validation = validation
        self.validate_at = validation_steps(steps)
        self.exact = LinearCrossEntropyLoss()
        self.validation_losses: list[Tensor] = []
        self.stops: list[tuple[int, float, float]] = []  # (step, time at which its validation began, and ended)
        self.register_buffer("curves", torch.full((1 + len(STATISTICS), steps), torch.nan), persistent=False)

    def compute_loss(self, batch: Batch) -> LossOutput:
        self.output = super().compute_loss(batch)
        return self.output

    def on_train_start(self) -> None:
        super().on_train_start()
        self.validate(0)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        output, missing = self.output, self.curves.new_full((), torch.nan)
        # here, and not where the loss is computed: the number of the step is known
        sums = [output.loss_sum.detach(), *(output.stats.get(name, missing) for name in STATISTICS)]
        self.curves[:, batch_idx] = torch.stack([value.float() for value in sums]) / output.num_tokens
        del self.output
        if batch_idx + 1 in self.validate_at:
            self.validate(batch_idx + 1)

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """By torch: Lightning refuses to clip for a fused optimiser, which could unscale float16 gradients itself."""
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    @torch.no_grad()
    def validate(self, step: int) -> None:
        begin = self.now()
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        with evaluation_mode(self.backbone), self.trainer.precision_plugin.forward_context():
            for batch in self.validation:
                output = self.exact.compute(self.model, batch)
                total += torch.stack([output.loss_sum.double(), output.num_tokens.double()])
        self.validation_losses.append(total[0] / total[1])
        self.stops.append((step, begin, self.now()))

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @property
    def ms_per_step(self) -> float:
        """From the second validation on, without the validations: kernels have been compiled and tuned by then."""
        seconds = sum(following[1] - stop[2] for stop, following in pairwise(self.stops[1:]))
        return 1000 * seconds / (self.stops[-1][0] - self.stops[1][0])


@contextmanager
def without_tail(bounded: bool) -> Iterator[list[None]]:
    """The filter without its correction: the tail distribution is zero; and without its bound, unless ``bounded``.
    Yields one entry for each call."""
    module = import_module(FILTER)
    tail_distribution = module.tail_distribution
    calls: list[None] = []

    def zeros(*args: Any, **options: Any) -> Tensor:
        calls.append(None)
        return torch.zeros_like(tail_distribution(*args, **options))

    bounds = {} if bounded else dict.fromkeys(("MAX_DROPPED", "MAX_ROW_DROPPED"), 2)  # more than there is
    with patch.multiple(module, tail_distribution=zeros, **bounds):
        yield calls


def train(loss: str, seed: int, settings: Settings, data: PreparedTokens, device: str) -> dict[str, Any]:
    """One run, from the initial weights on. What it returns is a run of the .json."""
    begin = time.perf_counter()
    head = LinearCrossEntropyLoss(**LOSSES[loss])
    if usable_backend(head.backend, torch.device(device)) is not head.backend:
        raise RuntimeError(f"loss={loss} would be replaced by another one on this device")
    seed_everything(seed, verbose=False)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    rows = settings.tokens // settings.length
    val_RT = blocks(data.val, settings.length, device)[: VALIDATION_BATCHES * rows].long()
    module = Recorded(
        AutoModelForCausalLM.from_config(
            LlamaConfig(
                vocab_size=settings.vocabulary,
                hidden_size=settings.hidden_size,
                intermediate_size=settings.hidden_size * 8 // 3 // 64 * 64,
                num_hidden_layers=settings.layers,
                num_attention_heads=settings.hidden_size // 64,
                num_key_value_heads=settings.hidden_size // 64,
                max_position_embeddings=settings.length,
                tie_word_embeddings=True,
            )
        ),
        head,
        partial(
            torch.optim.AdamW,
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=device == "cuda",
        ),
        partial(cosine_with_warmup, warmup_fraction=0.05),
        steps=settings.steps,
        validation=[{"input_ids": ids, "labels": ids} for ids in val_RT.split(rows)],
    )
    trainer = Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed",
        max_epochs=1,
        limit_val_batches=0,
        deterministic="warn" if device == "cuda" else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = Batches(blocks(data.train, settings.length, device), rows, settings.steps, seed)
    ablated = loss in ("plain", "bare")
    with without_tail(bounded=loss == "plain") if ablated else nullcontext() as calls:
        trainer.fit(module, batches)
    if ablated and not calls:
        raise RuntimeError(f"{FILTER}.tail_distribution was never called: the correction was not switched off")

    curves: dict[str, Tensor] = dict(zip(("train", *STATISTICS), module.curves.cpu(), strict=True))
    measured = [name for name in STATISTICS if not curves[name].isnan().any()]
    return {
        "loss": loss,
        "seed": seed,
        "validation": [round(value.item(), 5) for value in module.validation_losses],
        f"train_last_{LAST}": round(curves["train"][-LAST:].mean().item(), 5),
        "ms_per_step": round(module.ms_per_step, 2),
        "seconds": round(time.perf_counter() - begin, 1),
        "train": thinned(curves["train"]),
        "statistics": {
            name: {
                "mean": curves[name].mean().item(),
                f"last_{LAST}": curves[name][-LAST:].mean().item(),
                "curve": thinned(curves[name]),
            }
            for name in measured
        },
    }


# --- curves ---------------------------------------------------------------------------------------------------------


def validation_steps(steps: int) -> list[int]:
    """Numbers of updates after which the weights are validated."""
    return sorted({round(share * steps) for share in VALIDATED_AT})


def curve_edges(steps: int) -> list[int]:
    """Return the intervals of steps whose means are stored: single steps first."""
    width = max(1, -(-(steps - SINGLE_STEPS) // CURVE_POINTS))
    return [*range(min(SINGLE_STEPS, steps)), *range(SINGLE_STEPS, steps, width), steps]


def curve_steps(steps: int) -> list[float]:
    """The middle of each of these intervals; the first step is 1."""
    edges = curve_edges(steps)
    return [(start + 1 + stop) / 2 for start, stop in pairwise(edges)]


def thinned(values: Tensor) -> list[float]:
    edges = curve_edges(len(values))
    means = [values[start:stop].mean().item() for start, stop in pairwise(edges)]
    return [float(f"{mean:.5g}") for mean in means]


# --- all runs -------------------------------------------------------------------------------------------------------


def quiet() -> None:
    """In a process of its own: nothing of what Lightning and torch say twelve times."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"runs": []}


def save(record: dict[str, Any], path: Path) -> None:
    """Whole or not at all: a time limit may end this process at any moment."""
    partial_path = path.with_suffix(".partial")
    partial_path.write_text(json.dumps(record))
    partial_path.replace(path)


def run_all(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Do what is missing in the .json at ``path``, and keep it up to date."""
    begin = time.monotonic()
    source = load_records(options.text, max_bytes=options.max_bytes)
    data = TokenDataModule(source, TextEncoding(), vocab_size=options.vocabulary).prepared
    print(f"{data.report}, vocabulary {data.train.vocab_size}, {time.monotonic() - begin:.0f} s", flush=True)
    settings = Settings(
        vocabulary=options.vocabulary,
        hidden_size=options.hidden_size,
        layers=options.layers,
        length=options.length,
        tokens=options.tokens,
        steps=options.steps,
        learning_rate=options.learning_rate,
        train_tokens=data.train.num_tokens,
        val_tokens=data.val.num_tokens,
    )
    record = load(path)
    former = record.setdefault("settings", asdict(settings))
    if former != asdict(settings):
        changed = [name for name, value in asdict(settings).items() if former.get(name) != value]
        raise SystemExit(f"the runs of {path} had another {', '.join(changed)}; delete it, or choose another --out")
    record |= {"jobs": options.jobs, "machine": machine(torch.device(options.device)), "failed": {}}
    done = {(run["loss"], run["seed"]) for run in record["runs"]}
    pending = [(loss, seed) for seed in options.seeds for loss in options.losses if (loss, seed) not in done]
    running: dict[Future[dict[str, Any]], tuple[str, int]] = {}

    def fits(loss: str) -> bool:
        """Return whether a run would end within the limit, judged by those that have ended."""
        taken = [r["seconds"] for r in record["runs"] if r["loss"] == loss] or [r["seconds"] for r in record["runs"]]
        return time.monotonic() - begin + max(taken, default=0) <= 60 * options.minutes

    with (
        ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"), initializer=quiet)
        if options.jobs > 1
        else ThreadPoolExecutor(1)
    ) as pool:
        while running or (pending and fits(pending[0][0])):
            while pending and len(running) < options.jobs and fits(pending[0][0]):
                loss, seed = pending.pop(0)
                future = pool.submit(train, loss, seed, settings, data, options.device)
                running[future] = loss, seed
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                loss, seed = running.pop(future)
                error = future.exception()
                if error is not None:
                    record["failed"][f"{loss}, seed {seed}"] = f"{type(error).__name__}: {error}".splitlines()[0]
                    print(f"{loss}, seed {seed} failed: {type(error).__name__}: {error}", flush=True)
                else:
                    run = future.result()
                    record["runs"].append(run)
                    means = {name: round(curve["mean"], 4) for name, curve in run["statistics"].items()}
                    print(
                        f"{loss}, seed {seed}: {run['seconds']:.0f} s, {run['ms_per_step']} ms per step, validation "
                        f"{run['validation']}, {means}",
                        flush=True,
                    )
                save(record, path)
    record["not_run"] = [f"{loss}, seed {seed}" for loss, seed in pending]
    save(record, path)
    return record


# --- reports --------------------------------------------------------------------------------------------------------


def by_loss(record: dict[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    """The runs of each loss by their seeds, in the order of ``LOSSES``."""
    found = {loss: {r["seed"]: r for r in record["runs"] if r["loss"] == loss} for loss in LOSSES}
    return {loss: dict(sorted(runs.items())) for loss, runs in found.items() if runs}


def spread(values: Sequence[float]) -> float:
    """The standard deviation over seeds; not a number for a single one."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def shown(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4f}"


def differences(
    runs: dict[int, dict[str, Any]], exact: dict[int, dict[str, Any]], curve: str
) -> dict[int, list[float]]:
    """To the exact run of the same seed, point by point."""
    return {
        seed: [mine - its for mine, its in zip(run[curve], exact[seed][curve], strict=True)]
        for seed, run in runs.items()
        if seed in exact
    }


def tables(record: dict[str, Any]) -> list[str]:
    """Markdown: every run; every loss over its seeds; its differences to exact; these from the first step on."""
    settings, losses = record["settings"], by_loss(record)
    steps = validation_steps(settings["steps"])
    exact = losses.get("exact", {})
    lines = [
        f"Llama D={settings['hidden_size']} V={settings['vocabulary']} {settings['layers']} layers, "
        f"{settings['steps']} steps of {settings['tokens']} tokens, {record.get('jobs')} runs at once; "
        + ", ".join(f"{name} {value}" for name, value in record.get("machine", {}).items()),
        "",
        f"Statistics of the filter: mean of all steps (of the last {LAST}).",
        "",
        f"| loss | seed | validation loss | train loss, last {LAST} | ms per step "
        "| dropped mass | kept columns | exact tokens |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for loss, runs in losses.items():
        for seed, run in runs.items():
            cells = [
                f"{s['mean']:.4f} ({s[f'last_{LAST}']:.4f})" if (s := run["statistics"].get(name)) else ""
                for name in STATISTICS
            ]
            lines.append(
                f"| {loss} | {seed} | {run['validation'][-1]:.4f} | {run[f'train_last_{LAST}']:.4f} "
                f"| {run['ms_per_step']:.1f} | {' | '.join(cells)} |"
            )
    lines += [f"| {name} | | {why} | | | | | |" for name, why in record.get("failed", {}).items()]
    lines += [f"| {name} | | not run yet | | | | | |" for name in record.get("not_run", [])]

    noise = spread([run["validation"][-1] for run in exact.values()])
    lines += [
        "",
        "Final validation loss over seeds; differences are to exact with the same seed, and within exact's noise if "
        "their mean is at most exact's standard deviation over seeds.",
        "",
        "| loss | mean | standard deviation | difference | of each seed | standard deviation | within exact's noise |",
        "|---|---:|---:|---:|---|---:|---|",
    ]
    for loss, runs in losses.items():
        final = [run["validation"][-1] for run in runs.values()]
        row = f"| {loss} | {statistics.mean(final):.4f} | {shown(spread(final))} "
        paired = [values[-1] for values in differences(runs, exact, "validation").values()]
        if loss == "exact" or not paired:
            lines.append(row + "| | | | |")
            continue
        mean = statistics.mean(paired)
        each = ", ".join(f"{value:+.4f}" for value in paired)
        within = "" if math.isnan(noise) else "yes" if abs(mean) <= noise else "no"
        lines.append(f"{row}| {mean:+.4f} | {each} | {shown(spread(paired))} | {within} |")

    lines += [
        "",
        "Validation loss after so many steps: exact's mean and standard deviation over seeds, and the others' mean "
        "difference to exact.",
        "",
        f"| loss | {' | '.join(map(str, steps))} |",
        "|---|" + "---:|" * len(steps),
    ]
    for loss, runs in losses.items():
        if loss == "exact":
            points = zip(*(run["validation"] for run in runs.values()), strict=True)
            cells = [f"{statistics.mean(p):.4f} ± {shown(spread(p))}".removesuffix(" ± ") for p in points]
        else:
            points = zip(*differences(runs, exact, "validation").values(), strict=True)
            cells = [f"{statistics.mean(p):+.4f}" for p in points]
        lines.append(f"| {loss} | {' | '.join(cells)} |")
    return lines


def smoothed(x: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Means over twentieths of a decade, as many as a logarithmic axis shows."""
    buckets: dict[int, list[tuple[float, float]]] = {}
    for point in zip(x, values, strict=True):
        buckets.setdefault(int(20 * math.log10(point[0])), []).append(point)
    means = [[statistics.mean(coordinates) for coordinates in zip(*points, strict=True)] for points in buckets.values()]
    return [mean[0] for mean in means], [mean[1] for mean in means]


def plot(record: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = record["settings"]["steps"]
    trained, validated = curve_steps(steps), [updates + 1.0 for updates in validation_steps(steps)]
    losses = by_loss(record)
    exact = losses.get("exact", {})
    colors = dict(zip(LOSSES, PALETTE, strict=False))
    styles = dict(zip(LOSSES, ["-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 3))], strict=True))

    def over_seeds(axis: Any, x: list[float], curves: Sequence[Sequence[float]], **style: Any) -> None:
        points = list(zip(*curves, strict=True))
        axis.plot(x, [statistics.mean(p) for p in points], **style)
        axis.fill_between(x, list(map(min, points)), list(map(max, points)), color=style["color"], alpha=0.12, lw=0)

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for loss, runs in losses.items():
        style = {"color": colors[loss], "linestyle": styles[loss]}
        training = [smoothed(trained, run["train"]) for run in runs.values()]
        over_seeds(left, training[0][0], [curve for _, curve in training], linewidth=1.2, **style)
        values = [r["validation"] for r in runs.values()]
        label = f"{loss}, seeds {', '.join(map(str, runs))}"
        left.plot(validated, [statistics.mean(p) for p in zip(*values, strict=True)], "o", color=colors[loss], ms=3)
        left.plot([], [], label=label, **style)
        paired = differences(runs, exact, "validation")
        if loss == "exact" or not paired:
            continue
        training = [smoothed(trained, curve) for curve in differences(runs, exact, "train").values()]
        middle = [statistics.mean(p) for p in zip(*(curve for _, curve in training), strict=True)]
        right.plot(training[0][0], middle, linewidth=1, alpha=0.4, **style)
        over_seeds(right, validated, list(paired.values()), marker="o", markersize=3, label=label, **style)
    if len(exact) > 1:
        deviations = [spread(p) for p in zip(*(r["validation"] for r in exact.values()), strict=True)]
        band = {"color": "grey", "alpha": 0.25, "lw": 0, "label": "exact: ± standard deviation over seeds"}
        right.fill_between(validated, [-d for d in deviations], deviations, **band)
    right.axhline(0, color="black", linewidth=0.8, label="exact with the same seed")
    left.set(title="training loss (lines) and validation loss (dots)", ylabel="nats per token")
    right.set(title="less exact with the same seed: validation (dots), training (faint)")
    right.set(ylabel="nats per token; linear within ±0.01, logarithmic beyond")
    right.set_yscale("symlog", linthresh=0.01, linscale=2)
    limit = max(0.011, *map(abs, right.get_ylim()))
    ticks = [tick for tick in (0.0025, 0.005, 0.01, 0.03, 0.1, 0.3, 1, 3) if tick <= limit]
    right.set(ylim=(-limit, limit))
    right.set_yticks([*(-tick for tick in ticks), 0, *ticks], minor=False)
    right.set_yticks([], minor=True)
    right.yaxis.set_major_formatter("{x:+g}")
    for axis in (left, right):
        axis.set(xscale="log", xlabel="step (the first is 1); lines: mean of seeds, bands: their range")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--text", type=Path, help="a folder of .py, .md and .txt files; without it nothing is run")
    parser.add_argument("--out", type=Path, required=True, help="writes .json, .tables.md and .png")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=DEFAULT_LOSSES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=60.0, help="no run begins that would not end within them")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, each in a process of its own")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=8192, help="per step")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=65_536)
    parser.add_argument("--hidden-size", type=int, default=512, help="a multiple of 64, the size of an attention head")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--max-bytes", type=int, default=120_000_000, help="of the text")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args(arguments)

    path = options.out.with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    record = load(path) if options.text is None else run_all(options, path)
    if not record["runs"]:
        raise SystemExit(f"there are no finished runs in {path}; --text FOLDER makes them")
    lines = tables(record)
    print(*lines, sep="\n")
    options.out.with_suffix(".tables.md").write_text("\n".join(lines) + "\n")
    plot(record, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
