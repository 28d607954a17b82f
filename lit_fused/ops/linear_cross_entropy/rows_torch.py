"""The row work of the chunked head in plain PyTorch: from the logits of some tokens to their losses and, in place,
gradients.

A chunk's raw products ``hidden @ weight.T`` come in. Scale, bias and softcap are applied in float32, each row gives its
log-sum-exp, loss and statistics, and the gradient of the summed loss overwrites the products in their own buffer. The
trick is to walk the chunk in tiles of a few rows: the float32 temporaries then have the size of a cache, not of the
chunk, which is both the memory bound and, on a CPU, three times faster.

C rows of a chunk, V vocabulary, or a rank's part of it. ``rows_triton`` is the same three functions for a GPU.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from lit_fused.ops.linear_cross_entropy.plan import RowOptions, RowResults
from lit_fused.ops.linear_cross_entropy.vocabulary import LOWEST, PartialRows

_TILE_BYTES = {
    "cpu": 4 * 2**20,
    "cuda": 64 * 2**20,
}  # of one float32 temporary; on a GPU, launches cost more than memory


def forward_rows(
    products_CV: Tensor,
    targets_C: Tensor,
    bias_V: Tensor | None,
    options: RowOptions,
    results: RowResults,
    *,
    write_gradient: bool,
    factor: Tensor | None = None,
) -> None:
    """Write losses and statistics of every row into ``results`` (C,), in whose dtype they are computed.

    ``products_CV`` is used up: with ``write_gradient`` it becomes the gradient of the summed loss times ``factor``
    (scalar) with respect to the products, else it holds nothing of use.
    """
    # Nothing that is allocated here outlives a tile: small survivors between large temporaries would fragment the
    # CPU's heap.
    for tile in _tiles(products_CV):
        products, targets = products_CV[tile], targets_C[tile, None]
        logits = _logits(products, bias_V, options, results.loss.dtype)
        lse = logits.logsumexp(-1, keepdim=True)
        nll = lse - logits.gather(-1, targets)
        loss = nll
        if options.label_smoothing:
            smooth = lse - logits.mean(-1, keepdim=True)
            loss = (1 - options.label_smoothing) * nll + options.label_smoothing * smooth
        if options.z_loss:
            loss = loss + options.z_loss * lse**2
        results.loss[tile], results.lse[tile], results.nll[tile] = loss[:, 0], lse[:, 0], nll[:, 0]
        if options.statistics:
            torch.eq(logits.argmax(-1), targets[:, 0], out=results.correct[tile])
        if not options.statistics and not write_gradient:
            continue
        p = (logits - lse).exp_()
        if options.statistics:  # -inf logits (a masked vocabulary) have p = 0 and must count 0, not 0 * inf
            finite = logits.clamp_(min=torch.finfo(logits.dtype).min)
            results.entropy[tile] = lse[:, 0] - torch.linalg.vecdot(p, finite)
        if write_gradient:
            gradient = _gradient_(p, logits, targets, lse, options)
            products.copy_(gradient if factor is None else gradient.mul_(factor))


def partial_rows(
    products_CV: Tensor, targets_C: Tensor, bias_V: Tensor | None, options: RowOptions, partial: PartialRows
) -> None:
    """Write what these columns, a part of the vocabulary, contribute to every row into ``partial`` (C,).

    ``products_CV`` stays as it is, for ``backward_rows``. A target that is none of its columns is another rank's.
    """
    for tile in _tiles(products_CV):
        logits = _logits(products_CV[tile], bias_V, options, partial.maximum.dtype)
        mine, columns = _mine(targets_C[tile, None], logits.shape[-1])
        logit = logits.gather(-1, columns)
        maximum = logits.amax(-1, keepdim=True).clamp_(min=LOWEST)  # of a masked part all are -inf
        e = (logits - maximum).exp_()
        partial.maximum[tile], partial.total[tile] = maximum[:, 0], e.sum(-1)
        partial.target[tile] = logit.where(mine, 0)[:, 0]
        if options.label_smoothing:
            partial.plain[tile] = logits.sum(-1)
        if options.statistics:
            finite = logits.clamp(min=LOWEST)
            partial.weighted[tile] = torch.linalg.vecdot(e, finite)
            others = finite.scatter_(-1, columns, finite.gather(-1, columns).masked_fill_(mine, LOWEST))
            partial.rival[tile] = others.amax(-1)


def backward_rows(
    products_CV: Tensor,
    targets_C: Tensor,
    bias_V: Tensor | None,
    lse_C: Tensor,
    factor_C: Tensor | None,
    options: RowOptions,
) -> None:
    """Overwrite recomputed products by their gradient of ``(loss_C * factor_C).sum()``, given their log-sum-exp."""
    for tile in _tiles(products_CV):
        products, lse = products_CV[tile], lse_C[tile, None]
        logits = _logits(products, bias_V, options, lse_C.dtype)
        gradient = _gradient_((logits - lse).exp_(), logits, targets_C[tile, None], lse, options)
        products.copy_(gradient if factor_C is None else gradient.mul_(factor_C[tile, None]))


def _tiles(products_CV: Tensor) -> Iterator[slice]:
    rows, width = products_CV.shape
    if not width:  # a rank that has none of the vocabulary
        return
    step = max(1, _TILE_BYTES.get(products_CV.device.type, _TILE_BYTES["cuda"]) // (4 * width))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _logits(products: Tensor, bias_V: Tensor | None, options: RowOptions, dtype: torch.dtype) -> Tensor:
    """softcap(scale * products + bias) in ``dtype``; may share memory with ``products`` when nothing is to be done."""
    logits = products.to(dtype)
    if options.scale != 1.0:
        logits = logits * options.scale
    if bias_V is not None:
        logits = logits + bias_V.to(dtype)
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    return logits


def _mine(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Which targets are among these columns, and all of them as columns that exist."""
    return targets < width, targets.clamp(max=width - 1)


def _gradient_(p: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, options: RowOptions) -> Tensor:
    """d loss / d products, in the memory of the softmax ``p``.

    With e the label smoothing and z the z-loss weight: p (1 + 2 z lse) - e / V - (1 - e) [v = target], times the
    softcap's derivative 1 - (logits / softcap)^2 and the scale.
    """
    if options.z_loss:
        p.mul_(1 + 2 * options.z_loss * lse)
    if options.label_smoothing:
        p.sub_(options.label_smoothing / options.vocabulary)
    mine, columns = _mine(targets, p.shape[-1])
    p.scatter_add_(-1, columns, p.new_full(targets.shape, options.label_smoothing - 1).where(mine, 0))
    if options.softcap is not None:
        p.mul_(1 - (logits / options.softcap) ** 2)
    if options.scale != 1.0:
        p.mul_(options.scale)
    return p
