"""A student and its teacher in fits: it learns, under every strategy, and what does not fit is refused."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from frozen_cases import MODEL, fitted, other_model, rows
from lightning_helpers import loader, quiet_trainer
from strategy_cases import TRAINED
from tiny_models import sharpen, tiny_model

from lit_fused import CrossEntropyLoss, DistillationLoss, FusedDistillationModule, TeacherHead, drafter_for
from lit_fused.errors import UserError
from lit_fused.models.load import from_config, materialize

BATCHES = [rows(2, 1), rows(2, 2)]


def log_probs(model: Any, batch: Any, temperature: float = 1.0) -> torch.Tensor:
    return (model(input_ids=batch["input_ids"]).logits[:, :-1] / temperature).log_softmax(-1)


def test_an_accumulated_step_is_that_of_the_logits_of_both_over_all_tokens(tmp_path):
    options = {"divergence": "forward_kl", "temperature": 2.0, "divergence_weight": 4.0, "cross_entropy_weight": 0.5}
    student, teacher = tiny_model(MODEL).double(), other_model(torch.float64)
    module = FusedDistillationModule(copy.deepcopy(student), DistillationLoss(**options), *TRAINED, teacher=teacher)
    trainer = fitted(tmp_path, module, BATCHES, accumulate_grad_batches=2, max_epochs=1)
    total, divergence, count = torch.zeros(()), torch.zeros(()), 0
    for batch in BATCHES:
        targets = batch["labels"][:, 1:]
        valid = targets != -100
        log_p, log_q = log_probs(student, batch, 2.0), log_probs(teacher, batch, 2.0).detach()
        own = F.kl_div(log_p, log_q, log_target=True, reduction="none").sum(-1)[valid].sum()
        nll = F.cross_entropy(log_probs(student, batch)[valid], targets[valid], reduction="sum")
        total, divergence, count = total + 4 * own + nll / 2, divergence + own, count + int(valid.sum())
    (total / count).backward()
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert metrics["train/loss"] == pytest.approx((total / count).item(), rel=1e-6)
    assert metrics["train/divergence"] == pytest.approx((divergence / count).item(), rel=1e-6)
    assert metrics.keys() >= {"train/perplexity", "train/teacher_nll", "val/loss", "val/divergence"}
    for before, after in zip(student.parameters(), module.backbone.parameters(), strict=True):
        assert before.grad is not None
        torch.testing.assert_close(after, before - 0.1 * before.grad, rtol=1e-6, atol=1e-8)


def divergence(module: FusedDistillationModule, teacher: Any) -> float:
    """Return the sum of the forward KLs over the whole vocabulary at the targets of the batches."""
    total = 0.0
    with torch.no_grad():
        for batch in BATCHES:
            log_p, log_q = log_probs(module.backbone, batch), log_probs(teacher, batch)
            own = F.kl_div(log_p, log_q, log_target=True, reduction="none").sum(-1)
            total += own[batch["labels"][:, 1:] != -100].sum().item()
    return total


def positions(starts: torch.Tensor) -> torch.Tensor:
    places = torch.arange(starts.shape[1]).expand_as(starts)
    return places - places.where(starts, 0).cummax(1).values


@pytest.mark.parametrize("way", ["beside", "stored", "packed"])
def test_a_drafter_learns_from_its_targets_states_as_in_plain_torch(way, tmp_path):
    target = sharpen(other_model(), 5.0)
    target.save_pretrained(tmp_path / "target")
    target, drafter = target.double(), drafter_for(tmp_path / "target").double()
    before: Any = copy.deepcopy(drafter)
    starts = torch.zeros(2, 10, dtype=torch.bool)
    starts[:, 0] = starts[0, 4] = starts[1, 7] = True
    starts &= (way == "packed") | (torch.arange(10) == 0)
    batch, more = BATCHES[0], {}
    apart: Any = {"position_ids": positions(starts), "use_cache": False}  # A cache would hide the documents.
    whole = target(input_ids=batch["input_ids"], output_hidden_states=True, **apart)
    if way == "stored":
        more["teacher_hidden_states"] = whole.hidden_states[-1].detach()
    elif way == "packed":
        more["position_ids"] = positions(starts)
    loss = DistillationLoss(hidden_weight=0.5)
    module = FusedDistillationModule(drafter, loss, *TRAINED, teacher=None if way == "stored" else target)
    if way == "stored":
        loss.output_layer = TeacherHead(torch.empty(0), target.lm_head.weight.detach())
    found = fitted(tmp_path, module, [batch | more], max_epochs=1).callback_metrics["train/loss"]

    states = F.pad(whole.hidden_states[-1][:, :-1], (0, 0, 1, 0)).masked_fill(starts[..., None], 0).detach()
    inputs = before.both(torch.cat([target.get_input_embeddings()(batch["input_ids"]), states], -1))
    hidden_states = before.model(inputs_embeds=inputs, **apart).last_hidden_state
    log_p, log_q = (logits[:, :-1].log_softmax(-1) for logits in (target.lm_head(hidden_states), whole.logits))
    losses = F.kl_div(log_p, log_q.detach(), log_target=True, reduction="none").sum(-1)
    distance = F.smooth_l1_loss(hidden_states, whole.hidden_states[-1].detach(), reduction="none").mean(-1)[:, :-1]
    expected = (losses + 0.5 * distance)[batch["labels"][:, 1:] != -100].mean()
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for (name, old), new in zip(before.named_parameters(), drafter.parameters(), strict=True):
        frozen = name in ("model.embed_tokens.weight", "lm_head.weight")
        assert (old.grad is None, new.requires_grad) == (frozen, not frozen)
        torch.testing.assert_close(new, old if frozen else old - 0.1 * old.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_teacher_keeps_its_own_precision(dtype, tmp_path):
    teacher = other_model(dtype)
    module = FusedDistillationModule(tiny_model(MODEL), None, *TRAINED, teacher=teacher)
    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.validate(module, loader(BATCHES), verbose=False)
    assert {p.dtype for p in teacher.parameters()} == {dtype}
    total, count = 0.0, 0
    for batch in BATCHES:
        valid = batch["labels"][:, 1:] != -100
        log_q = log_probs(teacher, batch).float()
        own = F.kl_div(log_probs(module.backbone, batch), log_q, log_target=True, reduction="none").sum(-1)
        total, count = total + own[valid].sum().item(), count + int(valid.sum())
    assert trainer.callback_metrics["val/divergence"].item() == pytest.approx(total / count, rel=2e-2)


def test_both_models_without_weights_get_them(tmp_path):
    config = tiny_model(MODEL, initializer_range=0.1).config
    late = FusedDistillationModule(from_config(config, 1), None, *TRAINED, teacher=from_config(config, 2))
    early = FusedDistillationModule(from_config(config, 1), None, *TRAINED, teacher=from_config(config, 2))
    assert early.teacher is not None
    for model in (early.model, early.teacher.model):
        materialize(model)
    found = [fitted(tmp_path, module, BATCHES).callback_metrics["train/loss"] for module in (late, early)]
    torch.testing.assert_close(*found, rtol=1e-6, atol=0)


def refused(folder: Any, module: Any, batches: Any = BATCHES, **options: Any) -> str:
    with pytest.raises(UserError) as raised:
        quiet_trainer(folder, max_steps=1, **options).fit(module, loader(batches))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_what_does_not_fit_is_refused_with_a_sentence(tmp_path):
    larger = FusedDistillationModule(tiny_model(MODEL), teacher=tiny_model(MODEL, vocab_size=98))
    assert "the teacher's vocabulary has 98 entries and the student's 97" in refused(tmp_path, larger)
    assert "neither a teacher nor stored scores" in refused(tmp_path, FusedDistillationModule(tiny_model(MODEL)))
    stateless = FusedDistillationModule(tiny_model(MODEL), DistillationLoss(hidden_weight=1.0))
    assert "the student needs hidden states of its teacher; give teacher=" in refused(tmp_path, stateless)
    with pytest.raises(UserError, match="needs a DistillationLoss, got CrossEntropyLoss; choose loss=distillation"):
        FusedDistillationModule(tiny_model(MODEL), CrossEntropyLoss())  # type: ignore[arg-type]
    model = tiny_model(MODEL)
    with pytest.raises(UserError, match="the teacher shares weights with the model"):
        FusedDistillationModule(model, teacher=model)
    with pytest.raises(UserError, match="stored scores are of temperature 2 and the student is to be trained with 1"):
        DistillationLoss().check_stored(97, 2.0, 97)
    with pytest.raises(UserError, match="stored scores are of a vocabulary of 98 entries and the student has 97"):
        DistillationLoss().check_stored(98, 1.0, 97)
