"""The filtered backward against its definition, which is written down here on whole matrices in float64, and against
the exact gradients: sums that are kept, errors that fall with eps, the bound, statistics, memory, a divided vocabulary.

Groups have 64 rows here instead of 2048, unless a test says otherwise: the rules are the same.
"""

import itertools
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from head_cases import budget_for, error, live_bytes, make, run
from kernels_of import kernels_of
from ranks import call as call_in_processes
from torch import Tensor
from vocabulary_ranks import joined, part_of, shard_of

from lit_fused.errors import UserError
from lit_fused.filtered import kept_columns
from lit_fused.filtered import linear_cross_entropy as filtered
from lit_fused.ops import linear_cross_entropy, linear_cross_entropy_reference
from lit_fused.ops.vocabulary_parallel import VocabularyShard

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from linear_cross_entropy import inputs

GROUP = 64
EPS = 2**-8
EPSILON = torch.finfo(torch.float32).eps
OF_FILTER = {"dropped_mass", "kept_columns", "exact_tokens"}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 20.0},
    "scale": {"scale": 0.3},
    "negative_scale": {"scale": -1.7},
    "z_loss": {"z_loss": 1e-2},
    "everything": {"bias": True, "softcap": 20.0, "scale": -1.7, "z_loss": 1e-2},
}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(kept_columns, "GROUP_ROWS", GROUP)


def without_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_columns, "MAX_DROPPED", 2)  # more than there is
    monkeypatch.setattr(kept_columns, "MAX_ROW_DROPPED", 2)


