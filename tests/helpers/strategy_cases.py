"""Modules and ragged batches whose fits in two processes, under any strategy, are those of one process."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from frozen_cases import MODEL, fitted, frozen_module, other_model, rows
from lightning_helpers import ragged_batches, tiny_llama
from packing_cases import gpt_oss, mamba, row
from parallel_cases import STRATEGIES, whole
from preference_cases import batches_of, module_for
from ranks import Refusal, each
from safetensors.torch import save_file
from tiny_models import sharpen, tiny_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import get_constant_schedule
from vision_cases import batch_of, tiny

from lit_fused import (
    DistillationLoss,
    FusedCausalLMModule,
    FusedDistillationModule,
    FusedPolicyModule,
    LanguageModel,
    LinearCrossEntropyLoss,
    PolicyLoss,
    PreferenceLoss,
    drafter_for,
)
from lit_fused.objectives.distillation import STORED, scores_to_store, teacher_head
from lit_fused.parallel.collectives import objects_of_ranks

TRAINED: tuple[Any, ...] = (partial(torch.optim.SGD, lr=0.1), get_constant_schedule)
Case = tuple[FusedCausalLMModule, list[dict[str, Tensor]]]
IMAGES = {  # of each row of four batches, of which two ranks get every other one
    "everywhere": ([1, 1], [1], [2, 0, 1], [0, 2]),
    "on_one_rank": ([1, 1], [0, 0], [0, 0], [1, 0]),
}


def distilled() -> Case:
    loss = DistillationLoss("jsd", beta=0.3, temperature=2.0, cross_entropy_weight=0.5)
    return FusedDistillationModule(tiny_model(MODEL), loss, *TRAINED, teacher=other_model()), [rows(2, 1), rows(2, 2)]


def drafted() -> Case:
    with TemporaryDirectory() as folder:
        other_model().config.save_pretrained(folder)  # The whole model's method writes on the first rank alone.
        save_file(other_model().state_dict(), f"{folder}/model.safetensors", {"format": "pt"})
        torch.manual_seed(0)
        drafter = drafter_for(folder).train()
    loss = DistillationLoss(hidden_weight=0.5)
    return FusedDistillationModule(drafter, loss, *TRAINED, teacher=other_model()), [rows(2, 1), rows(2, 2)]


def stored() -> Case:
    loss = DistillationLoss("reverse_kl", temperature=2.0, cross_entropy_weight=0.5)
    batches = [batch | stored_scores(other_model(), batch, 7, 2.0) for batch in (rows(2, 1), rows(2, 2))]
    return FusedDistillationModule(tiny_model(MODEL), loss, *TRAINED), batches


@torch.no_grad()
def stored_hidden() -> Case:
    loss = DistillationLoss("jsd", temperature=2.0, cross_entropy_weight=0.5)
    teacher, batches = LanguageModel(other_model(), LinearCrossEntropyLoss()), []
    for batch in (rows(2, 1), rows(2, 2)):
        found = teacher_head(teacher, batch)
        loss.output_layer = found._replace(weight=found.weight.detach(), hidden_states=torch.empty(0))
        batches.append(batch | {"teacher_hidden_states": found.hidden_states})
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


def frozen(*, unlike: bool = False) -> Case:
    """A model beside; the first rank's numbers are those of all if the others have unlike ones."""
    module = frozen_module()
    for p in module.frozen[0].model.parameters():
        p.data.add_(int(os.environ.get("RANK", "0")) if unlike else 0)
    return module, [rows(2, 1), rows(2, 2)]


def preferences(objective: str, reference: str) -> Case:
    return module_for(objective, reference), batches_of(objective, reference)


def watched() -> Case:
    """Asserts that stored sums come as they are stored, whatever the precision."""
    module, batches = preferences("dpo", "stored")

    class Watched(PreferenceLoss):
        def of_answers(self, policy, reference, *others, **named):
            assert any(torch.equal(reference, batch["reference_log_prob"]) for batch in batches)
            return super().of_answers(policy, reference, *others, **named)

    module.model.loss.__class__ = Watched
    return module, batches


