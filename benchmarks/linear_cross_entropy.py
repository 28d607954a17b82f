"""Every way to a linear cross-entropy side by side in one run: time, memory, and the error that they are judged by.

    python benchmarks/linear_cross_entropy.py --out docs/evidence/head
    python benchmarks/linear_cross_entropy.py --shapes small --providers chunked cce standard
    python benchmarks/linear_cross_entropy.py --head head.pt          # hidden states of a trained model: train_head.py
    python benchmarks/linear_cross_entropy.py --tail           # inputs whose rows have no few likely entries
    python benchmarks/linear_cross_entropy.py --shapes gpt2_odd --graphs   # the device alone: the host launches nothing
    python benchmarks/linear_cross_entropy.py --device cpu --shapes tiny --providers chunked standard

Providers take turns in a new order each time. A GPU at its power limit lowers its clocks within tenths of a second, and
a provider must not profit from the one before: in a turn it first runs for as long as it is then measured. A time is
the median of all steps of all turns. Gradients are judged in float64 first: a provider whose error is beyond 50 times
that of the standard head is not timed. Memory is what forward and backward take beyond their inputs, gradients
included.

N tokens, D hidden, V vocabulary; inputs are bfloat16.
"""

import argparse
import gc
import json
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lit_fused
from lit_fused.heads.quantised import loaded_classes
from lit_fused.ops import linear_cross_entropy, linear_cross_entropy_reference
from lit_fused.ops.label_checks import IGNORE_INDEX

SHAPES = {
    "gemma2_2b": (8192, 2304, 256_000),
    "qwen3_1_7b": (4096, 2048, 151_936),
    "llama3_8b": (8192, 4096, 128_256),
    "qwen3_0_6b": (16384, 1024, 151_936),
    "llama3_8b, half the tokens": (4096, 4096, 128_256),
    "gpt_oss": (8192, 2880, 201_088),
    "small": (8192, 768, 65_536),
    "gpt2_odd": (8192, 768, 50_257),  # vocabularies that are no multiple of 8
    "qwen2_odd": (6000, 1536, 151_669),
    "xlmr_odd": (8192, 1024, 250_002),
    "llama3_odd": (4096, 4096, 128_259),
    "bert_odd": (16384, 1024, 30_522),
    "million, D=64": (8192, 64, 1_000_448),
    "million, D=128": (8192, 128, 1_000_000),
    "ten million": (4096, 128, 10_000_000),
    "rollouts, D=1024": (32768, 1024, 151_936),
    "rollouts, D=2048": (32768, 2048, 151_936),
    "tiny": (512, 64, 2048),
}
DEFAULT_SHAPES = [name for name in SHAPES if name != "tiny" and "rollouts" not in name]
WRONG = 50  # times the standard's error
MIB = 2**20
SPARE = 8 * MIB  # for what is of the size of N
TURN_SECONDS = 0.15

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def standard(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction=reduction)


def mean_outside(losses: Loss) -> Loss:
    """A head of which the caller averages the losses of the tokens, with reduction="none"."""
    return lambda hidden, weight, targets: losses(hidden, weight, targets).sum() / (targets != IGNORE_INDEX).sum()


def chunked(**options) -> Loss:
    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets, **{"statistics": False, **options})[0]

    return loss


def filtered(**options) -> Loss:
    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return lit_fused.filtered.linear_cross_entropy(hidden, weight, targets, statistics=False, **options)[0]

    return loss


def chunked_within(extra_bytes: Callable[[int, int, int], float]) -> Loss:
    """Our head with the budget that fills ``extra_bytes(N, D, V)``, in which the gradients count as well."""

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        (tokens, hidden_size), vocabulary = hidden.shape, len(weight)
        gradients = 2 * hidden_size * (tokens + vocabulary)
        budget = (extra_bytes(tokens, hidden_size, vocabulary) - gradients - SPARE) / MIB
        return linear_cross_entropy(hidden, weight, targets, statistics=False, logits_budget_mib=max(budget, 1))[0]

    return loss


def lean(tokens: int, hidden_size: int, vocabulary: int) -> float:
    """512 MiB and the gradient of the weight."""
    return 512 * MIB + 2 * hidden_size * vocabulary


