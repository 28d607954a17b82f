"""Token scores against the whole logits in float64: values, gradients of every combination, memory, what is refused."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from head_cases import NAMES, choice, error, live_bytes, make, scored, upcast_scores

from lit_fused.errors import UserError
from lit_fused.ops import linear_cross_entropy, token_scores, token_scores_reference

FEATURES = {"plain": {}, "everything": {"bias": True, "scale": 0.7, "softcap": 2.0}}


@pytest.mark.parametrize("wanted", [NAMES, ("log_prob",), ("entropy",), ("lse", "selected"), ("log_prob", "entropy")])
@pytest.mark.parametrize("feature", FEATURES)
def test_in_float64_scores_and_the_gradients_of_any_of_them_are_those_of_the_logits(feature, wanted):
    tensors, targets = make(bias=feature == "everything")
    selected = choice(targets, 97)
    expected, truth = scored(token_scores_reference, tensors, targets, selected, wanted, **FEATURES[feature])
    options = FEATURES[feature] | {"logits_budget_mib": 1e-6}
    found, gradients = scored(token_scores, tensors, targets, selected, wanted, **options)
    for name in NAMES:
        assert error(getattr(found, name), getattr(expected, name)) < 1e-13, name
    assert torch.equal(found.top1, expected.top1)
    for ours, theirs in zip(gradients, truth, strict=True):
        assert error(ours, theirs) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_lower_precision_errors_are_at_most_twice_those_of_the_upcast_standard(dtype):
    tensors, targets = make(d=64, v=501, dtype=dtype)
    selected = choice(targets, 501)
    expected, truth = scored(token_scores_reference, [t.double() for t in tensors], targets, selected)

    standard, usual = scored(upcast_scores, tensors, targets, selected)
    found, gradients = scored(token_scores, tensors, targets, selected, logits_budget_mib=1e-6)
    epsilon = torch.finfo(torch.float32).eps
    for name in NAMES:
        assert getattr(found, name).dtype == torch.float32
        usual_error = error(getattr(standard, name), getattr(expected, name))
        assert error(getattr(found, name), getattr(expected, name)) <= 2 * usual_error + 16 * epsilon, name
    for ours, theirs, exact in zip(gradients, usual, truth, strict=True):
        assert ours.dtype == dtype
        assert error(ours, exact) <= 2 * error(theirs, exact) + 16 * epsilon


@pytest.mark.parametrize("spread", [0.01, 0.3, 2.0])  # standard deviation of the logits
def test_the_entropys_gradient_in_float32_is_as_near_to_float64_as_that_of_a_softmax(spread):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 32, dtype=torch.float64, generator=generator)
    weight = torch.randn(5000, 32, dtype=torch.float64, generator=generator) * spread / 32**0.5

    def gradients(dtype: torch.dtype, *, ours: bool) -> torch.Tensor:
        h, w = (tensor.to(dtype, copy=True).requires_grad_() for tensor in (hidden, weight))
        if ours:
            entropy: Any = token_scores(h, w, torch.zeros(64, dtype=torch.int64)).entropy
        else:
            log_p = (h @ w.T).log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
        return torch.cat([g.flatten().double() for g in torch.autograd.grad(entropy.sum(), (h, w))])

    exact = gradients(torch.float64, ours=False)
    usual, found = (gradients(torch.float32, ours=ours) for ours in (False, True))
    assert (found - exact).norm() <= 1.2 * (usual - exact).norm()


def test_float32_tensors_under_autocast_are_scored_in_the_autocast_dtype():
    tensors, targets = make(d=64, v=501, dtype=torch.float32)
    _, truth = scored(token_scores_reference, [t.double() for t in tensors], targets, choice(targets, 501))
    _, usual = scored(token_scores, [t.bfloat16() for t in tensors], targets, choice(targets, 501))
    with torch.autocast("cpu", torch.bfloat16):
        _, gradients = scored(token_scores, tensors, targets, choice(targets, 501))
    for ours, theirs, exact in zip(gradients, usual, truth, strict=True):
        assert ours.dtype == torch.float32
        assert error(ours, exact) <= error(theirs, exact)


def test_the_lines_of_the_page_are_the_options_of_peers():
    """Losses and gradients of torch's own, and what Liger and cut-cross-entropy return beside them."""
    torch.manual_seed(0)
    page = (Path(__file__).parents[2] / "docs" / "primitive.md").read_text()
    first, second, third = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(first, names)
    names["targets"][0, :5] = -100
    exec(second, names)
    exec(third, names)
    hidden, weight, targets, classes = (names[name] for name in ("hidden", "weight", "targets", "classes"))
    logits = (hidden @ weight.T).flatten(0, 1)
    log_p, flat, count = logits.log_softmax(-1), targets.flatten(), names["count"]
    valid = flat != -100
    own = -log_p.gather(-1, flat.clamp(min=0)[:, None])[:, 0] * valid
    expected = {
        "loss": F.cross_entropy(logits, flat),
        "lse": logits.logsumexp(-1) * valid,
        "z_loss": (1e-4 * logits.logsumexp(-1).square() * valid).sum() / count,
        "accuracy": (logits.argmax(-1) == flat).sum() / count,
        "scaled": (own * (-own).exp().detach()).sum() / count,
        "weighted": F.cross_entropy(logits, flat, weight=classes),
        "smoothed": F.cross_entropy(logits, flat, weight=classes, label_smoothing=0.1),
        "crossed": F.cross_entropy(logits, names["soft"].flatten(0, 1)),
    }
    assert torch.equal(names["predicted"].flatten(), logits.argmax(-1).where(valid, -1))
    for name, truth in expected.items():
        found = names[name].flatten() if name == "lse" else names[name]
        torch.testing.assert_close(found, truth)
        if truth.requires_grad:
            gradients = [torch.autograd.grad(v.sum(), (hidden, weight), retain_graph=True) for v in (found, truth)]
            torch.testing.assert_close(*gradients)
    loss, _ = linear_cross_entropy(hidden, weight, targets, label_smoothing=0.1, z_loss=1e-4)
    plain = F.cross_entropy(logits, flat, label_smoothing=0.1)
    torch.testing.assert_close(loss, plain + expected["z_loss"])


