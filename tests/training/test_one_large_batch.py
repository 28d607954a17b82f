"""A step is that of one large batch, however its tokens are divided into micro-batches and over ranks: in float64, for
every objective, with windows without labels, incomplete last windows, packed rows and weights."""

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from errors_of import ROUNDING, relative_error
from frozen_cases import other_model
from head_cases import grad_of
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from preference_cases import pairs
from ranks import each
from strategy_cases import stored_scores
from tiny_models import tiny_model
from tiny_seq2seq import pair_batch, tiny_seq2seq
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import get_constant_schedule

from lit_fused import (
    BidirectionalItems,
    CrossEntropyLoss,
    DistillationLoss,
    FusedCausalLMModule,
    FusedDistillationModule,
    FusedMaskedLMModule,
    FusedPolicyModule,
    FusedPreferenceModule,
    FusedRecommenderModule,
    FusedSeq2SeqLMModule,
    LinearCrossEntropyLoss,
    ModelInternalLoss,
    PolicyLoss,
    PreferenceLoss,
    SASRec,
    filtered,
)

OPTIMIZER: tuple[Any, ...] = (partial(torch.optim.SGD, lr=0.05), get_constant_schedule)
Batch = dict[str, Tensor]
Case = tuple[Any, list[Batch]]
COUNT = 14  # micro-batches, of which two and more successive ones have no label


def without_labels(batches: list[Batch], *indices: int, ignored: int = -100) -> list[Batch]:
    empty = [batch | {"labels": torch.full_like(batch["labels"], ignored)} for batch in batches]
    return [empty[i] if i in indices else batch for i, batch in enumerate(batches)]


# Some of them are the whole of a window, for each division of the micro-batches below, and of two ranks the first has
# none but them in another window.
EMPTY = (4, 5, 6, 7, 8, 9, 10)


def ragged() -> list[Batch]:
    return without_labels(ragged_batches(COUNT), *EMPTY)


def causal(loss: Any = None, **entries: Any) -> Case:
    made = [batch | {name: make(batch) for name, make in entries.items()} for batch in ragged()]
    return FusedCausalLMModule(tiny_llama(), loss, *OPTIMIZER), made


def weights(batch: Batch) -> Tensor:
    generator = torch.Generator().manual_seed(int(batch["input_ids"].sum()))
    return torch.rand(batch["labels"].shape, generator=generator, dtype=torch.float64) * 1e-2


def documents(batch: Batch) -> Tensor:
    """Positions of two documents in each row."""
    length = batch["input_ids"].shape[1]
    return torch.cat([torch.arange(5), torch.arange(length - 5)]).expand(len(batch["input_ids"]), -1)


def weights_of_zero() -> Case:
    """Micro-batches that have labels of no weight in place of none."""
    made = ragged_batches(COUNT)
    for index, batch in enumerate(made):
        batch["token_weights"] = weights(batch) * (index not in EMPTY)
    return FusedCausalLMModule(tiny_llama(), None, *OPTIMIZER), made


