"""The chunked head against the float64 reference: values, gradients, statistics, memory, and what it refuses."""

import itertools
import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from head_cases import FEATURES, budget_for, error, fused, grad_of, live_bytes, make, run, upcast_standard, weights_of
from torch.utils.checkpoint import checkpoint

from lit_fused.errors import UserError
from lit_fused.losses import LinearCrossEntropyLoss
from lit_fused.ops import linear_cross_entropy, linear_cross_entropy_reference, token_scores, top_items
from lit_fused.ops.options import chunk_rows, chunks, gpu_enough_rows
from lit_fused.ops.products import padded
from lit_fused.ops.vocabulary_parallel import VocabularyShard


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("feature", FEATURES)
def test_in_float64_loss_statistics_and_gradients_are_those_of_the_reference(feature, reduction, recompute):
    options = FEATURES[feature]
    tensors, targets = make(bias="bias" in options)
    grad = torch.randn(targets.shape, dtype=torch.float64) if reduction == "none" else torch.tensor(0.37)
    expected = run(linear_cross_entropy_reference, tensors, targets, grad, reduction=reduction, **options)
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
    assert error(found[0], expected[0]) < 1e-13
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert error(found[1][name], value) < 1e-13, name
    for ours, truth in zip(found[2], expected[2], strict=True):
        assert error(ours, truth) < 1e-12


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint16, torch.int32, torch.uint64])
@pytest.mark.parametrize("ignore_index", [-100, 120])
@pytest.mark.parametrize("vocabulary", [250, 300])
def test_targets_of_any_integer_dtype_are_those_of_int64(dtype, ignore_index, vocabulary):
    hidden, weight = torch.randn(4, 8), torch.randn(vocabulary, 8)
    entries = [3, 120, 127, 2] if dtype == torch.int8 else [3, 120, 156, 249]  # 156 is -100 in 8 bits
    targets = torch.tensor(entries)
    narrow = targets.to(dtype)
    expected = F.cross_entropy(F.linear(hidden, weight), targets, ignore_index=ignore_index)
    of_scores = token_scores(hidden, weight, narrow, ignore_index=ignore_index).log_prob.sum()
    count = (targets != ignore_index).sum()
    for found in (linear_cross_entropy(hidden, weight, narrow, ignore_index=ignore_index)[0], -of_scores / count):
        torch.testing.assert_close(found, expected)
    ranks = (F.linear(hidden, weight) > F.linear(hidden, weight).gather(1, targets[:, None])).sum(1)
    assert torch.equal(torch.as_tensor(top_items(hidden, weight, 1, targets=narrow).ranks), ranks)


def test_weights_of_tokens_that_sum_to_zero_give_a_mean_of_zero():
    tensors, targets = make()
    loss, _, gradients = run(linear_cross_entropy, tensors, targets, token_weights=torch.zeros(len(targets)))
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients)


def test_weights_of_tokens_that_do_not_fit_or_want_a_gradient_are_refused():
    (hidden, weight), targets = make()
    with pytest.raises(UserError, match=r"token_weights of shape \(3,\) do not fit"):
        linear_cross_entropy(hidden, weight, targets, token_weights=torch.ones(3))
    learned = torch.ones(len(targets), requires_grad=True)
    with pytest.raises(UserError, match="token_weights want a gradient, and a fused loss has none for them"):
        linear_cross_entropy(hidden, weight, targets, token_weights=learned)


def test_the_reference_is_torch_cross_entropy_with_every_option_torch_has():
    tensors, targets = make(bias=True)
    hidden, weight, bias = tensors
    for reduction in ("mean", "sum", "none"):
        loss, _ = linear_cross_entropy_reference(
            hidden, weight, targets, bias=bias, label_smoothing=0.2, reduction=reduction
        )
        expected = F.cross_entropy(F.linear(hidden, weight, bias), targets, label_smoothing=0.2, reduction=reduction)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("feature", FEATURES)