def fast(tokens: int, hidden_size: int, vocabulary: int) -> float:
    """Half of what torch.compile takes for the standard loss: the logits once, and the gradients."""
    return (2 * tokens * vocabulary + 2 * hidden_size * (tokens + vocabulary)) / 2


def cce(**options) -> Loss:
    from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

    return lambda hidden, weight, targets: cut_cross_entropy(hidden, weight, targets, **options)


def liger(**options) -> Loss:
    from liger_kernel.transformers import functional

    fused: Callable[..., Any] = vars(functional)["liger_fused_linear_cross_entropy"]
    return lambda hidden, weight, targets: fused(hidden, weight, targets, **options)


def quack() -> Loss:
    return import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy


def liger_cute() -> Loss:
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90

    return liger_fused_linear_cross_entropy_sm90


def trl() -> Loss:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        found: Any = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32_768, None, 1.0, ())
        return -found[0].mean()

    return loss


def torch_native(**options) -> Loss:
    if "linear_cross_entropy" not in vars(F):
        raise ImportError("torch.nn.functional.linear_cross_entropy needs torch 2.13")
    native: Callable[..., Any] = vars(F)["linear_cross_entropy"]
    return lambda hidden, weight, targets: native(hidden, weight, targets, **options)


PROVIDERS: dict[str, Callable[[], Loss]] = {
    "standard": lambda: standard,
    "torch_compile": lambda: torch.compile(standard),
    "torch_compile, none": lambda: mean_outside(torch.compile(partial(standard, reduction="none"))),
    "cce": cce,
    "cce, no filter": lambda: cce(filter_eps=None),
    "liger": liger,
    "liger, CuTe": liger_cute,
    "quack": quack,
    "trl": trl,
    "torch_native": torch_native,
    "chunked": chunked,
    "chunked, none": lambda: mean_outside(chunked(reduction="none")),
    "chunked, lean": lambda: chunked_within(lean),
    "chunked, fast": lambda: chunked_within(fast),
    "chunked, a hundredth": lambda: chunked(logits_budget_mib=torch.cuda.mem_get_info()[1] / MIB / 100),
    "chunked, statistics": lambda: chunked(statistics=True),
    "chunked, float32 sums": lambda: chunked(float32_accumulation=True),
    "chunked, recompute": lambda: chunked(recompute=True),
    "filtered": filtered,
    "filtered, one block": lambda: filtered(logits_budget_mib=1600),
}


@dataclass
class Row:
    """Has what was measured of one provider at one shape; absent where it was not, and then ``note`` says why."""

    provider: str
    ms: float | None = None
    forward_ms: float | None = None
    extra_mib: float | None = None
    held_mib: float | None = None
    forward_extra_mib: float | None = None
    hidden_error: float | None = None
    weight_error: float | None = None
    note: str = ""
    times: list[float] = field(default_factory=list)
    forward_times: list[float] = field(default_factory=list)


# --- inputs and truth -----------------------------------------------------------------------------------------------


