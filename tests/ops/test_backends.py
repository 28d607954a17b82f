"""Backends on a CPU against the float64 reference; what they need, what may stand in for them, and what they refuse."""

import copy
import functools
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from head_cases import error, grad_of
from torch import Tensor, nn

from lit_fused.errors import UserError
from lit_fused.heads import OutputHead
from lit_fused.losses import LinearCrossEntropyLoss, shift_labels
from lit_fused.ops import foreign, linear_cross_entropy_reference
from lit_fused.ops.backends import backend_by_name, chunked, supported_options

CPU = torch.device("cpu")
COMPILED = {"torch_compile"}  # seconds each
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 4.0},
    "scale": {"scale": 0.3},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
}
HEAD_FEATURES = {"bias", "softcap", "scale"}


def cases() -> list[Any]:
    """Every feature of every backend that runs on a CPU; those that compile are slow, and take features in float32."""
    found = []
    for backend, feature, precision in itertools.product(
        ("chunked", "torch_native", "torch_compile"), FEATURES, ("float32", "bfloat16", "autocast")
    ):
        if backend in COMPILED and feature != "plain" and precision != "float32":
            continue
        if FEATURES[feature].keys() <= supported_options(backend_by_name(backend)) | {"scale"}:
            marks = [pytest.mark.slow, pytest.mark.needs_compiler] if backend in COMPILED else []
            found.append(pytest.param(backend, feature, precision, marks=marks, id=f"{backend}-{feature}-{precision}"))
    return found


def make(dtype: torch.dtype, *, bias: bool, d: int = 64, v: int = 501) -> tuple[Tensor, nn.Linear, Tensor]:
    """(hidden states (3, 40, d), an output layer, ragged labels)."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(d, v, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    hidden = torch.randn(3, 40, d, generator=generator, dtype=torch.float64)
    labels = torch.randint(v, (3, 40), generator=generator)
    for row, kept in enumerate((40, 25, 7)):
        labels[row, kept:] = -100
    return hidden.to(dtype).requires_grad_(), layer.to(dtype), labels


def standard(
    head: OutputHead, hidden: Tensor, labels: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Logits, upcast, and cross entropy of each token."""
    logits, targets = head.logits(hidden).flatten(0, 1).float(), shift_labels(labels).flatten()
    losses = F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction="none")
    return losses + z_loss * (logits.logsumexp(-1) ** 2).where(targets != -100, 0)


