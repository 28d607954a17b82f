"""Let output heads allocate what they do on a GPU that is not here: the exact paths without kernels, and other
people's kernels.

What another implementation allocates is a generator: forward runs up to its first ``yield``, its variables are what is
held until backward, and the second one yields the gradients. These were read in the sources of cut-cross-entropy
25.1.1, liger-kernel 0.8.5 and torch 2.13.

N tokens, D hidden, V vocabulary.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lit_fused.heads import probe
from lit_fused.losses import LinearCrossEntropyLoss
from lit_fused.ops import cross_entropy, foreign, kernel_path, options
from lit_fused.ops.backends import Backend, backend_attribute
from lit_fused.ops.hopper import hopper_path, narrow_path
from lit_fused.ops.kernel_path import HeadCall, KernelPath, Wanted
from lit_fused.ops.products import Products
from lit_fused.planning.ledger import HEAD, MemoryLedger

Allocations = Iterator[tuple[Tensor | None, ...] | None]
Allocating = Callable[[Tensor, Tensor, Tensor | None, Wanted], Allocations]
_HALVES = (torch.bfloat16, torch.float16)


class GPU(NamedTuple):
    """A GPU that a plan is made for."""

    capability: tuple[int, int]
    memory_mib: float = 0.0  # 0: unknown


class NoKernels(Products):
    """Kernels that compute nothing: with them, on fake tensors, a path allocates what it allocates on a GPU."""

    def multiply(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        return

    def scale_(self, tensor: Tensor, factor: Tensor) -> None:
        return

    multiply_add = multiply

    def multiprocessors(self, device: torch.device) -> int:
        """Return those of an H100 or H200, as Hopper's own path needs them."""
        return 132

    def __getattr__(self, name: str):
        return lambda *args, **options: None


@contextmanager
def heads_of(gpu: GPU, ledger: MemoryLedger) -> Iterator[None]:
    """Let heads in the block allocate what they do on ``gpu``, and compute nothing. What the backend of a
    :class:`~lit_fused.LinearCrossEntropyLoss` allocates is entered as the output head's."""

    def exact_path(hidden_ND: Tensor, weight_VD: Tensor, call: HeadCall) -> KernelPath:
        if call.frozen is None and gpu.capability[0] == 9 and hopper_path.computes(hidden_ND, call):
            narrow = narrow_path.computes(hidden_ND, call)
            return (narrow_path.NarrowPath if narrow else hopper_path.HopperPath)(NoKernels())
        return cross_entropy.LogitsPath(NoKernels())

    def row_kernels(_: Tensor) -> NoKernels:
        return NoKernels()

    def budget_mib(*_: Any) -> float:
        return options.gpu_budget_mib(gpu.memory_mib)

    def enough_rows(hidden_size: int, _: torch.device) -> int:
        return options.gpu_enough_rows(hidden_size)

    def indices_of(valid_N: Tensor) -> Tensor:
        return torch.arange(len(valid_N))  # All may be valid.

    def backend_on(loss: LinearCrossEntropyLoss, _: torch.device) -> Backend:
        return planned_backend(loss.backend, ledger)

    with ExitStack() as patches:
        for room, function in (
            (cross_entropy, exact_path),
            (cross_entropy, row_kernels),
            (kernel_path, budget_mib),
            (kernel_path, enough_rows),
            (kernel_path, indices_of),
        ):
            patches.enter_context(mock.patch.object(room, function.__name__, function))
        patches.enter_context(mock.patch.object(LinearCrossEntropyLoss, "backend_on", backend_on))
        patches.enter_context(mock.patch.object(probe, "PLAIN_WEIGHTS", (*probe.PLAIN_WEIGHTS, FakeTensor)))
        yield


