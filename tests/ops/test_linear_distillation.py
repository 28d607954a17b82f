"""Distillation against the whole logits of student and teacher in float64: values, gradients, ranks, memory."""

from typing import Any

import pytest
import torch
from distillation_cases import HEADS, LOSSES, answer, as_dtype, case, in_float64, teacher_of, upcast
from head_cases import error, live_bytes, make, weights_of
from ranks import call as call_in_processes
from vocabulary_ranks import joined, part_of, shard_of

from lit_fused.errors import UserError
from lit_fused.ops import TeacherHead, linear_distillation, linear_distillation_reference

SPLITS = {"uneven": (60, 7, 30), "one_empty": (50, 0, 47)}
NAMES = ["nll", "lse_squared", "correct", "entropy", "divergence", "teacher_nll"]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("way", [{"reduction": "mean"}, {"reduction": "sum", "recompute": True}, {"reduction": "none"}])
def test_in_float64_loss_statistics_and_gradients_are_those_of_the_logits(loss, head, way):
    tensors, targets, teacher, options = case(head)
    of_loss = LOSSES[loss] | options
    weights = {"token_weights": weights_of(targets)} if loss == "mixed" else {}
    reduction = {"reduction": way["reduction"]}
    truth = answer(linear_distillation_reference, tensors, targets, teacher, **of_loss, **weights, **reduction)
    found = answer(linear_distillation, tensors, targets, teacher, logits_budget_mib=1e-6, **of_loss, **weights, **way)
    assert error(found[0], truth[0]) < 1e-13
    assert list(found[1]) == NAMES
    for name in NAMES:
        assert error(found[1][name], truth[1][name]) < 1e-13, name
    for ours, exact in zip(found[2], truth[2], strict=True):
        assert error(ours, exact) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("head", HEADS)  # without a softcap nearly all of a row's probability is one entry's
def test_in_lower_precision_errors_are_at_most_twice_those_of_upcast_logits(head, loss, dtype):
    tensors, targets, teacher, options = case(head, dtype, d=128, v=501)
    of_loss = LOSSES[loss] | options
    truth = answer(linear_distillation_reference, *in_float64(tensors, targets, teacher), **of_loss)
    usual = answer(upcast, tensors, targets, teacher, **of_loss)
    found = answer(linear_distillation, tensors, targets, teacher, logits_budget_mib=1e-6, **of_loss)
    floor = 16 * torch.finfo(torch.float32).eps
    assert found[0].dtype == torch.float32
    assert error(found[0], truth[0]) <= 2 * error(usual[0], truth[0]) + floor
    for ours, theirs, exact in zip(found[2], usual[2], truth[2], strict=True):
        assert ours.dtype == dtype
        assert error(ours, exact) <= 2 * error(theirs, exact) + floor


def test_a_teacher_computes_in_its_own_precision_and_gets_no_gradient():
    tensors, targets, teacher, options = case("everything", torch.float32)
    half = as_dtype(teacher, torch.bfloat16)
    rounded = upcast_teacher(half)
    truth = answer(linear_distillation_reference, [t.double() for t in tensors], targets, rounded, **options)
    half.weight.requires_grad_()
    found = answer(linear_distillation, tensors, targets, half, **options)
    assert half.weight.grad is None
    for ours, exact in zip(found[2], truth[2], strict=True):
        assert error(ours, exact) < 1e-5


@pytest.mark.parametrize("name", ["hidden_states", "weight", "bias"])
def test_a_teacher_that_changed_before_a_backward_that_reads_it_is_refused_as_torch_does(name):
    tensors, targets, teacher, _ = case("everything", torch.float32)
    loss, _ = linear_distillation(tensors[0], tensors[1], targets.clamp(min=0), teacher, recompute=True)
    getattr(teacher, name).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def upcast_teacher(half: TeacherHead) -> TeacherHead:
    products = (half.hidden_states @ half.weight.T).double()
    assert half.bias is not None
    return TeacherHead(products, torch.eye(97, dtype=torch.float64), half.bias.double(), half.scale, half.softcap)