def test_gradcheck_and_functional_gradients():
    tensors, targets = make(n=6, d=3, v=5, bias=True)
    selected = choice(targets, 5, 3)

    def numbers(hidden, weight, bias):
        return token_scores(hidden, weight, targets, bias, softcap=2.0, selected=selected)[:4]

    assert torch.autograd.gradcheck(numbers, tensors)
    for function in (
        lambda hidden, weight, bias: torch.cat([n.flatten() for n in numbers(hidden, weight, bias)]).square().sum(),
        lambda hidden, weight, bias: linear_cross_entropy(hidden, weight, targets, bias=bias, label_smoothing=0.1)[0],
    ):
        expected = torch.autograd.grad(function(*tensors), tensors)
        found = torch.func.grad(function, argnums=(0, 1, 2))(*[t.detach() for t in tensors])
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_second_derivatives_are_refused():
    (hidden, weight), targets = make(n=6, d=3, v=5)
    (gradient,) = torch.autograd.grad(token_scores(hidden, weight, targets).entropy.sum(), hidden, create_graph=True)
    with pytest.raises(UserError, match="no second derivatives"):
        torch.autograd.grad(gradient.square().sum(), weight)


def test_any_ignore_index_any_leading_dimensions_no_token_and_one():
    (hidden, weight), targets = make()
    expected = token_scores(hidden, weight, targets)
    zero_ignored = token_scores(hidden, weight, targets.where(targets >= 0, 0), ignore_index=0)
    kept = targets > 0
    torch.testing.assert_close(zero_ignored.log_prob[kept], expected.log_prob[kept])
    assert (zero_ignored.top1[~kept] == -1).all()
    assert (zero_ignored.entropy[~kept] == 0).all()
    cubic = token_scores(
        hidden.view(7, 10, 10, 16), weight, targets.view(7, 10, 10), selected=choice(targets, 97).view(7, 10, 10, 7)
    )
    torch.testing.assert_close(cubic.lse.flatten(), expected.lse)
    assert cubic.selected.shape == (7, 10, 10, 7)
    empty = token_scores(hidden[:0], weight, targets[:0], selected=targets.new_zeros(0, 3))
    assert empty.selected.shape == (0, 3)
    none = token_scores(hidden, weight, targets, selected=targets.new_zeros(700, 0))
    (none.selected.sum() + none.lse.sum()).backward()
    assert none.selected.shape == (700, 0)
    first = int((targets >= 0).nonzero()[0])
    alone = token_scores(hidden[first], weight, targets[first], selected=torch.tensor([4, -1]))
    torch.testing.assert_close(alone.log_prob, expected.log_prob[first])
    assert alone.selected.shape == (2,)
    loss, _ = linear_cross_entropy(hidden[first], weight, targets[first])
    torch.testing.assert_close(loss, -expected.log_prob[first])