def planned_backend(backend: Backend, ledger: MemoryLedger) -> Backend:
    """Return a backend like this one that allocates what it does on a GPU, as the output head's. One that is unknown
    runs as it is."""
    allocates = next((found for name, found in _FOREIGN.items() if backend is vars(foreign).get(name)), None)
    run = backend if allocates is None else foreign.under_autocast(_without_kernels(allocates))

    @functools.wraps(backend)
    def planned(hidden_states: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Any:
        with ledger.under(HEAD):
            return run(hidden_states, weight, targets, **options)

    planned.options = backend_attribute(backend, "options")  # type: ignore[attr-defined]
    return planned


def _without_kernels(allocates: Allocating) -> Backend:
    def run(hidden_states: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, **_: Any) -> Tensor:
        return _AllocatingHead.apply(hidden_states, weight, bias, allocates)  # type: ignore[return-value]

    return run


class _AllocatingHead(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, allocates: Allocating
    ) -> Tensor:
        ctx.running = allocates(hidden, weight, bias, Wanted(*ctx.needs_input_grad[:3]))
        next(ctx.running)
        return hidden.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        running, ctx.running = ctx.running, None
        return *next(running), None


def _gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted, weight_dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    return (
        torch.empty_like(hidden) if wanted.hidden else None,
        torch.empty_like(weight, dtype=weight_dtype) if wanted.weight else None,
        None if bias is None or not wanted.bias else torch.empty_like(bias, dtype=torch.float32),
    )


def _rows_like_hidden(hidden_ND: Tensor, weight_VD: Tensor) -> int:
    """Return the rows of a chunk whose logits are as many numbers as the hidden states, up to a power of two."""
    chunks = -(-len(weight_VD) // hidden_ND.shape[1])
    return min(1 << (-(-len(hidden_ND) // chunks) - 1).bit_length(), len(hidden_ND))


def _allocated_by_cce(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted) -> Allocations:
    """Log-sum-exps and each entry's mean logit; in backward their order, and gradients in the hidden states' dtype."""
    held = hidden.new_empty(len(hidden), dtype=torch.float32), hidden.new_empty(len(weight), dtype=torch.float32)
    yield None
    order = weight.new_empty(len(weight), 3, dtype=torch.float32)
    gradients = _gradients(hidden, weight, None, wanted._replace(hidden=True, bias=False), hidden.dtype)
    del order, held
    yield gradients


def _allocated_by_liger(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted) -> Allocations:
    """Gradients in forward, the weight's in float32; a chunk of logits is as large as the hidden states."""
    sums = _gradients(hidden, weight, bias, wanted._replace(hidden=True), torch.float32)
    hidden.new_empty(_rows_like_hidden(hidden, weight), len(weight))
    dtypes = hidden.dtype, weight.dtype, torch.float32 if bias is None else bias.dtype
    gradients = tuple(None if s is None else s.to(dtype) for s, dtype in zip(sums, dtypes, strict=True))
    del sums, hidden, weight
    yield None
    yield gradients


def _allocated_by_torch_native(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted) -> Allocations:
    """Half precision computes its gradients in backward, float32 in forward, both in the dtype of the inputs; a chunk's
    float32 logits have at most as many numbers as the hidden states, up to a power of two."""
    rows = _rows_like_hidden(hidden, weight)
    in_forward = hidden.dtype not in _HALVES
    gradients = _gradients(hidden, weight, bias, wanted, weight.dtype) if in_forward else ()
    hidden.new_empty(rows, len(weight), dtype=torch.float32)
    if in_forward:
        del hidden, weight
        yield None
        yield gradients
        return
    yield None
    gradients = _gradients(hidden, weight, bias, wanted, hidden.dtype)
    hidden.new_empty(rows, len(weight), dtype=torch.float32)
    yield gradients


def _allocated_by_torch_compile(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted) -> Allocations:
    """Logits once, in the dtype of the products; their gradient overwrites them. A vocabulary that is no multiple of
    what the products want is padded: torch.compile copies the gradient of the logits for either product."""
    logits, lse = hidden.new_empty(len(hidden), len(weight)), hidden.new_empty(len(hidden), dtype=torch.float32)
    yield None
    odd = hidden.itemsize * len(weight) % 16 != 0
    padded = [torch.empty_like(logits) for _ in range(2)] if odd else []
    gradients = _gradients(hidden, weight, bias, wanted, weight.dtype)
    del padded, lse
    yield gradients


_FOREIGN: dict[str, Allocating] = {
    "cce": _allocated_by_cce,
    "liger": _allocated_by_liger,
    "torch_native": _allocated_by_torch_native,
    "torch_compile": _allocated_by_torch_compile,
}
