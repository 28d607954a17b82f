"""What each way to the loss allocates, on fake tensors: the kernels themselves cannot run on them.

A head is an ``autograd.Function`` that makes the buffers of the real one, in its order, keeps what it keeps, and gives
gradients of the same sizes. Our own head's buffers follow from its plan (``ops/linear_cross_entropy/plan.py``); the
others' were read in their sources (cut-cross-entropy 25.1.1, liger-kernel 0.8.5, torch 2.13). ``loss=standard`` and
``loss=model`` run as they are.

C chunk, N tokens, D hidden, V vocabulary, G groups of rows.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.ops.linear_cross_entropy.backends import Backend, backend_name, foreign
from lit_fused.ops.linear_cross_entropy.filtered import (
    GROUP_ROWS,
    block_columns,
    groups,
    product_parts,
    rows_within_group,
)
from lit_fused.ops.linear_cross_entropy.plan import (
    FREQUENT_ROWS,
    MAX_BFLOAT16_CHUNKS,
    ROWS_WITHOUT_GRADIENT,
    TILE_COLUMNS,
    chunk_rows,
)
from lit_fused.planning.ledger import HEAD, MemoryLedger

_GPU_BUDGET_MIB = 448.0
_MULTIPROCESSORS = 132  # of a Hopper GPU, the only ones that one_step runs on

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden (N, D), weight (V, D), bias (V,)


def modelled(backend: Backend, capability: tuple[int, int], ledger: MemoryLedger) -> Backend:
    """A backend of the same name and options that only allocates.

    Args:
        backend: of ``lit_fused.ops.linear_cross_entropy.backends``.
        capability: compute capability of the GPU.
        ledger: where what it allocates is entered as the output head's.

    Raises:
        UserError: nobody has written down what it allocates.
    """
    name = backend_name(backend)
    if name == "chunked":
        model: Callable[..., Tensor] = functools.partial(_chunked, hopper=capability[0] == 9)
    elif name in _FOREIGN:
        model = foreign(requires=lambda _: None)(_FOREIGN[name])  # type: ignore[assignment]
    else:
        raise UserError(
            f"mode=plan does not know what loss.impl={name} allocates; it knows {', '.join(['chunked', *_FOREIGN])}. "
            "mode=fit_batch measures any loss"
        )

    @functools.wraps(backend)
    def run(hidden_states: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Any:
        with ledger.under(HEAD):
            return model(hidden_states, weight, targets, **options)

    for attribute in ("requirement", "fallback"):
        vars(run).pop(attribute, None)
    return run


class _Head(torch.autograd.Function):
    """Runs ``head.forward`` in forward and ``head.backward`` in backward; keeps what the former returns."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: "type[_Allocations]", options: Any
    ) -> Tensor:
        wanted = tuple(ctx.needs_input_grad[:3])
        ctx.head, ctx.wanted, ctx.options = head, wanted, options
        saved, ctx.held = head.forward(hidden, weight, bias, wanted, options)
        ctx.save_for_backward(*saved)
        return hidden.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        held, ctx.held = ctx.held, None
        return *ctx.head.backward(ctx.saved_tensors, held, ctx.wanted, ctx.options), None, None


class _Allocations:
    """What a head makes in forward: (tensors that autograd keeps, others that it holds); and in backward: gradients."""

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...], options: Any
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        raise NotImplementedError

    @staticmethod
    def backward(saved: tuple[Tensor, ...], held: Any, wanted: tuple[bool, ...], options: Any) -> Gradients:
        raise NotImplementedError


def _gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...], weight_dtype: torch.dtype
) -> Gradients:
    return (
        torch.empty_like(hidden) if wanted[0] else None,
        torch.empty_like(weight, dtype=weight_dtype) if wanted[1] else None,
        None if bias is None or not wanted[2] else torch.empty_like(bias, dtype=torch.float32),
    )


