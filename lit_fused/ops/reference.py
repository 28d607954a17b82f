"""The definition of linear cross-entropy: the whole [N, V] logits, one line per term.

Tests and benchmarks call it in float64 and judge every other implementation by it. Training never calls it.

N tokens, D hidden, V vocabulary.
"""

import torch
from torch import Tensor


def linear_cross_entropy_reference(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and statistics of ``softcap(scale * hidden_states @ weight.T + bias)`` against ``targets``.

    Arguments and results are those of :func:`lit_fused.ops.linear_cross_entropy`, all in the dtype of the input.
    """
    targets_N = targets.reshape(-1).long()
    valid_N = targets_N != ignore_index
    safe_N = targets_N.where(valid_N, 0)

    logits_NV = scale * (hidden_states.reshape(-1, hidden_states.shape[-1]) @ weight.T)
    if bias is not None:
        logits_NV = logits_NV + bias
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)

    lse_N = logits_NV.logsumexp(-1)
    log_p_NV = logits_NV - lse_N[:, None]
    nll_N = -log_p_NV.gather(-1, safe_N[:, None])[:, 0]
    smooth_N = -log_p_NV.mean(-1)
    loss_N = (1 - label_smoothing) * nll_N + label_smoothing * smooth_N + z_loss * lse_N**2
    loss_N = loss_N.where(valid_N, 0)

    def total(x_N: Tensor) -> Tensor:
        return x_N.where(valid_N, 0).sum().detach()

    stats = {
        "nll": total(nll_N),
        "correct": (valid_N & (logits_NV.argmax(-1) == targets_N)).sum(),
        "entropy": total(-(log_p_NV.exp() * log_p_NV).sum(-1)),
        "lse_squared": total(lse_N**2),
    }
    if reduction == "none":
        return loss_N.view(targets.shape), stats
    loss = loss_N.sum()
    return (loss if reduction == "sum" else loss / valid_N.sum().clamp(min=1)), stats
