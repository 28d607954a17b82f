"""Distillation of models, from a teacher beside the student or from stored probabilities, against their logits."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import VOCABULARY, sharpen, tiny_batch, tiny_model
from torch import Tensor

from lit_fused import LanguageModel, LinearCrossEntropyLoss
from lit_fused.errors import UserError
from lit_fused.objectives import DistillationLoss
from lit_fused.objectives.distillation import LEAST_TAIL, STORED, divergence_with_tail, scores_to_store, teacher_head
from lit_fused.ops.logits.divergence_rows import Divergence

LOSSES: dict[str, dict[str, Any]] = {
    "forward_kl": {},
    "reverse_kl": {"divergence": "reverse_kl", "temperature": 2.0, "divergence_weight": 4.0},
    "jsd": {"divergence": "jsd", "beta": 0.3, "cross_entropy_weight": 0.5},
    "mixed": {"divergence": "jsd", "temperature": 0.8, "cross_entropy_weight": 0.5, "divergence_weight": 0.5},
}
STUDENTS = [("llama", "granite"), ("gemma2", "phi"), ("cohere", "gemma2"), ("gpt2", "llama_tied")]


def log_probs(model: Any, batch: dict[str, Tensor], temperature: float) -> Tensor:
    return (model(input_ids=batch["input_ids"]).logits / temperature).log_softmax(-1)


def of_log_probs(log_p: Tensor, log_q: Tensor, of_loss: Divergence) -> Tensor:
    """Each row's divergence of whole distributions, as torch has it."""
    if of_loss.divergence != "jsd":
        first, second = (log_p, log_q) if of_loss.divergence == "forward_kl" else (log_q, log_p)
        return F.kl_div(first, second, log_target=True, reduction="none").sum(-1)
    mixture = (of_loss.beta * log_q.exp() + (1 - of_loss.beta) * log_p.exp()).log()
    parts = [F.kl_div(mixture, log, log_target=True, reduction="none").sum(-1) for log in (log_q, log_p)]
    return of_loss.beta * parts[0] + (1 - of_loss.beta) * parts[1]


