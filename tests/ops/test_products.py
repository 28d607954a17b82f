"""Vocabularies of any length, their products cut as on a GPU: the results, and what the vendor's kernels get."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from distillation_cases import answer, case
from head_cases import FEATURES, choice, error, fused, make, run, scored, upcast_standard
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_fused.ops import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_distillation,
    products,
    token_scores,
    top_items,
)

VOCABULARIES = [512 + rest for rest in range(1, 8)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _products_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "CUT_ON", ("cpu",))


def check(found: Any, standard: Any, truth: Any) -> None:
    """Bound the errors of the gradients, and of the loss or scores before them, by twice those of rounded logits."""
    slack = 16 * torch.finfo(torch.float32).eps
    for ours, usual, exact in zip(found, standard, truth, strict=True):
        assert error(ours, exact) <= 2 * error(usual, exact) + slack


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("feature", ["plain", "everything"])
@pytest.mark.parametrize("way", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"filter_eps": 0.0}], ids=str)
def test_errors_are_at_most_twice_those_of_the_upcast_standard_at_a_vocabulary_of_any_length(
    way, feature, vocabulary, dtype
):
    options = FEATURES[feature]
    if "filter_eps" in way:
        options = {name: value for name, value in options.items() if name != "label_smoothing"}
    tensors, targets = make(300, 16, vocabulary, dtype, bias="bias" in options)
    reduction = way.get("reduction", "mean")

    def mean(*arguments: Any, **more: Any) -> Any:
        loss, stats = fused(*arguments, logits_budget_mib=1e-6, **more, **way)
        return loss.sum() / (1 if reduction == "mean" else (targets >= 0).sum()), stats

    truth = run(linear_cross_entropy_reference, [t.double() for t in tensors], targets, **options)
    standard = run(upcast_standard, tensors, targets, **options)
    found = run(mean, tensors, targets, **options)
    check([found[0], *found[2]], [standard[0], *standard[2]], [truth[0], *truth[2]])


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_items_are_those_of_a_full_sort(vocabulary):
    (hidden, weight), targets = make(300, 16, vocabulary, torch.float32, ignored=0)
    found = top_items(hidden, weight, 5, targets=targets, logits_budget_mib=0.2)
    scores = hidden.double() @ weight.double().T
    assert torch.equal(found.items, scores.topk(5).indices)
    assert found.ranks is not None
    assert torch.equal(found.ranks, (scores > scores.gather(1, targets[:, None])).sum(1))


class Operands(TorchDispatchMode):
    """Collects the factors and the result of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[list[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            matrices = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
            self.products.append(matrices)
        return result


def is_aligned(matrix: Tensor) -> bool:
    """Return whether all 16 bytes of the matrix's rows, or columns, begin at multiples of 16 bytes."""
    unit = 16 // matrix.itemsize
    along = 0 if matrix.stride(0) == 1 else 1
    places = matrix.shape[along], matrix.stride(1 - along), matrix.storage_offset()
    return matrix.stride(along) == 1 and all(place % unit == 0 for place in places)


def of(head: str, vocabulary: int, dtype: torch.dtype) -> Callable[[], object]:
    tensors, targets = make(304, 16, vocabulary, dtype, ignored=0)
    hidden, weight = tensors
    small: dict[str, Any] = {"logits_budget_mib": 1e-6}
    if head == "scores":
        return lambda: scored(token_scores, tensors, targets, choice(targets, vocabulary), **small)
    if head == "distillation":
        found = case("plain", dtype, n=304, v=vocabulary, ignored=0)
        return lambda: answer(linear_distillation, *found[:3], **small)
    if head == "evaluation":
        return lambda: linear_cross_entropy(hidden.detach(), weight.detach(), targets, **small)
    options = {"label_smoothing": 0.1} if head == "smoothing" else {"reduction": head}
    grad = torch.ones(304) if head == "none" else None
    return lambda: run(linear_cross_entropy, tensors, targets, grad, **small, **options)


HEADS = ["mean", "none", "smoothing", "evaluation", "scores", "distillation"]


def operands_of(head: str, vocabulary: int, dtype: torch.dtype) -> Iterator[list[Tensor]]:
    call = of(head, vocabulary, dtype)
    with Operands() as seen:
        call()
    assert seen.products
    yield from seen.products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", HEADS)
def test_the_vendors_products_get_aligned_matrices_or_fewer_than_8_rows_or_columns(head, dtype):
    for vocabulary in (513, 516, 519):
        for matrices in operands_of(head, vocabulary, dtype):
            few = min(min(matrix.shape) for matrix in matrices) < 8
            assert few or all(is_aligned(matrix) for matrix in matrices)


@pytest.mark.parametrize("head", HEADS)
def test_a_vocabulary_of_whole_vectors_costs_no_more_products_than_without_cuts(head, monkeypatch):
    cut = len(list(operands_of(head, 520, torch.bfloat16)))
    monkeypatch.setattr(products, "CUT_ON", ())
    assert cut == len(list(operands_of(head, 520, torch.bfloat16)))
