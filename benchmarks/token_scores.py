"""Log-probabilities per token with gradients, side by side in one run: time, memory, and errors against float64.

    python benchmarks/token_scores.py --out docs/evidence/token_scores
    python benchmarks/token_scores.py --device cpu --shapes tiny

A policy's rollouts, 32k tokens and 152k entries, beside TRL's and verl's own. The largest row, of whole logits with
entropy, takes 93 GiB:

    pip install "trl>=1.16" liger-kernel && pip install --no-deps verl
    python benchmarks/token_scores.py --out docs/evidence/token_scores_rollouts \
        --shapes "rollouts, D=1024" "rollouts, D=2048" --providers token_scores "token_scores, entropy" trl \
        "trl, entropy" "verl, chunks, entropy" "verl, Triton, entropy" "liger, CuTe, entropy" \
        "compiled chunks, entropy" "logits, entropy"

The objective is a policy gradient: each token's log-probability times a number of its own, and with "entropy" also its
entropy times another, and with "selected" the mean of 64 entries' log-probabilities. Turns and times are those of
linear_cross_entropy.py. The products are the four of a head that recomputes its logits. verl's functions always compute
the entropy. Their files are loaded without verl's ``__init__``, which would need ray, tensordict and others.
"""

import argparse
import gc
import json
import random
import statistics
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from linear_cross_entropy import SHAPES, Bench, Loss, gradient, inputs, machine, relative_error, why_not
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lit_fused.ops import linear_cross_entropy, token_scores, token_scores_reference

Scores = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None, Tensor | None]]
Work = tuple[Callable[[], object], Callable[[], object]]  # forward and backward, and forward alone
OF_SHAPES = ["llama3_8b", "gemma2_2b", "qwen3_0_6b", "qwen3_1_7b", "rollouts, D=1024", "rollouts, D=2048"]
SELECTED = 64
LARGEST_ERROR = 0.1  # of a gradient: some twenty times what rounded logits have


def ours(parts: str, hidden: Tensor, weight: Tensor, targets: Tensor, selected: Tensor, **options: Any) -> Any:
    entries = selected if "selected" in parts else None
    scores = token_scores(hidden, weight, targets, selected=entries, entropy="entropy" in parts, **options)
    return scores.log_prob, scores.entropy, scores.selected


def loss_per_token(hidden: Tensor, weight: Tensor, targets: Tensor, selected: Tensor) -> Any:
    return -linear_cross_entropy(hidden, weight, targets, reduction="none", statistics=False)[0], None, None


def whole(parts: str, hidden: Tensor, weight: Tensor, targets: Tensor, selected: Tensor) -> Any:
    log_p = F.linear(hidden, weight).float().log_softmax(-1)
    log_prob = log_p.gather(-1, targets[:, None])[:, 0]
    return log_prob, -(log_p.exp() * log_p).sum(-1) if "entropy" in parts else None, None


def in_chunks(parts: str, hidden: Tensor, weight: Tensor, targets: Tensor, selected: Tensor) -> Any:
    """Chunks of rows under activation checkpointing, each compiled: how training libraries do it."""
    one = torch.compile(partial(whole, parts))
    found = [
        checkpoint(one, h, weight, t, None, use_reentrant=False)
        for h, t in zip(hidden.split(1024), targets.split(1024), strict=True)
    ]
    log_prob, entropy, _ = zip(*found, strict=True)
    return torch.cat(log_prob), torch.cat(entropy) if "entropy" in parts else None, None


def liger_cute(parts: str, hidden: Tensor, weight: Tensor, targets: Tensor, selected: Tensor) -> Any:
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import LigerFusedScaledCrossEntropySM90Function

    found: Any = LigerFusedScaledCrossEntropySM90Function.apply(
        hidden, weight, targets, 1.0, -100, 1, "entropy" in parts
    )
    return (-found[0], found[1], None) if "entropy" in parts else (-found, None, None)


def trl(parts: str, hidden: Tensor, weight: Tensor, targets: Tensor, selected: Tensor) -> Any:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    outputs = ("entropy",) if "entropy" in parts else ()
    found: Any = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32_768, None, 1.0, outputs)
    return found[0], found[1], None


def of_verl(name: str) -> Any:
    """Return a module of the installed verl, whose packages above it are empty but for their folders."""
    if "verl" not in sys.modules:
        spec = find_spec("verl")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("verl is not installed; pip install --no-deps verl")
        folder = Path(spec.submodule_search_locations[0])
        for package in ("verl", "verl.utils", "verl.utils.kernel", "verl.utils.experimental"):
            empty = sys.modules[package] = ModuleType(package)
            empty.__path__ = [str(folder.joinpath(*package.split(".")[1:]))]
    return import_module(f"verl.utils.{name}")