def test_a_masked_vocabulary_entry_has_no_probability_no_gradient_and_no_nan():
    tensors, targets = make(bias=True)
    tensors[2] = tensors[2].detach().clone()
    tensors[2][3] = -torch.inf
    targets[targets == 3] = 4
    selected = choice(targets, 97)
    selected[selected == 3] = 5
    with_masked = torch.cat([selected, torch.full_like(selected[:, :1], 3)], 1)
    found, gradients = scored(token_scores, tensors, targets, selected, bias=True)
    expected, truth = scored(token_scores_reference, tensors, targets, selected, bias=True)
    assert error(found.entropy, expected.entropy) < 1e-13
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert error(gradients[0], truth[0]) < 1e-12
    assert (
        token_scores(tensors[0], tensors[1], targets, tensors[2], selected=with_masked).selected[targets >= 0, -1]
        == -torch.inf
    ).all()


def test_memory_is_a_chunk_and_the_gradients():
    tensors, targets = make(n=8192, d=32, v=4000, dtype=torch.float32, ignored=0)
    whole = 4 * 8192 * 4000
    with live_bytes() as counter:
        scored(token_scores, tensors, targets, choice(targets, 4000), logits_budget_mib=4)
    assert counter.peak < whole / 4


@pytest.mark.parametrize(
    ("selected", "message"),
    [
        (torch.zeros(700, 3), "must be integer class indices"),
        (torch.zeros(699, 3, dtype=torch.long), r"do not fit targets of shape \(700,\): expected \(700, 'K'\)"),
        (torch.full((700, 3), 97), r"must lie in \[0, 97\) or be -1"),
        (torch.full((700, 3), -2), r"must lie in \[0, 97\) or be -1"),
    ],
)
def test_entries_that_do_not_fit_are_refused_with_a_sentence(selected, message):
    (hidden, weight), targets = make()
    with pytest.raises(UserError, match=message):
        token_scores(hidden, weight, targets, selected=selected)


@pytest.mark.parametrize("wanted", [("log_prob",), ("entropy",), ("selected",)])
def test_in_float32_scores_of_confident_tokens_are_as_near_to_float64_as_those_of_whole_logits(wanted):
    weight = 5 * F.normalize(torch.randn(211, 24, generator=torch.Generator().manual_seed(0)))
    targets = torch.arange(64)
    tensors, selected = [weight[targets], weight], torch.stack([targets, targets + 1], 1)

    def of_logits(hidden: Any, weight: Any, targets: Any, selected: Any) -> Any:
        log_p = (hidden @ weight.T).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        log_prob = log_p.gather(-1, targets[:, None])[:, 0]
        return SimpleNamespace(log_prob=log_prob, entropy=entropy, selected=log_p.gather(-1, selected), lse=log_prob)

    exact = scored(token_scores_reference, [t.double() for t in tensors], targets, selected, wanted)
    usual, found = (scored(scores, tensors, targets, selected, wanted) for scores in (of_logits, token_scores))
    values = (getattr(scores, wanted[0]) for scores, _ in (found, usual, exact))
    for ours, theirs, truth in [tuple(values), *zip(found[1], usual[1], exact[1], strict=True)]:
        assert error(ours, truth) <= 2 * error(theirs, truth)
