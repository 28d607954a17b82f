"""Compare the filtered head with the exact one on a GPU: errors against float64, then times.

Exits with 1 if an error is beyond its bound, or if the filter takes the device more than 0.7 of ``chunked``'s time at a
shape where it pays.

    python benchmarks/filtered_check.py

Errors are of 2048 tokens, D = 512, V = 32,768. Times are of forward and backward: as the host launches them, and of the
device alone, which is held until all is launched, as the host is ahead in a run. Rows with flat softmaxes are mixed
into those of N = 8192, D = 2048, V = 131,072.
"""

import sys

import torch
from linear_cross_entropy import inputs
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lit_fused import filtered
from lit_fused.ops import linear_cross_entropy

EPS, DEVICE = 2**-12, torch.device("cuda")
SIZE = (8192, 2048, 131_072)  # N, D, V
PAYS = (
    (8192, 2880, 201_088),
    (8192, 2304, 256_000),
    (8192, 4096, 128_256),
    (4096, 4096, 128_256),
    (16_384, 1024, 151_936),
    (4096, 2048, 151_936),
    SIZE,
)
STANDS_ASIDE = ((8192, 64, 1_000_448), (8192, 768, 65_536))  # where a run that asks for it is exact
HELD = 100_000_000  # cycles, longer than any host launches a step
STATISTICS = ("dropped_mass", "kept_columns", "exact_tokens")
Rows = tuple[Tensor, Tensor, Tensor]


def of_kinds(tokens: int, hidden_size: int, vocabulary: int, probability: float) -> Rows:
    """Tokens of 16 kinds, each with a flat tail of its own, whose target has this probability and is like the tail."""
    kinds, like_it = torch.arange(tokens, device=DEVICE) % 16, 0.125
    weight = torch.zeros(vocabulary, hidden_size, device=DEVICE)
    entries = torch.arange(vocabulary, device=DEVICE)
    weight[entries, entries % 16] = 1
    weight[entries[:16], 16 + entries[:16]] = like_it
    hidden = torch.zeros(tokens, hidden_size, device=DEVICE)
    rows = torch.arange(tokens, device=DEVICE)
    hidden[rows, kinds] = 24
    odds = vocabulary / 16 * probability / (1 - probability)
    hidden[rows, 16 + kinds] = torch.tensor(odds).log().item() / like_it
    return hidden.bfloat16(), weight.bfloat16(), kinds


def with_flat_rows(tokens: int, hidden_size: int, vocabulary: int, share: float) -> Rows:
    """A trained model's rows, of which some have nearly flat softmaxes."""
    hidden, weight, targets = inputs((tokens, hidden_size, vocabulary), DEVICE)
    flat = torch.arange(tokens, device=DEVICE) % round(1 / share) == 0
    return hidden.where(~flat[:, None], hidden * 0.05), weight, targets


def step(rows: Rows, dtype: torch.dtype, **options: float | bool) -> tuple[dict[str, Tensor], list[Tensor]]:
    hidden, weight = (t.to(dtype).detach().requires_grad_() for t in rows[:2])
    head = filtered.linear_cross_entropy if "filter_eps" in options else linear_cross_entropy
    loss, statistics = head(hidden, weight, rows[2], statistics=False, **options)  # type: ignore[arg-type]
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return statistics, [hidden.grad, weight.grad]


def errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, truth, strict=True)]


def check_errors() -> bool:
    size, good = (2048, 512, 32_768), True
    cases = {
        "trained": inputs(size, DEVICE),
        "a fiftieth flat": with_flat_rows(*size, 0.02),
        "half flat": with_flat_rows(*size, 0.5),
        **{f"kinds, target {p}": of_kinds(*size, p) for p in (0.6, 0.9, 0.99)},
    }
    for name, rows in cases.items():
        truth = step(rows, torch.float64, filter_eps=EPS)  # the filter's own error, without rounding
        exact_truth = step(rows, torch.float64, recompute=True)[1]
        usual = errors(step(rows, torch.bfloat16, recompute=True)[1], exact_truth)
        statistics, gradients = step(rows, torch.bfloat16, filter_eps=EPS)
        rounding, whole = errors(gradients, truth[1]), errors(gradients, exact_truth)
        right = all(ours <= 2 * theirs + 1e-4 for ours, theirs in zip(rounding, usual, strict=True))
        if not name.startswith("kinds"):
            right &= whole[0] < 0.1
        good &= right
        shares = {key: round(statistics[key].item() / size[0], 4) for key in STATISTICS}
        in_float64 = {key: round(truth[0][key].item() / size[0], 4) for key in STATISTICS}
        print(f"{name:<18}{'right' if right else 'WRONG'}  dh, dW against float64 {whole}, chunked {usual}")
        print(f"{'':<18}against the filter in float64 {rounding}; {shares}, in float64 {in_float64}")
    return good


def milliseconds(rows: Rows, held: int = 0, **options: float | bool) -> float:
    """Return the median of 20 turns of forward and backward on the device, which waits for so many cycles before."""
    times = []
    for turn in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(held)
        begin.record()
        step(rows, torch.bfloat16, **options)
        end.record()
        end.synchronize()
        if turn >= 5:
            times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def compare(name: str, rows: Rows) -> float:
    """Print both heads' times and shares of tokens, and return the filter's part of the device's time."""
    as_launched, alone = ([milliseconds(rows, held, **k) for k in ({}, {"filter_eps": EPS})] for held in (0, HELD))
    statistics = step(rows, torch.bfloat16, filter_eps=EPS)[0]
    shares = {key: round(statistics[key].item() / len(rows[0]), 4) for key in STATISTICS}
    both = (
        f"chunked {exact:.2f} ms, filtered {filtered:.2f}, {filtered / exact:.3f} of it"
        for exact, filtered in (as_launched, alone)
    )
    print(f"{name:>20}: {'; the device alone: '.join(both)}; {shares}", flush=True)
    return alone[1] / alone[0]


def check_times() -> bool:
    parts = {shape: compare(", ".join(map(str, shape)), inputs(shape, DEVICE)) for shape in PAYS + STANDS_ASIDE}
    for share in (0.005, 0.05, 1.0):
        compare(f"{share:.1%} flat", with_flat_rows(*SIZE, share))
    rows = inputs(SIZE, DEVICE)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step(rows, torch.bfloat16, filter_eps=EPS)
        torch.cuda.synchronize()
    print(profiled.key_averages().table(sort_by="self_cuda_time_total", row_limit=16, max_name_column_width=40))
    return max(parts[shape] for shape in PAYS) <= 0.7


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), torch.__version__)
    right, fast = check_errors(), check_times()
    sys.exit(0 if right and fast else 1)