class Stream(IterableDataset[Batch]):
    """Batches of which nobody knows the number."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def own_mean() -> Case:
    """A function of a project's own that returns the mean over its labels."""
    model = tiny_llama()

    def loss(hidden_states: Tensor, labels: Tensor) -> Tensor:
        targets = labels[:, 1:].flatten()
        logits = model.lm_head(hidden_states[:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits, targets, reduction="sum") / (targets != -100).sum().clamp(min=1)

    return FusedCausalLMModule(model, loss, *OPTIMIZER), ragged()


def masked() -> Case:
    made = [batch | {"input_ids": batch["input_ids"].masked_fill(batch["labels"] >= 0, 3)} for batch in ragged()]
    return FusedMaskedLMModule(tiny_model("masked_modernbert"), None, *OPTIMIZER), made


def seq2seq() -> Case:
    made = [pair_batch(2, ignored=(0, 5, 7, 3, 6)[index % 5], seed=index) for index in range(COUNT)]
    return FusedSeq2SeqLMModule(tiny_seq2seq("bart"), None, *OPTIMIZER), without_labels(made, *EMPTY)


def distilled(stored: bool = False) -> Case:
    loss = DistillationLoss("forward_kl", temperature=2.0, cross_entropy_weight=0.5)
    teacher, batches = other_model(torch.float64), ragged_batches(COUNT)
    if stored:
        batches = [batch | stored_scores(teacher, batch, 7, 2.0) for batch in batches]
    module = FusedDistillationModule(tiny_model("qwen3"), loss, *OPTIMIZER, teacher=None if stored else teacher)
    return module, without_labels(batches, *EMPTY)


def preferences(objective: str) -> Case:
    batches = without_labels([pairs(1 + index % 2, index) for index in range(COUNT)], *EMPTY)
    return FusedPreferenceModule(tiny_model("qwen3"), PreferenceLoss(objective), *OPTIMIZER), batches


def policy(objective: str, **options: Any) -> Case:
    """Groups of four completions in two micro-batches each."""
    generator, batches = torch.Generator().manual_seed(3), without_labels(ragged_batches(COUNT), *EMPTY)
    for first in range(0, COUNT, 2):
        group, rewards = batches[first : first + 2], torch.randn(4, generator=generator)
        numbers = {"group_mean": rewards.mean(), "group_std": rewards.std(), "group_size": 4.0}
        numbers["group_tokens"] = sum((batch["labels"][:, 1:] >= 0).sum() for batch in group)
        for batch, own in zip(group, rewards.split(2), strict=True):
            batch["sampler_log_probs"] = -4 - torch.rand(batch["labels"].shape, generator=generator)
            batch |= {"reward": own} | {name: torch.full((2,), float(value)) for name, value in numbers.items()}
    return FusedPolicyModule(tiny_llama(), PolicyLoss(objective, **options), *OPTIMIZER), batches


def recommender(kind: Any, **options: Any) -> Case:
    torch.manual_seed(0)
    backbone = kind(60, hidden_size=16, num_layers=1, num_heads=2, max_length=12, dropout=0.0)
    options = {"mask_fraction": 1 - 1e-9, "optimizer": OPTIMIZER[0], "scheduler": OPTIMIZER[1]} | options
    made = [
        {"input_ids": (ids := batch["input_ids"].masked_fill(batch["labels"] == -100, 0)), "labels": ids}
        for batch in ragged()
    ]
    return FusedRecommenderModule(backbone, **options), made


CASES: dict[str, Callable[[], Case]] = {
    "chunked": causal,
    "standard": partial(causal, CrossEntropyLoss()),
    "the model's own": partial(causal, ModelInternalLoss()),
    "torch_native": partial(causal, "torch_native"),
    "filtered, of nothing": lambda: causal(
        LinearCrossEntropyLoss(partial(filtered.linear_cross_entropy, filter_eps=0.0))
    ),
    "smoothing and z-loss": partial(causal, LinearCrossEntropyLoss(label_smoothing=0.2, z_loss=1e-2)),
    "weighted": partial(causal, token_weights=weights),
    "weights of zero": weights_of_zero,
    "packed": partial(causal, position_ids=documents),
    "a function": own_mean,
    "masked": masked,
    "seq2seq": seq2seq,
    "distilled": distilled,
    "stored": partial(distilled, stored=True),
    **{objective: partial(preferences, objective) for objective in ("dpo", "ipo", "simpo", "orpo", "cpo")},
    **{objective: partial(policy, objective) for objective in ("grpo", "dapo", "rloo", "ppo", "reinforce")},
    "dr_grpo": partial(policy, "dr_grpo", length=8),
    "grpo, kl": partial(policy, "grpo", kl_weight=0.3, entropy_weight=0.1),
    "recommender": partial(recommender, SASRec),
    "bidirectional": partial(recommender, BidirectionalItems),
}


class Steps(L.Callback):
    """Notes the gradients of each optimiser step, and what was logged for it."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.logged: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        zero = torch.zeros(())
        named = {n: zero if p.grad is None else grad_of(p).clone() for n, p in pl_module.named_parameters()}
        self.gradients.append(named)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == len(self.gradients) > len(self.logged):
            self.logged.append({n: v.item() for n, v in trainer.callback_metrics.items() if n.startswith("train/")})


def fit(name: str, folder: Path, accumulated: int, limit: int | None, how: str = "") -> Any:
    """Return a fit's gradients and metrics by step, and those of its last validation.

    ``how`` is "at once": in one process, with all batches of a step, of all ranks, in one; or "streamed": the number of
    batches is not known, and a validation follows each of them.
    """
    module, batches = CASES[name]()
    steps, validation, at_once = Steps(), batches, how == "at once"
    ranks = 1 if at_once else int(os.environ.get("WORLD_SIZE", "1"))
    if at_once:
        batches = [merged(window) for window in windows(batches, accumulated, limit)]
        validation = [merged(validation)]
    else:
        batches, validation = (each[int(os.environ.get("RANK", "0")) :: ranks] for each in (batches, validation))
    trainer = quiet_trainer(
        folder,
        max_epochs=1,
        precision="64-true",
        accumulate_grad_batches=1 if at_once else accumulated,
        limit_train_batches=None if at_once else limit,
        devices=ranks,
        strategy="auto" if ranks == 1 else "ddp",
        use_distributed_sampler=False,
        callbacks=[steps],
        val_check_interval=1 if how == "streamed" else None,
    )
    data = DataLoader(Stream(batches), batch_size=None) if how == "streamed" else loader(batches)
    trainer.fit(module, data, loader(validation))
    validated = {n: v.item() for n, v in trainer.callback_metrics.items() if n.startswith("val/")}
    return steps.gradients, steps.logged, validated


def windows(batches: list[Batch], size: int, limit: int | None) -> list[list[Batch]]:
    used = batches[:limit]
    return [used[start : start + size] for start in range(0, len(used), size)]


def merged(window: list[Batch]) -> Batch:
    return {name: torch.cat([batch[name] for batch in window]) for name in window[0]}


def assert_same(found: Any, expected: Any, name: str) -> None:
    for step, (ours, truth) in enumerate(zip(found[0], expected[0], strict=True)):
        if not any(gradient.any() for gradient in truth.values()):
            assert not any(gradient.any() for gradient in ours.values()), (name, step)
            continue
        assert relative_error(ours, truth) < ROUNDING, (name, step)
    for ours, truth in zip([*found[1], found[2]], [*expected[1], expected[2]], strict=True):
        assert ours == pytest.approx(truth, rel=1e-5, abs=1e-7, nan_ok=True), name
    assert any(math.isnan(logged["train/loss"]) for logged in found[1]), "one window has no label"


pytestmark = pytest.mark.filterwarnings("ignore:the rollouts' log-probabilities")


QUICK = ["chunked", "standard", "weighted", "dpo", "dapo", "recommender"]
DIVISIONS = [(name, 3, None) for name in CASES] + [
    pytest.param(name, 2, 13, marks=() if name in QUICK else pytest.mark.slow) for name in CASES
]


@pytest.mark.parametrize(("name", "accumulated", "limit"), DIVISIONS)
def test_micro_batches_are_one_large_batch(name, accumulated, limit, tmp_path):
    found = fit(name, tmp_path, accumulated, limit)
    assert_same(found, fit(name, tmp_path, accumulated, limit, "at once"), name)


@pytest.mark.parametrize("name", ["chunked", "weighted", "simpo", "dapo"])
def test_validations_among_micro_batches_of_a_stream_change_nothing(name, tmp_path):
    assert_same(fit(name, tmp_path, 3, 13, "streamed"), fit(name, tmp_path, 3, 13, "at once"), name)


@pytest.mark.parametrize("names", [QUICK, pytest.param([*CASES], marks=pytest.mark.slow)], ids=["quick", "every"])
def test_two_ranks_with_unequal_numbers_of_tokens_are_one_large_batch(names, tmp_path):
    for name, found in each(fit, 2, names, tmp_path, 2, None).items():
        assert_same(found, fit(name, tmp_path, 2 * 2, None, "at once"), name)