def _cast(gradients: Gradients, dtypes: tuple[torch.dtype, ...]) -> Gradients:
    return tuple(None if g is None else g.to(d) for g, d in zip(gradients, dtypes, strict=True))  # type: ignore[return-value]


# Our own head.


def _chunked(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    hopper: bool,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    recompute: bool = False,
    float32_accumulation: bool | None = None,
    logits_budget_mib: float | None = None,
    filter_eps: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> Tensor:
    autocast = torch.is_autocast_enabled("cpu")
    compute = torch.get_autocast_dtype("cpu") if autocast else hidden_states.dtype
    one_step = hopper and compute == torch.bfloat16 and not label_smoothing and hidden_states.shape[1] % 8 == 0
    options = {
        "compute": compute,
        "one_step": one_step,
        "recompute": recompute,
        "float32": float32_accumulation,
        "budget": logits_budget_mib or _GPU_BUDGET_MIB,
        "partial_sums": 3 if softcap is None or filter_eps is None else 4,
    }
    head = _Chunked if filter_eps is None else _Filtered
    with torch.autocast("cpu", enabled=False):
        return _Head.apply(hidden_states, weight, bias, head, options)  # type: ignore[return-value]


class _Chunked(_Allocations):
    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...], options: Any
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        results = [hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(4)]
        if options["recompute"] or not any(wanted):
            _Chunked.work(hidden, weight, bias, (False, False, False), options)
            return (hidden, weight, bias, *results[:2]), None
        sums = _Chunked.work(hidden, weight, bias, wanted, options)
        halves = [t.dtype if t.dtype == torch.bfloat16 else None for t in (hidden, weight)]
        found = [g if g is None or half is None else g.to(half) for g, half in zip(sums, [*halves, None], strict=True)]
        dtypes = hidden.dtype, weight.dtype, torch.float32 if bias is None else bias.dtype
        return (), (tuple(found), dtypes)

    @staticmethod
    def backward(saved: tuple[Tensor, ...], held: Any, wanted: tuple[bool, ...], options: Any) -> Gradients:
        if not options["recompute"]:
            found, dtypes = held
            return _cast(found, dtypes)
        hidden, weight, bias = saved[:3]
        sums = _Chunked.work(hidden, weight, bias, wanted, options)
        return _cast(sums, (hidden.dtype, weight.dtype, torch.float32 if bias is None else bias.dtype))

    @staticmethod
    def work(
        hidden_ND: Tensor, weight_VD: Tensor, bias: Tensor | None, wanted: tuple[bool, ...], options: Any
    ) -> Gradients:
        """The chunks' buffers and the sums over them: of ``one_step._Numerators`` and the ``_GradientSums`` of both."""
        source_dtype = weight_VD.dtype
        hidden_ND, weight_VD = hidden_ND.to(options["compute"]), weight_VD.to(options["compute"])
        (tokens, size), vocabulary = hidden_ND.shape, len(weight_VD)
        float32 = options["float32"]
        buffers = []
        if options["one_step"] and not any(wanted):  # nothing of V columns is stored
            tiles = -(-vocabulary // TILE_COLUMNS)
            buffers.append(hidden_ND.new_empty(3 * tiles, min(tokens, ROWS_WITHOUT_GRADIENT), dtype=torch.float32))
        elif options["one_step"]:
            padded, tiles = -(-vocabulary // 64) * 64, -(-vocabulary // TILE_COLUMNS)
            rows = min(tokens, chunk_rows(tokens, 2 * padded + 6 * size + 12 * tiles, options["budget"]))
            buffers.append(hidden_ND.new_empty(rows, padded))
            buffers.append(hidden_ND.new_empty(3 * tiles, rows, dtype=torch.float32))
            if wanted[0]:
                buffers.append(hidden_ND.new_empty(rows, size, dtype=torch.float32))
            if wanted[1]:
                buffers.append(hidden_ND.new_empty(rows, size))
            if float32 is None:
                float32 = -(-tokens // rows) > MAX_BFLOAT16_CHUNKS or source_dtype != torch.bfloat16
        else:
            rows = min(tokens, chunk_rows(tokens, vocabulary * hidden_ND.itemsize, options["budget"]))
            buffers.append(hidden_ND.new_empty(rows, vocabulary))
            float32 = not (float32 is False and options["compute"] == torch.bfloat16)
        dtype = torch.promote_types(options["compute"], torch.float32) if float32 else options["compute"]
        return _gradients(hidden_ND, weight_VD, bias, wanted, dtype)


class _Filtered(_Allocations):
    """Keeps marks and the tail of every group, and four numbers per token; makes the gradients in backward.

    Planned as if every group were exact, as in the first steps of a training from scratch: with fewer columns it can
    only take less.
    """

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...], options: Any
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        if not any(wanted):
            return _Chunked.forward(hidden, weight, bias, wanted, options)
        tokens, vocabulary, count = len(hidden), len(weight), len(groups(len(hidden)))
        targets = hidden.new_empty(tokens, dtype=torch.int64)
        lse, nll, mass, *others = (_float32(hidden, tokens) for _ in range(5))
        source = hidden.to(options["compute"]), weight.to(options["compute"])
        column_sums = _float32(hidden, count, vocabulary), _float32(hidden, count, vocabulary + 1)
        buffers = _Filtered.chunk(hidden, vocabulary, options)
        kept_GV = hidden.new_empty(count, vocabulary, dtype=torch.bool)
        tail_GV = _float32(hidden, count, vocabulary)
        del others, source, column_sums, buffers
        return (hidden, weight, bias, targets, lse, nll, kept_GV, tail_GV, mass), None

    @staticmethod
    def backward(saved: tuple[Tensor, ...], held: Any, wanted: tuple[bool, ...], options: Any) -> Gradients:
        hidden, weight, bias, kept_GV, tail_GV = *saved[:3], *saved[6:8]
        if not any(wanted):
            return None, None, None
        work = _Filtered.blocks if options["one_step"] else _Filtered.products
        sums = work(hidden, weight, bias, kept_GV, tail_GV, wanted, options)
        return _cast(sums, (hidden.dtype, weight.dtype, torch.float32 if bias is None else bias.dtype))

    @staticmethod
    def chunk(hidden: Tensor, vocabulary: int, options: Any) -> list[Tensor]:
        """Forward's buffers: the logits of a chunk, and with one step their partial sums."""
        tokens, size = hidden.shape
        itemsize = options["compute"].itemsize
        padded, tiles = -(-vocabulary // 64) * 64, -(-vocabulary // TILE_COLUMNS)
        row_bytes = 2 * padded + 6 * size + 12 * tiles if options["one_step"] else vocabulary * itemsize
        rows = min(tokens, rows_within_group(chunk_rows(tokens, row_bytes, options["budget"])))
        if not options["one_step"]:
            return [hidden.new_empty(rows, vocabulary, dtype=options["compute"])]
        partial_sums = _float32(hidden, options["partial_sums"] * tiles, rows)
        return [hidden.new_empty(rows, padded, dtype=options["compute"]), partial_sums]

    @staticmethod
    def kept_columns(kept_GV: Tensor) -> Tensor:
        """The kept columns' numbers, made of every column's place among them."""
        count, vocabulary = kept_GV.shape
        places_GV = torch.empty_like(kept_GV, dtype=torch.int64)
        columns_GV = kept_GV.new_empty(count, vocabulary + 1, dtype=torch.int32)
        targets_GV = torch.empty_like(places_GV)
        del places_GV, targets_GV
        return columns_GV

    @staticmethod
    def blocks(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kept_GV: Tensor,
        tail_GV: Tensor,
        wanted: tuple[bool, ...],
        options: Any,
    ) -> Gradients:
        """``one_step``: blocks of kept columns within the budget."""
        source_dtype = weight.dtype
        hidden_ND, weight_VD = hidden.to(options["compute"]), weight.to(options["compute"])
        (tokens, size), vocabulary, count = hidden_ND.shape, len(weight_VD), len(tail_GV)
        rows = min(tokens, GROUP_ROWS)
        parts = product_parts(rows, size, _MULTIPROCESSORS)
        width = block_columns(tokens, size, vocabulary, options["budget"], _MULTIPROCESSORS)
        buffers = [
            _Filtered.kept_columns(kept_GV),
            hidden_ND.new_empty(rows, width),
            weight_VD.new_empty(width, size),
            _float32(hidden, options["partial_sums"] * (width // TILE_COLUMNS), rows),
        ]
        float32 = options["float32"]
        if float32 is None:
            float32 = count + 1 > MAX_BFLOAT16_CHUNKS or source_dtype != torch.bfloat16
        dtype = torch.float32 if float32 else options["compute"]
        gradients = _gradients(hidden_ND, weight_VD, bias, wanted, dtype)
        buffers.append(tail_GV.to(options["compute"]))
        if wanted[0]:
            buffers += [_float32(hidden, parts * rows, size), _float32(hidden, count, size)]
        if wanted[1]:
            buffers += [hidden_ND.new_empty(rows, size), _float32(hidden, count, size)]
            buffers += [] if float32 else [_float32(hidden, min(FREQUENT_ROWS, vocabulary), size)]
        return gradients

    @staticmethod
    def products(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kept_GV: Tensor,
        tail_GV: Tensor,
        wanted: tuple[bool, ...],
        options: Any,
    ) -> Gradients:
        """``two_step``: a group's rows of the weight and of its gradient, next to each other."""
        hidden_ND, weight_VD = hidden.to(options["compute"]), weight.to(options["compute"])
        (tokens, size), vocabulary, count = hidden_ND.shape, len(weight_VD), len(tail_GV)
        float32 = not (options["float32"] is False and options["compute"] == torch.bfloat16)
        dtype = torch.promote_types(options["compute"], torch.float32) if float32 else options["compute"]
        gradients = _gradients(hidden_ND, weight_VD, bias, wanted, dtype)
        buffers = [_Filtered.kept_columns(kept_GV), tail_GV.to(options["compute"])]
        buffers += [_float32(hidden, count, size) for _ in range(2)]
        row_bytes, rows = vocabulary * hidden_ND.itemsize, min(tokens, GROUP_ROWS)
        rows = min(rows, rows_within_group(chunk_rows(rows, row_bytes, options["budget"])))
        weight_KD = torch.empty_like(weight_VD)
        sums_KD = torch.empty_like(weight_VD, dtype=dtype) if wanted[1] else None
        logits_CK = hidden_ND.new_empty(rows, vocabulary)
        product_CD = _float32(hidden, rows, size)
        del product_CD, weight_KD, sums_KD, logits_CK, buffers
        return gradients


def _float32(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.promote_types(like.dtype, torch.float32))


# Other people's. Under autocast their inputs are cast before, by ``foreign``.


def _cce(hidden_states: Tensor, weight: Tensor, targets: Tensor, *, softcap: Any = None, tile_filter: Any = None):
    return _Head.apply(hidden_states, weight, None, _Cce, None)


class _Cce(_Allocations):
    """Keeps the log-sum-exps and the mean logit of each entry; gradients in the dtype of the hidden states."""

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...], options: Any
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        lse = hidden.new_empty(len(hidden), dtype=torch.float32)
        return (hidden, weight, lse, hidden.new_empty(len(weight), dtype=torch.float32)), None

    @staticmethod
    def backward(saved: tuple[Tensor, ...], held: Any, wanted: tuple[bool, ...], options: Any) -> Gradients:
        hidden, weight = saved[:2]
        order = weight.new_empty(len(weight), 3, dtype=torch.float32)
        gradients = _gradients(hidden, weight, None, (True, wanted[1], False), hidden.dtype)
        del order
        return gradients


def _liger(hidden_states: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, **_: Any):
    return _Head.apply(hidden_states, weight, bias, _Liger, None)


class _Liger(_Allocations):
    """Gradients in forward, the weight's in float32; a chunk of logits is as large as the hidden states."""

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...], options: Any
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        rows = _rows_like_hidden(hidden, weight)
        sums = _gradients(hidden, weight, bias, (True, wanted[1], wanted[2]), torch.float32)
        logits = hidden.new_empty(rows, len(weight))
        del logits
        return (), _cast(sums, (hidden.dtype, weight.dtype, torch.float32 if bias is None else bias.dtype))

    @staticmethod
    def backward(saved: tuple[Tensor, ...], held: Any, wanted: tuple[bool, ...], options: Any) -> Gradients:
        return held


def _torch_compile(hidden_states: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, **_: Any):
    return _Head.apply(hidden_states, weight, bias, _TorchCompile, None)


class _TorchCompile(_Allocations):
    """Logits once, in the dtype of the products; their gradient overwrites them. A vocabulary that is no multiple of
    what the products want is padded: torch.compile copies the gradient of the logits for either product."""

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...], options: Any
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        logits = hidden.new_empty(len(hidden), len(weight))
        lse = hidden.new_empty(len(hidden), dtype=torch.float32)
        return (hidden, weight, bias), (logits, lse)

    @staticmethod
    def backward(saved: tuple[Tensor, ...], held: Any, wanted: tuple[bool, ...], options: Any) -> Gradients:
        hidden, weight, bias = saved
        odd = hidden.itemsize * len(weight) % 16 != 0
        padded = [torch.empty_like(held[0]) for _ in range(2)] if odd else []
        gradients = _gradients(hidden, weight, bias, wanted, weight.dtype)
        del padded
        return gradients


def _torch_native(hidden_states: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None):
    return _Head.apply(hidden_states, weight, bias, _TorchNative, None)


class _TorchNative(_Allocations):
    """Half precision computes its gradients in backward, float32 in forward, both in the dtype of the inputs; a chunk's
    float32 logits have at most as many numbers as the hidden states, up to a power of two."""

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...], options: Any
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        if hidden.dtype in (torch.bfloat16, torch.float16):
            _TorchNative.chunk(hidden, weight)
            return (hidden, weight, bias), None
        gradients = _gradients(hidden, weight, bias, wanted, weight.dtype)
        _TorchNative.chunk(hidden, weight)
        return (), gradients

    @staticmethod
    def backward(saved: tuple[Tensor, ...], held: Any, wanted: tuple[bool, ...], options: Any) -> Gradients:
        if held is not None:
            return held
        hidden, weight, bias = saved
        gradients = _gradients(hidden, weight, bias, wanted, hidden.dtype)
        _TorchNative.chunk(hidden, weight)
        return gradients

    @staticmethod
    def chunk(hidden: Tensor, weight: Tensor) -> None:
        rows = _rows_like_hidden(hidden, weight)
        logits = hidden.new_empty(rows, len(weight), dtype=torch.float32)
        del logits


def _rows_like_hidden(hidden_ND: Tensor, weight_VD: Tensor) -> int:
    """Rows of a chunk whose logits are as many numbers as the hidden states, up to a power of two."""
    chunks = -(-len(weight_VD) // hidden_ND.shape[1])
    return min(1 << (-(-len(hidden_ND) // chunks) - 1).bit_length(), len(hidden_ND))


_FOREIGN: dict[str, Callable[..., Any]] = {
    "cce": _cce,
    "liger": _liger,
    "torch_compile": _torch_compile,
    "torch_native": _torch_native,
}
