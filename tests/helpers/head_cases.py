"""Calls of the heads that tests have in common: their tensors, errors against float64, and the bytes that live."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_fused import filtered
from lit_fused.ops import linear_cross_entropy, token_scores_reference
from lit_fused.ops.products import padded

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.3},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "smoothed": {"bias": True, "scale": 1.7, "label_smoothing": 0.1, "z_loss": 1e-2},
    "token_weights": {"bias": True, "token_weights": True},
    "everything": {"bias": True, "softcap": 2.0, "scale": 1.7, "label_smoothing": 0.1, "z_loss": 1e-2},
}


def make(
    n: int = 700,
    d: int = 16,
    v: int = 97,
    dtype: torch.dtype = torch.float64,
    *,
    bias: bool = False,
    ignored: float = 0.2,
) -> tuple[list[Tensor], Tensor]:
    """Tensors for one call; 700 tokens make three chunks of the smallest size."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=generator, dtype=torch.float64)
    weight = torch.randn(v, d, generator=generator, dtype=torch.float64)
    targets = torch.randint(v, (n,), generator=generator)
    targets[torch.rand(n, generator=generator) < ignored] = -100
    tensors = [hidden, weight] + ([torch.randn(v, generator=generator, dtype=torch.float64)] if bias else [])
    return [t.to(dtype).requires_grad_() for t in tensors], targets


def grad_of(leaf: Tensor) -> Tensor:
    """Return the gradient that a backward pass has left on the leaf."""
    assert leaf.grad is not None
    return leaf.grad


def run(
    function: Any, tensors: list[Tensor], targets: Tensor, grad: Tensor | None = None, **options: Any
) -> tuple[Tensor, Any, list[Tensor]]:
    """(loss, stats, gradients) of one implementation, on copies of the tensors."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    options.pop("bias", None)
    if options.get("token_weights") is True:
        options["token_weights"] = weights_of(targets)
    bias = leaves[2] if len(leaves) > 2 else None
    loss, stats = function(leaves[0], leaves[1], targets, bias=bias, **options)
    loss.backward(torch.ones_like(loss) if grad is None else grad.to(loss.dtype))
    return loss.detach(), stats, [grad_of(leaf) for leaf in leaves]


def fused(*operands: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The exact head, or the filtered one where there is an option ``filter_eps``."""
    return (filtered.linear_cross_entropy if "filter_eps" in options else linear_cross_entropy)(*operands, **options)


def weights_of(targets: Tensor) -> Tensor:
    """Return weights of tokens, of which one in eight is zero and some are negative."""
    numbers = torch.arange(targets.numel(), device=targets.device).view(targets.shape)
    return (numbers % 8) / 4 * torch.where(numbers % 5 == 0, -0.5, 1.0)


def error(found: Tensor, truth: Tensor) -> float:
    """Relative error in the Euclidean norm, judged in float64."""
    return ((found.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-300)).item()


def upcast_standard(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss of logits that are rounded to the dtype of their products, and upcast to float32."""
    logits = scale * F.linear(hidden, weight).float()
    logits = logits if bias is None else logits + bias.float()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    if token_weights is not None:
        losses = F.cross_entropy(logits, targets, reduction="none")
        return (token_weights * losses).sum() / token_weights[targets != -100].sum(), {}
    loss = F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
    return loss + z_loss * (logits.logsumexp(-1) ** 2)[targets != -100].mean(), {}


NAMES = ("log_prob", "lse", "entropy", "selected")  # of token scores with a gradient


def choice(targets: Tensor, vocabulary: int, count: int = 7) -> Tensor:
    """Entries of which one is the target, one is there twice, and some are none."""
    generator = torch.Generator().manual_seed(1)
    selected = torch.randint(-1, vocabulary, (*targets.shape, count), generator=generator).to(targets.device)
    selected[..., 0] = targets.clamp(min=-1)
    selected[..., 1] = selected[..., 2]
    return selected


def scored(
    function: Any,
    tensors: list[Tensor],
    targets: Tensor,
    selected: Tensor,
    wanted: Sequence[str] = NAMES,
    tokens: slice = slice(None),
    **options: Any,
) -> tuple[Any, tuple[Tensor, ...]]:
    """Return some tokens' scores, and the gradients of a weighted sum of the wanted ones, on copies of the tensors."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    options = options | ({"bias": leaves[2]} if options.get("bias") else {})
    scores = function(leaves[0][tokens], leaves[1], targets[tokens], selected=selected[tokens], **options)
    generator = torch.Generator().manual_seed(2)
    total = torch.zeros((), dtype=torch.float64, device=targets.device)
    for name in NAMES:
        numbers = getattr(scores, name)
        weights = torch.randn((len(targets), *numbers.shape[1:]), generator=generator, dtype=torch.float64)[tokens]
        if name in wanted:
            total = total + (numbers * weights.to(numbers)).double().sum()
    return scores, torch.autograd.grad(total, leaves)


def upcast_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    selected: Tensor,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Any:
    """Return the scores of logits that were rounded to the inputs' dtype once, and then were float32."""
    products = F.linear(hidden, weight).float()
    identity = torch.eye(len(weight), device=weight.device)
    bias = None if bias is None else bias.float()
    return token_scores_reference(products, identity, targets, bias, scale, softcap, selected)


def budget_for(rows: int, v: int, dtype: torch.dtype) -> float:
    return rows * padded(v) * dtype.itemsize / 2**20


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations allocate and that are still alive, and remembers the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in inputs | self.seen:
                self.seen.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                self.largest = max(self.largest, storage.nbytes())
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return result

    def _free(self, key: int, nbytes: int) -> None:
        self.seen.discard(key)
        self.live -= nbytes


@contextmanager
def live_bytes() -> Iterator[LiveBytes]:
    with LiveBytes() as counter:
        yield counter
