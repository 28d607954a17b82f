"""Other implementations of the same loss, each a backend (``backends``), with what it allocates beside it.

One that cannot run on a machine says what is missing; only one that names a ``fallback`` is ever replaced, with a
warning.

What an implementation allocates is a generator: forward runs up to its first ``yield``, its variables are what is held
until backward, and the second one yields the gradients. These were read in the sources of cut-cross-entropy 25.1.1,
liger-kernel 0.8.5 and torch 2.13; a plan of memory runs them on fake tensors.

N tokens, D hidden, V vocabulary.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.ops.backends import Backend, Requirement, chunked, compiler_missing, cuda_missing, package_missing
from lit_fused.ops.first_derivatives import FirstDerivativeOnly
from lit_fused.ops.kernel_path import Wanted
from lit_fused.ops.label_checks import IGNORE_INDEX
from lit_fused.ops.operands import PlannedGPU

Allocations = Iterator[tuple[Tensor | None, ...] | None]
Allocating = Callable[[Tensor, Tensor, Tensor | None, Wanted], Allocations]
_HALVES = (torch.bfloat16, torch.float16)


def foreign(
    requires: Requirement,
    fallback: Backend | None = None,
    *,
    builds_logits: bool = False,
    allocates: Allocating | None = None,
) -> Callable[[Backend], Backend]:
    """Say what an implementation needs, what may stand in and what it allocates, and do for it what autocast means:
    inputs other than float64 are cast to the autocast dtype, and the gradients come back in the inputs' own. Second
    derivatives are refused: with some implementations they would be zero."""

    def adapt(function: Backend) -> Backend:
        run: Any = _under_autocast(function)
        run.requirement, run.fallback, run.builds_logits = requires, fallback, builds_logits
        run.allocating = None if allocates is None else _allocating(allocates)
        return run

    return adapt


def _under_autocast(function: Backend) -> Backend:
    @functools.wraps(function)
    def run(hidden_states: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Any:
        device_type = hidden_states.device.type
        if torch.is_autocast_enabled(device_type) and hidden_states.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device_type)
            hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
            options = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in options.items()}
        with torch.autocast(device_type, enabled=False):
            loss = function(hidden_states, weight, targets.long(), **options)
        return FirstDerivativeOnly.apply(loss, (targets != IGNORE_INDEX).any())

    return run


def _allocating(allocates: Allocating) -> Callable[[PlannedGPU], Backend]:
    def run(hidden_states: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, **_: Any) -> Tensor:
        return _AllocatingHead.apply(hidden_states, weight, bias, allocates)  # type: ignore[return-value]

    return lambda planned: _under_autocast(run)


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


@foreign(lambda device: package_missing("cut_cross_entropy") or compiler_missing(device), chunked, builds_logits=True)
def cce_torch_compile(
    hidden_states: Tensor, weight: Tensor, targets: Tensor, *, softcap: float | None = None
) -> Tensor:
    """cut-cross-entropy's own ``torch_compile`` implementation. It builds the logits of all valid tokens."""
    from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

    # It insists on a whole graph, and takes out ignored tokens first: a ragged batch, one without any, evaluation and a
    # second model in the process are each compiled anew, and beyond torch's limit of eight that is an error.
    with torch._dynamo.config.patch(recompile_limit=256):
        return cut_cross_entropy(hidden_states, weight, targets, softcap=softcap, reduction="sum", impl="torch_compile")


def _allocated_by_cce(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted) -> Allocations:
    """Log-sum-exps and each entry's mean logit; in backward their order, and gradients in the hidden states' dtype."""
    held = hidden.new_empty(len(hidden), dtype=torch.float32), hidden.new_empty(len(weight), dtype=torch.float32)
    yield None
    order = weight.new_empty(len(weight), 3, dtype=torch.float32)
    gradients = _gradients(hidden, weight, None, wanted._replace(hidden=True, bias=False), hidden.dtype)
    del order, held
    yield gradients


