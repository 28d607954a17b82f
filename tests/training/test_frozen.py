"""A model beside the trained one that is not trained: alone, under every strategy, and in no checkpoint."""

import copy

import pytest
import torch
from frozen_cases import MODEL, fitted, frozen_module, other_model, rows
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_helpers import loader, quiet_trainer
from strategy_cases import assert_as_in_one_process
from tiny_models import tiny_model

from lit_fused.models.load import from_config, materialize

BATCHES = [rows(2, 1), rows(2, 2)]


def log_probs(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].log_softmax(-1)
    targets = batch["labels"][:, 1:]
    return logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0].where(targets != -100, 0), targets != -100


def test_a_step_uses_the_frozen_model_and_leaves_it_as_it_is(tmp_path):
    module = frozen_module(tiny_model(MODEL).double(), other_model(torch.float64))
    trained, frozen = copy.deepcopy(module.backbone), copy.deepcopy(module.frozen[0].model.backbone)
    trainer = fitted(tmp_path, module, BATCHES, accumulate_grad_batches=2, max_epochs=1)
    total, count = torch.zeros(()), torch.zeros(())
    for batch in BATCHES:
        (ours, valid), (theirs, _) = log_probs(trained, batch), log_probs(frozen, batch)
        total, count = total + (ours - theirs.detach()).square().sum() / 2, count + valid.sum()
    (total / count).backward()
    assert total > 1
    assert trainer.callback_metrics["train/loss"].item() == pytest.approx((total / count).item(), rel=1e-6)
    for p, after in zip(trained.parameters(), module.backbone.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(after, p - 0.1 * p.grad, rtol=1e-6, atol=1e-8)
    for before, after in zip(frozen.parameters(), module.frozen[0].model.parameters(), strict=True):
        assert torch.equal(before, after)
        assert after.grad is None


def test_a_frozen_model_is_in_no_parameter_list_and_no_checkpoint_and_a_run_resumes_beside_it(tmp_path):
    own = {name for name, _ in tiny_model(MODEL).named_parameters()}
    saver = ModelCheckpoint(tmp_path, save_last=True)
    module = frozen_module()
    assert {name.removeprefix("model.backbone.") for name, _ in module.named_parameters()} == own
    fitted(tmp_path, module, BATCHES, max_epochs=1, callbacks=[saver], enable_checkpointing=True)
    assert not module.frozen[0].model.training
    saved = torch.load(saver.last_model_path, weights_only=False)
    assert len(saved["state_dict"]) == len(own)
    assert len(saved["optimizer_states"][0]["param_groups"][0]["params"]) <= len(own)
    at_once, resumed = frozen_module(), frozen_module()
    fitted(tmp_path, at_once, BATCHES)
    quiet_trainer(tmp_path, max_epochs=2).fit(resumed, loader(BATCHES), ckpt_path=saver.last_model_path)
    for p, other in zip(at_once.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, other)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_a_frozen_model_without_weights_gets_them_with_the_trained_one(tmp_path, precision):
    config = tiny_model(MODEL, initializer_range=0.1).config
    late = frozen_module(from_config(config, 1), from_config(config, 2))
    early = frozen_module(from_config(config, 1), from_config(config, 2))
    for model in (early.model, early.frozen[0].model):
        materialize(model)
    found = [fitted(tmp_path, m, BATCHES, precision=precision).callback_metrics["train/loss"] for m in (late, early)]
    assert found[0] > 0.01
    torch.testing.assert_close(*found, rtol=2e-2 if "bf16" in precision else 1e-6, atol=0)
    buffers = dict(late.frozen[0].model.named_buffers())
    assert {b.dtype for name, b in buffers.items() if name.endswith("inv_freq")} == {torch.float32}
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {p.dtype for p in late.frozen[0].model.parameters()} == {dtype}


@pytest.mark.slow
def test_every_strategy_runs_the_frozen_model_beside_as_one_process_does_or_says_why_not(tmp_path):
    words = "strategy=pp divides one model, and a reference model cannot run beside it; store its log-probabilities"
    cases = {"frozen_unlike": {"ddp": "", "tp": ""}, "frozen": {"fsdp2": "", "pp": words}}
    found = assert_as_in_one_process(tmp_path, cases)
    assert all(found["frozen", "fsdp2"]["divided"])
    assert any(found["frozen_unlike", "tp"]["divided"])
    assert not any(found["frozen_unlike", "ddp"]["divided"])
