"""Other implementations of the same loss, each behind one function of the same form.

A backend is a function ``f(hidden_ND, weight_VD, targets_N, *, ...)`` that returns the *summed* loss over the valid
targets, or that and a dictionary of summed statistics. What it supports is what its signature names: ``bias``,
``softcap``, ``scale``, ``label_smoothing``, ``z_loss``, ``recompute``, ``drop_ignored``, ``float32_accumulation``,
``logits_budget_mib``, ``filter_eps``, and ``shard`` where it takes a rank's part of a divided vocabulary. Inputs arrive
checked and flat; targets of -100 are ignored. There is no registry: a function of this module is found by its name, any
other by its dotted path, or is passed itself.

``@foreign`` adapts an implementation that is not ours. One that cannot run on a machine says what is missing; only one
that names a ``fallback`` is ever replaced, with a warning.

N tokens, D hidden, V vocabulary.
"""

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.ops.linear_cross_entropy.checks import IGNORE_INDEX
from lit_fused.ops.linear_cross_entropy.chunked import linear_cross_entropy
from lit_fused.ops.linear_cross_entropy.plan import VocabularyShard

Backend = Callable[..., Tensor | tuple[Tensor, dict[str, Tensor]]]
Requirement = Callable[[torch.device], str | None]  # what is missing on this device, or None


def foreign(
    requires: Requirement, fallback: Backend | None = None, *, builds_logits: bool = False
) -> Callable[[Backend], Backend]:
    """Adapt an implementation that is not ours: say what it needs and what may stand in, and do for it what autocast
    means.

    Under autocast, floating inputs are cast to the autocast dtype and autocast is off inside; the gradients come back
    in the inputs' own dtypes.
    """

    def adapt(function: Backend) -> Backend:
        @functools.wraps(function)
        def run(hidden_states: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Any:
            device_type = hidden_states.device.type
            if torch.is_autocast_enabled(device_type):
                dtype = torch.get_autocast_dtype(device_type)
                hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
                options = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in options.items()}
            with torch.autocast(device_type, enabled=False):
                return function(hidden_states, weight, targets.long(), **options)

        for name, value in (("requirement", requires), ("fallback", fallback), ("builds_logits", builds_logits)):
            setattr(run, name, value)
        return run

    return adapt


def usable_backend(backend: Backend, device: torch.device) -> Backend:
    """The backend itself, or with one warning its stand-in; without one, a :class:`UserError` says what is missing."""
    name = backend_name(backend)
    needs: dict[str, str] = {}
    stand_in: Backend | None = backend
    while stand_in is not None and (missing := _missing(stand_in, device)) is not None:
        needs[backend_name(stand_in)] = missing
        stand_in = getattr(_function(stand_in), "fallback", None)
    if not needs:
        return backend
    if stand_in is None:
        raise UserError(
            f"loss={name} cannot run here: it needs {needs[name]}; choose loss=chunked, which runs everywhere"
        )
    summary = (inspect.getdoc(stand_in) or "").partition("\n")[0]
    lacking = "; ".join(f"{tried} needs {missing}" for tried, missing in needs.items())
    warnings.warn(f"loss={lacking}; this run uses {backend_name(stand_in)} instead: {summary}", stacklevel=2)
    return stand_in


def backend_by_name(name: str) -> Backend:
    """A backend of this module by its name, or any other by the dotted path of its function."""
    if "." in name:
        module, _, attribute = name.rpartition(".")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UserError(f"impl={name!r} cannot be imported: {error}") from error
    known = {
        name: function
        for name, function in globals().items()
        if inspect.isfunction(function) and function.__module__ == __name__ and is_backend(function)
    }
    if name not in known:
        raise UserError(
            f"impl={name!r} is unknown; choose one of {', '.join(known)}, or name a function by its dotted path"
        )
    return known[name]


def is_backend(function: Callable[..., Any]) -> bool:
    """Whether a function begins with (hidden_states, weight, targets)."""
    return list(inspect.signature(function).parameters)[:3] == ["hidden_states", "weight", "targets"]


def supported_options(backend: Backend) -> set[str]:
    """The options that a backend's signature names."""
    return set(inspect.signature(backend).parameters) - {"hidden_states", "weight", "targets"}


def backend_name(backend: Backend) -> str:
    function = _function(backend)
    return getattr(function, "__name__", type(function).__name__)


def backend_builds_logits(backend: Backend) -> bool:
    return getattr(_function(backend), "builds_logits", False)


def _function(backend: Backend) -> Any:
    while isinstance(backend, functools.partial):
        backend = backend.func
    return backend


