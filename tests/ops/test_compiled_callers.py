"""Compiled callers keep the heads whole: no graph break, and the numbers of the call without a compiler."""

import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import call
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lit_fused import linear_cross_entropy, token_scores
from lit_fused.errors import UserError

V, D = 211, 24


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()


def operands(*shape, dtype=torch.float64, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    offset = torch.randn(V, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(0, V, shape, generator=generator)
    if targets.numel() > 2:
        targets.view(-1)[1] = -100
    return hidden, weight, offset, targets


def same(function, tensors, *, compiled=None, **compilation):
    """Compare results and gradients with those of the caller that is not compiled."""
    leaves = [t for t in tensors if t is not None and t.requires_grad]
    compiled = compiled or torch.compile(function, fullgraph=True, backend="aot_eager", **compilation)
    results = []
    for caller in (function, compiled):
        total, others = caller(*tensors)
        results.append((total, *others, *(torch.autograd.grad(total, leaves) if leaves else ())))
    for expected, found in zip(*results, strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        torch.testing.assert_close(found, expected, rtol=1e-6 if expected.dtype == torch.float32 else 1e-12, atol=1e-12)


@pytest.mark.parametrize(("reduction", "recompute"), [("mean", False), ("sum", True), ("mean", True), ("none", False)])
@pytest.mark.parametrize("shape", [(5, 7), pytest.param((35,), marks=pytest.mark.slow), ()])
def test_a_compiled_caller_of_the_loss_has_no_graph_break(shape, reduction, recompute):
    def caller(hidden, weight, bias, targets):
        options = {"scale": 0.5, "softcap": 9.0, "label_smoothing": 0.1, "z_loss": 1e-3, "recompute": recompute}
        loss, stats = linear_cross_entropy(2 * hidden, weight, targets, bias=bias, reduction=reduction, **options)
        factors = torch.arange(loss.numel(), dtype=loss.dtype).view(loss.shape) + 1
        return (loss * factors).sum(), (loss, *stats.values())

    same(caller, operands(*shape))


@pytest.mark.parametrize(
    "options", [{"reduction": "sum"}, {"reduction": "mean"}, {"reduction": "sum", "recompute": True}]
)
def test_a_compiled_mean_over_no_tokens_has_gradients_of_zero(options):
    def caller(hidden, weight, bias, targets):
        return linear_cross_entropy(hidden, weight, targets, bias=bias, **options)[0] / (targets != -100).sum()

    hidden, weight, bias, targets = operands(5, 7)
    loss = torch.compile(caller, fullgraph=True, backend="aot_eager")(hidden, weight, bias, targets.fill_(-100))
    assert loss.isnan()
    assert bias is not None
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, (hidden, weight, bias)))


WANTED = [
    pytest.param(wanted, marks=() if all(wanted) or wanted == (True, False, False, False) else pytest.mark.slow)
    for wanted in itertools.product([False, True], repeat=4)
]


@pytest.mark.parametrize("wanted", WANTED)
def test_a_compiled_caller_of_scores_has_no_graph_break(wanted):
    def caller(hidden, weight, bias, targets, selected, g):
        scores = token_scores(hidden, weight, targets, bias, softcap=9.0, selected=selected)
        numbers = zip(g, (scores.log_prob, scores.lse, scores.entropy, scores.selected.sum(-1)), wanted, strict=True)
        used = [(number * w).sum() for w, number, use in numbers if use]
        return sum(used, start=scores.lse.sum() * 0), (scores.top1, scores.selected)

    selected = torch.randint(-1, V, (5, 7, 3), generator=torch.Generator().manual_seed(1))
    g = torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    same(caller, (*operands(5, 7), selected, g))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_dtypes_of_gradients_are_those_of_their_operands(dtype, reduction):
    def caller(hidden, weight, bias, targets):
        loss, stats = linear_cross_entropy(hidden, weight, targets, bias=bias, reduction=reduction)
        return loss.sum(), stats.values()

    same(caller, operands(64, dtype=dtype))


def test_autocast_around_a_compiled_caller_is_its_precision():
    def caller(hidden, weight, bias, targets):
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, targets, bias=bias)[0]
            scores = token_scores(hidden, weight, targets, bias)
        return loss + scores.entropy.sum(), (scores.log_prob,)

    same(caller, operands(64, dtype=torch.float32))


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"reduction": "none"}], ids=str)
def test_weights_of_tokens_act_in_a_compiled_caller(options):
    def caller(hidden, weight, bias, targets, weights):
        loss, _ = linear_cross_entropy(hidden, weight, targets, bias=bias, token_weights=weights, **options)
        return (loss * loss).sum(), (loss,)

    same(caller, (*operands(4, 9), torch.rand(4, 9, dtype=torch.float64)))