def test_under_autocast_both_heads_compute_in_its_dtype():
    tensors, targets, teacher, _ = case("plain", torch.float32, d=64, v=501)
    truth = answer(linear_distillation_reference, *in_float64(tensors, targets, teacher))
    usual = answer(linear_distillation, [t.bfloat16() for t in tensors], targets, as_dtype(teacher, torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        found = answer(linear_distillation, tensors, targets, teacher)
    for ours, theirs, exact in zip(found[2], usual[2], truth[2], strict=True):
        assert ours.dtype == torch.float32
        assert error(ours, exact) <= 2 * error(theirs, exact)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_a_vocabulary_entry_that_both_mask_changes_nothing(kind):
    tensors, targets, teacher, _ = case("everything")
    targets[targets == 3] = 4
    kept = torch.arange(97) != 3
    masked = [t.detach().clone() for t in tensors]
    masked[2][3] = -torch.inf
    assert teacher.bias is not None
    bias = teacher.bias.masked_fill(~kept, -torch.inf)
    found = answer(
        linear_distillation, masked, targets, TeacherHead(teacher.hidden_states, teacher.weight, bias), divergence=kind
    )
    fewer = [masked[0], masked[1][kept], masked[2][kept]]
    shifted = targets - (targets > 3).long()
    cut = TeacherHead(teacher.hidden_states, teacher.weight[kept], teacher.bias[kept])
    expected = answer(linear_distillation_reference, fewer, shifted, cut, divergence=kind)
    assert error(found[0], expected[0]) < 1e-12
    assert error(found[2][0], expected[2][0]) < 1e-12
    assert error(found[2][1][kept], expected[2][1]) < 1e-12
    assert (found[2][1][3] == 0).all()


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_probabilities_that_underflow_keep_their_logarithms(kind):
    tensors, targets, teacher, _ = case("plain")
    large = 3e4 * tensors[0].detach(), 3e4 * teacher.hidden_states
    found, expected = (
        loss(large[0], tensors[1], targets, teacher._replace(hidden_states=large[1]), divergence=kind)[0]
        for loss in (linear_distillation, linear_distillation_reference)
    )
    assert expected > 1e4
    torch.testing.assert_close(found, expected)


def test_no_valid_target_gives_zero_and_zero_gradients():
    tensors, targets, teacher, options = case("everything")
    loss, stats, gradients = answer(linear_distillation, tensors, targets.fill_(-100), teacher, **options)
    assert loss == 0
    assert not any(value.any() for value in stats.values())
    assert not any(gradient.any() for gradient in gradients)


def test_memory_is_a_chunk_of_each_and_the_gradients():
    tensors, targets = make(n=8192, d=32, v=4000, dtype=torch.float32, ignored=0)
    teacher = as_dtype(teacher_of(targets, 4000), torch.float32)
    with live_bytes() as counter:
        answer(linear_distillation, tensors, targets, teacher, divergence="jsd", logits_budget_mib=8)
    assert counter.peak < 4 * 8192 * 4000 / 3  # of the four and more such tensors that logits would need


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divergence": "kl"}, "divergence must be one of forward_kl, reverse_kl, jsd, got 'kl'"),
        ({"divergence": "jsd", "beta": 1.0}, "beta must lie between 0 and 1, got 1.0"),
        ({"divergence_weight": 0.0}, "both 0, so there is no loss"),
        ({"label_smoothing": 0.1}, "no label_smoothing"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_a_sentence(options, message):
    tensors, targets, teacher, _ = case("plain")
    with pytest.raises(UserError, match=message):
        linear_distillation(tensors[0], tensors[1], targets, teacher, **options)


def test_teachers_that_do_not_fit_are_refused_with_a_sentence():
    (hidden, weight), targets = make()
    with pytest.raises(UserError, match="teacher's vocabulary has 98 entries and the student's 97"):
        linear_distillation(hidden, weight, targets, teacher_of(targets, 98))
    with pytest.raises(UserError, match=r"labels of shape \(700,\) do not fit hidden states of shape \(699, 24\)"):
        linear_distillation(hidden, weight, targets, teacher_of(targets[1:]))


# The vocabulary divided over three processes.


CALLS = [(split, loss) for split in SPLITS for loss in LOSSES]


def work(rank: int, calls: list[tuple[str, str]]) -> list[Any]:
    found = []
    for split, loss in calls:
        tensors, targets, teacher, options = case("everything")
        shard, own = shard_of(rank, SPLITS[split])
        assert teacher.bias is not None
        teacher = teacher._replace(weight=teacher.weight[own], bias=teacher.bias[own])
        options |= LOSSES[loss] | {"logits_budget_mib": 1e-6, "shard": shard}
        found.append(answer(linear_distillation, part_of(tensors, own), targets, teacher, **options))
    return found


def test_a_divided_vocabulary_gives_the_loss_and_the_gradients_of_the_whole():
    ranks = call_in_processes(work, 3, CALLS, timeout=100)
    for (_, loss), *found in zip(CALLS, *ranks, strict=True):
        tensors, targets, teacher, options = case("everything")
        truth = answer(linear_distillation_reference, tensors, targets, teacher, **options, **LOSSES[loss])
        value, statistics, gradients = joined(found)
        assert error(value, truth[0]) < 1e-12, loss
        for name in NAMES:
            assert error(statistics[name], truth[1][name]) < 1e-12, name
        for ours, exact in zip(gradients, truth[2], strict=True):
            assert error(ours, exact) < 1e-11, loss
