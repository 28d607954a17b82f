"""Frozen columns of a weight: made in tiles, never whole, and the numbers of the whole weight."""

from typing import Any

import pytest
import torch
from largest_tensor import LargestTensor
from ranks import call as call_in_processes
from torch import Tensor
from vocabulary_ranks import shard_of

from lit_fused.ops import TeacherHead, frozen_columns, linear_cross_entropy, linear_distillation, token_scores
from lit_fused.ops.frozen_columns import FrozenColumns, whole_weight, with_frozen_columns

TOKENS, HIDDEN, VOCABULARY = 40, 24, 1000


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(frozen_columns, "_TILE_BYTES", 1)  # 64 rows


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operands(trained: int, made: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, FrozenColumns]:
    """Hidden states and trained columns that want gradients, and frozen ones, in memory or ``made`` of integers."""
    hidden = drawn(TOKENS, HIDDEN + trained, seed=1, dtype=dtype).requires_grad_()
    up = (drawn(VOCABULARY, trained, seed=2, dtype=dtype) / 4).requires_grad_(trained > 0)
    levels = (drawn(VOCABULARY, HIDDEN, seed=3) * 8).round().to(torch.int8)
    if made:
        return hidden, up, FrozenColumns(lambda rows: levels[rows] / 32, HIDDEN)
    return hidden, up, FrozenColumns((levels / 32).to(dtype).__getitem__, HIDDEN, dtype)