def expected(student: Any, teacher: Any, batch: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """The mean loss of the batch, of the whole logits of both."""
    of_loss = Divergence(**options)
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    with torch.no_grad():
        log_q = log_probs(teacher, batch, of_loss.temperature)
    divergence = of_log_probs(log_probs(student, batch, of_loss.temperature), log_q, of_loss)
    nll = F.cross_entropy(log_probs(student, batch, 1.0).flatten(0, 1), targets.flatten())
    return of_loss.divergence_weight * divergence[targets >= 0].mean() + of_loss.cross_entropy_weight * nll


def pair(student: str, teacher: str, options: dict[str, Any]) -> tuple[LanguageModel, LanguageModel]:
    beside = LanguageModel(sharpen(tiny_model(teacher).double(), 5).eval(), LinearCrossEntropyLoss())
    loss = DistillationLoss(**options)
    loss.teacher = partial(teacher_head, beside)
    return LanguageModel(sharpen(tiny_model(student).double(), 5), loss), beside


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("student", "teacher"), STUDENTS)
def test_loss_and_gradients_are_those_of_the_logits_of_both(student, teacher, loss):
    model, beside = pair(student, teacher, LOSSES[loss])
    batch = tiny_batch()
    truth = expected(model.backbone, beside.backbone, batch, LOSSES[loss])
    weights = [p for p in model.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(truth, weights)
    output = model(batch)
    torch.testing.assert_close(output.loss, truth, rtol=1e-6, atol=0)  # Scales are float32 numbers.
    found = torch.autograd.grad(output.loss, weights)
    assert_close(found, wanted)
    assert output.stats.keys() >= {"nll", "correct", "entropy", "divergence", "teacher_nll"}


def from_stored(model: LanguageModel) -> None:
    assert isinstance(model.loss, DistillationLoss)
    model.loss.teacher = None


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    norm = torch.stack([g.norm() for g in wanted]).norm()
    for gradient, other in zip(found, wanted, strict=True):
        assert (gradient - other).norm() <= tolerance * norm


def stored(teacher: LanguageModel, batch: dict[str, Tensor], k: int, temperature: float) -> dict[str, Tensor]:
    """Return a batch with the teacher's scores, as those of a file."""
    entries, stored_log_q, of_target = found = scores_to_store(teacher, batch, k, temperature)
    targets = teacher.targets(batch)
    valid = (targets >= 0)[..., None]
    with torch.no_grad():
        log_q = log_probs(teacher.backbone, batch, temperature)
    top, own = log_q.topk(k, -1), log_q.gather(-1, targets.clamp(min=0)[..., None])
    torch.testing.assert_close(stored_log_q, top.values.where(valid, 0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(of_target, own.where(valid, 0)[..., 0], rtol=1e-6, atol=1e-6)
    assert torch.equal(entries, top.indices.where(valid, -1))
    return batch | dict(zip(STORED, found, strict=True))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("student", "teacher"), STUDENTS[:2])
def test_all_entries_stored_are_the_teacher_itself(student, teacher, loss):
    model, beside = pair(student, teacher, LOSSES[loss])
    batch = stored(beside, tiny_batch(), VOCABULARY, LOSSES[loss].get("temperature", 1.0))
    weights = [p for p in model.parameters() if p.requires_grad]
    output = model({name: value for name, value in batch.items() if not name.startswith("teacher")})
    wanted = torch.autograd.grad(output.loss, weights)
    from_stored(model)
    found = model(batch)
    torch.testing.assert_close(found.loss, output.loss, rtol=1e-6, atol=0)
    assert_close(torch.autograd.grad(found.loss, weights), wanted)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("k", [1, 5, 90])
def test_the_entries_that_are_not_stored_are_one_more(loss, k):
    options = LOSSES[loss]
    model, beside = pair("gemma2", "phi", options)
    of_loss = Divergence(**options)
    batch = stored(beside, tiny_batch(), k, of_loss.temperature)
    targets = beside.targets(batch)
    log_p = log_probs(model.backbone, batch, of_loss.temperature)[targets >= 0]
    with torch.no_grad():
        log_q = log_probs(beside.backbone, batch, of_loss.temperature)[targets >= 0]
    entries = batch["teacher_entries"][targets >= 0]
    is_stored = torch.zeros_like(log_p, dtype=torch.bool).scatter_(1, entries, True)
    is_stored.scatter_(1, targets[targets >= 0][:, None], True)
    rows = []
    for p, q, known in zip(log_p, log_q, is_stored, strict=True):
        p, q = (torch.cat([log[known], log[~known].logsumexp(0)[None]]) for log in (p, q))
        rows.append(of_log_probs(p, q, of_loss))
    nll = F.cross_entropy(log_probs(model.backbone, batch, 1.0).flatten(0, 1), targets.flatten())
    truth = of_loss.divergence_weight * torch.stack(rows).mean() + of_loss.cross_entropy_weight * nll
    weights = [p for p in model.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(truth, weights)
    from_stored(model)
    found = model(batch)
    torch.testing.assert_close(found.loss, truth, rtol=1e-6, atol=0)
    assert_close(torch.autograd.grad(found.loss, weights), wanted)
    assert found.stats["divergence"] <= of_log_probs(log_p, log_q, of_loss).sum()


@pytest.mark.parametrize("loss", LOSSES)
def test_stored_in_float32_loss_and_gradients_are_as_near_to_float64_as_those_of_float32_logits(loss):
    options, found = LOSSES[loss], {}
    for kind in ("exact", "plain", "ours"):
        model, beside = pair("llama", "llama_tied", options)
        if kind != "exact":
            model, beside = model.float(), beside.float()
        batch = tiny_batch()
        if kind == "ours":
            batch = stored(beside, batch, VOCABULARY, options.get("temperature", 1.0))
            from_stored(model)
        value = model(batch).loss if kind == "ours" else expected(model.backbone, beside.backbone, batch, options)
        gradients = torch.autograd.grad(value, [p for p in model.parameters() if p.requires_grad])
        found[kind] = value.detach().double(), torch.cat([g.flatten().double() for g in gradients])
    (exact, gradients), (ours, own), (theirs, others) = found["exact"], found["ours"], found["plain"]
    assert (ours - exact).abs() <= 2 * (theirs - exact).abs() + 1e-6 * exact.abs()
    assert (own - gradients).norm() <= 2 * (others - gradients).norm() + 1e-6 * gradients.norm()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("student", "teacher"), STUDENTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_stored_hidden_states_give_loss_and_gradients_of_the_teacher_beside(student, teacher, loss, dtype):
    model, of_teacher = pair(student, teacher, LOSSES[loss])
    of_teacher.to(dtype)
    batch, found = tiny_batch(), []
    with torch.no_grad():
        stored = teacher_head(of_teacher, batch)
    targets = model.targets(batch)
    ways = {
        "beside": batch,
        "stored": batch | {"teacher_hidden_states": stored.hidden_states * (targets >= 0)[..., None]},
    }
    for way, given in ways.items():
        used = model.loss
        assert isinstance(used, DistillationLoss)
        used.teacher = partial(teacher_head, of_teacher) if way == "beside" else None
        used.output_layer = stored._replace(hidden_states=torch.empty(0))
        output = model(given)
        weights = [p for p in model.parameters() if p.requires_grad]
        found.append((output.loss, output.stats["divergence"], *torch.autograd.grad(output.loss, weights)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["teacher_entries", "teacher_log_probs", "teacher_target_log_prob"])
def test_stored_scores_of_other_rows_than_the_labels_are_refused(name):
    ids = torch.randint(3, VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "teacher_entries": ids[..., None].expand(-1, -1, 2)}
    batch |= {"teacher_log_probs": torch.full((3, 6, 2), -3.0), "teacher_target_log_prob": torch.full((3, 6), -5.0)}
    model = LanguageModel(tiny_model("llama"), DistillationLoss())
    assert model(batch).loss > 0
    with pytest.raises(UserError, match=r"stored scores of \(3, 6\) tokens must be teacher_entries .* \(1, 6"):
        model(batch | {name: batch[name][:1]})


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_a_tail_that_float32_cannot_see_has_finite_loss_and_gradient(kind):
    log_p = torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    log_q = torch.tensor([[0.9, 0.05]]).log()
    found = divergence_with_tail(log_p, log_q, torch.ones(1, 2, dtype=torch.bool), Divergence(kind))
    found.sum().backward()
    assert found.isfinite().all()
    assert log_p.grad is not None
    assert log_p.grad.isfinite().all()
    if kind == "forward_kl":
        p, q = torch.tensor([0.5, 0.5, LEAST_TAIL]), torch.tensor([0.9, 0.05, 0.05])
        torch.testing.assert_close(found[0], (q * (q / p).log()).sum())
