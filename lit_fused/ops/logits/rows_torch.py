"""The row work of the chunked head in plain PyTorch: from the logits of some tokens to their losses and, in place,
gradients.

Scale, bias and softcap are applied in float32, each row gives its log-sum-exp, loss and statistics, and the gradient of
the summed loss overwrites the products in their own buffer. The chunk is processed in tiles of a few rows: the float32
temporaries then have the size of a cache, not of the chunk, which is three times faster on a CPU.

C rows of a chunk, V vocabulary, or a rank's part of it. ``rows_triton`` has the same three functions for a GPU.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernel_path import HeadCall, Inputs, LogitsGradient, RowResults
from ..options import LossOptions, chunk_rows, chunks
from ..products import Products
from .rows_of_ranks import LOWEST, PartialRows

# Bytes of one float32 temporary; on a GPU, launches cost more than memory.
_TILE_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}

CONFIDENT = 1.0  # nats, of the loss of a row


class Chunk(NamedTuple):
    """The operands of the row work."""

    products_CV: Tensor
    targets_C: Tensor
    bias_V: Tensor | None
    call: HeadCall


class TorchRows(Products):
    """The row work on any device."""

    handles_ignored = False

    def forward_rows(
        self, chunk: Chunk, results: RowResults, *, write_gradient: bool, factor_C: Tensor | None = None
    ) -> None:
        """Write losses and statistics of every row into ``results`` (C,), in its dtype. With ``write_gradient`` the
        products become the gradient of ``(loss * factor_C).sum()``, else they stay."""
        products_CV, targets_C, bias_V, call = chunk
        options = call.options
        # Nothing that is allocated here outlives a tile: small survivors between large temporaries would fragment the
        # CPU's heap.
        for tile in tiles(products_CV):
            products, targets = products_CV[tile], targets_C[tile, None]
            logits = logits_of_products(products, bias_V, options, results.loss.dtype)
            # Only differences from the maximum have the digits of a confident row's 1 - p.
            maximum = logits.amax(-1, keepdim=True)
            below = logits - maximum
            p = below.exp()
            total = p.sum(-1, keepdim=True)
            normalizer = total.log()
            lse, nll = maximum + normalizer, normalizer - below.gather(-1, targets)
            loss = nll
            if options.label_smoothing:
                smooth = normalizer - below.mean(-1, keepdim=True)
                loss = (1 - options.label_smoothing) * nll + options.label_smoothing * smooth
            if options.z_loss:
                loss = loss + options.z_loss * lse**2
            results.loss[tile], results.lse[tile], results.nll[tile] = loss[:, 0], lse[:, 0], nll[:, 0]
            if options.statistics or results.top1 is not None:
                top1 = logits.argmax(-1)
                torch.eq(top1, targets[:, 0], out=results.correct[tile])
                if results.top1 is not None:
                    results.top1[tile] = top1
            if options.statistics:  # -inf logits (a masked vocabulary) have p = 0 and must count 0, not 0 * inf
                # A gradient subtracts it from log_probabilities: it has the same log-sum-exp, which is rounded or not.
                mean = torch.linalg.vecdot(p, below.clamp_(min=-1e4)) / total[:, 0]
                results.entropy[tile] = torch.where(nll < CONFIDENT, normalizer, lse - maximum)[:, 0] - mean
            if write_gradient:
                rows = LogitsGradient.of_loss(lse[:, 0], None if factor_C is None else factor_C[tile], call)
                products.copy_(gradient_of_products_(p.div_(total), logits, targets, rows, options))

    def partial_rows(self, chunk: Chunk, partial: PartialRows) -> None:
        """Write what these columns contribute to every row into ``partial`` (C,). The products stay, for
        ``backward_rows``; a target beyond their columns is another rank's."""
        options = chunk.call.options
        for tile in tiles(chunk.products_CV):
            logits = logits_of_products(chunk.products_CV[tile], chunk.bias_V, options, partial.maximum.dtype)
            mine, columns = _mine(chunk.targets_C[tile, None], logits.shape[-1])
            logit = logits.gather(-1, columns)
            maximum = logits.amax(-1, keepdim=True).clamp_(min=LOWEST)  # all logits of a masked part are -inf
            below = logits - maximum
            e = below.exp()
            partial.maximum[tile], partial.total[tile] = maximum[:, 0], e.sum(-1)
            partial.place[tile] = logits.argmax(-1).to(partial.place.dtype)
            partial.target[tile] = logit.where(mine, 0)[:, 0]
            if options.label_smoothing:
                partial.plain[tile] = logits.sum(-1)
            if options.statistics:
                partial.weighted[tile] = torch.linalg.vecdot(e, below.clamp_(min=-1e4))
                finite = logits.clamp(min=LOWEST)
                others = finite.scatter_(-1, columns, finite.gather(-1, columns).masked_fill_(mine, LOWEST))
                partial.rival[tile] = others.amax(-1)

    def backward_rows(self, chunk: Chunk, gradient: LogitsGradient) -> None:
        """Overwrite recomputed products by their gradient, given that of the logits."""
        options = chunk.call.options
        for tile in tiles(chunk.products_CV):
            products, rows = chunk.products_CV[tile], gradient.at(tile)
            logits = logits_of_products(products, chunk.bias_V, options, rows.lse_N.dtype)
            targets = chunk.targets_C[tile, None]
            p = _log_probabilities(logits, targets, rows).exp_()
            products.copy_(gradient_of_products_(p, logits, targets, rows, options))


