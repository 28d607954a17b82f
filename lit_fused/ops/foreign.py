"""Other implementations of the same loss, each a backend (``backends``).

One that cannot run on a machine says what is missing; only one that names a ``fallback`` is ever replaced, with a
warning.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .backends import Backend, Requirement, chunked, compiler_missing, cuda_missing, package_missing
from .first_derivatives import FirstDerivativeOnly
from .label_checks import IGNORE_INDEX
from .user_error import UserError

_HALVES = (torch.bfloat16, torch.float16)


def foreign(
    requires: Requirement,
    fallback: Backend | None = None,
    *,
    builds_logits: bool = False,
) -> Callable[[Backend], Backend]:
    """Say what an implementation needs and what may stand in, and run it :func:`under_autocast`."""

    def adapt(function: Backend) -> Backend:
        run: Any = under_autocast(function)
        run.requirement, run.fallback, run.builds_logits = requires, fallback, builds_logits
        return run

    return adapt


def under_autocast(function: Backend) -> Backend:
    """Do for an implementation what autocast means: inputs other than float64 are cast to the autocast dtype, and the
    gradients come back in the inputs' own. Second derivatives are refused: with some implementations they would be
    zero."""

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


@foreign(lambda device: cuda_missing(device, (8, 0)) or package_missing("cut_cross_entropy"), chunked)
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


@foreign(lambda device: cuda_missing(device, (7, 0)) or package_missing("liger_kernel"))
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


@foreign(requires=_native_missing)
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


@foreign(requires=compiler_missing, builds_logits=True)
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
