"""The options of Liger and cut-cross-entropy as docs/primitive.md writes them, beside these libraries themselves.

Liger's kernels run in Triton's interpreter, which cannot take its softcap and its weights of classes.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from lit_fused import linear_cross_entropy, token_scores

Z, IGNORED = 1e-2, -100


@pytest.fixture
def operands() -> tuple[Tensor, ...]:
    """Hidden states (20, 16), a weight (50, 16) and a bias of small logits, and targets of which four are ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(size, generator=generator) / 2 for size in ((20, 16), (50, 16), (50,)))
    targets = torch.randint(50, (20,), generator=generator)
    targets[:4] = IGNORED
    return *(tensor.requires_grad_() for tensor in (hidden, weight, bias)), targets


def of_liger(operands: tuple[Tensor, ...], **options: Any) -> Any:
    module = pytest.importorskip("liger_kernel.transformers.fused_linear_cross_entropy")
    hidden, weight, bias, targets = operands
    return module.LigerFusedLinearCrossEntropyLoss(**options)(weight, hidden, targets, bias)


def assert_same(found: Tensor, expected: Tensor, operands: tuple[Tensor, ...]) -> None:
    """Compare two losses and their gradients."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(loss.sum(), operands[:-1], retain_graph=True) for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


# Liger's name and value, and ours.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "z_loss": ({"lse_square_scale": Z}, {"z_loss": Z}),
    "label_smoothing": ({"label_smoothing": 0.1}, {"label_smoothing": 0.1}),
    "sum": ({"reduction": "sum"}, {"reduction": "sum"}),
    "none": ({"reduction": "none"}, {"reduction": "none"}),
    "ignore_index": ({"ignore_index": 7}, {"ignore_index": 7}),
    "float32": ({"accum_dtype": torch.float32}, {"float32_accumulation": True}),
}


@pytest.mark.slow  # Its package takes half a minute to import.
@pytest.mark.skipif(torch.cuda.is_available(), reason="there tests/ops/test_gpu.py compares with Liger")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_liger_has_a_name_here_and_the_same_loss_and_gradients(option, operands):
    theirs, ours = OPTIONS[option]
    hidden, weight, bias, targets = operands
    if option == "ignore_index":
        operands = hidden, weight, bias, targets.where(targets >= 0, 7)
    found, _ = linear_cross_entropy(hidden, weight, operands[-1], bias=bias, **ours)
    assert_same(found, of_liger(operands, **theirs), operands)


@pytest.mark.slow  # Its package takes half a minute to import.
@pytest.mark.skipif(torch.cuda.is_available(), reason="there tests/ops/test_gpu.py compares with Liger")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_what_liger_returns_beside_its_loss_is_made_of_token_scores(operands):
    hidden, weight, bias, targets = operands
    returned = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
    theirs = of_liger(operands, lse_square_scale=Z, **returned)
    scores, count = token_scores(hidden, weight, targets, bias), (targets != IGNORED).sum()
    z_loss = Z * scores.lse.square().sum() / count
    torch.testing.assert_close(theirs.z_loss, z_loss)
    torch.testing.assert_close(theirs.token_accuracy, (scores.top1 == targets).sum() / count)
    assert torch.equal(theirs.predicted_tokens, scores.top1)
    assert_same(-scores.log_prob.sum() / count + z_loss, theirs.loss, operands)
    scaled = -(scores.log_prob.detach().exp() * scores.log_prob).sum() / count
    assert_same(scaled, of_liger(operands, use_token_scaling=True), operands)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_shift_of_cut_cross_entropy_is_a_slice_of_hidden_states_and_targets(softcap, reduction, operands):
    peer = pytest.importorskip("cut_cross_entropy")
    hidden, weight, _, targets = operands
    hidden, targets = hidden.view(2, 10, 16), targets.view(2, 10)
    with torch.compiler.set_stance("force_eager"):
        options = {"softcap": softcap, "reduction": reduction, "shift": True, "impl": "torch_compile"}
        expected = peer.linear_cross_entropy(hidden, weight, targets, **options)
    found, _ = linear_cross_entropy(hidden[:, :-1], weight, targets[:, 1:], softcap=softcap, reduction=reduction)
    assert_same(found, expected, (*operands[:2], targets))
