"""Modules with objectives beside cross entropy, with two ragged batches each: their fits are those of one process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_cases import MODEL, fitted, other_model, rows
from tiny_models import tiny_model
from torch import Tensor
from torchrun import run
from transformers import get_constant_schedule

from lit_fused import (
    DistillationLoss,
    FusedCausalLMModule,
    FusedDistillationModule,
    FusedMultiTokenModule,
    FusedPolicyModule,
    LanguageModel,
    LinearCrossEntropyLoss,
    PolicyLoss,
    from_config,
)
from lit_fused.objectives.distillation import STORED, scores_to_store

JOB = Path(__file__).with_name("objective_job.py")
TRAINED: tuple[Any, ...] = (partial(torch.optim.SGD, lr=0.1), get_constant_schedule)
Case = tuple[FusedCausalLMModule, list[dict[str, Tensor]]]


def distilled() -> Case:
    loss = DistillationLoss("jsd", beta=0.3, temperature=2.0, cross_entropy_weight=0.5)
    return FusedDistillationModule(tiny_model(MODEL), loss, *TRAINED, teacher=other_model()), [rows(2, 1), rows(2, 2)]


def stored() -> Case:
    loss = DistillationLoss("reverse_kl", temperature=2.0, cross_entropy_weight=0.5)
    batches = [batch | stored_scores(other_model(), batch, 7, 2.0) for batch in (rows(2, 1), rows(2, 2))]
    return FusedDistillationModule(tiny_model(MODEL), loss, *TRAINED), batches


@torch.no_grad()
def stored_scores(teacher: Any, batch: dict[str, Tensor], k: int, temperature: float = 1.0) -> dict[str, Tensor]:
    """Return what a batch with a teacher's scores has besides."""
    scores = scores_to_store(LanguageModel(teacher, LinearCrossEntropyLoss()), batch, k, temperature)
    return dict(zip(STORED, scores, strict=True))


def rollouts() -> list[dict[str, Tensor]]:
    """Two batches of two ragged completions, which are one group, the last of which is not learned from."""
    generator, batches = torch.Generator().manual_seed(3), []
    for number in (1, 2):
        batch = rows(2, number)
        batch["sampler_log_probs"] = -4 - torch.rand(batch["labels"].shape, generator=generator)
        batch["reward"] = torch.randn(2, generator=generator)
        batches.append(batch)
    batches[1]["labels"][1] = -100
    rewards = torch.cat([batch["reward"] for batch in batches])
    tokens = sum((batch["labels"] >= 0).sum() for batch in batches)
    numbers = {"group_mean": rewards.mean(), "group_std": rewards.std(), "group_size": 4.0, "group_tokens": tokens}
    of_group = {name: torch.full((2,), float(value)) for name, value in numbers.items()}
    return [batch | of_group for batch in batches]


def policy() -> Case:
    return FusedPolicyModule(tiny_model(MODEL), PolicyLoss("dapo", entropy_weight=0.1), *TRAINED), rollouts()


def policy_of(objective: str) -> Case:
    return FusedPolicyModule(tiny_model(MODEL), PolicyLoss(objective), *TRAINED), rollouts()


def policy_beside() -> Case:
    loss = PolicyLoss("grpo", kl_weight=0.5, temperature=0.7)
    return FusedPolicyModule(tiny_model(MODEL), loss, *TRAINED, reference=other_model()), rollouts()


def weighted() -> Case:
    generator = torch.Generator().manual_seed(4)
    batches = [rows(2, 1), rows(2, 2)]
    batches = [batch | {"token_weights": torch.rand(batch["labels"].shape, generator=generator)} for batch in batches]
    return FusedCausalLMModule(tiny_model(MODEL), None, *TRAINED), batches


def multi_token(*, late: bool = False) -> Case:
    model = tiny_model(MODEL)
    model = from_config(model.config, seed=5) if late else model
    return FusedMultiTokenModule(model, None, *TRAINED, heads=2, weight=0.5), [rows(2, 1), rows(2, 2)]


CASES: dict[str, Callable[[], Case]] = {
    "weighted": weighted,
    "multi_token": multi_token,
    "multi_token_late": partial(multi_token, late=True),
    "policy": policy,
    "policy_beside": policy_beside,
    "rloo": partial(policy_of, "rloo"),
    "ppo": partial(policy_of, "ppo"),
    "distilled": distilled,
    "stored": stored,
}


def assert_as_in_one_process(folder: Path, case: str, strategies: dict[str, str]) -> None:
    """Fit a case in one process, and in two under each strategy; an entry that is not empty is the refusal's words."""
    module, batches = CASES[case]()
    trainer = fitted(folder, module, batches, accumulate_grad_batches=2)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    run(JOB, 2, folder, *(f"{case}:{strategy}" for strategy in strategies), timeout=240)
    for strategy, words in strategies.items():
        found = torch.load(folder / f"{case}_{strategy}.pt")
        if words:
            assert words in found["refusal"]
            continue
        assert "refusal" not in found, (strategy, found)
        for name, value in metrics.items():
            assert found["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), (strategy, name)
        for name, p in module.model.named_parameters():
            torch.testing.assert_close(found["weights"][name], p.detach(), rtol=1e-4, atol=1e-6, msg=strategy)