def trained(
    n: int = 300,
    d: int = 32,
    v: int = 512,
    dtype: torch.dtype = torch.float64,
    *,
    bias: bool = False,
    ignored: float = 0.2,
    **options: Any,
) -> tuple[list[Tensor], Tensor]:
    """Tensors with the softmax of a trained model, whatever the scale."""
    hidden, weight, targets = inputs((n, d, v), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    targets[torch.rand(n, generator=generator) < ignored] = -100
    tensors = [hidden.double() / options.get("scale", 1.0), weight.double()]
    if bias:
        tensors.append(0.3 * torch.randn(v, generator=generator, dtype=torch.float64))
    return [t.to(dtype).requires_grad_() for t in tensors], targets


def unequal(targets: Tensor) -> Tensor:
    """Incoming gradients, one per token."""
    return torch.randn(targets.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def true_probability(
    products_NV: Tensor,
    biases: list[Tensor],
    targets: Tensor,
    scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Each target's probability."""
    logits_NV = scale * products_NV + (biases[0] if biases else 0)
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    return logits_NV.softmax(1).gather(1, targets.clamp(min=0)[:, None])[:, 0]


class Definition(NamedTuple):
    gradients: list[Tensor]
    statistics: dict[str, Tensor]


def definition(
    tensors: list[Tensor],
    targets: Tensor,
    eps: float,
    grad: Tensor | float = 1.0,
    parts: tuple[int, ...] | None = None,
    *,
    ignored_stay: bool = False,
    reduction: str = "mean",
    bias: bool = False,
    **options: Any,
) -> Definition:
    """Return what the filtered backward is: the gradient of all logits, changed group by group. ``parts`` are the sizes
    of ranks' vocabularies, of which each has its own tail; ignored tokens are not in a group, or ``ignored_stay``."""
    hidden, weight, *biases = (t.detach().double() for t in tensors)
    products_NV = (hidden @ weight.T).requires_grad_()
    whole = torch.eye(len(weight), dtype=torch.float64)
    loss, _ = linear_cross_entropy_reference(
        products_NV, whole, targets, bias=biases[0] if biases else None, reduction="sum", **options
    )
    scale = options.get("scale", 1.0)
    gradient_NV = torch.autograd.grad(loss, products_NV)[0] / scale
    dropped_mass, kept, exact_tokens = torch.zeros(3, dtype=torch.float64)
    valid = targets != -100
    others_NV = gradient_NV.scatter(1, targets.clamp(min=0)[:, None], 0)
    whole_N = 1 - true_probability(products_NV.detach(), biases, targets, **options)
    alone = valid & (others_NV.masked_fill(others_NV > eps, 0).sum(1) > kept_columns.MAX_ROW_DROPPED * whole_N)
    for rows in (torch.arange(len(targets)) if ignored_stay else valid.nonzero()[:, 0]).split(kept_columns.GROUP_ROWS):
        exact = alone[rows].sum()
        kept += exact
        exact_tokens += exact
        rows = rows[valid[rows] & ~alone[rows]]
        if not len(rows):
            continue
        group_CV = gradient_NV[rows]
        kept_V = group_CV.amax(0) > eps
        kept_V[targets[rows]] = True
        mass = group_CV[:, ~kept_V].sum() / whole_N[rows].mean()
        if mass > kept_columns.MAX_DROPPED * len(rows) or kept_V.all():
            kept += len(rows)
            exact_tokens += len(rows)
            continue
        kept += len(rows) * kept_V.double().mean()
        dropped_mass += mass
        for part in torch.arange(len(weight)).split(list(parts or [len(weight)])):
            columns = part[~kept_V[part]]
            tail_CT = group_CV[:, columns]
            if tail_CT.sum():
                group_CV[:, columns] = torch.outer(tail_CT.sum(1), tail_CT.sum(0)) / tail_CT.sum()
        gradient_NV[rows] = group_CV
    count = valid.sum() if reduction == "mean" else 1
    gradient_NV *= (torch.as_tensor(grad, dtype=torch.float64) / count).reshape(-1, 1)
    gradients = [scale * gradient_NV @ weight, scale * gradient_NV.T @ hidden, gradient_NV.sum(0)]
    statistics = {"dropped_mass": dropped_mass, "kept_columns": kept, "exact_tokens": exact_tokens}
    return Definition(gradients[: len(tensors)], statistics)


# --- eps = 0 is exact; any eps is what its definition says ------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("feature", FEATURES)
def test_with_eps_zero_loss_and_gradients_are_those_of_the_reference(feature, reduction):
    options = FEATURES[feature] | {"reduction": reduction}
    tensors, targets = make(bias="bias" in options)  # eight groups of valid tokens and a part of one
    grad = unequal(targets) if reduction == "none" else torch.tensor(0.37)
    expected = run(linear_cross_entropy_reference, tensors, targets, grad, **options)
    found = run(filtered, tensors, targets, grad, filter_eps=0.0, **options)
    assert error(found[0], expected[0]) < 1e-13
    assert found[1].keys() == expected[1].keys() | OF_FILTER
    for name, value in expected[1].items():
        assert error(found[1][name], value) < 1e-13, name
    for ours, truth in zip(found[2], expected[2], strict=True):
        assert error(ours, truth) < 1e-12
    valid = (targets != -100).sum()
    assert found[1]["dropped_mass"] == 0
    assert error(found[1]["kept_columns"], valid) < 1e-13


@pytest.mark.parametrize("tokens", [2048, 2049, 5000])
def test_groups_of_2048_rows_and_a_ragged_last_one_are_worked_on_in_chunks(tokens, monkeypatch):
    monkeypatch.setattr(kept_columns, "GROUP_ROWS", 2048)
    tensors, targets = trained(tokens, 16, ignored=0)
    for eps, exact in ((0.0, True), (2**-6, False)):
        hand = definition(tensors, targets, eps)
        reference = run(linear_cross_entropy_reference, tensors, targets)[2]
        assert (error(hand.gradients[0], reference[0]) < 1e-12) == exact
        for budget in (1e-6, 256):  # chunks of 256 rows; and of a whole group, or of half of the tokens
            found = run(filtered, tensors, targets, filter_eps=eps, logits_budget_mib=budget)
            for ours, theirs in zip(found[2], hand.gradients, strict=True):
                assert error(ours, theirs) < 1e-12


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("feature", FEATURES)
def test_gradients_and_statistics_are_those_of_the_definition(feature, reduction):
    options = FEATURES[feature] | {"reduction": reduction}
    tensors, targets = trained(**FEATURES[feature])
    with torch.no_grad():
        tensors[0][:90] *= 0.05  # more than a group of diffuse tokens
    grad = unequal(targets) if reduction == "none" else torch.tensor(0.37, dtype=torch.float64)
    hand = definition(tensors, targets, EPS, grad, **options)
    assert 0 < hand.statistics["exact_tokens"] < hand.statistics["kept_columns"] < (targets != -100).sum()
    exact = run(linear_cross_entropy, tensors, targets, grad, **options)
    found = run(filtered, tensors, targets, grad, filter_eps=EPS, **options)
    assert error(found[0], exact[0]) < 1e-13
    for name, value in hand.statistics.items():
        assert error(found[1][name], value) < 1e-12, name
    for ours, theirs, truth in zip(found[2][:2], hand.gradients, exact[2], strict=False):
        assert error(ours, theirs) < 1e-12 < 1e-4 < error(ours, truth)
    for ours, theirs in zip(found[2], hand.gradients, strict=True):
        assert error(ours, theirs) < 1e-12


# --- sums ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [2**-6, EPS, 2**-10])
@pytest.mark.parametrize("feature", FEATURES)
def test_column_sums_of_the_logits_gradient_are_exact_at_any_eps(feature, eps):
    """The gradient of a bias is the column sums; only the gradient that is common to all tokens keeps them."""
    options: dict[str, Any] = FEATURES[feature] | {"bias": True}
    tensors, targets = trained(**options)
    for reduction in ("mean", "sum"):
        truth = run(linear_cross_entropy_reference, tensors, targets, reduction=reduction, **options)
        found = run(filtered, tensors, targets, reduction=reduction, filter_eps=eps, **options)
        assert error(found[2][2], truth[2][2]) < 1e-12


def with_row_sums(tensors: list[Tensor]) -> list[Tensor]:
    """One more entry of the hidden states, which adds nothing to a logit, and whose gradient is the row's sum."""
    hidden, weight, *bias = (t.detach() for t in tensors)
    hidden = torch.cat([hidden, torch.zeros_like(hidden[:, :1])], 1)
    weight = torch.cat([weight, torch.ones_like(weight[:, :1])], 1)
    return [hidden, weight, *bias]


@pytest.mark.parametrize("eps", [2**-6, EPS, 2**-10])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("feature", FEATURES)
def test_row_sums_of_the_logits_gradient_are_exact_at_any_eps_and_incoming_gradient(feature, reduction, eps):
    options = FEATURES[feature] | {"reduction": reduction}
    tensors, targets = trained(**FEATURES[feature])
    tensors = with_row_sums(tensors)
    grad = unequal(targets) if reduction == "none" else None
    truth = run(linear_cross_entropy_reference, tensors, targets, grad, **options)[2][0]
    found = run(filtered, tensors, targets, grad, filter_eps=eps, **options)[2][0]
    # The sums of a plain cross entropy are zero.
    assert (found[:, -1] - truth[:, -1]).norm() < 1e-13 * truth.norm()


# --- errors -------------------------------------------------------------------------------------------------------


def test_errors_fall_with_eps_and_are_a_fraction_of_those_without_the_correction(monkeypatch):
    without_bounds(monkeypatch)
    tensors, targets = trained(512, 64, 4096, ignored=0)
    truth = run(linear_cross_entropy_reference, tensors, targets)[2]
    own = kept_columns.tail_distribution
    curve = []
    for eps in (2**-10, 2**-12, 2**-14):
        found = {}
        for name, tail in (("corrected", own), ("plain", lambda sums, kept: torch.zeros_like(sums))):
            monkeypatch.setattr(kept_columns, "tail_distribution", tail)
            _, stats, gradients = run(filtered, tensors, targets, filter_eps=eps)
            assert stats["exact_tokens"] == 0
            found[name] = [error(ours, exact) for ours, exact in zip(gradients, truth, strict=True)]
        assert 3 * found["corrected"][0] < found["plain"][0]
        assert 1.5 * found["corrected"][1] < found["plain"][1]
        curve.append(found["corrected"])
    for fewer, more in itertools.pairwise(curve):
        assert more[0] < fewer[0] / 3
        assert more[1] < fewer[1] / 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "autocast"])
@pytest.mark.parametrize("feature", FEATURES)
def test_in_lower_precision_the_filter_adds_its_own_error_to_that_of_the_exact_head(feature, dtype):
    options = FEATURES[feature]
    tensors, targets = trained(dtype=torch.float32 if dtype == "autocast" else getattr(torch, dtype), **options)
    in_float64 = [t.detach().double() for t in tensors]
    truth = run(linear_cross_entropy_reference, in_float64, targets, **options)
    own = run(filtered, in_float64, targets, filter_eps=EPS / 2, **options)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        exact = run(linear_cross_entropy, tensors, targets, **options)
        found = run(filtered, tensors, targets, filter_eps=EPS / 2, **options)
    assert 0 < found[1]["dropped_mass"] < kept_columns.MAX_DROPPED * (targets != -100).sum()
    assert {found[1][name].dtype for name in OF_FILTER} == {torch.float32}
    for ours, theirs, filter_, expected in zip(found[2], exact[2], own[2], truth[2], strict=True):
        assert ours.dtype == theirs.dtype
        assert error(ours, expected) <= 1.1 * (error(theirs, expected) + error(filter_, expected)) + EPSILON


def test_float16_does_not_overflow_where_the_dropped_mass_of_a_group_times_a_large_hidden_state_would(monkeypatch):
    """A group of 2048 rows may drop 100 rows' worth of mass."""
    without_bounds(monkeypatch)
    monkeypatch.setattr(kept_columns, "GROUP_ROWS", 2048)
    n, d, v = 2048, 16, 512
    targets = torch.arange(n) % d
    hidden, weight = torch.zeros(n, d + 1), torch.zeros(v, d + 1)
    hidden[torch.arange(n), targets], hidden[:, d] = 9.4, 2000.0
    weight[:d, :d] = torch.eye(d)
    tensors = [hidden.half(), weight.half()]
    truth = run(linear_cross_entropy_reference, [t.double() for t in tensors], targets, reduction="sum")
    _, stats, gradients = run(filtered, tensors, targets, reduction="sum", filter_eps=2**-12)
    assert stats["exact_tokens"] == 0
    assert stats["dropped_mass"] > 0.9 * n
    for ours, expected in zip(gradients, truth[2], strict=True):
        assert error(ours, expected) < 2e-3


def test_a_masked_vocabulary_entry_is_dropped_and_gets_no_gradient():
    tensors, targets = trained(bias=True)
    targets[targets == 3] = 4
    with torch.no_grad():
        tensors[2][3] = -torch.inf
    loss, stats, gradients = run(filtered, tensors, targets, filter_eps=EPS)
    assert loss.isfinite()
    assert all(value.isfinite() for value in stats.values())
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[1][3].any()
    assert gradients[2][3] == 0


# --- the bound ----------------------------------------------------------------------------------------------------


def test_rows_beyond_the_bound_are_exact_alone_and_the_others_are_filtered_as_if_they_were_not_there():
    tensors, targets = trained(3 * GROUP, ignored=0)
    diffuse = torch.arange(3 * GROUP) % 5 == 1
    with torch.no_grad():
        tensors[0][diffuse] *= 0.05
    truth = run(linear_cross_entropy_reference, tensors, targets, reduction="sum")[2][0]
    _, stats, (gradient, _) = run(filtered, tensors, targets, reduction="sum", filter_eps=EPS)
    assert diffuse.sum() <= stats["exact_tokens"] < 1.2 * diffuse.sum()
    assert error(gradient[diffuse], truth[diffuse]) < 1e-13
    assert 1e-4 < error(gradient[~diffuse], truth[~diffuse]) < 0.1
    first = torch.arange(GROUP)
    others = first[~diffuse[:GROUP]]
    found = [
        run(filtered, [tensors[0][rows], tensors[1]], targets[rows], reduction="sum", filter_eps=EPS)
        for rows in (first, others)
    ]
    assert error(found[0][2][0][others], found[1][2][0]) < 1e-13
    assert found[0][1]["dropped_mass"].item() == pytest.approx(found[1][1]["dropped_mass"].item(), rel=1e-12)


def test_where_many_rows_are_exact_the_groups_with_most_of_them_drop_nothing(monkeypatch):
    monkeypatch.setattr(kept_columns, "TILE_ROWS", 4)
    tensors, targets = trained(4 * GROUP, ignored=0)
    of_group, flat = torch.arange(4 * GROUP) % GROUP, torch.zeros(4 * GROUP, dtype=torch.bool)
    assert kept_columns.most_rows_alone(4 * GROUP) == 12
    for group, count in enumerate((1, 14, 0, 4)):
        flat[group * GROUP :][:GROUP] = of_group[:GROUP] < count
    with torch.no_grad():
        tensors[0][flat] *= 0.02
    truth = run(linear_cross_entropy_reference, tensors, targets, reduction="sum")[2][0]
    _, stats, (gradient, _) = run(filtered, tensors, targets, reduction="sum", filter_eps=EPS)
    assert GROUP + 5 <= stats["exact_tokens"] <= GROUP + 12
    assert error(gradient[flat], truth[flat]) < 1e-13
    exact = [error(*(of[group * GROUP :][:GROUP] for of in (gradient, truth))) < 1e-13 for group in range(4)]
    assert exact == [False, True, False, False]


KINDS, LIKE_IT = 16, 0.02


def of_kinds(target_probability: float) -> tuple[list[Tensor], Tensor]:
    """Tokens of 16 kinds, each with a flat tail of its own, to whose entries its target is similar."""
    size = 256
    of_entry = torch.arange(KINDS).repeat_interleave(size)
    weight = torch.zeros(KINDS * (size + 1), 2 * KINDS, dtype=torch.float64)
    weight[torch.arange(KINDS * size), of_entry] = 1
    targets = KINDS * size + torch.arange(KINDS)
    weight[targets, torch.arange(KINDS)] = 1
    weight[targets, KINDS + torch.arange(KINDS)] = LIKE_IT
    kinds = torch.arange(3 * GROUP) % KINDS
    excess = torch.tensor(size * target_probability / (1 - target_probability)).log() / LIKE_IT
    hidden = torch.zeros(len(kinds), 2 * KINDS, dtype=torch.float64)
    hidden[torch.arange(len(kinds)), kinds] = 20
    hidden[torch.arange(len(kinds)), KINDS + kinds] = excess.double()
    return [hidden, weight], targets[kinds]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("probability", [0.6, 0.9, 0.99])
def test_confident_rows_whose_gradients_are_all_in_small_entries_are_exact(probability, dtype):
    """The mass that they would drop is small, and nearly all of their gradients."""
    tensors, targets = of_kinds(probability)
    rounded = [t.to(dtype) for t in tensors]
    truth = run(linear_cross_entropy_reference, [t.double() for t in rounded], targets)[2]
    usual = run(linear_cross_entropy, rounded, targets, recompute=True)[2]
    _, stats, found = run(filtered, rounded, targets, filter_eps=EPS)
    for ours, theirs, expected in zip(found, usual, truth, strict=True):
        assert error(ours, expected) <= 1.1 * error(theirs, expected)
    assert stats["exact_tokens"] == len(targets)
    assert stats["dropped_mass"] == 0


def test_a_row_that_a_z_loss_turns_around_is_exact():
    """Below a log-sum-exp of -1 / (2 z) all entries of a row but the target's are negative: the largest says nothing,
    and masses of either sign would cancel."""
    tensors, targets = trained(bias=True)
    for shift in (0.0, -15.0, -30.0):  # no row, some, all
        shifted = [*tensors[:2], tensors[2].detach() + shift]
        lse_N = (shifted[0] @ shifted[1].T + shifted[2]).logsumexp(1)
        turned = (targets != -100) & (lse_N < -10)
        assert (turned.sum() == 0, turned.sum() == (targets != -100).sum()) == (shift == 0, shift == -30)
        truth = run(linear_cross_entropy_reference, shifted, targets, z_loss=0.05)[2]
        _, stats, gradients = run(filtered, shifted, targets, filter_eps=EPS / 2, z_loss=0.05)
        assert turned.sum() <= stats["exact_tokens"] < turned.sum() + 50
        assert error(gradients[0][turned], truth[0][turned]) < 1e-12
        assert shift > -30 or all(error(a, b) < 1e-12 for a, b in zip(gradients, truth, strict=True))


# --- the rest of the op -------------------------------------------------------------------------------------------


def test_forward_is_bit_for_bit_the_exact_one(monkeypatch):
    monkeypatch.setattr(kept_columns, "GROUP_ROWS", 256)  # chunks of 256 rows in both
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        tensors, targets = make(700, v=501, dtype=dtype, bias=True)
        for changes in ({}, {"reduction": "none"}, {"softcap": 5.0, "scale": 0.7, "z_loss": 1e-2}):
            options: dict[str, Any] = changes | {"logits_budget_mib": 1e-6, "bias": tensors[2]}
            exact = linear_cross_entropy(tensors[0], tensors[1], targets, **options)
            found = filtered(tensors[0], tensors[1], targets, filter_eps=EPS, **options)
            assert torch.equal(found[0], exact[0])
            assert found[1].keys() - exact[1].keys() == OF_FILTER
            assert all(torch.equal(found[1][name], value) for name, value in exact[1].items())
            assert not any(value.requires_grad for value in found[1].values())


def test_without_gradients_nothing_is_filtered():
    tensors, targets = trained()
    with torch.no_grad():
        in_validation = filtered(tensors[0], tensors[1], targets, filter_eps=EPS)
        exact = linear_cross_entropy(tensors[0], tensors[1], targets)
    constants = filtered(tensors[0].detach(), tensors[1].detach(), targets, filter_eps=EPS)
    for loss, stats in (in_validation, constants):
        assert torch.equal(loss, exact[0])
        assert stats.keys() == exact[1].keys()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_an_empty_batch_and_one_of_ignored_tokens_give_zero_loss_and_zero_gradients(tokens, reduction):
    tensors, targets = make(n=tokens, bias=True)
    loss, stats, gradients = run(filtered, tensors, torch.full_like(targets, -100), filter_eps=EPS, reduction=reduction)
    assert torch.equal(loss, torch.zeros_like(loss))
    assert stats.keys() >= OF_FILTER
    assert all(value == 0 for value in stats.values())
    assert all(torch.equal(g, torch.zeros_like(t)) for g, t in zip(gradients, tensors, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_hidden_state_that_is_no_number_reaches_its_own_gradient_and_the_weights_and_no_other(bad):
    tensors, targets = trained()
    row = int((targets != -100).nonzero()[100])
    with torch.no_grad():
        tensors[0][row, 3] = bad
    exact = run(linear_cross_entropy, tensors, targets)[2]
    found = run(filtered, tensors, targets, filter_eps=EPS)[2]
    assert exact[0][row].isnan().all()
    for ours, theirs in zip(found, exact, strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filter_eps": 1.0}, "filter_eps must be a probability, at least 0 and below 1, got 1.0"),
        ({"filter_eps": 0.0, "label_smoothing": 0.1}, "label_smoothing=0.1 their gradient is not small"),
    ],
)
def test_what_cannot_be_filtered_is_refused_with_a_sentence(options, message):
    tensors, targets = make()
    with pytest.raises(UserError, match=message):
        filtered(tensors[0], tensors[1], targets, **options)


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("eps", [0.0, 2**-6])  # all columns kept; the groups are exact, or drop
def test_no_tensor_of_all_tokens_by_the_vocabulary_ever_lives(eps, reduction, monkeypatch):
    monkeypatch.setattr(kept_columns, "GROUP_ROWS", 2048)
    n, d, v, rows = 4096, 8, 6000, 256
    tensors, targets = make(n, d, v, torch.float32)
    budget = budget_for(rows, v, torch.float32)
    saved: list[Tensor] = []
    with live_bytes() as counter, torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss, _ = filtered(
            tensors[0], tensors[1], targets, reduction=reduction, filter_eps=eps, logits_budget_mib=budget
        )
        groups = 2
        between = counter.live
        loss.backward(torch.ones_like(loss))
    assert max(t.numel() for t in saved) <= max(n * d, v * d, groups * v)
    # the valid hidden states, a few numbers per token, and per group a mark and a float of each column
    assert between <= (n * d * 4) + 16 * n * 4 + groups * v * 5 + 1024
    assert counter.largest <= budget * 2**20
    assert counter.peak <= rows * v * 4 + 8 * 4 * 2**20 + 64 * (n * d + v * d) * 4
    assert counter.peak < n * v * 4 / 2


# --- a vocabulary that is divided over ranks ------------------------------------------------------------------------


class Call(NamedTuple):
    split: str
    reduction: str = "mean"
    eps: float = EPS
    feature: str = "everything"
    dtype: str = "float64"
    ignored: bool = False
    kernels: str = ""  # the way whose Triton kernels run, in the interpreter

    def __str__(self) -> str:
        return "-".join(str(value) for value in self)


# the second part of "all_dropped" has the entries that are never a target, and probable nowhere
SPLITS = {"uneven": (200, 312), "one_empty": (512, 0), "all_dropped": (400, 112)}
CALLS = [
    *(Call(split, reduction, eps) for split in SPLITS for reduction in ("mean", "none") for eps in (0.0, EPS)),
    *(Call("uneven", feature=feature) for feature in ("plain", "softcap", "z_loss")),
    *(Call(split, eps=EPS / 2, dtype="bfloat16", feature="bias") for split in SPLITS),
    *(Call(split, ignored=True) for split in SPLITS),
]
OF_KERNELS: list[Call] = []
if find_spec("triton") and not torch.cuda.is_available():  # else there is no interpreter
    OF_KERNELS += [
        *(Call("uneven", "none", feature=f, dtype="float32", kernels="hopper") for f in ("plain", "everything")),
        *(Call("all_dropped", feature=f, dtype="float32", kernels="hopper") for f in ("bias", "z_loss")),
        *(Call(split, feature="bias", dtype="float32", kernels="logits") for split in ("one_empty", "all_dropped")),
        *(Call("uneven", ignored=True, dtype="float32", kernels=way) for way in ("hopper", "logits")),
    ]


def inputs_of(call: Call) -> tuple[list[Tensor], Tensor, Tensor]:
    tensors, targets = trained(dtype=getattr(torch, call.dtype), **FEATURES[call.feature])
    if call.split == "all_dropped":
        rare = SPLITS[call.split][0]
        targets = targets.where(targets < rare, targets - rare)
        with torch.no_grad():
            if len(tensors) > 2:
                tensors[2][rare:] -= 30
    if call.ignored:
        targets = torch.full_like(targets, -100)
    grad = unequal(targets) if call.reduction == "none" else torch.tensor(0.37, dtype=torch.float64)
    return tensors, targets, grad


def compute(call: Call, tensors: list[Tensor], shard: VocabularyShard | None) -> tuple[Any, ...]:
    _, targets, grad = inputs_of(call)
    options = FEATURES[call.feature] | {"reduction": call.reduction, "shard": shard, "logits_budget_mib": 1e-6}
    return run(filtered, tensors, targets, grad, filter_eps=call.eps, **options)


def work(rank: int, calls: list[Call]) -> dict[Call, Any]:
    """A process: every call, as the rank of its part of the vocabulary."""
    kept_columns.GROUP_ROWS = GROUP
    results = {}
    for call in calls:
        shard, own = shard_of(rank, SPLITS[call.split])
        with kernels_of(call.kernels):
            results[call] = compute(call, part_of(inputs_of(call)[0], own), shard)
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[Call, Any]]:
    return call_in_processes(work, 2, CALLS, timeout=120)


@pytest.fixture(scope="module")
def ranks_of_kernels() -> list[dict[Call, Any]]:
    return call_in_processes(work, 2, OF_KERNELS, timeout=280)


@pytest.mark.parametrize("call", CALLS + [pytest.param(call, marks=pytest.mark.slow) for call in OF_KERNELS], ids=str)
def test_a_divided_vocabulary_gives_the_whole_ones_statistics_and_its_own_tails_gradients(call: Call, request):
    """Each rank spreads what its own part drops over that part: with eps = 0 that is the exact gradient."""
    tensors, targets, grad = inputs_of(call)
    options: dict[str, Any] = FEATURES[call.feature] | {"reduction": call.reduction}
    whole = compute(call, tensors, None)
    ranks = request.getfixturevalue("ranks_of_kernels" if call.kernels else "ranks")
    loss, statistics, gradients = joined([rank[call] for rank in ranks])
    assert statistics.keys() == whole[1].keys()
    if call.ignored:
        assert not any(statistics.values())
        assert not any(gradient.any() for gradient in gradients)
        return
    kept_in_groups = bool(call.kernels)  # plain PyTorch takes ignored tokens out
    hand = definition(tensors, targets, call.eps, grad, SPLITS[call.split], ignored_stay=kept_in_groups, **options)
    truth = run(linear_cross_entropy_reference, [t.double() for t in tensors], targets, grad, **options)
    tolerance = {"float64": 1e-12, "float32": 64 * EPSILON, "bfloat16": 0.03}[call.dtype]
    assert error(loss, whole[0]) < tolerance
    for name in OF_FILTER:
        assert error(statistics[name], hand.statistics[name]) < tolerance, name
    if call.dtype != "bfloat16":
        for ours, theirs, exact in zip(gradients, hand.gradients, truth[2], strict=True):
            assert error(ours, theirs) < tolerance
            assert call.eps or error(ours, exact) < tolerance
    else:
        exact_head = run(linear_cross_entropy, tensors, targets, grad, **options)[2]
        for ours, theirs, filter_, exact in zip(gradients, exact_head, hand.gradients, truth[2], strict=True):
            assert error(ours, exact) <= 1.1 * (error(theirs, exact) + error(filter_, exact))