def reference(head: OutputHead, hidden: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """The mean, or whatever ``reduction`` says."""
    hidden, weight, bias = head.operands(hidden)
    loss, _ = linear_cross_entropy_reference(
        hidden, weight, shift_labels(labels), bias=bias, scale=head.scale, softcap=head.softcap, **options
    )
    return loss


def loss_and_gradients(function: Any, head: OutputHead, hidden: Tensor, *, autocast: bool = False) -> list[Tensor]:
    hidden = hidden.detach().clone().requires_grad_()
    head.layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = function(head, hidden)
        mean = loss if loss.ndim == 0 else loss.sum() / (loss != 0).sum()
    mean.backward()
    return [loss.detach(), grad_of(hidden), *(grad_of(p).clone() for p in head.layer.parameters())]


def quiet(function: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function()


@pytest.mark.parametrize(("backend", "feature", "precision"), cases())
def test_errors_are_at_most_twice_those_of_the_upcast_standard(backend, feature, precision):
    options = FEATURES[feature]
    of_head = {name: value for name, value in options.items() if name in HEAD_FEATURES - {"bias"}}
    of_loss = {name: value for name, value in options.items() if name not in HEAD_FEATURES}
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    autocast = precision == "autocast"
    hidden, layer, labels = make(dtype, bias="bias" in options)
    exact_hidden, exact_layer, _ = make(dtype, bias="bias" in options)
    exact_layer, exact_hidden = exact_layer.double(), exact_hidden.double()  # of the same rounded numbers

    truth = loss_and_gradients(
        lambda head, h: reference(head, h, labels, reduction="none", **of_loss).flatten(),
        OutputHead(exact_layer, **of_head),
        exact_hidden,
    )
    baseline = loss_and_gradients(
        lambda head, h: standard(head, h, labels, **of_loss), OutputHead(layer, **of_head), hidden, autocast=autocast
    )
    ours = loss_and_gradients(
        lambda head, h: LinearCrossEntropyLoss(backend, head, **of_loss)(h, labels),
        OutputHead(layer, **of_head),
        hidden,
        autocast=autocast,
    )
    assert ours[0].dtype == torch.float32
    assert ours[0].shape == ()
    rounding = 4 * torch.finfo(torch.float32).eps
    # a mean can be right by luck: it is judged by the errors of the tokens' losses, of which it is one
    exact_mean = truth[0].sum() / (truth[0] != 0).sum()
    assert error(ours[0], exact_mean) <= 2 * error(baseline[0], truth[0]) + rounding
    for name, mine, theirs, exact in zip(
        ["hidden_states", *dict(layer.named_parameters())], ours[1:], baseline[1:], truth[1:], strict=True
    ):
        assert mine.dtype == dtype
        assert error(mine, exact) <= 2 * error(theirs, exact) + rounding, name


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "backend",
    ["chunked", "torch_native", pytest.param("torch_compile", marks=(pytest.mark.slow, pytest.mark.needs_compiler))],
)
def test_all_labels_ignored_gives_zero_loss_and_zero_gradients_that_are_attached(backend, dtype):
    hidden, layer, labels = make(dtype, bias=False, d=16, v=97)
    loss = quiet(lambda: LinearCrossEntropyLoss(backend, layer)(hidden, torch.full_like(labels, -100)))
    (loss / 0).backward()  # as a sum over no tokens that is divided by their number
    assert loss.item() == 0
    assert torch.equal(grad_of(hidden), torch.zeros_like(hidden))
    assert torch.equal(grad_of(layer.weight), torch.zeros_like(layer.weight))


# The tests below show what is missing, and what stands in.


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")


def one_warning(function: Any) -> tuple[Any, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    messages = [str(w.message) for w in caught if "lit_fused" in w.filename or "loss=" in str(w.message)]
    assert len(messages) == 1, messages
    return result, messages[0]


def test_cce_without_a_gpu_runs_chunked_with_one_warning_that_names_both():
    hidden, layer, labels = make(torch.float32, bias=False)
    loss = LinearCrossEntropyLoss("cce", layer)
    value, message = one_warning(lambda: [loss(hidden, labels) for _ in range(3)][-1])
    assert message.startswith("loss=cce needs a CUDA GPU of compute capability 8.0 (this run is on cpu); this run uses")
    assert message.endswith("uses chunked instead")
    assert not loss.builds_logits
    assert torch.equal(value, LinearCrossEntropyLoss("chunked", layer)(hidden, labels))


@pytest.mark.parametrize(
    ("name", "lacking"),
    [("liger", "a CUDA GPU"), ("torch_native", "torch.*new in torch 2.13"), ("torch_compile", r"a C\+\+ compiler")],
)
def test_a_backend_that_cannot_run_here_is_refused_with_what_it_needs(name, lacking, no_compiler, monkeypatch):
    monkeypatch.delattr(F, "linear_cross_entropy")
    hidden, layer, labels = make(torch.float32, bias=False)
    with pytest.raises(UserError, match=f"loss={name} cannot run here: it needs {lacking}.*choose loss=chunked"):
        LinearCrossEntropyLoss(name, layer)(hidden, labels)


# Finding a backend, and its options


def half_of_chunked(hidden: Tensor, weight: Tensor, targets: Tensor, *, factor: float = 0.5) -> Tensor:
    loss, _ = chunked(hidden, weight, targets)
    return factor * loss


def test_a_users_function_is_a_backend_by_dotted_path_as_itself_and_as_a_partial():
    hidden, layer, labels = make(torch.float32, bias=False)
    exact = LinearCrossEntropyLoss("chunked", layer)(hidden, labels)
    for impl, factor in (
        (f"{__name__}.half_of_chunked", 0.5),
        (half_of_chunked, 0.5),
        (functools.partial(half_of_chunked, factor=3.0), 3.0),
        ("lit_fused.ops.backends.chunked", 1.0),
    ):
        torch.testing.assert_close(LinearCrossEntropyLoss(impl, layer)(hidden, labels), factor * exact)


@pytest.mark.parametrize("name", ["chunkd", "linear_cross_entropy", "foreign", "usable_backend", "_missing", "F", ""])
def test_an_unknown_impl_is_answered_with_the_known_ones(name):
    with pytest.raises(UserError, match=f"impl='{name}' is unknown; choose one of") as refusal:
        LinearCrossEntropyLoss(name)
    listed = str(refusal.value).partition("one of ")[2].partition(", or name")[0].split(", ")
    known = ["cce", "chunked", "liger", "torch_compile", "torch_native"]
    assert sorted(listed) == sorted([*known, "auto", "pytorch"])


OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-4, "logits_budget_mib": 64.0, "recompute": True}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["chunked", "cce", "liger", "torch_native", "torch_compile"])
def test_an_option_that_a_backend_does_not_have_is_refused_by_name_when_it_is_configured(name, option):
    arguments = {option: OPTIONS[option]}
    if option in supported_options(backend_by_name(name)):
        LinearCrossEntropyLoss(name, **arguments)
    else:
        with pytest.raises(UserError, match=f"loss={name} has no {option}, .*choose loss=chunked"):
            LinearCrossEntropyLoss(name, **arguments)