def test_in_lower_precision_errors_are_at_most_twice_those_of_the_upcast_standard(feature, dtype):
    options = FEATURES[feature]
    tensors, targets = make(d=64, v=501, dtype=dtype, bias="bias" in options)
    truth = run(linear_cross_entropy_reference, [t.double() for t in tensors], targets, **options)

    standard = run(upcast_standard, tensors, targets, **options)
    ours = run(linear_cross_entropy, tensors, targets, logits_budget_mib=1e-6, **options)
    epsilon = torch.finfo(torch.float32).eps
    assert ours[0].dtype == torch.float32
    assert error(ours[0], truth[0]) <= 2 * error(standard[0], truth[0]) + 4 * epsilon
    for mine, theirs, exact in zip(ours[2], standard[2], truth[2], strict=True):
        assert mine.dtype == dtype
        assert error(mine, exact) <= 2 * error(theirs, exact) + 4 * epsilon


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", [{}, {"reduction": "sum"}, {"recompute": True}], ids=str)
def test_what_lay_in_memory_before_is_in_no_result(way, dtype):
    tensors, targets = make(d=64, v=501, dtype=dtype)
    expected = run(linear_cross_entropy, tensors, targets, logits_budget_mib=1e-6, **way)
    torch.use_deterministic_algorithms(True)  # fills what is allocated and not written with NaN
    try:
        found = run(linear_cross_entropy, tensors, targets, logits_budget_mib=1e-6, **way)
    finally:
        torch.use_deterministic_algorithms(False)
    for mine, same in zip((found[0], *found[2]), (expected[0], *expected[2]), strict=True):
        assert torch.equal(mine, same)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_tensors_under_autocast_give_the_gradients_of_the_autocast_standard(dtype):
    tensors, targets = make(d=64, v=501, dtype=torch.float32)
    truth = run(linear_cross_entropy_reference, [t.double() for t in tensors], targets)

    def standard(hidden, weight, targets, **_):
        return F.cross_entropy(F.linear(hidden, weight).float(), targets), {}

    with torch.autocast("cpu", dtype):
        theirs = run(standard, tensors, targets)
    for backward_inside in (True, False):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        with torch.autocast("cpu", dtype):
            loss, _ = linear_cross_entropy(leaves[0], leaves[1], targets)
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        assert loss.dtype == torch.float32
        for leaf, other, exact in zip(leaves, theirs[2], truth[2], strict=True):
            assert grad_of(leaf).dtype == torch.float32
            assert error(grad_of(leaf), exact) <= 2 * error(other, exact)


@pytest.mark.parametrize("impl", ["chunked", "torch_native"])
def test_autocast_leaves_float64_as_it_is(impl):
    hidden, weight = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (4, 30))
    targets = torch.tensor([1, -100, 3, 4])
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(F.linear(hidden, weight), targets)
        found = LinearCrossEntropyLoss(impl, weight)(hidden, targets)
        scores = token_scores(hidden, weight, targets)
        with pytest.raises(
            UserError, match="hidden states are torch.float32 and the output layer's weight is torch.fl"
        ):
            linear_cross_entropy(hidden.float(), weight, targets)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(-scores.log_prob.sum() / 3, expected, rtol=1e-13, atol=0)
    gradients = (torch.autograd.grad(value, (hidden, weight)) for value in (found, expected))
    for mine, truth in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-11, atol=1e-14)


def test_a_chunk_fills_the_budget_but_never_holds_all_tokens_nor_fewer_than_256():
    assert chunk_rows(8192, 2 * 128_000, 256) == 1024  # 1048 rows fit; whole tiles of 128
    assert chunk_rows(8192, 2 * 1000, 256) == 4096
    assert chunk_rows(8192, 4 * 256_000, 1) == 256
    assert chunk_rows(100, 4 * 1000, 256) == 256
    assert chunk_rows(0, 4 * 1000, 256) == 256
    assert [chunk_rows(1000, 4 * 1000, 256, size) for size in (128, 300, 10**6)] == [128, 384, 1024]


def test_a_gpus_chunk_holds_no_more_tokens_than_it_is_fast_with_unless_a_budget_was_chosen():
    assert [gpu_enough_rows(size) for size in (768, 1024, 2304, 5120)] == [5462, 4096, 2816, 2816]
    assert chunk_rows(100_000, 2 * 1000, 4096, enough=2816) == 2816
    assert chunk_rows(100_000, 2 * 256_000, 448, enough=2816) == 896  # 917 rows fit
    assert chunk_rows(100_000, 2 * 1000, 4096) == 50_048


