"""Measure how far tensors are from the truth."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

ROUNDING = 8 * torch.finfo(torch.float32).eps  # Norms and rotary embeddings compute in float32 in a float64 model too.


def relative_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    assert found.keys() == truth.keys()
    difference = torch.stack([(found[n].double() - truth[n].double()).norm() for n in truth]).norm()
    return (difference / torch.stack([t.double().norm() for t in truth.values()]).norm()).item()


def norm_of_all(gradients: Iterable[Tensor]) -> Tensor:
    return torch.stack([gradient.double().norm() for gradient in gradients]).norm()


def gradients_after(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close_gradients(found: dict[Any, Tensor], expected: dict[Any, Tensor], tolerance: float) -> None:
    """Differences are small against the gradient of all parameters together."""
    assert found.keys() == expected.keys()
    whole = norm_of_all(expected.values())
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= tolerance * whole, name


def assert_same_gradients(loss: Tensor, expected: Tensor, weights: Iterable[Tensor], tolerance: float = 1e-6) -> None:
    """Two losses have gradients that are close to each other beside those of all weights together."""
    weights = [*weights]
    found, wanted = (dict(enumerate(torch.autograd.grad(value, weights))) for value in (loss, expected))
    assert_close_gradients(found, wanted, tolerance)


def assert_as_near(
    found: dict[str, Tensor], usual: dict[str, Tensor], truth: dict[str, Tensor], rounding: float
) -> None:
    """Errors of the loss and of each gradient are at most twice the usual ones, and rounding.

    A gradient that is zero in exact arithmetic (a key's bias, say) is rounding alone: it is judged beside all others.
    """
    assert found.keys() == usual.keys() == truth.keys(), f"gradients of {found.keys() ^ truth.keys()} only in one"
    whole = norm_of_all(gradient for name, gradient in truth.items() if name != "loss")
    assert whole > 1e-3, "gradients near zero would agree with anything"
    for name, value in truth.items():
        scale = value.abs() if name == "loss" else whole
        error, of_usual = ((other[name] - value).norm() / scale for other in (found, usual))
        assert error <= 2 * of_usual + rounding, f"{name} is wrong by {error:.2g}, usually by {of_usual:.2g}"
