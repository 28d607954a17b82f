"""TRL's trainers of policies and our loss, on the same rollouts: the same losses, gradients and metrics.

TRL pads, scores and rewards the rollouts by its own code; only sampling is replaced. The sampler has other weights than
the policy, as in TRL's second iteration over the same rollouts, so that many ratios are clipped.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import make_tokenizer
from datasets import Dataset
from tiny_models import sharpen, tiny_model
from torch import Tensor

from lit_fused import FusedPolicyModule, PolicyLoss
from lit_fused.data import RolloutDataModule

pytestmark = pytest.mark.slow  # TRL's import alone takes seconds.

LENGTHS = [(4, 5), (4, 2), (4, 1), (6, 7), (6, 3), (6, 6)]  # of prompt and completion, in two groups of three
REWARDS = [1.0, 0.0, 0.25, 0.5, 2.0, -1.0]
LONGEST = max(after for _, after in LENGTHS)
BETA = 0.4
OURS: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.3, "temperature": 0.8}
THEIRS: dict[str, Any] = {"epsilon": 0.1, "epsilon_high": 0.3, "temperature": 0.8, "num_generations": 3}
FIXED: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": [], "gradient_checkpointing": False}
# TRL's loss_type -> its other settings, our objective and our options, for one batch.
TYPES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "grpo": ({}, "grpo", {}),
    # TRL's dr_grpo divides by the deviation, which the paper does not, unless it is told not to scale.
    "dr_grpo": ({"scale_rewards": "none", "max_completion_length": 9}, "dr_grpo", {"length": 9}),
    # TRL's dapo divides by the tokens of all groups; the paper and ours by those of each group.
    "dapo": ({}, "dapo", {"normalization": "token"}),
    "bnpo": ({}, "grpo", {"normalization": "token"}),
    # TRL's epsilon_high of cispo is the largest ratio itself.
    "cispo": ({"epsilon_high": 1.3}, "cispo", {"clip_low": "none"}),
}
BY_TOKENS = ("dapo", "bnpo", "cispo")
# Settings that every type has, and ours.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {"kl_bias_correction": True}),
    "sequence": ({"importance_sampling_level": "sequence", "use_bias_correction_kl": False}, {"ratio": "sequence"}),
    "delta": ({"delta": 1.4}, {"delta": 1.4, "kl_bias_correction": True}),
    "entropy": ({"entropy_coef": 0.7}, {"entropy_weight": 0.7, "kl_bias_correction": True}),
}


@pytest.fixture(scope="module")
def trl() -> Any:
    import trl

    return trl


def model_of(tokenizer: Any, seed: int, noise: float) -> Any:
    model = sharpen(tiny_model("llama", vocab_size=len(tokenizer)), 3)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data += noise * torch.randn(p.shape, generator=generator)
    return model


class Case:
    """A trainer of TRL, the batch that it makes of rollouts, and what we need of them."""

    def __init__(self, trl: Any, name: str, folder: Path, *, steps: int = 1, **settings: Any) -> None:
        tokenizer = make_tokenizer()
        tokenizer.pad_token = tokenizer.eos_token
        ids = torch.randint(3, len(tokenizer), (6, 20), generator=torch.Generator().manual_seed(0)).tolist()
        prompts = {before: ids[before % 4][:before] for before, _ in LENGTHS}
        completions = [row[20 - after :] for row, (_, after) in zip(ids, LENGTHS, strict=True)]
        self.folder, self.steps = folder, steps
        self.policy, self.reference = model_of(tokenizer, 12, 0.02), model_of(tokenizer, 1, 0.03)
        model = model_of(tokenizer, 0, 0.0).train()
        self.reference.save_pretrained(folder / "reference")
        model.config._name_or_path = str(folder / "reference")  # TRL loads its reference from there.
        arguments = getattr(trl, f"{name}Config")(
            str(folder),
            per_device_train_batch_size=6 // steps,
            gradient_accumulation_steps=steps,
            num_iterations=2,  # Otherwise GRPO takes the sampler for the policy.
            **(FIXED | THEIRS | settings),
        )
        data = Dataset.from_list([{"prompt": "fox"}])
        trainer: Any = getattr(trl, f"{name}Trainer")(
            model, lambda **_: REWARDS, args=arguments, train_dataset=data, processing_class=tokenizer
        )
        trainer.current_gradient_accumulation_steps = steps  # train() would set it.
        trainer._tokenize_prompts = lambda _: ([prompts[before] for before, _ in LENGTHS], None, {})
        trainer._generate_single_turn = lambda *_: (completions, None) if name == "GRPO" else completions
        self.trainer, self.metrics = trainer, trainer._metrics["train"]
        self.inputs = trainer._generate_and_score_completions([{"prompt": "fox"}] * 6)
        self.sampler = self.log_probs(model).detach()
        self.rollouts: list[dict[str, Any]] = [
            {"prompt_ids": prompts[before], "completion_ids": completion, "reward": reward, "log_probs": row[:after]}
            for (before, after), completion, reward, row in zip(
                LENGTHS, completions, REWARDS, self.sampler.tolist(), strict=True
            )
        ]
        model.load_state_dict(self.policy.state_dict())

    def log_probs(self, model: Any) -> Tensor:
        """Return TRL's log-probabilities (B, T) of completions, 0 where there is no token."""
        ids, mask = (
            torch.cat([self.inputs[f"prompt_{part}"], self.inputs[f"completion_{part}"]], 1) for part in ("ids", "mask")
        )
        return self.trainer._get_per_token_logps_and_entropies(model, ids, mask, LONGEST)[0]

    def theirs(self) -> Tensor:
        """Return TRL's loss, summed over the accumulated steps."""
        losses = []
        for rows in torch.arange(6).chunk(self.steps):
            part = {name: value[rows] if value.ndim else value for name, value in self.inputs.items()}
            losses.append(self.trainer.compute_loss(self.trainer.model, part))
        return torch.stack(losses).sum()

    def ours(self, objective: str, **options: Any) -> Any:
        """Return our output for the rollouts as one batch."""
        path = self.folder / "rollouts.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in self.rollouts))
        data = RolloutDataModule(path, batch_size=6)
        data.setup()
        loss = PolicyLoss(objective, **(OURS | options))
        module = FusedPolicyModule(self.policy, loss, reference=self.reference if loss.kl_weight else None)
        return module.model(next(iter(data.val_dataloader())))

    def assert_same(self, loss: Tensor, wanted: Tensor) -> None:
        # Terms of size 1 almost cancel: advantages of a group add up to 0.
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5, abs=1e-6)
        models = (self.policy, self.trainer.model)
        own, theirs = (
            torch.cat([gradient.flatten() for gradient in torch.autograd.grad(value, list(model.parameters()))])
            for value, model in zip((loss, wanted), models, strict=True)
        )
        assert (own - theirs).norm() <= 1e-5 * theirs.norm()

    def assert_both_sides_are_clipped(self) -> None:
        assert self.metrics["clip_ratio/low_mean"][0] > 0
        assert self.metrics["clip_ratio/high_mean"][0] > 0


