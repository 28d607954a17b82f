"""How one call of the chunked head runs: its options, its chunks, and where its results are written.

C rows of a chunk, N tokens, D hidden, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from lit_fused.errors import UserError

# Every chunk reads and writes the whole gradient of the weight once (8 bytes per entry in float32) beside 6 C
# operations per entry: 8 V D / bandwidth against 6 C V D / arithmetic. On an H200 (4.3 TB/s, 770 TFLOP/s) both take
# the same time at C = 8 * 770 / (6 * 4.3) = 240, so smaller chunks are never made, whatever the budget.
MIN_CHUNK_ROWS = 256

# Products are computed in tiles of 128 rows; a chunk that is no multiple of it pays for rows that it does not have.
TILE_ROWS = 128

# What follows is of ``one_step``, and here because a plan of memory needs it where Triton, and so one_step, is not.
TILE_COLUMNS = 256
# dW in bfloat16 is rounded once per chunk. For up to this many its error is below that of the standard head, which
# rounds its logits; for more, sums are kept in float32 (docs/performance.md has the measurements).
MAX_BFLOAT16_CHUNKS = 24
FREQUENT_ROWS = 256  # of dW in float32: 64 leave 10 % more error, 1024 take away 3 %
ROWS_WITHOUT_GRADIENT = 4096  # nothing of V columns is stored: a chunk is bounded by the L2 cache, not by memory

# The local target of a row whose target is another rank's entry: no column, but no ignored row either.
ELSEWHERE = 2**40


@dataclass(frozen=True)
class RowOptions:
    """What turns products into a loss: ``logits = softcap(scale * products + bias)``, then the loss terms."""

    scale: float
    softcap: float | None
    label_smoothing: float
    z_loss: float
    statistics: bool
    vocabulary: int  # entries that label smoothing spreads over: all of them, also where this rank has some only


@dataclass
class RowResults:
    """Where the results of rows are written: tensors of one number per token."""

    loss: Tensor
    lse: Tensor
    nll: Tensor
    entropy: Tensor
    correct: Tensor  # bool

    @classmethod
    def zeros(cls, count: int, dtype: torch.dtype, device: torch.device) -> "RowResults":
        numbers = (torch.zeros(count, dtype=dtype, device=device) for _ in range(4))
        return cls(*numbers, correct=torch.zeros(count, dtype=torch.bool, device=device))

    def __getitem__(self, rows: slice) -> "RowResults":
        """Views of some rows."""
        return RowResults(self.loss[rows], self.lse[rows], self.nll[rows], self.entropy[rows], self.correct[rows])


class Wanted(NamedTuple):
    """Which inputs need a gradient."""

    hidden: bool
    weight: bool
    bias: bool


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's part of a vocabulary: the entries from ``start`` on, as many as its weight has rows.

    Attributes:
        start: the first entry of this rank.
        vocabulary: entries of all ranks together; each belongs to one of them.
        largest: rows of the largest part, by which all ranks cut the same chunks.
        group: the ranks. All of them make the same calls with the same hidden states and targets.
    """

    start: int
    vocabulary: int
    largest: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, weight: DTensor) -> "VocabularyShard":
        """The part of a weight (V, D) that this rank has, under tensor parallelism.

        Raises:
            UserError: it is not divided by rows over a mesh "tensor_parallel"; under FSDP it is not, outside of the
                model's own forward.
        """
        mesh = weight.device_mesh
        if mesh.mesh_dim_names != ("tensor_parallel",) or weight.placements != (Shard(0),):
            raise UserError(
                f"the output layer's weight is distributed as {weight.placements} over {mesh}; a loss can take it "
                "whole or by rows over the mesh tensor_parallel. Call the loss inside of the model's forward, where "
                "FSDP's weights are whole"
            )
        vocabulary = weight.shape[0]
        largest = -(-vocabulary // mesh.size())
        return cls(min(mesh.get_local_rank() * largest, vocabulary), vocabulary, largest, mesh.get_group())

    def first(self, entries: int) -> "VocabularyShard":
        """The part of a vocabulary that has the first entries of this one."""
        return VocabularyShard(min(self.start, entries), entries, min(self.largest, entries), self.group)

    def local(self, targets_N: Tensor, rows: int) -> Tensor:
        """Targets as columns of this rank's ``rows`` entries: -1 where ignored, ELSEWHERE where another rank's."""
        columns_N = targets_N - self.start
        mine_N = (columns_N >= 0) & (columns_N < rows)
        return columns_N.where(mine_N, targets_N.new_full((), ELSEWHERE)).where(targets_N >= 0, -1)


@dataclass(frozen=True)
class Plan:
    """How one call runs: everything that is not a tensor."""

    rows: RowOptions
    compute_dtype: torch.dtype
    weight_dtype: torch.dtype  # of the weight as it came, which under autocast is not that of the products
    budget_mib: float
    float32_accumulation: bool | None
    per_token: bool
    gradients_in_forward: bool
    wanted: Wanted
    shard: VocabularyShard | None = None  # where the weight has some of the vocabulary's entries only
    filter_eps: float | None = None  # by which ``filtered`` chooses backward's columns; None where there is no backward

    @property
    def result_dtype(self) -> torch.dtype:
        """Of losses, log-sum-exps and, unless it is asked otherwise, sums over tokens."""
        return torch.promote_types(self.compute_dtype, torch.float32)


@dataclass
class Gradients:
    """Gradients of the summed loss with respect to hidden states (N, D), weight (V, D) and bias (V,), where wanted."""

    hidden_ND: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None


def chunk_rows(tokens: int, row_bytes: float, budget_mib: float) -> int:
    """Rows of a chunk: those that fit the budget, at most half of the tokens, and never fewer than 256, where rewriting
    the weight's gradient takes as long as the chunk's own arithmetic. Chunks are evened out, in whole tiles."""
    within_budget = min(int(budget_mib * 2**20 / row_bytes), -(-tokens // 2))
    rows = max(within_budget // TILE_ROWS * TILE_ROWS, MIN_CHUNK_ROWS)
    count = max(-(-tokens // rows), 1)
    return max(-(-tokens // (count * TILE_ROWS)) * TILE_ROWS, MIN_CHUNK_ROWS)


def chunks(tokens: int | slice, rows: int) -> list[slice]:
    """The chunks' rows, of all tokens or of some."""
    start, stop = (0, tokens) if isinstance(tokens, int) else (tokens.start, tokens.stop)
    return [slice(first, min(first + rows, stop)) for first in range(start, stop, max(rows, 1))]
