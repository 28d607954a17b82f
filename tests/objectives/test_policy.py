"""Policy gradients over given rollouts: every objective against plain logits in float64."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from errors_of import assert_same_gradients
from frozen_cases import fitted
from lightning_helpers import loader, quiet_trainer
from strategy_cases import TRAINED
from tiny_models import VOCABULARY, ScaledInTraining, sharpen, tiny_batch, tiny_llama, tiny_model
from torch import Tensor

from lit_fused import FusedPolicyModule, LanguageModel, PolicyLoss
from lit_fused.data import RolloutDataModule
from lit_fused.errors import UserError
from lit_fused.objectives.policy_loss import OBJECTIVES
from lit_fused.ops import TokenScores

LENGTHS = [(4, 5), (4, 2), (4, 1), (6, 7), (6, 3), (6, 6)]  # of prompt and completion, in two groups of three
REWARDS = [1.0, 0.0, 0.25, 0.5, 2.0, -1.0]


def lines(*, log_probs: bool = True, seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)

    def numbers(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    prompts = {4: numbers(4), 6: numbers(6)}
    found = []
    for (before, after), reward in zip(LENGTHS, REWARDS, strict=True):
        line = {"prompt_ids": prompts[before], "completion_ids": numbers(after), "reward": reward}
        if log_probs:
            line["log_probs"] = (-4 - torch.rand(after, generator=generator)).tolist()
        found.append(line)
    return found


def data_of(folder: Path, rollouts: list[dict[str, Any]], **options: Any) -> RolloutDataModule:
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in rollouts))
    settings: Any = {"batch_size": 6} | options
    data = RolloutDataModule(path, **settings)
    data.setup()
    return data


def batch_of(folder: Path, rollouts: list[dict[str, Any]]) -> dict[str, Tensor]:
    return next(iter(data_of(folder, rollouts).val_dataloader()))


def plain_loss(
    model: Any, rollouts: list[dict[str, Any]], objective: str, options: dict[str, Any], reference: Any = None
) -> Tensor:
    """The objective of the logits of each rollout alone, as its paper writes it."""
    temperature, kl_weight = options.get("temperature", 1.0), options.get("kl_weight", 0.0)
    low, high = {"dapo": (0.2, 0.28), "cispo": (1.0, 4.0)}.get(objective, (0.2, 0.2))
    limit = options.get("delta", math.inf)
    groups: dict[Any, list[int]] = {}
    for index, line in enumerate(rollouts):
        groups.setdefault(tuple(line["prompt_ids"]), []).append(index)
    rewards = torch.tensor([line["reward"] for line in rollouts]).double()
    sums, entropies, counts = [], [], []
    for index, line in enumerate(rollouts):
        ids = torch.tensor([line["prompt_ids"] + line["completion_ids"]])
        of_group = rewards[groups[tuple(line["prompt_ids"])]]
        own, size = rewards[index], len(of_group)
        advantage = {
            "reinforce": own,
            "ppo": own,
            "rloo": own - (of_group.sum() - own) / (size - 1),
            "dr_grpo": own - of_group.mean(),
        }.get(objective, (own - of_group.mean()) / (of_group.std() + 1e-4))
        after = len(line["completion_ids"])

        def scores(net: Any, ids: Tensor = ids, after: int = after) -> tuple[Tensor, Tensor]:
            log_p = (net(input_ids=ids).logits[0, -after - 1 : -1] / temperature).log_softmax(-1)
            return log_p.gather(-1, ids[0, -after:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

        log_p, entropy = scores(model)
        old = torch.tensor(line["log_probs"]).double() if "log_probs" in line else log_p.detach()
        log_ratio = log_p - old
        if objective == "rloo":
            log_ratio = log_ratio.sum().expand(after)
        ratio = log_ratio.exp()
        terms = -torch.min(ratio.clamp(max=limit) * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        if objective == "rloo":
            terms = terms / after
        if objective == "cispo":
            terms = -ratio.clamp(max=min(limit, 1 + high)).detach() * advantage * log_p
        if objective == "reinforce":
            terms = -advantage * log_p
        if kl_weight:
            with torch.no_grad():
                theirs, _ = scores(reference)
            difference = theirs - log_p
            kinds = {"k1": -difference, "k2": difference**2 / 2, "k3": difference.exp() - difference - 1}
            kl = kinds[options.get("kl_estimator", "k3")] * (ratio if options.get("kl_bias_correction") else 1)
            terms = terms + kl_weight * kl
        sums.append(terms.sum())
        entropies.append(entropy.sum())
        counts.append(after)

    def over_tokens(each: list[Tensor]) -> Tensor:
        return torch.stack(each).sum() / sum(counts)

    def over_completions(each: list[Tensor]) -> Tensor:
        return torch.stack([s / n for s, n in zip(each, counts, strict=True)]).mean()

    def over_groups(each: list[Tensor]) -> Tensor:
        of_groups: Any = [sum(each[i] for i in part) / sum(counts[i] for i in part) for part in groups.values()]
        return torch.stack(of_groups).mean()

    means = {"ppo": over_tokens, "cispo": over_tokens, "dapo": over_groups}
    mean = means.get(objective, over_completions)
    entropy = options.get("entropy_weight", 0.0) * mean(entropies)
    if objective == "dr_grpo":
        return torch.stack(sums).mean() / options["length"] - entropy
    if objective in ("reinforce", "rloo"):
        return torch.stack(sums).mean() - entropy
    return mean(sums) - entropy


WAYS: list[dict[str, Any]] = [
    {},
    {"log_probs": False},
    {"kl_weight": 0.3, "entropy_weight": 0.1, "temperature": 0.7},
    {"kl_weight": 0.3, "kl_estimator": "k2", "kl_bias_correction": True},
    {"kl_weight": 0.3, "kl_estimator": "k1", "delta": 1.5},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradients_are_those_of_plain_logits(objective, way, tmp_path):
    options = {name: value for name, value in way.items() if name != "log_probs"}
    options |= {"length": 20} if objective == "dr_grpo" else {}
    rollouts = lines(log_probs=way.get("log_probs", True))
    net, other = sharpen(tiny_model("gemma2").double(), 3), sharpen(tiny_model("gemma2").double(), 2)
    truth = plain_loss(net, rollouts, objective, options, other)
    weights = [p for p in net.parameters() if p.requires_grad]
    module = FusedPolicyModule(
        net, PolicyLoss(objective, **options), reference=other if options.get("kl_weight") else None
    )
    output = module.model(batch_of(tmp_path, rollouts))
    torch.testing.assert_close(output.loss, truth, rtol=1e-6, atol=1e-7)  # Rewards are float32 numbers.
    assert_same_gradients(output.loss, truth, weights)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_in_float32_loss_and_gradients_are_as_near_to_float64_as_those_of_float32_logits(objective, tmp_path):
    options: Any = {"kl_weight": 0.3, "entropy_weight": 0.1} | ({"length": 20} if objective == "dr_grpo" else {})
    rollouts, found = lines(), {}
    for kind in ("exact", "plain", "ours"):
        dtype = torch.float64 if kind == "exact" else torch.float32
        net, other = (sharpen(tiny_model("llama", dtype), factor) for factor in (3, 2))
        module = FusedPolicyModule(net, PolicyLoss(objective, **options), reference=other)
        ours = kind == "ours"
        loss = (
            module.model(batch_of(tmp_path, rollouts)).loss
            if ours
            else plain_loss(net, rollouts, objective, options, other)
        )
        gradients = torch.autograd.grad(loss, [p for p in net.parameters() if p.requires_grad])
        found[kind] = loss.detach().double(), torch.cat([g.flatten().double() for g in gradients])
    (exact, gradients), (ours, own), (theirs, others) = found["exact"], found["ours"], found["plain"]
    assert (ours - exact).abs() <= 2 * (theirs - exact).abs() + 1e-6 * exact.abs()
    assert (own - gradients).norm() <= 2 * (others - gradients).norm() + 1e-6 * gradients.norm()


def test_gspo_is_a_ratio_of_the_geometric_mean(tmp_path):
    rollouts = lines()
    net = tiny_model("llama").double()
    found = LanguageModel(net, PolicyLoss("grpo", ratio="sequence"))(batch_of(tmp_path, rollouts)).loss
    rewards = torch.tensor(REWARDS).double().view(2, 3)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    losses = []
    for line, advantage in zip(rollouts, advantages, strict=True):
        ids, after = torch.tensor([line["prompt_ids"] + line["completion_ids"]]), len(line["completion_ids"])
        log_p = net(input_ids=ids).logits[0, -after - 1 : -1].log_softmax(-1).gather(-1, ids[0, -after:, None])[:, 0]
        ratio = (log_p - torch.tensor(line["log_probs"]).double()).mean().exp()
        losses.append(-torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    truth = torch.stack(losses).mean()
    torch.testing.assert_close(found, truth, rtol=1e-6, atol=0)  # Rewards are float32 numbers.
    assert_same_gradients(found, truth, net.parameters())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_groups_that_are_cut_into_micro_batches_are_whole(objective, tmp_path):
    found = []
    for size in (6, 1, 4):
        options: Any = {"entropy_weight": 0.1} | ({"length": 20} if objective == "dr_grpo" else {})
        module = FusedPolicyModule(tiny_model("llama").double(), PolicyLoss(objective, **options), *TRAINED)
        batches = [*data_of(tmp_path, lines(), batch_size=size).val_dataloader()]
        trainer = fitted(tmp_path, module, batches, accumulate_grad_batches=len(batches), max_epochs=1)
        found.append((dict(trainer.callback_metrics), [p.detach() for p in module.parameters()]))
    for metrics, weights in found[1:]:
        for name, value in found[0][0].items():
            torch.testing.assert_close(metrics[name], value, rtol=1e-6, atol=1e-9, msg=name)
        for weight, whole in zip(weights, found[0][1], strict=True):
            assert (weight - whole).norm() <= 1e-6 * whole.norm()  # Llama's norms are float32.


def test_advantages_of_tokens_are_taken_as_they_are(tmp_path):
    rollouts = lines()
    for line in rollouts:
        line["advantage"] = [line.pop("reward")] * len(line["completion_ids"])
    net = tiny_model("llama").double()
    found = LanguageModel(net, PolicyLoss("ppo"))(batch_of(tmp_path, rollouts)).loss
    torch.testing.assert_close(found, plain_loss(net, lines(), "ppo", {}), rtol=1e-6, atol=0)


def test_rollouts_of_another_model_are_told_with_their_kl(tmp_path):
    rollouts = lines()
    module = FusedPolicyModule(tiny_model("llama"), PolicyLoss("grpo"))
    for line in rollouts:
        line["log_probs"] = [-1.0] * len(line["log_probs"])
    with pytest.warns(UserWarning, match=r"Cause: mask \(all scores are -1\).* KL [\d.]+ nats per token"):
        quiet_trainer(tmp_path, max_steps=1).fit(module, data_of(tmp_path, rollouts))
    own = lines(log_probs=False)
    with torch.no_grad():
        for line in own:
            ids, after = torch.tensor([line["prompt_ids"] + line["completion_ids"]]), len(line["completion_ids"])
            log_p = module.backbone(input_ids=ids).logits[0, -after - 1 : -1].log_softmax(-1)
            line["log_probs"] = log_p.gather(-1, ids[0, -after:, None])[:, 0].tolist()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the sampler's")
        quiet_trainer(tmp_path, max_steps=1).validate(module, data_of(tmp_path, own), verbose=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward": math.nan}, "rollout 1 of .*rollouts.jsonl: its reward must be finite numbers, .* got nan"),
        ({"reward": None}, "rollout 1 has other numbers than rollout 0; give them to all"),
        ({"log_probs": [-1.0]}, "it has 1 log_probs for 2 tokens of its completion"),
        ({"completion_ids": []}, "it has 4 tokens of a prompt and 0 of a completion; each needs one"),
        ({"completion_ids": None}, "it has no completion_ids, and no text completion with data.tokenizer"),
        ({"completion_ids": [5] * 2000, "log_probs": [-1.0] * 2000}, "data.block_size=1024 is the most of both"),
        ({"log_probs": [-1.0, 0.5]}, "its log_probs must be finite numbers, log_probs at most 0; got .-1.0, 0.5"),
    ],
)
def test_numbers_that_would_be_silently_wrong_are_refused_with_their_rollout(change, words, tmp_path):
    rollouts = lines()
    rollouts[1] |= change
    with pytest.raises(UserError, match=words) as raised:
        data_of(tmp_path, rollouts)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["reward", "advantages"])
def test_a_batch_of_ones_own_with_nan_is_refused(name, tmp_path):
    batch = batch_of(tmp_path, lines()) | {"advantages": torch.ones(6, 1)}
    batch[name] = torch.full_like(batch[name], math.nan)
    module = FusedPolicyModule(tiny_model("llama"), PolicyLoss("ppo"))
    with pytest.raises(UserError, match=f"'{name}' of the first batch has numbers that are not finite"):
        quiet_trainer(tmp_path, max_steps=1).fit(module, loader([batch]))


@pytest.mark.parametrize(
    ("name", "numbers", "words"),
    [
        ("advantages", torch.ones(13), r"'advantages' must have one number for each position, \(6, 13\), got \(13,\)"),
        ("sampler_log_probs", torch.zeros(6, 1), "'sampler_log_probs' must have one number for each position"),
        ("reward", torch.ones(6, 1), r"'reward' must have one number for each completion, \(6,\), got \(6, 1\)"),
        ("group_std", None, "needs reward, group_mean, group_std, group_size, or advantages; this batch has .*mask"),
    ],
)
def test_numbers_of_another_shape_and_missing_ones_are_refused(name, numbers, words, tmp_path):
    batch = batch_of(tmp_path, lines()) | {name: numbers}
    if numbers is None:
        del batch[name]
    module = FusedPolicyModule(tiny_model("llama"), PolicyLoss("grpo"))
    for run in (module.model, module.model.spot_check)[: 1 if numbers is None else 2]:
        with pytest.raises(UserError, match=words):
            run(batch)


def test_groups_of_one_alone_are_refused_where_completions_are_compared(tmp_path):
    rollouts = [line | {"group": index} for index, line in enumerate(lines())]
    module = FusedPolicyModule(tiny_model("llama"), PolicyLoss("rloo"))
    with pytest.raises(UserError, match="objective=rloo compares the completions of one prompt"):
        quiet_trainer(tmp_path, max_steps=1).fit(module, data_of(tmp_path, rollouts))
    quiet_trainer(tmp_path, max_steps=1).fit(
        FusedPolicyModule(tiny_model("llama"), PolicyLoss("reinforce")), data_of(tmp_path, rollouts)
    )


def test_groups_of_equal_rewards_and_batches_that_train_nothing_are_told_once(tmp_path):
    module = FusedPolicyModule(tiny_model("llama"), PolicyLoss("rloo"), check_every_n_steps=1)
    equal = [line | {"reward": 0.1} if len(line["prompt_ids"]) == 4 else line for line in lines()]
    cases: dict[str, Any] = {
        "learns nothing from 3 of 6: 0 are the only ones of their prompt, and 3 have": data_of(tmp_path, equal),
        "all advantages of a batch are zero": loader([batch_of(tmp_path, equal[:3])] * 3),
    }
    for told, data in cases.items():
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("default")
            quiet_trainer(tmp_path, max_steps=3).fit(module, data)
        assert sum(told in str(warning.message) for warning in warned) == 1


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("high", [0.2, None])
@pytest.mark.parametrize("ratio", ["token", "sequence", "trajectory"])
def test_ratios_beyond_float32_give_what_the_formula_gives_in_float64(ratio, high, advantage):
    targets, log_ratio = torch.tensor([[5, 6, 7]]), torch.tensor([[200.0, 0.1, 150.0]])
    log_prob = -torch.ones(1, 3, requires_grad=True)
    scores = TokenScores(log_prob, log_prob * 0, log_prob * 0, None, targets)
    batch = {"advantages": torch.full((1, 3), advantage), "sampler_log_probs": log_prob.detach() - log_ratio}
    loss = PolicyLoss("ppo", ratio=ratio, clip_high="none" if high is None else high)
    found = loss.of_scores(scores, targets, batch).loss_sum

    exact = log_prob.detach().double().requires_grad_()
    plain = exact - batch["sampler_log_probs"].double()
    if ratio != "token":
        plain = (plain.mean() if ratio == "sequence" else plain.sum()).expand(1, 3)
    plain = plain.exp()
    expected = -torch.min(plain * advantage, plain.clamp(0.8, None if high is None else 1 + high) * advantage).sum()
    torch.testing.assert_close(found, expected.float())
    gradients = torch.autograd.grad(found, log_prob)[0], torch.autograd.grad(expected, exact)[0].float()
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("length", [20, 3000])
def test_the_first_batch_is_compared_with_the_models_own_logits(length, tmp_path):
    batch = tiny_batch(4, length) | {"advantages": torch.ones(4, length)}
    batch["labels"][:, : length // 2] = -100
    module = FusedPolicyModule(sharpen(tiny_llama(ScaledInTraining)), PolicyLoss("ppo"))
    with pytest.raises(UserError, match="ScaledInTraining does something to its logits"):
        quiet_trainer(tmp_path, max_steps=1).fit(module, loader([batch]))