@pytest.mark.parametrize(
    ("kind", "way"),
    [(kind, way) for kind in TYPES for way in ("default", "sequence")]
    + [(kind, "delta") for kind in TYPES if kind != "cispo"]
    + [(kind, "entropy") for kind in BY_TOKENS],
)
def test_loss_gradients_and_metrics_are_those_of_grpo(kind, way, trl, tmp_path):
    settings, objective, options = TYPES[kind]
    theirs_too, ours_too = WAYS[way]
    case = Case(trl, "GRPO", tmp_path, beta=BETA, loss_type=kind, **settings, **theirs_too)
    theirs, output = case.theirs(), case.ours(objective, kl_weight=BETA, **options, **ours_too)
    case.assert_same(output.loss, theirs)
    names = {"kl": "kl", "entropy": "entropy"}
    if kind != "cispo":
        case.assert_both_sides_are_clipped()
    if way in ("default", "entropy"):  # TRL's share of a sequence's ratios is of sequences, ours of tokens.
        names |= {"clipped": "cispo_clip_ratio" if kind == "cispo" else "clip_ratio/region_mean"}
    for name, other in names.items():
        found = output.stats[f"{name}/tokens"] / output.stats["tokens"]
        assert found.item() == pytest.approx(case.metrics[other][0], rel=1e-5), name


@pytest.mark.parametrize("kind", TYPES)
def test_one_batch_is_the_sum_of_accumulated_steps_of_grpo(kind, trl, tmp_path):
    settings, objective, options = TYPES[kind]
    if kind == "bnpo":  # TRL's bnpo divides a step by its own tokens. A step is a group here, as in our dapo.
        options = {"normalization": "group"}
    case = Case(trl, "GRPO", tmp_path, steps=2, loss_type=kind, **settings)
    case.assert_same(case.ours(objective, **options).loss, case.theirs())


@pytest.mark.parametrize("beta", [0.0, BETA])
def test_loss_and_gradients_are_those_of_rloo(beta, trl, tmp_path):
    case = Case(trl, "RLOO", tmp_path, beta=beta)
    if beta:  # TRL's RLOO takes the sampler's KL, an estimate by k1, off the rewards.
        kl = (case.sampler - case.log_probs(case.trainer.ref_model)).sum(-1)
        for line, value in zip(case.rollouts, kl.tolist(), strict=True):
            line["reward"] -= beta * value
    case.assert_same(case.ours("rloo").loss, case.theirs())
    case.assert_both_sides_are_clipped()
