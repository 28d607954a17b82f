"""The options of a loss, and the chunks of logits that they ask for.

The public functions have them as keywords; everything below takes the one object.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .user_error import UserError, check_number, check_switches
from .vocabulary_parallel import VocabularyShard

# The rule of each number: what it must be, whether it is, and a hint. None is allowed where it is the default.
_NUMBERS: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "scale": ("be a number other than zero", lambda x: 0 < abs(x) < math.inf, ""),
    "softcap": ("be a positive number or None", lambda x: 0 < x < math.inf, ""),
    "label_smoothing": ("lie in [0, 1]", lambda x: 0 <= x <= 1, ""),
    "z_loss": ("be a number and not negative", lambda x: 0 <= x < math.inf, "1e-4 is a usual value"),
    "logits_budget_mib": ("be positive", lambda x: 0 < x < math.inf, "null lets the device decide"),
    "chunk_size": ("be a positive number of rows", lambda x: x > 0, "4096 is a usual value"),
}

# Every chunk reads and writes the whole gradient of the weight once (8 bytes per entry in float32) beside 6 C
# operations per entry: 8 V D / bandwidth against 6 C V D / arithmetic. On an H200 (4.3 TB/s, 770 TFLOP/s) both take
# the same time at C = 8 * 770 / (6 * 4.3) = 240, so smaller chunks are never made, whatever the budget.
MIN_CHUNK_ROWS = 256

# Products are computed in tiles of 128 rows; a chunk that is no multiple of it pays for rows that it does not have.
TILE_ROWS = 128

CPU_BUDGET_MIB = 32.0  # A CPU is as fast with small chunks as with large ones.
LEAST_GPU_BUDGET_MIB = 448.0
_GPU_SHARE = 0.02  # of a GPU's memory

# Rows of a chunk on a GPU that are about as fast as any more (docs/evidence/head.md): the product with the weight,
# (C, D), fills the multiprocessors with tiles, and the gradient of the weight is read and written seldom.
_ENOUGH_NUMBERS, _ENOUGH_ROWS = 2**22, 2816


@dataclass(frozen=True)
class LossOptions:
    """The options of :func:`lit_fused.ops.linear_cross_entropy`, which documents each of them."""

    scale: float = 1.0
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    reduction: str = "mean"
    statistics: bool = True
    recompute: bool = False
    drop_ignored: bool = False
    float32_accumulation: bool | None = None
    logits_budget_mib: float | None = None
    chunk_size: int | None = None
    invariant: bool = False

    def __post_init__(self) -> None:
        # A compiler may have symbols for numbers; the operator checks the numbers that it gets.
        if not torch.compiler.is_compiling():
            refuse_trained(self)
            values = vars(self).values()
            try:
                _check(*values)
            except TypeError:  # A list has no hash, and is no value of an option.
                _check.__wrapped__(*values)

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}


@lru_cache(maxsize=256, typed=True)  # True is no number, though it equals 1.
def _check(*values: Any) -> None:
    """Raise a UserError for an option out of its range. A training gives the same options in every step."""
    options = {f.name: value for f, value in zip(fields(LossOptions), values, strict=True)}
    check_switches({f.name: f.type for f in fields(LossOptions)}, options)
    for name, rule in _NUMBERS.items():
        if options[name] is not getattr(LossOptions, name):
            check_number(name, options[name], *rule, whole=name == "chunk_size")
    rows, budget, reduction = options["chunk_size"], options["logits_budget_mib"], options["reduction"]
    if rows is not None and budget is not None:
        raise UserError(
            f"chunk_size={rows} and logits_budget_mib={budget} both set the size of a chunk of logits; choose one"
        )
    if options["invariant"] and options["label_smoothing"]:
        raise UserError("invariant=True has no label_smoothing; choose one")
    if reduction not in ("mean", "sum", "none"):
        raise UserError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")


def refuse_trained(options: Any) -> None:
    """Raise a UserError for options, fields of a dataclass, that want a gradient: it would be lost without a word."""
    for name, value in vars(options).items():
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise UserError(
                f"{name} wants a gradient, and a fused loss has none for it; multiply the hidden states by a scale or "
                "an inverse temperature that is trained, and pass a number otherwise"
            )


def budget_mib(device: torch.device, shard: VocabularyShard | None = None) -> float:
    """Return the size of a chunk for a device. Ranks that divide a vocabulary cut the same chunks, whatever GPUs they
    have."""
    if device.type == "cpu":
        return CPU_BUDGET_MIB
    known = device.type == "cuda" and shard is None
    return gpu_budget_mib(torch.cuda.get_device_properties(device).total_memory / 2**20 if known else 0.0)


def gpu_budget_mib(memory_mib: float) -> float:
    """Return the size of a chunk on a GPU: a share of its memory, which is the less missed the more there is."""
    return max(_GPU_SHARE * memory_mib, LEAST_GPU_BUDGET_MIB)


def enough_rows(hidden_size: int, device: torch.device) -> int | None:
    """Return the rows of a chunk that are enough where nobody has chosen."""
    return None if device.type == "cpu" else gpu_enough_rows(hidden_size)


def gpu_enough_rows(hidden_size: int) -> int:
    """Return the rows of a chunk that are enough for a GPU."""
    return max(-(-_ENOUGH_NUMBERS // hidden_size), _ENOUGH_ROWS)


def chunk_rows(
    tokens: int,
    row_bytes: float,
    budget_mib: float,
    chunk_size: int | None = None,
    *,
    tile: int = TILE_ROWS,
    least: int = MIN_CHUNK_ROWS,
    parts: int = 2,
    enough: int | None = None,
) -> int:
    """Return the rows of a chunk of any head: as many as fit the budget, at most a part of the tokens (whose last tile
    may be partly filled), no more than are ``enough``, and never fewer than ``least``; in whole tiles, and evened out.
    Or, in tiles of 128 rows, ``chunk_size``."""
    if chunk_size is not None:
        return -(-max(min(chunk_size, tokens), 1) // TILE_ROWS) * TILE_ROWS
    part = -(-tokens // (parts * tile)) * tile
    fitting = min(int(budget_mib * 2**20 / max(row_bytes, 1)), part)
    fitting = fitting if enough is None else min(fitting, -(-enough // tile) * tile)
    rows = max(fitting // tile * tile, least)
    count = max(-(-tokens // rows), 1)
    return max(-(-tokens // (count * tile)) * tile, least)


def chunks(tokens: int | slice, rows: int) -> list[slice]:
    """Return the chunks of all tokens, or of a slice of them."""
    start, stop = (0, tokens) if isinstance(tokens, int) else (tokens.start, tokens.stop)
    return [slice(first, min(first + rows, stop)) for first in range(start, stop, max(rows, 1))]