def results(name: str, hidden: Tensor, weight: Tensor, targets: Tensor, up: Tensor) -> list[Tensor]:
    formula: dict[str, Any] = {"bias": drawn(VOCABULARY, seed=4, dtype=hidden.dtype), "scale": 0.7, "softcap": 5.0}
    if name == "distillation":
        teacher = TeacherHead(hidden.detach().flip(0), whole_weight(weight).detach().flip(0))
        loss, stats = linear_distillation(hidden, weight, targets, teacher, reduction="sum", **formula)
    elif name == "scores":
        selected = drawn(TOKENS, 3, seed=5).mul(400).long().clamp(-1, VOCABULARY - 1)
        scores = token_scores(hidden, weight, targets, selected=selected, chunk_size=16, **formula)
        loss = (scores.log_prob + 0.3 * scores.entropy + 0.2 * scores.lse + scores.selected.sum(-1)).sum()
        stats = {"top1": scores.top1}
    else:
        loss, stats = linear_cross_entropy(
            hidden, weight, targets, z_loss=0.1, label_smoothing=0.1, recompute=name == "recompute", **formula
        )
    loss.backward()
    found = [loss.detach(), *stats.values(), hidden.grad, *([up.grad] if up.requires_grad else [])]
    hidden.grad = up.grad = None
    return found


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("name", ["loss", "recompute", "scores", "distillation"])
def test_frozen_columns_give_the_numbers_of_the_whole_weight(name, trained, made):
    hidden, up, frozen = operands(trained, made)
    targets = torch.arange(TOKENS) * 7
    targets[3] = -100
    weight = with_frozen_columns(up * 1, frozen)
    expected = results(name, hidden, whole_weight(weight), targets, up)
    found = results(name, hidden, with_frozen_columns(up * 1, frozen), targets, up)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def selected_scores(hidden: Tensor, weight: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """The log-probabilities of targets and of three entries of each token."""
    entries = torch.arange(3 * TOKENS).reshape(TOKENS, 3) * 8 % VOCABULARY
    scores = token_scores(hidden, weight, entries[:, 0], selected=entries, **more)
    assert scores.selected is not None
    return scores.log_prob, scores.selected


def scores_of_own_rows(rank: int) -> tuple[Tensor, Tensor]:
    """A process that has some of the rows of both kinds of columns."""
    (shard, own), (hidden, up, frozen) = shard_of(rank, (600, VOCABULARY - 600)), operands(3, made=False)
    part = FrozenColumns(frozen.rows(own).__getitem__, HIDDEN, frozen.stored)
    with torch.no_grad():
        return selected_scores(hidden, with_frozen_columns(up[own] * 1, part), shard=shard)


def test_ranks_that_divide_frozen_columns_have_the_scores_of_the_whole_weight():
    hidden, up, frozen = operands(3, made=False)
    with torch.no_grad():
        whole = selected_scores(hidden, whole_weight(with_frozen_columns(up * 1, frozen)))
    for found in call_in_processes(scores_of_own_rows, 2, timeout=60):
        for one, expected in zip(found, whole, strict=True):
            assert torch.allclose(one, expected, rtol=1e-12, atol=1e-12)


def test_invariant_scores_of_frozen_columns_are_those_of_the_whole_weight():
    hidden, up, frozen = operands(3, made=True)
    targets = torch.arange(TOKENS)
    whole = whole_weight(with_frozen_columns(up * 1, frozen))
    expected = token_scores(hidden, whole, targets, invariant=True, entropy=False)
    found = token_scores(hidden, with_frozen_columns(up * 1, frozen), targets, invariant=True, entropy=False)
    assert torch.equal(found.log_prob, expected.log_prob)


@torch.no_grad()
def test_a_teachers_frozen_columns_give_the_numbers_of_its_whole_weight():
    hidden, up, frozen = operands(3, made=True)
    weight, targets = with_frozen_columns(up * 1, frozen), torch.arange(TOKENS)
    losses = [
        linear_distillation(hidden.flip(0), whole_weight(weight), targets, TeacherHead(hidden, of_teacher))[0]
        for of_teacher in (whole_weight(weight), weight)
    ]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("name", ["loss", "scores"])
def test_half_precision_errs_no_more_than_the_plain_product(name, made):
    hidden, up, frozen = operands(8, made, torch.bfloat16)
    targets = torch.arange(TOKENS)
    inputs = [hidden, up]

    def gradients(loss: Tensor) -> list[Tensor]:
        return [loss.detach().double(), *(g.double() for g in torch.autograd.grad(loss, inputs))]

    def plain(wide: torch.dtype) -> list[Tensor]:
        base = frozen.rows(slice(0, VOCABULARY)).to(torch.bfloat16).to(wide)
        x, y = hidden.to(wide), up.to(wide)
        logits = x[:, :HIDDEN] @ base.T + x[:, HIDDEN:] @ y.T
        return gradients(
            torch.nn.functional.cross_entropy(logits.to(torch.promote_types(wide, torch.float32)), targets)
        )

    weight = with_frozen_columns(up * 1, frozen)
    if name == "loss":
        ours = gradients(linear_cross_entropy(hidden, weight, targets)[0])
    else:
        ours = gradients(-token_scores(hidden, weight, targets).log_prob.mean())
    for found, baseline, exact in zip(ours, plain(torch.bfloat16), plain(torch.float64), strict=True):
        assert (found - exact).norm() <= 2 * (baseline - exact).norm() + 1e-4 * exact.norm()


@pytest.mark.parametrize("name", ["loss", "recompute", "scores", "distillation"])
def test_no_tensor_has_the_size_of_the_frozen_columns(name):
    hidden, up, frozen = operands(3, made=True, dtype=torch.float32)
    weight = with_frozen_columns(up * 1, frozen)
    few = slice(0, 4)  # tokens, as their logits are one chunk
    with LargestTensor() as largest:
        inputs = hidden[few].detach().requires_grad_(), weight, torch.arange(TOKENS)[few]
        if name == "distillation":
            teacher = TeacherHead(inputs[0].detach(), weight)
            loss = linear_distillation(*inputs, teacher)[0]
        elif name == "scores":
            loss = token_scores(*inputs).log_prob.sum()
        else:
            loss = linear_cross_entropy(*inputs, recompute=name == "recompute")[0]
        loss.backward()
    assert up.grad is not None
    assert largest.numbers < VOCABULARY * HIDDEN / 2, largest.shape


def test_compiled_callers_give_the_same_numbers():
    hidden, up, frozen = operands(3, made=True)
    targets = torch.arange(TOKENS)

    def loss() -> Tensor:
        weight = with_frozen_columns(up * 1, frozen)
        scores = token_scores(hidden, weight, targets)
        return linear_cross_entropy(hidden, weight, targets)[0] - scores.log_prob.mean()

    ways = loss, torch.compile(loss, backend="aot_eager")
    expected, found = (torch.autograd.grad(way(), [hidden, up]) for way in ways)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