def verl_chunks(hidden: Tensor, weight: Tensor, targets: Tensor, selected: Tensor) -> Any:
    return *of_verl("experimental.torch_functional").FusedLinearForPPO()(hidden, weight, targets), None


def verl_triton(hidden: Tensor, weight: Tensor, targets: Tensor, selected: Tensor) -> Any:
    return *of_verl("kernel.linear_cross_entropy").linear_cross_entropy(hidden, weight, targets), None


PROVIDERS: dict[str, tuple[str, Scores]] = {
    "loss per token": ("log_prob", loss_per_token),
    "token_scores": ("log_prob", partial(ours, "log_prob")),
    "token_scores, entropy": ("log_prob entropy", partial(ours, "log_prob entropy")),
    "token_scores, entropy, 448 MiB": ("log_prob entropy", partial(ours, "log_prob entropy", logits_budget_mib=448)),
    "token_scores, invariant": ("log_prob", partial(ours, "log_prob", invariant=True)),
    "token_scores, entropy, invariant": ("log_prob entropy", partial(ours, "log_prob entropy", invariant=True)),
    "token_scores, entropy, 64 selected": ("log_prob entropy selected", partial(ours, "log_prob entropy selected")),
    "liger, CuTe": ("log_prob", partial(liger_cute, "log_prob")),
    "liger, CuTe, entropy": ("log_prob entropy", partial(liger_cute, "log_prob entropy")),
    "trl": ("log_prob", partial(trl, "log_prob")),
    "trl, entropy": ("log_prob entropy", partial(trl, "log_prob entropy")),
    "verl, chunks, entropy": ("log_prob entropy", verl_chunks),
    "verl, Triton, entropy": ("log_prob entropy", verl_triton),
    "logits": ("log_prob", partial(whole, "log_prob")),
    "logits, entropy": ("log_prob entropy", partial(whole, "log_prob entropy")),
    "compiled chunks": ("log_prob", partial(in_chunks, "log_prob")),
    "compiled chunks, entropy": ("log_prob entropy", partial(in_chunks, "log_prob entropy")),
}


