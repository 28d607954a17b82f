"""The choices of conf/optimizer and conf/scheduler, as a command gets them."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from composed import CONF, composed
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lit_fused.app.commands import MODES
from lit_fused.app.config import check_config
from lit_fused.app.trusted import check_trusted
from lit_fused.errors import UserError

CHOICES = [f"{group}={file.stem}" for group in ("optimizer", "scheduler") for file in (CONF / group).glob("*.yaml")]


@pytest.mark.parametrize("choice", CHOICES)
def test_each_choice_fits_and_a_run_that_has_it_is_resumed(choice):
    cfg = composed(choice)
    check_config(cfg, MODES)
    check_trusted(OmegaConf.to_container(cfg), Path("run"), [])


def rates(*overrides: str, steps: int = 20) -> list[float]:
    """The learning rate of each step, of which the largest is 1."""
    build: Any = instantiate(composed(*overrides).scheduler)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    takes_steps = "num_training_steps" in inspect.signature(build).parameters
    schedule = build(optimizer, **({"num_training_steps": steps} if takes_steps else {}))
    found = []
    for _ in range(steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def test_the_schedules_warm_up_over_a_tenth_of_the_steps_and_end_as_they_say():
    linear, constant, wsd = (rates(f"scheduler={name}") for name in ("linear", "constant_with_warmup", "wsd"))
    for found in (linear, constant, wsd, rates("scheduler=cosine")):
        assert found[:3] == [0.0, 0.5, 1.0]
    assert linear[2:] == pytest.approx([1 - step / 18 for step in range(18)])
    assert constant[2:] == [1.0] * 18
    assert wsd[2:16] == [1.0] * 14
    assert wsd[16:] == pytest.approx([1 - (step / 4) ** 0.5 for step in range(4)])
    assert rates("scheduler=constant") == [1.0] * 20
    floor = rates("scheduler=wsd", "scheduler.min_lr_ratio=0.1", "scheduler.decay_type=linear", steps=21)
    assert floor[17:] == pytest.approx([1.0, 0.775, 0.55, 0.325])


def test_a_warm_up_and_a_decay_longer_than_the_run_are_refused():
    with pytest.raises(UserError, match=r"take 0.5 and 0.7 of the steps, more than all of them; choose a smaller"):
        rates("scheduler=wsd", "scheduler.warmup_fraction=0.5", "scheduler.decay_fraction=0.7")