def _missing(backend: Backend, device: torch.device) -> str | None:
    requirement: Requirement | None = getattr(_function(backend), "requirement", None)
    return requirement(device) if requirement else None


def compiler_missing(device: torch.device) -> str | None:
    """What ``torch.compile`` lacks on a device; None if it has everything."""
    if device.type == "cuda":
        return _package_missing("triton")
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler for torch.compile on the CPU (install g++)"
    return None


def _package_missing(package: str) -> str | None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        return f"the package {package} ({error})"
    return None


def _cuda_missing(device: torch.device, capability: tuple[int, int]) -> str | None:
    wanted = f"a CUDA GPU of compute capability {capability[0]}.{capability[1]}"
    if device.type != "cuda":
        return f"{wanted} (this run is on {device.type})"
    found = torch.cuda.get_device_capability(device)
    return None if found >= capability else f"{wanted} (this one has {found[0]}.{found[1]})"


def chunked(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    statistics: bool = True,
    recompute: bool = False,
    drop_ignored: bool = False,
    float32_accumulation: bool | None = None,
    logits_budget_mib: float | None = None,
    filter_eps: float | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Our own exact head: :func:`lit_fused.ops.linear_cross_entropy.linear_cross_entropy`.

    Only with ``filter_eps`` is its backward approximate.
    """
    return linear_cross_entropy(
        hidden_states,
        weight,
        targets,
        bias=bias,
        scale=scale,
        softcap=softcap,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction="sum",
        statistics=statistics,
        recompute=recompute,
        drop_ignored=drop_ignored,
        float32_accumulation=float32_accumulation,
        logits_budget_mib=logits_budget_mib,
        filter_eps=filter_eps,
        shard=shard,
    )


@foreign(
    requires=lambda device: _package_missing("cut_cross_entropy") or compiler_missing(device),
    fallback=chunked,
    builds_logits=True,
)
def cce_torch_compile(
    hidden_states: Tensor, weight: Tensor, targets: Tensor, *, softcap: float | None = None
) -> Tensor:
    """cut-cross-entropy's own ``torch_compile`` implementation. It builds the logits of all valid tokens."""
    from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

    # It insists on a whole graph, and takes out ignored tokens first: a ragged batch, one without any, evaluation and a
    # second model in the process are each compiled anew, and beyond torch's limit of eight that is an error.
    with torch._dynamo.config.patch(recompile_limit=256):
        return cut_cross_entropy(hidden_states, weight, targets, softcap=softcap, reduction="sum", impl="torch_compile")


@foreign(
    requires=lambda device: _cuda_missing(device, (8, 0)) or _package_missing("cut_cross_entropy"),
    fallback=cce_torch_compile,
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
    if hidden_states.dtype not in (torch.bfloat16, torch.float16) and torch.is_grad_enabled():
        raise UserError(
            f"loss=cce has gradients in half precision only, and the hidden states are {hidden_states.dtype}; choose "
            "precision=bf16-mixed, or loss=chunked"
        )
    from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

    return cut_cross_entropy(
        hidden_states, weight, targets, softcap=softcap, reduction="sum", filter_eps=tile_filter, impl="cce"
    )


@foreign(requires=lambda device: _cuda_missing(device, (7, 0)) or _package_missing("liger_kernel"))
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
    if hasattr(F, "linear_cross_entropy"):
        return None
    return f"torch.nn.functional.linear_cross_entropy, new in torch 2.13 (this is {torch.__version__})"


@foreign(requires=_native_missing)
def torch_native(hidden_states: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """torch's own chunked ``F.linear_cross_entropy`` (torch 2.13).

    Its sum is rounded to the inputs' dtype, which for half precision is three digits. There the losses are asked for
    per token and summed in float32 instead, at the price of computing the logits again in backward.
    """
    half = hidden_states.dtype in (torch.bfloat16, torch.float16)
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


@functools.cache
def _compiled_upcast() -> Callable[..., Tensor]:
    def upcast(
        hidden_states: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        label_smoothing: float,
        z_loss: float,
    ) -> Tensor:
        logits = F.linear(hidden_states, weight, bias).float()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        loss = F.cross_entropy(
            logits, targets, ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing, reduction="sum"
        )
        if z_loss:
            loss = loss + z_loss * (logits.logsumexp(-1) ** 2).where(targets != IGNORE_INDEX, 0).sum()
        return loss

    return torch.compile(upcast)


@foreign(requires=compiler_missing, builds_logits=True)
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
    return _compiled_upcast()(hidden_states, weight, targets, bias, softcap, label_smoothing, z_loss)