@pytest.mark.parametrize(
    ("name", "head", "lacking"), [("torch_native", {"softcap": 30.0}, "softcap"), ("cce", {"bias": True}, "bias")]
)
def test_a_head_that_a_backend_cannot_serve_is_refused_by_what_it_lacks(name, head, lacking):
    hidden, layer, labels = make(torch.float32, bias=head.pop("bias", False))
    with pytest.raises(UserError, match=f"loss={name} has no {lacking}, which the output layer"):
        quiet(lambda: LinearCrossEntropyLoss(name, OutputHead(layer, **head))(hidden, labels))


@pytest.mark.parametrize("name", ["chunked", "torch_native"])
def test_a_backend_without_scale_gets_it_on_the_hidden_states_bias_included(name):
    hidden, layer, labels = make(torch.float64, bias=True)
    head = OutputHead(layer, scale=0.37)
    found = loss_and_gradients(lambda head, h: LinearCrossEntropyLoss(name, head)(h, labels), head, hidden)
    truth = loss_and_gradients(lambda head, h: reference(head, h, labels), head, hidden)
    for mine, exact in zip(found[1:], truth[1:], strict=True):
        assert error(mine, exact) < torch.finfo(torch.float32).eps  # a LossOutput's sum is float32, the rest float64


@pytest.mark.parametrize("name", ["chunked", "torch_native"])
def test_the_mean_over_a_long_half_precision_batch_is_not_rounded_to_three_digits(name):
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(8, 97, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(97, 8, generator=generator).bfloat16())
    hidden = torch.randn(1, 3000, 8, generator=generator).bfloat16()
    labels = torch.randint(97, (1, 3000), generator=generator)
    truth = reference(OutputHead(copy.deepcopy(layer).double()), hidden.double(), labels)
    found = LinearCrossEntropyLoss(name, layer.bfloat16())(hidden, labels)
    assert error(found, truth) < torch.finfo(torch.bfloat16).eps / 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_derivatives_are_refused_where_an_implementation_would_give_zero(dtype):
    hidden, weight = (torch.randn(size, 8, dtype=dtype, requires_grad=True) for size in (6, 5))
    loss = foreign.torch_native(hidden, weight, torch.arange(6) % 5)
    assert isinstance(loss, Tensor)
    with pytest.raises(UserError, match="no second derivatives.*choose loss=standard"):
        torch.autograd.grad(loss, [hidden, weight], create_graph=True)
