"""When a filtered loss filters: where it pays, and the same in every run."""

import math
from functools import partial
from typing import cast

import pytest
import torch
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from torch import Tensor

from lit_fused import FusedCausalLMModule, LinearCrossEntropyLoss
from lit_fused.filtered import Filtered
from lit_fused.filtered.filter_schedule import FIRST_TRIAL, LAG, LONGEST_GAP, FilterSchedule

ROWS, ALL = torch.zeros(8, 4), torch.tensor(8)


def calls(schedule: FilterSchedule, kept: list[float]) -> list[bool]:
    """Return which of some calls filter, if a filtered one keeps this share of columns."""
    found = []
    for share in kept:
        found.append(schedule.filters(ROWS, 100))
        statistics = {"kept_columns": share * ALL.float()} if found[-1] else {}
        assert schedule.noted(statistics, ALL)["kept_columns"] == (share if found[-1] else 1) * ALL
    return found


def trials(found: list[bool]) -> list[int]:
    return [number for number, filters in enumerate(found, 1) if filters]


def test_a_training_that_learns_nothing_is_exact_but_for_ever_rarer_trials():
    found = trials(calls(FilterSchedule(), [1.0] * 2000))
    gaps = [second - first for first, second in zip([0, *found], found, strict=False)]
    assert gaps[0] == FIRST_TRIAL
    assert gaps == sorted(gaps)
    assert gaps[-1] == LONGEST_GAP + LAG
    assert len(found) / 2000 < 0.01


def test_from_a_trial_that_keeps_few_columns_on_calls_filter_and_stop_where_many_are_kept():
    schedule = FilterSchedule()
    assert trials(calls(schedule, [0.1] * 40)) == [FIRST_TRIAL, *range(FIRST_TRIAL + LAG, 41)]
    assert calls(schedule, [0.9] * 5) == [True] * LAG + [False] * 3
    assert FIRST_TRIAL in trials(calls(schedule, [0.1] * (FIRST_TRIAL + LAG)))


def test_a_call_without_a_token_decides_nothing():
    schedule = FilterSchedule(filtering=True)
    for _ in range(5):
        assert schedule.filters(ROWS, 100)
        schedule.noted({"kept_columns": torch.tensor(0.0)}, torch.tensor(0))


class OnGPU:
    is_cuda, device = True, "cuda"

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.dtype = shape, dtype

    def numel(self) -> int:
        return math.prod(self.shape)


def test_a_small_call_on_a_gpu_is_exact_and_counts_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    schedule = FilterSchedule(filtering=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    small, narrow = (cast(Tensor, OnGPU(8192, hidden_size)) for hidden_size in (768, 128))
    assert not schedule.filters(small, 65_536)
    assert not schedule.filters(narrow, 2_000_000)
    assert schedule.calls == 0
    assert schedule.filters(small, 65_536 * 8)


@pytest.mark.parametrize(
    ("capability", "dtype", "autocast", "filters"),
    [
        ((9, 0), torch.bfloat16, False, True),
        ((9, 0), torch.float32, True, True),
        ((9, 0), torch.float32, False, False),
        ((9, 0), torch.float16, False, False),
        ((8, 0), torch.bfloat16, False, False),
        ((10, 0), torch.bfloat16, False, False),
    ],
)
def test_on_a_gpu_only_what_was_timed_is_filtered(capability, dtype, autocast, filters, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: autocast)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.bfloat16)
    hidden = cast(Tensor, OnGPU(8192, 768, dtype=dtype))
    assert FilterSchedule(filtering=True).filters(hidden, 65_536 * 8) == filters


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("share", [0.07, 0.2, 0.3, 0.33, 0.34, 0.5, 1.0])
def test_a_training_takes_at_no_step_five_percent_more_time_than_an_exact_one(share, learns):
    """With the measured times, the worse one where few columns are kept: 0.8 at 7 %, 1.6 at all."""
    shares = [max(share, 1 - step / 1000) if learns else share for step in range(2000)]
    taken = 0.0
    for step, (filters, kept) in enumerate(zip(calls(FilterSchedule(), shares), shares, strict=True), 1):
        taken += 0.8 + (1.6 - 0.8) * (kept - 0.07) / (1 - 0.07) if filters else 1.0
        assert taken <= 1.05 * step


def test_the_first_steps_of_a_filtered_loss_are_those_of_chunked(tmp_path):
    batches = [b for b in ragged_batches(4) if (b["labels"][:, 1:] != -100).any()]
    weights = []
    for impl in ("chunked", Filtered(0.9)):
        module = FusedCausalLMModule(tiny_llama(), LinearCrossEntropyLoss(impl), partial(torch.optim.SGD, lr=0.1))
        quiet_trainer(tmp_path, max_steps=FIRST_TRIAL - 1, max_epochs=-1).fit(module, loader(batches))
        weights.append(module.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.slow
def test_a_resumed_run_of_a_filtered_loss_begins_with_exact_calls_again(tmp_path):
    batches = ragged_batches(1) * 4

    def fit(steps: int, checkpoint: str | None = None) -> Filtered:
        impl = Filtered(0.02)
        impl.schedule = FilterSchedule(trial=2)
        module = FusedCausalLMModule(tiny_llama(), LinearCrossEntropyLoss(impl), partial(torch.optim.Adam, lr=0.05))
        trainer = quiet_trainer(tmp_path, max_steps=steps, max_epochs=-1)
        trainer.fit(module, loader(batches), ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return impl

    assert fit(3).schedule.calls == 3
    assert fit(4, str(tmp_path / "3.ckpt")).schedule.calls == 1
