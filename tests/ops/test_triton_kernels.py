"""The Triton kernels in Triton's interpreter, on a CPU: both ways of working on a chunk, in float32.

The interpreter has no bfloat16 products. In float32 the algorithm has to be right to seven digits, which says more.
"""

import math
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from distillation_cases import LOSSES as DIVERGENCES
from distillation_cases import answer, in_float64
from distillation_cases import case as distillation_case
from head_cases import FEATURES, NAMES, choice, error, fused, grad_of, make, run, scored
from kernels_of import kernels_of

pytest.importorskip("triton", reason="Triton exists for Linux only")

from lit_fused.filtered import filtered_hopper, kept_columns
from lit_fused.ops import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_distillation,
    linear_distillation_reference,
    products,
    token_scores,
    token_scores_reference,
    triton_available,
)
from lit_fused.ops.hopper import hopper_path, hopper_rows, narrow_path, numerators
from lit_fused.ops.logits import logits_path

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernels are compiled: test_gpu.py"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

WAYS = ["hopper", "narrow", "logits"]


def poisoned(like: torch.Tensor, rows: int, columns: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a matrix of padded rows, all of it not a number."""
    return like.new_full((rows, products.padded(columns)), math.nan, dtype=dtype)[:, :columns]


@pytest.fixture
def kernels_on_cpu(monkeypatch):
    """Send every call through one way and its kernels."""
    with ExitStack() as stack:

        def through(way: str) -> None:
            stack.enter_context(kernels_of(way))
            monkeypatch.setattr(products, "CUT_ON", ("cpu",))  # as on a GPU
            for module in (logits_path, numerators):
                monkeypatch.setattr(module, "with_aligned_rows", poisoned)

        yield through


def features(way: str):
    """The options that a way has: without label smoothing where ``logits`` smooths."""
    has_all = {
        name: way == "logits" or (way == "hopper" and "softcap" not in options) for name, options in FEATURES.items()
    }
    return {
        name: {k: v for k, v in options.items() if has_all[name] or k != "label_smoothing"}
        for name, options in FEATURES.items()
        if has_all[name] or name != "label_smoothing"
    }


# A case takes the interpreter some seconds: each option is met with one reduction, all of them together with each.
REDUCTIONS = [("mean", False), ("sum", True), ("none", False)]
QUICK = {
    "hopper": [("everything", "mean"), ("smoothed", "none"), ("token_weights", "none")],
    "narrow": [("everything", "mean")],
    "logits": [("everything", "none")],
}
CASES = [
    pytest.param(
        way,
        feature,
        reduction,
        recompute,
        id=f"{way}-{feature}-{reduction}-{recompute}",
        marks=() if (feature, reduction) in QUICK[way] else pytest.mark.slow,
    )
    for way in WAYS
    for number, feature in enumerate(features(way))
    for reduction, recompute in (REDUCTIONS if feature == "everything" else [REDUCTIONS[number % 3]])
]


def case(feature: str, way: str, n: int = 300):
    options = features(way)[feature]
    tensors, targets = make(n, d=64, v=501, dtype=torch.float32, bias="bias" in options)
    return tensors, targets, options


def exact(tensors, targets, grad=None, **options):
    return run(linear_cross_entropy_reference, [t.double() for t in tensors], targets, grad, **options)


@pytest.mark.parametrize(("way", "feature", "reduction", "recompute"), CASES)
def test_loss_statistics_and_gradients_are_exact_to_float32(way, feature, reduction, recompute, kernels_on_cpu):
    tensors, targets, options = case(feature, way)
    grad = torch.randn(targets.shape, generator=torch.Generator().manual_seed(1)) if reduction == "none" else None
    truth = exact(tensors, targets, None if grad is None else grad.double(), reduction=reduction, **options)
    kernels_on_cpu(way)
    found = run(
        linear_cross_entropy,
        tensors,
        targets,
        grad,
        reduction=reduction,
        recompute=recompute,
        logits_budget_mib=1e-6,
        **options,
    )
    epsilon = torch.finfo(torch.float32).eps
    assert error(found[0], truth[0]) < 8 * epsilon
    assert found[1].keys() == truth[1].keys()
    assert found[1]["correct"] == truth[1]["correct"]
    for name, value in truth[1].items():
        assert error(found[1][name], value) < 16 * epsilon, name
    for ours, theirs in zip(found[2], truth[2], strict=True):
        assert error(ours, theirs) < 32 * epsilon


SCORED = [
    pytest.param(
        way, feature, wanted, id=f"{way}-{feature}-{'-'.join(wanted)}", marks=() if quick else pytest.mark.slow
    )
    for way in WAYS
    for feature, wanted, quick in [
        ("everything", NAMES, way == "hopper"),
        ("plain", ("log_prob",), False),
        ("plain", ("entropy",), False),
        ("everything", ("selected",), False),
    ]
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "feature", "wanted"), SCORED)
def test_token_scores_and_their_gradients_are_exact_to_float32(way, feature, wanted, kernels_on_cpu):
    tensors, targets, options = case(feature, way)
    options = {name: option for name, option in options.items() if name in ("bias", "scale", "softcap")}
    selected = choice(targets, 501)
    wide = [t.detach().double() for t in tensors]
    expected, truth = scored(token_scores_reference, wide, targets, selected, wanted, **options)
    _, usual = scored(token_scores, tensors, targets, selected, wanted, **options)  # of plain PyTorch
    kernels_on_cpu(way)
    found, gradients = scored(token_scores, tensors, targets, selected, wanted, logits_budget_mib=1e-6, **options)
    epsilon = torch.finfo(torch.float32).eps
    # Under a softcap many logits are equal once they are rounded: any of the largest will do.
    both = torch.stack([found.top1, expected.top1], 1)
    tops = scored(token_scores_reference, wide, targets, both, **options)[0].selected
    assert error(tops[:, 0], tops[:, 1]) < 16 * epsilon
    for name in NAMES:
        assert error(getattr(found, name), getattr(expected, name)) < 32 * epsilon, name
    for ours, theirs, expected in zip(gradients, usual, truth, strict=True):
        assert error(ours, expected) < 2 * error(theirs, expected) + 32 * epsilon


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["everything", "plain", "z_loss"])
def test_a_filter_does_the_same_in_either_way(feature, kernels_on_cpu, monkeypatch):
    """Groups of 64 rows, of which the last is ragged; the kept columns of ``hopper`` need two blocks."""
    monkeypatch.setattr(kept_columns, "GROUP_ROWS", 64)
    monkeypatch.setattr(filtered_hopper, "MIN_BLOCK_TILES", 1)
    (hidden, *others), targets, options = case(feature, "hopper", n=150)
    with torch.no_grad():
        hidden[100:] *= 0.05  # these rows are diffuse, and exact
    if "softcap" in options:  # below a cap of 2 all rows are diffuse
        monkeypatch.setattr(kept_columns, "MAX_DROPPED", 2)
        monkeypatch.setattr(kept_columns, "MAX_ROW_DROPPED", 2)
    reduction = "none" if feature == "everything" else "mean"
    grad = torch.randn(targets.shape, generator=torch.Generator().manual_seed(1)) if reduction == "none" else None
    options |= {"reduction": reduction, "filter_eps": 4e-3, "logits_budget_mib": 1e-6}
    kernels_on_cpu("logits")
    expected = run(fused, [hidden, *others], targets, grad, **options)
    kernels_on_cpu("hopper")
    found = run(fused, [hidden, *others], targets, grad, **options)
    epsilon = torch.finfo(torch.float32).eps
    for name, value in expected[1].items():
        assert error(found[1][name], value) < 64 * epsilon, name
    assert found[1]["exact_tokens"] > 0 or "softcap" in options
    assert found[1]["dropped_mass"] > 0
    for ours, theirs in zip(found[2], expected[2], strict=True):
        assert error(ours, theirs) < 64 * epsilon


@pytest.mark.slow
@pytest.mark.parametrize("entries", [7, 501], ids=["fewer targets than rows", "more targets than rows"])
@pytest.mark.parametrize("way", [{}, {"filter_eps": 0}], ids=str)
def test_rows_of_frequent_targets_are_summed_apart_and_arrive_in_the_weights_gradient(
    way, entries, kernels_on_cpu, monkeypatch
):
    """In a bfloat16 gradient these rows are exact; here all have one precision, and some rows are the frequent ones.
    Where there are fewer targets than such rows, some are no target's."""
    monkeypatch.setattr(hopper_rows, "FREQUENT_ROWS", 20)
    tensors, targets, _ = case("plain", "hopper")
    targets[::2] = targets[::2] % 7
    targets = targets.where(targets < 0, targets % entries)
    truth = exact(tensors, targets)
    kernels_on_cpu("hopper")
    found = run(fused, tensors, targets, None, logits_budget_mib=1e-6, float32_accumulation=False, **way)
    for ours, theirs in zip(found[2], truth[2], strict=True):
        assert error(ours, theirs) < 32 * torch.finfo(torch.float32).eps


@pytest.fixture
def bfloat16_by_default():
    """Set the default dtype that Lightning's bf16-true sets around every step."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_depends_on_torchs_default_dtype(way, recompute, kernels_on_cpu, request):
    kernels_on_cpu(way)
    options = {"logits_budget_mib": 1e-6, "float32_accumulation": False, "recompute": recompute}
    tensors, targets, _ = case("plain", way)
    expected = run(linear_cross_entropy, tensors, targets, None, **options)
    request.getfixturevalue("bfloat16_by_default")
    found = run(linear_cross_entropy, tensors, targets, None, **options)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[2], expected[2], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS, "hopper in groups", "narrow in shorter sums", "logits in shorter blocks"])
def test_rows_far_beyond_the_estimate_of_their_size_are_exact_too(way, kernels_on_cpu, monkeypatch):
    """The shift of ``hopper`` is the target's logit: here some exceed it by hundreds of nats, in some tiles; that of
    ``logits`` is the largest of the first block. Of a large vocabulary tiles are joined in groups, and sums end after
    some entries: the last parts have none."""
    if way == "hopper in groups":
        from lit_fused.ops.hopper import hopper_kernels

        way, of_one = "hopper", hopper_kernels.tl.constexpr(1)
        for module in (hopper_path, hopper_rows):
            monkeypatch.setattr(module, "GROUP_TILES", 1)
        monkeypatch.setattr(hopper_kernels, "GROUP", of_one)
        monkeypatch.setattr(hopper_kernels, "UNIFIED_TILES", of_one)
    if way == "narrow in shorter sums":
        way = "narrow"
        monkeypatch.setattr(narrow_path, "LONGEST_SUM", 100)
    if way == "logits in shorter blocks":
        from lit_fused.ops.logits import rows_triton

        way = "logits"
        monkeypatch.setattr(rows_triton, "_MAX_BLOCK", 16)
    tensors, targets, _ = case("plain", way)
    with torch.no_grad():
        tensors[0][::7] *= 20
    logits = (tensors[0] @ tensors[1].T).detach()
    valid = targets >= 0
    excess = logits.max(-1).values[valid] - logits[valid].gather(1, targets[valid, None])[:, 0]
    assert excess.max() > 10 * 40 * math.log(2)
    kernels_on_cpu(way)
    truth, found = exact(tensors, targets), run(linear_cross_entropy, tensors, targets)
    assert error(found[0], truth[0]) < 1e-6
    for name, value in truth[1].items():
        assert error(found[1][name], value) < 1e-5, name
    for ours, theirs in zip(found[2], truth[2], strict=True):
        assert error(ours, theirs) < 1e-5


@pytest.mark.parametrize("way", ["hopper", *(pytest.param(w, marks=pytest.mark.slow) for w in WAYS if w != "hopper")])
def test_all_labels_ignored_is_zero_and_never_nan(way, kernels_on_cpu):
    tensors, targets, _ = case("bias", way)
    kernels_on_cpu(way)
    cases: list[dict[str, Any]] = [{}, {"recompute": True}, {"drop_ignored": True}]
    for options in cases:
        loss, stats, gradients = run(
            linear_cross_entropy, tensors, torch.full_like(targets, -100), bias=True, **options
        )
        assert loss == 0
        assert all(value == 0 for value in stats.values())
        assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


@pytest.mark.parametrize("way", [*(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[:2]), WAYS[2]])
def test_gradients_of_ignored_tokens_are_zero_whatever_their_loss_is_multiplied_by(way, kernels_on_cpu):
    tensors, targets, _ = case("bias", way)
    kernels_on_cpu(way)
    ways = [{}, {"recompute": True}, {"reduction": "none"}, {"reduction": "none", "filter_eps": 0.01}]
    for labels in (targets, torch.full_like(targets, -100)):
        ignored = labels == -100
        for options in ways:
            incoming = torch.full(labels.shape if "reduction" in options else (), math.nan)
            gradients = run(fused, tensors, labels, incoming, **options)[2]
            assert not gradients[0][ignored].any()
            assert ignored.all() == gradients[1].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_masked_vocabulary_entry_has_no_probability_and_no_nan(way, kernels_on_cpu):
    tensors, targets, _ = case("bias", way)
    kept = torch.arange(501) % 3 != 0
    position = kept.cumsum(0) - 1
    targets = torch.where(targets >= 0, kept.nonzero()[:, 0][targets % int(kept.sum())], targets)
    of_kept = torch.where(targets >= 0, position[targets], targets)
    truth = exact([tensors[0], tensors[1][kept], tensors[2][kept]], of_kept, bias=True)
    with torch.no_grad():
        tensors[2][~kept] = -math.inf
    kernels_on_cpu(way)
    found = run(linear_cross_entropy, tensors, targets, bias=True)
    assert error(found[0], truth[0]) < 1e-6
    assert error(found[1]["entropy"], truth[1]["entropy"]) < 1e-5
    assert error(found[2][0], truth[2][0]) < 1e-5
    assert error(found[2][1][kept], truth[2][1]) < 1e-5
    assert found[2][1][~kept].abs().max() == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_weight_of_other_strides_gets_the_same_gradient(way, kernels_on_cpu):
    tensors, targets, _ = case("plain", way)
    truth = exact(tensors, targets)
    kernels_on_cpu(way)
    wide = torch.zeros(501, 72)
    wide[:, :64] = tensors[1].detach()
    tall = tensors[1].detach().T.contiguous()
    views = [wide[:, :64], *([tall.T] if way == "logits" else [])]
    for view in views:
        assert not view.is_contiguous()
        hidden, weight = tensors[0].detach().requires_grad_(), view.requires_grad_()
        linear_cross_entropy(hidden, weight, targets)[0].backward()
        assert error(grad_of(weight), truth[2][1]) < 1e-5
        assert error(grad_of(hidden), truth[2][0]) < 1e-5


def test_only_aligned_contiguous_rows_are_left_to_the_copy_engine():
    flat = torch.zeros(64 * 16 + 1, dtype=torch.bfloat16)
    assert hopper_path.fetchable(flat[:-1].view(64, 16))
    assert hopper_path.fetchable(flat[:-1].view(32, 32)[:, :16])
    assert not hopper_path.fetchable(flat[1:].view(64, 16))
    assert not hopper_path.fetchable(flat[:-1].view(64, 16).T)
    assert not hopper_path.fetchable(torch.zeros(51, 20, dtype=torch.bfloat16))


def test_without_a_compiler_one_warning_says_what_is_missing(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(triton_available.shutil, "which", lambda name: None)
    triton_available.kernels_can_be_built.cache_clear()
    try:
        with pytest.warns(UserWarning, match="a C compiler .*plain PyTorch") as warned:
            assert [triton_available.kernels_can_be_built() for _ in range(2)] == [False, False]
        assert len(warned) == 1
        monkeypatch.setenv("CC", "cc")
        triton_available.kernels_can_be_built.cache_clear()
        assert triton_available.kernels_can_be_built()
    finally:
        triton_available.kernels_can_be_built.cache_clear()


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl", "jsd", "hinton"])
def test_distillation_is_that_of_the_logits(loss, kernels_on_cpu):
    kernels_on_cpu("logits")
    tensors, targets, teacher, options = distillation_case("everything", torch.float32, n=40)
    options |= DIVERGENCES[loss]
    truth = answer(linear_distillation_reference, *in_float64(tensors, targets, teacher), **options)
    found = answer(linear_distillation, tensors, targets, teacher, logits_budget_mib=1e-6, **options)
    assert error(found[0], truth[0]) < 32 * torch.finfo(torch.float32).eps
    for name, number in truth[1].items():
        assert error(found[1][name], number) < 32 * torch.finfo(torch.float32).eps, name
    for ours, exact in zip(found[2], truth[2], strict=True):
        assert error(ours, exact) < 32 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_in_distillation_probabilities_that_underflow_keep_their_logarithms(kind, kernels_on_cpu):
    kernels_on_cpu("logits")
    tensors, targets, teacher, _ = distillation_case("plain", torch.float32, n=40)
    tensors, teacher = [3e4 * tensors[0].detach(), tensors[1]], teacher._replace(hidden_states=3e4 * teacher[0])
    found = answer(linear_distillation, tensors, targets, teacher, divergence=kind)[0]
    expected = answer(linear_distillation_reference, *in_float64(tensors, targets, teacher), divergence=kind)[0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
