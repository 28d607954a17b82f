"""Objectives of preferences against an implementation of logits in float64: losses, gradients and what is logged."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors_of import assert_same_gradients
from lightning_helpers import loader, quiet_trainer
from preference_cases import OPTIONS, packed, pairs, perturbed, plain, singles
from tiny_models import tiny_model

from lit_fused import FusedPreferenceModule, LanguageModel, PreferenceLoss, UserError
from lit_fused.objectives.preference import OBJECTIVES

NAMES = [*OPTIONS]


def loss_of(name: str, **more: Any) -> PreferenceLoss:
    options: dict[str, Any] = OPTIONS[name] | more
    return PreferenceLoss(name, **options)


def gradient(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad.clone()


def module_of(name, model, **options):
    return FusedPreferenceModule(model, loss_of(name), lambda groups: torch.optim.SGD(groups, lr=0.1), **options)


def reference_for(name):
    return {"reference": perturbed("llama", torch.float64)} if OBJECTIVES[name].has_reference else {}


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in NAMES for form in ("padded", "packed") if (name, form) != ("kto", "packed")],
)
def test_loss_and_all_gradients_are_those_of_the_logits(name, form):
    batch = singles(5) if name == "kto" else pairs(3)
    given = reference_for(name)
    module = module_of(name, tiny_model("llama", torch.float64), **given)
    expected, _ = plain(name, module.backbone, given.get("reference"), batch)
    found = module.model(packed(batch) if form == "packed" else batch)
    assert found.num_tokens == (5 if name == "kto" else 3)
    torch.testing.assert_close(found.loss, expected, rtol=1e-9, atol=0)
    assert_same_gradients(found.loss, expected, module.parameters(), 1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_in_float32_loss_and_gradients_are_as_near_to_float64_as_those_of_float32_logits(name):
    batch = singles(4, 3) if name == "kto" else pairs(4, 3)
    found = {}
    for kind in ("exact", "plain", "ours"):
        dtype = torch.float64 if kind == "exact" else torch.float32
        given = {"reference": perturbed("llama", dtype)} if OBJECTIVES[name].has_reference else {}
        module = module_of(name, tiny_model("llama", dtype), **given)
        loss = (
            module.model(batch).loss
            if kind == "ours"
            else plain(name, module.backbone, given.get("reference"), batch)[0]
        )
        loss.backward()
        gradients = torch.cat([gradient(p).flatten().double() for p in module.parameters()])
        found[kind] = loss.detach().double(), gradients
    (exact, gradients), (ours, own), (theirs, others) = found["exact"], found["ours"], found["plain"]
    assert (ours - exact).abs() <= 2 * (theirs - exact).abs() + 1e-6 * exact.abs()
    assert (own - gradients).norm() <= 2 * (others - gradients).norm() + 1e-6 * gradients.norm()


def test_accumulated_kto_is_one_mean_over_all_examples_each_with_the_kl_of_its_micro_batch(tmp_path):
    parts, reference = [singles(4, 1), singles(3, 2)], perturbed("llama", torch.float64)
    model = tiny_model("llama", torch.float64)
    losses = [plain("kto", model, reference, part)[0] * len(part["input_ids"]) for part in parts]
    wanted = torch.autograd.grad(torch.stack(losses).sum() / 7, list(model.parameters()))
    module = module_of("kto", tiny_model("llama", torch.float64), reference=reference)
    trainer = quiet_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=2, precision="64-true")
    trainer.fit(module, loader(parts))
    assert trainer.callback_metrics["train/loss"].item() == pytest.approx(torch.stack(losses).sum().item() / 7)
    for p, before, gradient in zip(module.backbone.parameters(), model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p, before - 0.1 * gradient, rtol=1e-6, atol=1e-9)


def test_rewards_margins_accuracy_and_log_probabilities_are_logged(tmp_path):
    batch, reference = pairs(4), perturbed("llama", torch.float64)
    module = module_of("dpo", tiny_model("llama", torch.float64), reference=reference)
    _, (policy, theirs, _) = plain("dpo", module.backbone, reference, batch)
    rewards = 0.3 * (policy - theirs)
    trainer = quiet_trainer(tmp_path, max_epochs=1)
    trainer.fit(module, loader([batch]))
    logged = {name.removeprefix("train/"): value.item() for name, value in trainer.callback_metrics.items()}
    margins = rewards[::2] - rewards[1::2]
    expected = {
        "reward_chosen": rewards[::2].mean(),
        "reward_rejected": rewards[1::2].mean(),
        "reward_margin": margins.mean(),
        "reward_accuracy": (margins > 0).double().mean(),
        "log_prob_chosen": policy[::2].mean(),
        "log_prob_rejected": policy[1::2].mean(),
    }
    for name, value in expected.items():
        assert logged[name] == pytest.approx(value.item(), rel=1e-5, abs=1e-7), name


def test_a_copy_of_the_model_a_model_with_adapters_off_and_stored_sums_are_the_same_reference(tmp_path):
    from peft import LoraConfig, get_peft_model

    batch = pairs(3)
    losses = {}
    for kind in ("copy", "stored", "adapters_off"):
        model = tiny_model("llama", torch.float64)
        _, (base, _, _) = plain("dpo", model, model, batch)
        config = LoraConfig(target_modules=["q_proj", "lm_head"], lora_dropout=0.0, r=2)
        adapted = get_peft_model(model, config)
        if kind == "copy":
            module = module_of("dpo", adapted, reference="copy")
        else:
            module = module_of("dpo", adapted, reference=None if kind == "adapters_off" else kind)
        generator = torch.Generator().manual_seed(0)
        for name, p in adapted.named_parameters():
            if "lora_" in name:
                p.data = 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        given = batch | ({"reference_log_prob": base.detach()} if kind == "stored" else {})
        output = module.model(given)
        output.loss.backward()
        gradients = [gradient(p) for p in module.parameters() if p.requires_grad]
        losses[kind] = output.loss.detach(), gradients
        assert module.backbone.training
    assert losses["copy"][0] != math.log(2)
    for kind in ("stored", "adapters_off"):
        torch.testing.assert_close(losses[kind], losses["copy"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("gpt2", {"target_modules": ["c_attn"], "bias": "all"}, r"h\.0\.ln_1\.bias is trained as well"),
        ("llama", {"target_modules": ["q_proj"], "init_lora_weights": "olora"}, "init_lora_weights=olora has changed"),
    ],
)
def test_a_model_that_is_another_one_without_its_adapters_is_no_reference(name, options, why):
    from peft import LoraConfig, get_peft_model

    base, batch = tiny_model(name), pairs(3)
    expected = plain("dpo", base, base, batch)[0]  # The model begins as it was.
    adapted = get_peft_model(base, LoraConfig(r=2, **options))
    with pytest.raises(UserError, match=f"without its adapters the model is no reference: .*{why}.*reference=copy"):
        module_of("dpo", adapted)
    found = module_of("dpo", adapted, reference="copy").model(batch).loss
    torch.testing.assert_close(found, expected)


def test_a_reference_with_trained_weights_is_refused_and_one_with_frozen_weights_is_not():
    from peft import LoraConfig, get_peft_model

    model, reference = tiny_model("llama"), tiny_model("llama")
    reference.lm_head = model.lm_head
    with pytest.raises(UserError, match="the reference shares weights with the model"):
        module_of("dpo", model, reference=reference)
    model.lm_head.requires_grad_(False)
    module_of("dpo", model, reference=reference)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UserError, match="as one does that PEFT's adapters were put into"):
        module_of("dpo", adapted, reference=model)
    assert any(p.requires_grad for p in adapted.parameters())


def test_pairs_without_answers_weigh_nothing_and_a_batch_of_them_is_zero():
    batch, model = pairs(3), tiny_model("llama", torch.float64)
    module = module_of("dpo", model, reference=perturbed("llama", torch.float64))
    whole = module.model(batch)
    padded = {key: torch.cat([value, value[:2]]) for key, value in batch.items()}
    padded["labels"][-2:] = -100
    found = module.model(padded)
    assert found.num_tokens == whole.num_tokens == 3
    torch.testing.assert_close(found.loss, whole.loss)
    nothing = module.model({**batch, "labels": torch.full_like(batch["labels"], -100)})
    nothing.loss.backward()
    assert nothing.loss == 0
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


@pytest.mark.parametrize(
    ("objective", "change", "message"),
    [
        ("simpo", lambda batch: batch.pop("desirable"), "a batch of preferences needs 'desirable', .* and got none"),
        (
            "simpo",
            lambda batch: batch["desirable"].zero_(),
            "compares pairs, a chosen answer followed by a rejected one",
        ),
        ("dpo", lambda batch: None, "compares with a reference model, and there is none"),
        (
            "kto",
            lambda batch: batch.update(reference_log_prob=torch.zeros(4)),
            "of these the batch has no stored other_reference_log_prob",
        ),
    ],
)
def test_batches_that_are_no_preferences_are_refused_by_a_sentence(objective, change, message):
    batch = pairs(2)
    change(batch)
    with pytest.raises(UserError, match=message):
        LanguageModel(tiny_model("llama"), PreferenceLoss(objective))(batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "simpo", "kto"])
def test_a_model_learns_to_prefer(name, tmp_path):
    batch = pairs(4)
    module = FusedPreferenceModule(
        tiny_model("llama"), PreferenceLoss(name), lambda groups: torch.optim.AdamW(groups, lr=1e-3)
    )
    trainer = quiet_trainer(tmp_path, max_epochs=30)
    trainer.fit(module, loader([batch]), loader([batch]))
    logged = trainer.callback_metrics
    assert logged["val/reward_chosen"] - logged["val/reward_rejected"] > 0.2
    if name != "kto":
        assert logged["val/reward_accuracy"] == 1
    assert F.relu(logged["val/loss"]) == logged["val/loss"] < {"dpo": 0.6, "simpo": 1.2, "kto": 0.5}[name]