def vision(name: str, images: str) -> Case:
    """A model of which a batch without images needs only parts."""
    batches = [batch_of(name, of_rows, 14, seed) for seed, of_rows in enumerate(IMAGES[images])]
    return FusedCausalLMModule(tiny(name), None, *TRAINED), batches


def unused() -> Case:
    model = tiny_llama()
    model.extra = nn.Linear(2, 2)
    return FusedCausalLMModule(model, None, *TRAINED), ragged_batches(2)


def closed_mamba() -> nn.Module:
    """Return a model whose documents are apart until its first step: its output projections are zero."""
    model = mamba()
    for name, parameter in model.named_parameters():
        if "out_proj" in name:
            nn.init.zeros_(parameter)
    return model


def packed(build: Callable[[], nn.Module]) -> Case:
    batch = {name: value.repeat(4, 1) for name, value in row(9, 20).items()}
    return FusedCausalLMModule(sharpen(build()), None, *TRAINED), [batch] * 2


CASES: dict[str, Callable[[], Case]] = {
    "weighted": weighted,
    "policy": policy,
    "policy_beside": policy_beside,
    "rloo": partial(policy_of, "rloo"),
    "ppo": partial(policy_of, "ppo"),
    "distilled": distilled,
    "drafted": drafted,
    "stored": stored,
    "stored_hidden": stored_hidden,
    "frozen": frozen,
    "frozen_unlike": partial(frozen, unlike=True),
    **{f"{o}_{r}": partial(preferences, o, r) for o in ("dpo", "kto") for r in ("model", "stored", "packed")},
    **{f"{o}_none": partial(preferences, o, "none") for o in ("orpo", "simpo")},
    "watched": watched,
    **{f"{m}_{i}": partial(vision, m, i) for m in ("llava", "qwen_vl", "gemma3") for i in IMAGES},
    "unused": unused,
    "packed_llama": partial(packed, partial(tiny_model, "llama")),
    "packed_gpt_oss": partial(packed, gpt_oss),
    "packed_mamba": partial(packed, closed_mamba),
}


def fit(item: tuple[str, str], folder: Path, precision: str = "32-true") -> dict[str, Any]:
    """Fit a case with a strategy on two ranks."""
    case, strategy = item
    module, batches = CASES[case]()
    ranks, copies, make = STRATEGIES[strategy]
    own = batches[int(os.environ["RANK"]) :: 2] if copies == ranks else batches
    options = {"accumulate_grad_batches": 2 // copies, "precision": precision}
    trainer = fitted(folder, module, own, devices=2, strategy=make(), max_steps=2, **options)
    beside = [p for frozen in module.frozen for p in frozen.model.parameters()]
    return {
        "weights": whole(trainer.strategy, module, lambda p: p, "model"),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "packing": objects_of_ranks(module.model.packing),
        "divided": [isinstance(p, DTensor) for p in beside],
    }


def assert_as_in_one_process(folder: Path, cases: dict[str, dict[str, str]]) -> dict[tuple[str, str], Any]:
    """Fit cases in one process, and in two under each strategy, and return what two processes have found.

    An entry of ``cases`` that is not empty has words of the refusal.
    """
    items = [(case, strategy) for case, strategies in cases.items() for strategy in strategies]
    fits = each(fit, 2, items, folder, timeout=800)
    for case, strategies in cases.items():
        module, batches = CASES[case]()
        options = {"max_steps": 2, "accumulate_grad_batches": 2}
        trainer: Any = None if all(strategies.values()) else fitted(folder, module, batches, **options)
        for strategy, words in strategies.items():
            found = fits[case, strategy]
            if words:
                assert words in found
                continue
            assert not isinstance(found, Refusal), (case, strategy, found)
            assert found["packing"] == [module.model.packing] * 2
            for name, value in trainer.callback_metrics.items():
                assert found["metrics"][name] == pytest.approx(value.item(), rel=2e-5, abs=1e-6), (case, strategy, name)
            for name, p in module.model.named_parameters():
                message = partial("{} {}: {}".format, case, strategy)
                torch.testing.assert_close(found["weights"][name], p.detach(), rtol=1e-4, atol=1e-6, msg=message)
    return fits