def inputs(shape: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and targets with the softmax of a trained model: at V=65536 a loss of 2.9 nats, an entropy
    of 2.3, 70 entries of a row above 2^-12 and 9 % of the mass below (a model trained for minutes: 2.3, 2.2, 100, 8 %).

    Entries are sorted by frequency, as tokenizers sort theirs, and follow Zipf's law, as targets do: one direction of
    the hidden states carries each entry's log-frequency. The rest of a logit is normal with deviation 1.5. On top,
    five candidates of each token, of which the target is one, are raised until each competes with the sum of all.
    """
    tokens, hidden_size, vocabulary = shape
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator)

    log_frequency = -torch.log(torch.arange(1, vocabulary + 1, device=device) + 2.7)
    weight = normal(vocabulary, hidden_size) / hidden_size**0.5
    weight[:, 0] = log_frequency / 8
    hidden = 1.5 * normal(tokens, hidden_size)
    hidden[:, 0] = 8
    level = torch.logsumexp(log_frequency, 0) + 1.5**2 / 2  # the log-sum-exp without candidates
    frequency = log_frequency.double().cpu().softmax(0).cumsum(0).to(device)  # on a GPU, sums differ from run to run
    targets = torch.empty(0)
    for _ in range(5):
        uniform = torch.rand(tokens, device=device, generator=generator, dtype=torch.float64)
        targets = torch.searchsorted(frequency, uniform).clamp(max=vocabulary - 1)
        raised = level - 0.5 - log_frequency[targets, None] + normal(tokens, 1)
        hidden[:, 1:] += (raised * weight[targets])[:, 1:]
    return hidden.bfloat16(), weight.bfloat16(), targets


def tail_inputs(shape: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The same with independent normal logits of deviation 4, in no order, and targets drawn from the softmax: at
    V=65536 an entropy of 4.5 nats, 290 entries of a row above 2^-12, and 11 % of the mass below.
    """
    tokens, hidden_size, vocabulary = shape
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(vocabulary, hidden_size, device=device, generator=generator).bfloat16() / hidden_size**0.5
    hidden = (4 * torch.randn(tokens, hidden_size, device=device, generator=generator)).bfloat16()
    targets = []
    for rows in hidden.split(rows_of_slice(weight)):
        noise = -torch.empty(len(rows), vocabulary, device=device).exponential_(generator=generator).log()
        targets.append((F.linear(rows, weight) + noise).argmax(1))
    return hidden, weight, torch.cat(targets)


def truth(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients in float64, summed over chunks of at most 1024 tokens."""
    exact_hidden, exact_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    count = (targets != IGNORE_INDEX).sum()
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for rows in torch.arange(len(targets), device=hidden.device).split(rows_of_slice(weight)):
        loss, _ = linear_cross_entropy_reference(exact_hidden[rows], exact_weight, targets[rows], reduction="sum")
        (loss / count).backward()
        total += loss.detach()
    return total / count, gradient(exact_hidden), gradient(exact_weight)


def rows_of_slice(weight: Tensor) -> int:
    """The tokens whose logits fit in 4 GiB of float64; at most 1024."""
    return min(1024, max(2**29 // len(weight), 1))


def gradient(leaf: Tensor) -> Tensor:
    if leaf.grad is None:
        raise ValueError("no gradient has reached an input")
    return leaf.grad


def relative_error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


# --- measurement ----------------------------------------------------------------------------------------------------


class Bench:
    """The providers at one shape."""

    def __init__(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
        self.hidden, self.weight = hidden.requires_grad_(), weight.requires_grad_()
        self.targets, self.device = targets, hidden.device

    def step(self, loss: Loss) -> Tensor:
        self.hidden.grad = self.weight.grad = None
        value = loss(self.hidden, self.weight, self.targets)
        value.backward()
        return value

    def forward(self, loss: Loss) -> None:
        with torch.no_grad():
            loss(self.hidden, self.weight, self.targets)

    def judge(self, row: Row, loss: Loss, exact: tuple[Tensor, Tensor, Tensor]) -> tuple[float, float]:
        """The errors of both gradients; a wrong loss is noted."""
        value = self.step(loss)
        row.hidden_error = relative_error(gradient(self.hidden), exact[1])
        row.weight_error = relative_error(gradient(self.weight), exact[2])
        if not abs(value.double() - exact[0]) < 1e-2 * exact[0]:
            row.note = f"loss {value.item():.4f}, expected {exact[0].item():.4f}"
        return row.hidden_error, row.weight_error

    def errors_in_slices(self, exact: tuple[Tensor, Tensor, Tensor]) -> tuple[float, float]:
        """The errors of the standard head's gradients, whose logits need not fit as a whole."""
        self.hidden.grad = self.weight.grad = None
        count = (self.targets != IGNORE_INDEX).sum()
        for rows in torch.arange(len(self.targets), device=self.device).split(rows_of_slice(self.weight)):
            targets = self.targets[rows]
            if (learned := (targets != IGNORE_INDEX).sum()) > 0:
                (standard(self.hidden[rows], self.weight, targets) * (learned / count)).backward()
        found = gradient(self.hidden), gradient(self.weight)
        self.hidden.grad = self.weight.grad = None
        return relative_error(found[0], exact[1]), relative_error(found[1], exact[2])

    def memory(self, row: Row, loss: Loss) -> None:
        if self.device.type != "cuda":
            return
        self.hidden.grad = self.weight.grad = None
        row.forward_extra_mib = self._extra(lambda: self.forward(loss))[0]
        row.extra_mib = self._extra(lambda: self.step(loss))[0]
        self.hidden.grad = self.weight.grad = None
        _, row.held_mib = self._extra(lambda: loss(self.hidden, self.weight, self.targets))
        self.hidden.grad = self.weight.grad = None

    def _extra(self, work: Callable[[], object]) -> tuple[float, float]:
        """(peak, held at the end) in MiB, beyond what was allocated before."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = work()
        torch.cuda.synchronize()
        peak, held = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
        del result
        return peak / MIB, held / MIB

    def time(self, work: Callable[[], object]) -> list[float]:
        """Milliseconds of each step of one turn, after a first half of the turn that is not counted."""
        work()
        repeats = max(3, round(TURN_SECONDS / (self._times(work, 2)[-1] / 1e3)))
        return self._times(work, 2 * repeats)[repeats:]

    def _times(self, work: Callable[[], object], repeats: int) -> list[float]:
        if self.device.type != "cuda":
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                work()
                times.append(1e3 * (time.perf_counter() - start))
            return times
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in events:
            start.record()
            work()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]


def replayed(work: Callable[[], object], pool: Any) -> Callable[[], None]:
    """The same work as a CUDA graph, in memory that all graphs share: the device alone, as in a training whose host is
    ahead of it."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        work()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph.replay


def floor(hidden: Tensor, weight: Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """The three products of an exact head alone, in chunks of 4096 tokens, fewer above two million entries, and the
    first of them alone."""
    rows = min(4096, len(hidden), max(2**33 // len(weight), 1))
    logits = torch.empty(rows, len(weight), dtype=hidden.dtype, device=hidden.device).normal_()
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
    slices = [slice(i, i + rows) for i in range(0, len(hidden), rows)]

    @torch.no_grad()
    def forward() -> None:
        for s in slices:
            torch.mm(hidden[s], weight.T, out=logits[: len(hidden[s])])

    @torch.no_grad()
    def step() -> None:
        for s in slices:
            chunk = logits[: len(hidden[s])]
            torch.mm(hidden[s], weight.T, out=chunk)
            torch.mm(chunk, weight, out=d_hidden[s])
            if s.start == 0:
                torch.mm(chunk.T, hidden[s], out=d_weight)
            else:
                d_weight.addmm_(chunk.T, hidden[s])

    return step, forward


def why_not(problem: Exception) -> str:
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    return f"cannot run: {lines[0][:100]}"


def measure(
    name: str, tensors: tuple[Tensor, Tensor, Tensor], providers: list[str], turns: int, graphs: bool = False
) -> list[Row]:
    bench = Bench(*tensors)
    exact = truth(bench.hidden.detach(), bench.weight.detach(), bench.targets)
    rows: list[Row] = []
    losses: dict[str, Loss] = {}
    of_standard: tuple[float, float] | None = None
    for provider in ["standard", *(p for p in providers if p != "standard")]:
        row = Row(provider)
        rows.append(row)
        try:
            torch._dynamo.reset()
            losses[provider] = PROVIDERS[provider]()
            errors = bench.judge(row, losses[provider], exact)
            of_standard = of_standard or errors
            if not (errors[0] <= WRONG * of_standard[0] and errors[1] <= WRONG * of_standard[1]):
                row.note = row.note or "wrong gradients"
            if not row.note:
                bench.memory(row, losses[provider])
        except (
            ImportError,
            RuntimeError,
            TypeError,
            ValueError,
            *loaded_classes("cutlass.base_dsl.common.DSLBaseError"),  # quack's compiler, which may refuse a shape
        ) as problem:  # absent, not for this device, or without gradients
            row.note = why_not(problem)
            bench.hidden.grad = bench.weight.grad = None
        of_standard = of_standard or bench.errors_in_slices(exact)
        if row.note:
            losses.pop(provider, None)
    del exact
    bench.hidden.grad = bench.weight.grad = None
    gc.collect()

    base = Row("floor: the products alone")
    rows.insert(0, base)
    work: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        row.provider: (partial(bench.step, loss), partial(bench.forward, loss))
        for row in rows
        if (loss := losses.get(row.provider))
    }
    work[base.provider] = floor(bench.hidden.detach(), bench.weight.detach())
    if graphs:
        pool = torch.cuda.graph_pool_handle()
        work = {provider: (replayed(step, pool), replayed(forward, pool)) for provider, (step, forward) in work.items()}
    order = [row for row in rows if row.provider in work]
    shuffle = random.Random(0).shuffle
    for _ in range(turns):
        shuffle(order)
        for row in order:
            step, forward = work[row.provider]
            try:
                row.times += bench.time(step)
                row.forward_times += bench.time(forward)
            except RuntimeError as problem:  # of torch.compile's memory, which depends on what ran before
                row.note, row.times, row.forward_times = why_not(problem), [], []
                bench.hidden.grad = bench.weight.grad = None
        order = [row for row in order if not row.note]
    for row in rows:
        if row.times:
            row.ms, row.forward_ms = statistics.median(row.times), statistics.median(row.forward_times)
    print(f"\n{name} {shape_of(tensors)}", *table(rows), sep="\n", flush=True)
    return rows


def memory_over_tokens(device: torch.device, providers: list[str], largest: int) -> dict[str, list[tuple[int, float]]]:
    """Extra peak of forward and backward in MiB for 4k tokens and more, at the hidden size and vocabulary of
    Qwen3-0.6B. A provider that runs out of memory has no further points."""
    _, hidden_size, vocabulary = SHAPES["qwen3_0_6b"]
    found: dict[str, list[tuple[int, float]]] = {}
    for provider in providers:
        loss, tokens = PROVIDERS[provider](), 4096
        while tokens <= largest:
            gc.collect()
            torch.cuda.empty_cache()
            bench = Bench(*inputs((tokens, hidden_size, vocabulary), device))
            try:
                bench.step(loss)  # without what is allocated once: cuBLAS's workspace, compiled code
                bench.hidden.grad = bench.weight.grad = None
                found.setdefault(provider, []).append((tokens, bench._extra(partial(bench.step, loss))[0]))
            except torch.OutOfMemoryError:
                break
            tokens *= 2
    return found


# --- reports --------------------------------------------------------------------------------------------------------


def record(row: Row) -> dict[str, Any]:
    """For JSON: of the steps' times the quartiles."""
    found = asdict(row)
    for name in ("times", "forward_times"):
        quartiles = statistics.quantiles(found[name], n=4) if len(found[name]) > 1 else found[name]
        found[name] = {"steps": len(found[name]), "quartiles": [round(t, 3) for t in quartiles]}
    return found


def shape_of(tensors: tuple[Tensor, Tensor, Tensor]) -> str:
    return f"N={len(tensors[0])} D={tensors[0].shape[1]} V={len(tensors[1])}"


def table(rows: list[Row]) -> list[str]:
    """Markdown."""

    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    lines = [
        "| provider | ms | / floor | forward ms | / floor | extra MiB | held MiB | forward MiB | dh error | dW error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    base = rows[0]
    for row in rows:
        if row.note:
            lines.append(
                f"| {row.provider} | {row.note} | | | | | | | {cell(row.hidden_error, '.1e')} "
                f"| {cell(row.weight_error, '.1e')} |"
            )
            continue
        ratio = row.ms / base.ms if row.ms and base.ms else None
        forward_ratio = row.forward_ms / base.forward_ms if row.forward_ms and base.forward_ms else None
        cells = [
            row.provider,
            cell(row.ms, ".2f"),
            cell(ratio, ".3f"),
            cell(row.forward_ms, ".2f"),
            cell(forward_ratio, ".3f"),
            *(cell(x, ".0f") for x in (row.extra_mib, row.held_mib, row.forward_extra_mib)),
            *(cell(x, ".2e") for x in (row.hidden_error, row.weight_error)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def machine(device: torch.device) -> dict[str, str]:
    found = {}
    for package in ("torch", "triton", "cut-cross-entropy", "liger-kernel", "quack-kernels", "trl", "verl"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "python": platform.python_version(), **found}


def plot(results: dict[str, list[Row]], memory: dict[str, list[tuple[int, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = len(results) + bool(memory)
    columns = min(panels, 3)
    figure, axes = pyplot.subplots(-(-panels // columns), columns, figsize=(5.2 * columns, 4 * -(-panels // columns)))
    axes = [axes] if panels == 1 else list(axes.flat)
    names = list(dict.fromkeys(row.provider for rows in results.values() for row in rows if row.extra_mib))
    colors = {name: pyplot.get_cmap("tab20")(2 * i % 20 + i // 10) for i, name in enumerate(names)}
    for axis, (name, rows) in zip(axes, results.items(), strict=False):
        axis.axvline(rows[0].ms, color="grey", linestyle=":", label=rows[0].provider)
        for row in rows:
            if row.ms and row.extra_mib:
                marker = "*" if row.provider.startswith("chunked") else "o"
                size = 13 if marker == "*" else 8
                axis.plot(
                    row.ms, row.extra_mib, marker, markersize=size, color=colors[row.provider], label=row.provider
                )
        axis.set(title=name, xlabel="forward + backward, ms", ylabel="extra memory, MiB", yscale="log", xscale="log")
        axis.grid(alpha=0.3, which="both")
        for labels in (axis.xaxis, axis.yaxis):
            labels.set_major_formatter("{x:g}")
            labels.set_minor_formatter("{x:g}")
        axis.tick_params(which="minor", labelsize=6)
    if memory:
        axis = axes[len(results)]
        for name, points in memory.items():
            axis.plot(*zip(*points, strict=True), "o-", color=colors.get(name), label=name)
        axis.set(title="D=1024, V=151936", xlabel="tokens", ylabel="extra memory, MiB", xscale="log", yscale="log")
        axis.grid(alpha=0.3, which="both")
    for axis in axes[panels:]:
        axis.set_visible(False)
    handles = {label: h for a in axes[:panels] for h, label in zip(*a.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, list[Row]]:
    parser = argparse.ArgumentParser(description="Linear cross-entropies side by side.")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=DEFAULT_SHAPES)
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--head", type=Path, help="a file of train_head.py: also measure on its hidden states")
    parser.add_argument("--memory-tokens", type=int, default=0, help="plot memory from 4096 tokens up to this many")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tail", action="store_true", help="inputs with a long tail in place of those of a model")
    parser.add_argument("--graphs", action="store_true", help="replay CUDA graphs: the device without its host")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="write NAME.json, NAME.tables.md and NAME.png")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)

    results: dict[str, list[Row]] = {}
    memory: dict[str, list[tuple[int, float]]] = {}
    command = "python benchmarks/linear_cross_entropy.py " + shlex.join(arguments or sys.argv[1:])
    about = {"command": command, "machine": machine(device)}

    def store() -> None:
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            shapes = {name: [record(row) for row in rows] for name, rows in results.items()}
            found = json.dumps({**about, "shapes": shapes, "memory": memory}, indent=1)
            options.out.with_suffix(".json").write_text(found)

    for name in options.shapes:
        made = (tail_inputs if options.tail else inputs)(SHAPES[name], device)
        results[name] = measure(name, made, options.providers, options.turns, options.graphs)
        store()  # A run that ends early keeps what it has measured.
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if options.head:
        for name, tensors in torch.load(options.head, map_location=device).items():
            results[name] = measure(name, tensors, options.providers, options.turns, options.graphs)
    if options.memory_tokens:
        grown = [p for p in ("standard", "torch_compile", "cce", "chunked") if p in options.providers]
        memory |= memory_over_tokens(device, grown, options.memory_tokens)
        for name, points in memory.items():
            print(f"memory over tokens, {name}:", *(f"{n}: {mib:.0f} MiB" for n, mib in points), sep="  ")
    store()
    if options.out:
        lines = [f"`{command}`  ", ", ".join(f"{k} {v}" for k, v in about["machine"].items())]
        for name, rows in results.items():
            lines += ["", f"**{name}**", "", *table(rows)]
        options.out.with_suffix(".tables.md").write_text("\n".join(lines) + "\n")
        plot(results, memory, options.out.with_suffix(".png"))
    return results


if __name__ == "__main__":
    main()