def test_chunks_are_evened_out_and_cover_every_token_once():
    assert chunk_rows(4096, 2**20, 1300) == 1024  # not 1280, 1280, 1280, 256
    for tokens in (0, 1, 255, 256, 257, 5000):
        covered = [i for chunk in chunks(tokens, chunk_rows(tokens, 2**20, 700)) for i in range(tokens)[chunk]]
        assert covered == list(range(tokens))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("recompute", [False, True])
def test_all_labels_ignored_gives_zero_loss_and_zero_gradients(reduction, recompute):
    tensors, targets = make(n=5, bias=True)
    loss, stats, gradients = run(
        linear_cross_entropy, tensors, torch.full_like(targets, -100), reduction=reduction, recompute=recompute
    )
    assert torch.equal(loss, torch.zeros_like(loss))
    assert all(value == 0 for value in stats.values())
    assert all(torch.equal(g, torch.zeros_like(t)) for g, t in zip(gradients, tensors, strict=True))


WAYS = [
    {},
    {"recompute": True},
    {"filter_eps": 0.01},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"token_weights": True},
]


def torchs(hidden, weight, targets, *, bias, reduction, **_):
    """Return torch's loss of the logits, whose gradients of ignored tokens are zero under any factor."""
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits, targets, reduction=reduction), {}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("factor", [torch.inf, -torch.inf, torch.nan, 3.0])
def test_gradients_of_ignored_tokens_are_zero_whatever_their_loss_is_multiplied_by(way, reduction, factor):
    tensors, targets = make(n=40, bias=True)
    for labels in (torch.full_like(targets, -100), targets):
        ignored = labels == -100
        shape = labels.shape if reduction == "none" else ()
        incoming = torch.full(shape, factor, dtype=torch.float64)
        if reduction == "none":
            incoming = incoming.where(ignored, 1)
        of_torch = run(torchs, tensors, labels, incoming, reduction=reduction)[2]
        ours = run(fused, tensors, labels, incoming, reduction=reduction, **way)[2]
        assert not ours[0][ignored].any()
        for gradient, theirs in zip(ours, of_torch, strict=True):
            assert gradient.isfinite().all() == theirs.isfinite().all()
            assert gradient.any() == theirs.any()


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_of_ignored_tokens_are_not_read(recompute):
    tensors, targets = make(n=40)
    weights = weights_of(targets)
    expected = run(linear_cross_entropy, tensors, targets, token_weights=weights, recompute=recompute)
    poisoned = weights.masked_fill(targets == -100, torch.nan)
    found = run(linear_cross_entropy, tensors, targets, token_weights=poisoned, recompute=recompute)
    assert all(torch.equal(a, b) for a, b in zip((found[0], *found[2]), (expected[0], *expected[2]), strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_an_empty_batch_gives_zero_loss_and_zero_gradients(recompute):
    tensors, _ = make()
    tensors[0] = tensors[0][:0]
    loss, stats, gradients = run(linear_cross_entropy, tensors, torch.empty(0, dtype=torch.long), recompute=recompute)
    assert loss == 0
    assert all(value == 0 for value in stats.values())
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


def test_ignored_tokens_neither_cost_nor_change_anything():
    tensors, targets = make()
    valid = targets != -100
    with_ignored = run(linear_cross_entropy, tensors, targets)
    without = run(linear_cross_entropy, [tensors[0][valid], tensors[1]], targets[valid])
    assert error(with_ignored[0], without[0]) < 1e-15
    assert torch.equal(with_ignored[2][0][~valid], torch.zeros_like(with_ignored[2][0][~valid]))
    poisoned = [tensors[0].detach().masked_fill(~valid[:, None], torch.nan), tensors[1]]
    assert run(linear_cross_entropy, poisoned, targets)[2][1].isfinite().all()


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"reduction": "none"}, {"filter_eps": 2**-12}])
def test_in_float32_confident_rows_are_as_near_to_float64_as_those_of_the_standard(options):
    weight = 5 * F.normalize(torch.randn(211, 24, generator=torch.Generator().manual_seed(0)))
    targets = torch.arange(64)
    tensors = [weight[targets], weight]
    truth = run(linear_cross_entropy_reference, [t.double() for t in tensors], targets)
    usual = run(upcast_standard, tensors, targets)
    grad = torch.full((64,), 1 / 64) if "reduction" in options else None
    found = run(fused, tensors, targets, grad, **options)
    assert truth[0] < 1e-4
    losses, gradients = (found[0].mean(), usual[0], truth[0]), zip(found[2], usual[2], truth[2], strict=True)
    for ours, theirs, exact in [losses, *gradients]:
        assert error(ours, exact) <= 2 * error(theirs, exact)