@foreign(
    lambda device: cuda_missing(device, (8, 0)) or package_missing("cut_cross_entropy"),
    cce_torch_compile,
    allocates=_allocated_by_cce,
)
def cce(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    softcap: float | None = None,
    tile_filter: float | str | None = "high",
) -> Tensor:
    """Apple's cut-cross-entropy (arXiv:2411.09009): Triton kernels that recompute, and skip tiles of tiny gradients.

    ``tile_filter`` is its own ``filter_eps``, a bound on gradients where ``chunked``'s is one on probabilities: an
    option of the loss has one meaning.
    """
    if hidden_states.dtype not in _HALVES and torch.is_grad_enabled():
        raise UserError(
            f"loss=cce has gradients in half precision only, and the hidden states are {hidden_states.dtype}; choose "
            "precision=bf16-mixed, or loss=chunked"
        )
    from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

    return cut_cross_entropy(
        hidden_states, weight, targets, softcap=softcap, reduction="sum", filter_eps=tile_filter, impl="cce"
    )


cce.approximate_backward = True  # type: ignore[attr-defined]  # by its tile_filter


def _allocated_by_liger(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted) -> Allocations:
    """Gradients in forward, the weight's in float32; a chunk of logits is as large as the hidden states."""
    sums = _gradients(hidden, weight, bias, wanted._replace(hidden=True), torch.float32)
    hidden.new_empty(_rows_like_hidden(hidden, weight), len(weight))
    dtypes = hidden.dtype, weight.dtype, torch.float32 if bias is None else bias.dtype
    gradients = tuple(None if s is None else s.to(dtype) for s, dtype in zip(sums, dtypes, strict=True))
    del sums, hidden, weight
    yield None
    yield gradients


@foreign(lambda device: cuda_missing(device, (7, 0)) or package_missing("liger_kernel"), allocates=_allocated_by_liger)
def liger(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Liger-Kernel's fused linear cross-entropy (arXiv:2410.10989), accumulating the weight's gradient in float32."""
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORE_INDEX,
        lse_square_scale=z_loss,
        label_smoothing=label_smoothing,
        reduction="sum",
        softcap=softcap,
        accum_dtype=torch.float32,
    )
    return loss(weight, hidden_states, targets, bias)


def _native_missing(_: torch.device) -> str | None:
    needed = f"torch.nn.functional.linear_cross_entropy, new in torch 2.13 (this is {torch.__version__})"
    return None if hasattr(F, "linear_cross_entropy") else needed


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


@foreign(requires=_native_missing, allocates=_allocated_by_torch_native)
def torch_native(hidden_states: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """torch's own chunked ``F.linear_cross_entropy`` (torch 2.13).

    Its sum is rounded to the inputs' dtype, which for half precision is three digits. There the losses are asked for
    per token and summed in float32 instead, at the price of computing the logits again in backward.
    """
    half = hidden_states.dtype in _HALVES
    loss: Tensor = F.linear_cross_entropy(  # type: ignore[attr-defined]
        hidden_states,
        weight,
        targets,
        linear_bias=bias,
        ignore_index=IGNORE_INDEX,
        reduction="none" if half else "sum",
        options=torch.nn.LinearCrossEntropyOptions(),  # type: ignore[attr-defined]
    )
    return loss.float().sum() if half else loss


def _compiled_when_called(function: Backend) -> Backend:
    compiled = functools.cache(lambda: torch.compile(function))
    return functools.wraps(function)(lambda *operands, **options: compiled()(*operands, **options))


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


@foreign(requires=compiler_missing, builds_logits=True, allocates=_allocated_by_torch_compile)
@_compiled_when_called
def torch_compile(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The standard loss under ``torch.compile``, which fuses the upcast; logits in the inputs' dtype are built."""
    logits = F.linear(hidden_states, weight, bias).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing, reduction="sum")
    if z_loss:
        loss = loss + z_loss * (logits.logsumexp(-1) ** 2).where(targets != IGNORE_INDEX, 0).sum()
    return loss