def tiles(products_CV: Tensor) -> list[slice]:
    rows, width = products_CV.shape
    if not width:  # this rank has no entry of the vocabulary
        return []
    tile_bytes = _TILE_BYTES.get(products_CV.device.type, _TILE_BYTES["cuda"])
    return chunks(rows, max(tile_bytes // (4 * width), 1))


def logits_of_products(products: Tensor, bias_V: Tensor | None, options: LossOptions, dtype: torch.dtype) -> Tensor:
    """Return softcap(scale * products + bias) in ``dtype``; it may share memory with ``products``."""
    logits = products.to(dtype)
    if options.scale != 1.0:
        logits = logits * options.scale
    if bias_V is not None:
        logits = logits + bias_V.to(dtype)
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    return logits


def logits_of_entries(columns_NK: Tensor, inputs: Inputs, call: HeadCall) -> Tensor:
    """Return the logits (N, K) of K columns of each row, zero where the column is not here."""
    hidden_ND, weight_VD, bias_V, _ = inputs
    logits_NK = hidden_ND.new_zeros(columns_NK.shape, dtype=call.result_dtype)
    mine_NK = (columns_NK >= 0) & (columns_NK < len(weight_VD))
    if len(weight_VD):
        columns_NK = columns_NK.where(mine_NK, 0)
        row_bytes = 4 * columns_NK.shape[1] * hidden_ND.shape[1]
        size = chunk_rows(len(hidden_ND), row_bytes, call.budget_mib, tile=1, least=1, parts=1)
        for rows in chunks(len(hidden_ND), size):
            weight_CKD = weight_VD[columns_NK[rows]].to(call.result_dtype)
            hidden_CD1 = hidden_ND[rows, :, None].to(call.result_dtype)
            products_CK = (weight_CKD @ hidden_CD1)[..., 0].to(call.compute_dtype)  # rounded as all of them are
            bias_CK = None if bias_V is None else bias_V[columns_NK[rows]]
            logits_NK[rows] = logits_of_products(products_CK, bias_CK, call.options, call.result_dtype)
        logits_NK.masked_fill_(~mine_NK, 0)
    return logits_NK


def write_chosen(gradient_CV: Tensor, columns_CK: Tensor, values_CK: Tensor) -> None:
    """Write values into columns of each row, those outside excepted; a row's equal columns have equal values."""
    width = gradient_CV.shape[1]
    if not width or not columns_CK.shape[1]:
        return
    here_CK = (columns_CK >= 0) & (columns_CK < width)
    # Those that are not here repeat the row's first one that is; a row without any rewrites what it has.
    first_C1 = here_CK.int().argmax(1, keepdim=True)
    columns_CK = columns_CK.where(here_CK, columns_CK.gather(1, first_C1)).where(here_CK.any(1, keepdim=True), 0)
    values_CK = values_CK.where(here_CK, values_CK.gather(1, first_C1)).to(gradient_CV.dtype)
    values_CK = values_CK.where(here_CK.any(1, keepdim=True), gradient_CV.gather(1, columns_CK))
    gradient_CV.scatter_(1, columns_CK, values_CK)


def _mine(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return which targets are among these columns, and all targets as columns that exist."""
    return targets < width, targets.clamp(max=width - 1)


def _log_probabilities(logits: Tensor, targets: Tensor, rows: LogitsGradient) -> Tensor:
    """Return the logarithms of the softmax of rows, or of some of their columns. Those of confident rows come from
    differences from the target's logit, as the rounding of a log-sum-exp is larger than their 1 - p."""
    if rows.nll_N is None:
        return logits - rows.lse_N[:, None]
    mine, columns = _mine(targets, logits.shape[-1])
    is_confident, nll = mine & (rows.nll_N[:, None] < CONFIDENT), rows.nll_N[:, None]
    pivot = logits.gather(-1, columns).where(is_confident, rows.lse_N[:, None])
    return (logits - pivot).sub_(nll.where(is_confident, 0))


def gradient_of_products_(
    p: Tensor, logits: Tensor, targets: Tensor, rows: LogitsGradient, options: LossOptions
) -> Tensor:
    """Return, in the memory of the softmax ``p``, the logits' gradient times 1 - (logits / softcap)^2 and the scale."""
    if rows.slope_N is not None:  # a probability of zero has no part in it, and its logarithm may be infinite
        log_p = _log_probabilities(logits, targets, rows).clamp_(min=-1e4)
        log_p.mul_(rows.slope_N[:, None])
        p.mul_(log_p if rows.base_N is None else log_p.add_(rows.base_N[:, None]))
    elif rows.base_N is not None:
        p.mul_(rows.base_N[:, None])
    if rows.uniform_N is not None:
        p.sub_(rows.uniform_N[:, None])
    mine, columns = targets < p.shape[-1], targets.clamp(max=p.shape[-1] - 1)
    p.scatter_add_(-1, columns, rows.target_N[:, None].where(mine, 0))
    if options.softcap is not None:
        p.mul_(1 - (logits / options.softcap) ** 2)
    if options.scale != 1.0:
        p.mul_(options.scale)
    return p