def test_a_masked_vocabulary_entry_has_no_probability_no_gradient_and_no_nan():
    tensors, targets = make(bias=True)
    targets[targets == 3] = 4
    with torch.no_grad():
        tensors[2][3] = -torch.inf
    loss, stats, gradients = run(linear_cross_entropy, tensors, targets)
    assert loss.isfinite()
    assert all(value.isfinite() for value in stats.values())
    assert torch.equal(gradients[1][3], torch.zeros(16, dtype=torch.float64))


def test_gradients_flow_only_where_they_are_wanted():
    tensors, targets = make()
    for hidden_wants, weight_wants in itertools.product([True, False], repeat=2):
        hidden = tensors[0].detach().requires_grad_(hidden_wants)
        weight = tensors[1].detach().requires_grad_(weight_wants)
        loss, _ = linear_cross_entropy(hidden, weight, targets)
        assert loss.requires_grad == (hidden_wants or weight_wants)
        if loss.requires_grad:
            loss.backward()
        assert (hidden.grad is not None) == hidden_wants
        assert (weight.grad is not None) == weight_wants


def test_a_second_backward_is_refused_unless_the_logits_are_recomputed():
    tensors, targets = make()
    loss, _ = linear_cross_entropy(tensors[0], tensors[1], targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    again = [t.detach().requires_grad_() for t in tensors]
    loss, _ = linear_cross_entropy(again[0], again[1], targets, recompute=True)
    loss.backward(retain_graph=True)
    first = grad_of(again[1]).clone()
    loss.backward()
    torch.testing.assert_close(again[1].grad, 2 * first)


def test_inside_a_checkpoint_gradients_are_those_outside():
    tensors, targets = make(ignored=0)

    def loss(hidden, weight, **options):
        return fused(hidden, weight, targets, **options)[0].mean()

    def scores(hidden, weight):
        return -token_scores(hidden, weight, targets).log_prob.mean()

    expected = torch.autograd.grad(loss(*tensors), tensors)
    options = {}, {"recompute": True}, {"reduction": "none"}, {"filter_eps": 0}
    functions = [scores, *(partial(loss, **changed) for changed in options)]
    for function in functions + [torch.compile(function, backend="eager") for function in (scores, functions[2])]:
        found = torch.autograd.grad(checkpoint(function, *tensors, use_reentrant=False), tensors)
        torch.testing.assert_close(found, expected)


@pytest.fixture
def whole_shard(tmp_path) -> Iterator[VocabularyShard]:
    """A divided vocabulary, of which the only rank has all 5 entries."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield VocabularyShard(0, 5, 5, dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"filter_eps": 1e-3}, {"divided": True}], ids=str)
def test_second_derivatives_are_refused_whoever_asks_for_them(options, reduction, request):
    """They would be zero: a penalty on gradients would train nothing."""
    tensors, targets = make(n=6, d=3, v=5, ignored=0)
    options = {"reduction": reduction} | options
    if options.pop("divided", False):
        options["shard"] = request.getfixturevalue("whole_shard")

    def function(hidden, weight):
        return fused(hidden, weight, targets, **options)[0].sum()

    def penalty(loss, with_respect_to):
        first = torch.autograd.grad(loss, with_respect_to, create_graph=True)
        return torch.cat([gradient.flatten() for gradient in first]).square().sum()

    with pytest.raises(UserError, match=r"no second derivatives.*leave create_graph out, or choose loss=standard"):
        torch.autograd.grad(penalty(function(*tensors), tensors), tensors)
    body = tensors[0].detach().requires_grad_()
    with pytest.raises(UserError, match="no second derivatives"):  # with respect to a body's parameters alone
        torch.autograd.grad(penalty(function(body.tanh(), tensors[1].detach()), [body]), body)
    with pytest.raises(UserError, match="no second derivatives"):
        torch.autograd.gradgradcheck(function, tensors)


@pytest.mark.parametrize(("reduction", "recompute"), [("mean", False), ("none", False), ("none", True)])
@pytest.mark.parametrize("options", [{}, FEATURES["everything"]], ids=["plain", "everything"])
def test_no_tensor_of_all_tokens_by_the_vocabulary_ever_lives(options, recompute, reduction):
    n, d, v = 4096, 8, 6000
    tensors, targets = make(n, d, v, torch.float32, bias="bias" in options)
    rows, tile = 256, 4 * 2**20
    with live_bytes() as counter:
        run(
            linear_cross_entropy,
            tensors,
            targets,
            reduction=reduction,
            recompute=recompute,
            logits_budget_mib=budget_for(rows, v, torch.float32),
            **options,
        )
    chunk_bytes = rows * padded(v) * 4
    small = 64 * (n * d + v * d) * 4
    assert counter.largest <= chunk_bytes
    assert counter.peak <= chunk_bytes + 8 * tile + small
    assert counter.peak < n * v * 4 / 2


def test_without_gradients_memory_is_one_chunk():
    tensors, targets = make(4096, 8, 6000, torch.float32)
    with torch.no_grad(), live_bytes() as counter:
        linear_cross_entropy(tensors[0], tensors[1], targets, logits_budget_mib=budget_for(256, 6000, torch.float32))
    assert counter.peak < 3 * 256 * 6000 * 4 + 8 * 4 * 2**20


H, W, Y = torch.randn(6, 4), torch.randn(9, 4), torch.arange(6)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((H, W, Y.float()), {}, r"labels must be integer.*got torch.float32.*labels.long\(\)"),
        ((H, W, Y.bool()), {}, "labels must be integer.*got torch.bool"),
        ((H, W, Y + 5), {}, r"labels must lie in \[0, 9\).*got values from 5 to 10"),
        ((H, W, Y - 1), {}, r"labels must lie in \[0, 9\).*got values from -1 to 4"),
        ((H, W[:, :3], Y), {}, r"hidden states of shape \(6, 4\) do not fit.*\(9, 3\)"),
        ((H, W, Y[:5]), {}, r"labels of shape \(5,\) do not fit hidden states of shape \(6, 4\)"),
        ((H, W.double(), Y), {}, "hidden states are torch.float32 and the output layer's weight is torch.float64"),
        ((H, W.to("meta"), Y), {}, "must be on one device, got cpu, meta, cpu"),
        ((H, W, Y), {"bias": torch.zeros(9, device="meta")}, "must be on one device, got cpu, cpu, cpu, meta"),
        ((H, W.to(torch.int8), Y), {}, "the output layer's weight is torch.int8; give both one floating point dtype"),
        ((H, W, Y), {"bias": torch.zeros(4)}, r"bias of shape \(4,\) does not fit 9"),
        ((H, W, Y), {"softcap": math.inf}, "softcap must be a positive number"),
        (
            (H, W, Y),
            {"scale": torch.ones((), requires_grad=True)},
            "scale wants a gradient.*multiply the hidden states",
        ),
        ((H, W, Y), {"label_smoothing": 1.5}, "label_smoothing must lie in"),
        ((H, W, Y), {"chunk_size": 64, "logits_budget_mib": 8}, "chunk_size=64 and logits_budget_mib=8 both"),
        ((H, W, Y), {"reduction": "avg"}, "reduction must be 'mean', 'sum' or 'none', got 'avg'"),
    ],
)
def test_input_that_does_not_fit_is_refused_with_a_sentence(arguments, options, message):
    with pytest.raises(UserError, match=message):
        linear_cross_entropy(*arguments, **options)