def test_only_the_gradients_that_are_wanted_are_made():
    hidden, weight, _, targets = operands(4, 5, bias=False)

    def caller(hidden, weight, bias, targets):
        return linear_cross_entropy(hidden, weight, targets)[0], (token_scores(hidden, weight, targets).entropy,)

    same(caller, (hidden.detach(), weight, None, targets))
    same(caller, (hidden, weight.detach(), None, targets))
    same(caller, (hidden.detach(), weight.detach(), None, targets))


def test_sizes_that_change_do_not_compile_again():
    def caller(hidden, weight, bias, targets):
        return linear_cross_entropy(hidden, weight, targets, bias=bias)[0], ()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(caller, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for rows in (8, 13, 21):
        same(caller, operands(rows), compiled=compiled)
        counts.append(counter.frame_count)
    assert counts[1:] == counts[:1] * 2


def test_a_temperature_that_changes_is_the_one_of_each_call():
    hidden, weight, _, targets = operands(9)
    compiled = torch.compile(token_scores, fullgraph=True, backend="aot_eager")
    for scale in (0.5, 0.7, 0.9):
        found, expected = (scores(hidden, weight, targets, scale=scale) for scores in (compiled, token_scores))
        torch.testing.assert_close(found.entropy, expected.entropy, rtol=1e-12, atol=0)


def test_a_label_outside_of_the_vocabulary_is_still_refused():
    hidden, weight, _, targets = operands(9)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    targets[3] = V
    with pytest.raises(UserError, match=r"labels must lie in \[0, 211\)"):
        compiled(hidden, weight, targets)


def test_operators_pass_the_checks_of_torch():
    # The autograd function around them has the gradients.
    hidden, weight, bias, targets = (t if t is None else t.detach() for t in operands(6, dtype=torch.float32))
    options = (1.0, None, 0.0, 0.0, "mean", True, False, False, None, None, None, False)
    given = (hidden, weight, bias, targets, None, -100, False, torch.float32, [True] * 3, *options)
    for name in ("linear_cross_entropy", "token_scores"):
        torch.library.opcheck(getattr(torch.ops.lit_fused, name).default, given)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.output = nn.Linear(D, D), nn.Linear(D, V)

    def forward(self, hidden, targets):
        hidden = self.body(hidden).tanh()
        loss = linear_cross_entropy(hidden, self.output.weight, targets, bias=self.output.bias)[0]
        return loss - 0.1 * token_scores(hidden, self.output.weight, targets, self.output.bias).entropy.mean()


def _sharded_and_compiled(rank: int) -> None:
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    hidden, _, _, targets = operands(2, 6)
    hidden, targets = hidden.detach(), targets.clamp(min=0)
    whole, sharded = Model(), Model()
    fully_shard(sharded)
    sharded.compile(fullgraph=True, backend="aot_eager")
    for model, rows in ((whole, slice(None)), (sharded, slice(rank, rank + 1))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(hidden[rows], targets[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in whole.named_parameters():
        found = sharded.get_parameter(name)
        assert isinstance(found, DTensor)
        torch.testing.assert_close(found.full_tensor(), parameter, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_compiled_model_under_fsdp2_trains_as_the_whole_one():
    call(_sharded_and_compiled, 2, timeout=120)


@pytest.mark.needs_compiler
@pytest.mark.slow
def test_a_caller_compiled_to_code_gives_the_same_numbers():
    def caller(hidden, weight, bias, targets):
        loss = linear_cross_entropy(hidden.sin(), weight, targets, bias=bias)[0]
        return loss + token_scores(hidden.cos(), weight, targets, bias).entropy.sum(), ()

    same(caller, operands(40), compiled=torch.compile(caller, fullgraph=True))