def objective(scores: Scores, weights: Tensor, selected: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        log_prob, entropy, chosen = scores(hidden, weight, targets, selected)
        total = (log_prob * weights[0].to(log_prob)).sum()
        if entropy is not None:
            total = total + (entropy * weights[1].to(entropy)).sum()
        return total if chosen is None else total + (chosen.mean(-1) * weights[2].to(chosen)).sum()

    return loss


def truth(parts: str, bench: Bench, weights: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients in float64, summed over chunks of 1024 tokens."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (bench.hidden, bench.weight))

    def reference(hidden: Tensor, weight: Tensor, targets: Tensor, entries: Tensor) -> Any:
        scores = token_scores_reference(hidden, weight, targets, selected=entries)
        return scores.log_prob, *(getattr(scores, name) if name in parts else None for name in ("entropy", "selected"))

    for rows in torch.arange(len(hidden), device=hidden.device).split(1024):
        objective(reference, weights[:, rows], selected[rows])(hidden[rows], weight, bench.targets[rows]).backward()
    return gradient(hidden), gradient(weight)


def products(bench: Bench) -> Callable[[], None]:
    """Return the four products of a head that recomputes, in chunks of 4096 tokens."""
    hidden, weight = bench.hidden.detach(), bench.weight.detach()
    rows = min(4096, len(hidden))
    logits = torch.empty(rows, len(weight), dtype=hidden.dtype, device=hidden.device)
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def step() -> None:
        for h, d in zip(hidden.split(rows), d_hidden.split(rows), strict=True):
            chunk = logits[: len(h)]
            torch.mm(h, weight.T, out=chunk)
            torch.mm(h, weight.T, out=chunk)
            torch.mm(chunk, weight, out=d)
            d_weight.addmm_(chunk.T, h)

    logits.normal_()
    return step


def judge(
    bench: Bench, losses: dict[str, Loss], exact: Callable[[str], tuple[Tensor, Tensor]]
) -> tuple[list[dict[str, Any]], dict[str, Work]]:
    """Return a row for each loss with its errors and its memory, and the work to be timed of those that are right."""
    rows: list[dict[str, Any]] = []
    work: dict[str, Work] = {}
    for provider, loss in losses.items():
        row: dict[str, Any] = {"provider": provider}
        rows.append(row)
        try:
            d_hidden, d_weight = exact(provider)
            bench.step(loss)
            row["hidden_error"] = relative_error(gradient(bench.hidden), d_hidden)
            row["weight_error"] = relative_error(gradient(bench.weight), d_weight)
            if not max(row["hidden_error"], row["weight_error"]) <= LARGEST_ERROR:
                row["note"] = "wrong gradients"
                continue
            if bench.device.type == "cuda":
                bench.hidden.grad = bench.weight.grad = None
                row["extra_mib"] = bench._extra(partial(bench.step, loss))[0]
            work[provider] = partial(bench.step, loss), partial(bench.forward, loss)
        except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as problem:
            row["note"] = why_not(problem)
        bench.hidden.grad = bench.weight.grad = None
    return rows, work


def take_turns(bench: Bench, rows: list[dict[str, Any]], work: dict[str, Work], turns: int) -> None:
    """Time the work of the rows, and of the products alone in a row before them."""
    base = {"provider": "the four products alone"}
    rows.insert(0, base)
    step = products(bench)
    work[base["provider"]] = step, step
    order = [row for row in rows if row["provider"] in work]
    times: dict[str, tuple[list[float], list[float]]] = {row["provider"]: ([], []) for row in order}
    shuffle = random.Random(0).shuffle
    for _ in range(turns):
        shuffle(order)
        for row in order:
            for kind, of_kind in zip(work[row["provider"]], times[row["provider"]], strict=True):
                of_kind += bench.time(kind)
    for row in order:
        row["ms"], row["forward_ms"] = (statistics.median(t) for t in times[row["provider"]])
        row["tokens_per_sec"] = 1e3 * len(bench.targets) / row["ms"]
    del base["forward_ms"]


def measure(name: str, device: torch.device, providers: list[str], turns: int) -> list[dict[str, Any]]:
    bench = Bench(*inputs(SHAPES[name], device))
    generator = torch.Generator(device).manual_seed(1)
    weights = torch.randn(3, len(bench.targets), device=device, generator=generator)
    vocabulary = len(bench.weight)
    selected = torch.randint(vocabulary, (len(bench.targets), SELECTED), device=device, generator=generator)
    of_parts = cache(lambda parts: truth(parts, bench, weights, selected))
    losses: dict[str, Loss] = {provider: objective(PROVIDERS[provider][1], weights, selected) for provider in providers}
    rows, work = judge(bench, losses, lambda provider: of_parts(PROVIDERS[provider][0]))
    of_parts.cache_clear()
    gc.collect()
    take_turns(bench, rows, work, turns)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    def cell(row: dict[str, Any], key: str, form: str) -> str:
        return format(row[key], form) if key in row else ""

    columns = {"ms": ".2f", "tokens_per_sec": ",.0f", "forward_ms": ".2f", "extra_gib": ".2f"}
    columns |= {"hidden_error": ".1e", "weight_error": ".1e"}
    lines = [
        "| | ms | tokens/s | forward ms | extra GiB | dh error | dW error |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        if "extra_mib" in row:
            row = {**row, "extra_gib": row["extra_mib"] / 1024}
        cells = [cell(row, key, form) for key, form in columns.items()]
        lines.append(f"| {row['provider']} | {' | '.join(cells)} |" + (f" {row['note']}" if "note" in row else ""))
    return lines


def main(arguments: list[str] | None = None) -> dict[str, list[dict[str, Any]]]:
    return report(measure, list(PROVIDERS), OF_SHAPES, arguments)


def report(
    measured: Callable[[str, torch.device, list[str], int], list[dict[str, Any]]],
    providers: list[str],
    shapes: list[str],
    arguments: list[str] | None,
) -> dict[str, list[dict[str, Any]]]:
    """Measure the shapes that the command line names, print the tables, and write them where it says."""
    parser = argparse.ArgumentParser(description="Providers side by side.")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=shapes)
    parser.add_argument("--providers", nargs="+", choices=providers, default=providers)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="write NAME.json and NAME.tables.md")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    print(about := machine(device))
    found = {}
    for name in options.shapes:
        found[name] = measured(name, device, options.providers, options.turns)
        print(f"\n{name} (N, D, V) = {SHAPES[name]}", *table(found[name]), sep="\n", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if options.out:
        options.out.with_suffix(".json").write_text(json.dumps({"machine": about, "shapes": found}, indent=1))
        lines = [line for name, rows in found.items() for line in ("", f"**{name}** {SHAPES[name]}", "", *table(rows))]
        options.out.with_suffix(".tables.md").write_text("\n".join(lines) + "\n")
    return found


if __name__ == "__main__":
    main()
