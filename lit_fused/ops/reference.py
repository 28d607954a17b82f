"""The definition of linear cross-entropy: the whole [N, V] logits, one line per term.

Tests, benchmarks and certificates call it in float64 and judge every other implementation by it. No step calls it.

N tokens, D hidden, V vocabulary.
"""

from types import SimpleNamespace
from typing import Any

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
    token_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and statistics of ``softcap(scale * hidden_states @ weight.T + bias)`` against ``targets``.

    Arguments and results are those of :func:`lit_fused.ops.linear_cross_entropy`, all in the dtype of the input.
    """
    targets_N = targets.reshape(-1).long()
    valid_N = targets_N != ignore_index
    safe_N = targets_N.where(valid_N, 0)
    logits_NV = _logits(hidden_states, weight, bias, scale, softcap)
    lse_N = logits_NV.logsumexp(-1)
    log_p_NV = logits_NV - lse_N[:, None]
    nll_N = -log_p_NV.gather(-1, safe_N[:, None])[:, 0]
    smooth_N = -log_p_NV.mean(-1)
    loss_N = (1 - label_smoothing) * nll_N + label_smoothing * smooth_N + z_loss * lse_N**2
    weights_N = torch.ones_like(loss_N) if token_weights is None else token_weights.reshape(-1).to(loss_N.dtype)
    weights_N = weights_N.where(valid_N, 0)
    loss_N = loss_N.where(valid_N, 0) * weights_N

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
    loss, total_weight = loss_N.sum(), weights_N.sum()
    return (loss if reduction == "sum" else loss / total_weight.where(total_weight != 0, 1)), stats


def token_scores_reference(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    selected: Tensor | None = None,
    ignore_index: int = -100,
) -> SimpleNamespace:
    """Return what :func:`lit_fused.ops.token_scores` returns, in the dtype of the input."""
    valid = targets != ignore_index
    logits = _logits(hidden_states, weight, bias, scale, softcap).view(*targets.shape, len(weight))
    lse = logits.logsumexp(-1)
    log_p = logits - lse[..., None]
    # A masked entry has a probability of zero, and counts zero, not 0 * inf.
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)
    found = SimpleNamespace(
        log_prob=log_p.gather(-1, targets.where(valid, 0)[..., None])[..., 0].where(valid, 0),
        lse=lse.where(valid, 0),
        entropy=entropy.where(valid, 0),
        selected=None,
        top1=logits.argmax(-1).where(valid, -1),
    )
    if selected is not None:
        exists = (selected >= 0) & valid[..., None]
        found.selected = log_p.gather(-1, selected.where(exists, 0)).where(exists, 0)
    return found


def linear_distillation_reference(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher: Any,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    divergence_weight: float = 1.0,
    cross_entropy_weight: float = 0.0,
    reduction: str = "mean",
    token_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what :func:`lit_fused.ops.linear_distillation` returns, in the dtype of the input."""
    of_head = {"bias": bias, "scale": scale, "softcap": softcap}
    _, stats = linear_cross_entropy_reference(hidden_states, weight, targets, **of_head)
    nll_N, _ = linear_cross_entropy_reference(hidden_states, weight, targets, **of_head, reduction="none")
    theirs = {"bias": teacher.bias, "scale": teacher.scale, "softcap": teacher.softcap, "reduction": "none"}
    teacher_nll_N, _ = linear_cross_entropy_reference(teacher.hidden_states, teacher.weight, targets, **theirs)
    log_p_NV = (_logits(hidden_states, weight, bias, scale, softcap) / temperature).log_softmax(-1)
    log_q_NV = _logits(teacher.hidden_states, teacher.weight, teacher.bias, teacher.scale, teacher.softcap)
    log_q_NV = (log_q_NV / temperature).log_softmax(-1)
    p_NV, q_NV = log_p_NV.exp(), log_q_NV.exp()
    if divergence == "forward_kl":
        divergence_N = (q_NV * (log_q_NV - log_p_NV)).sum(-1)
    elif divergence == "reverse_kl":
        divergence_N = (p_NV * (log_p_NV - log_q_NV)).sum(-1)
    else:
        log_m_NV = (beta * q_NV + (1 - beta) * p_NV).log()
        divergence_N = beta * (q_NV * (log_q_NV - log_m_NV)).sum(-1)
        divergence_N = divergence_N + (1 - beta) * (p_NV * (log_p_NV - log_m_NV)).sum(-1)
    valid_N = targets.reshape(-1) >= 0
    divergence_N = divergence_N.where(valid_N, 0)
    stats |= {"divergence": divergence_N.sum().detach(), "teacher_nll": teacher_nll_N.sum().detach()}
    loss_N = cross_entropy_weight * nll_N.reshape(-1) + divergence_weight * divergence_N
    weights_N = valid_N.to(loss_N.dtype) * (1 if token_weights is None else token_weights.reshape(-1))
    loss_N = loss_N * weights_N
    if reduction == "none":
        return loss_N.view(targets.shape), stats
    return loss_N.sum() / (weights_N.sum() if reduction == "mean" else 1), stats


def _logits(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """Return the whole logits (N, V)."""
    logits_NV = scale * (hidden_states.reshape(-1, hidden_states.shape[-1]) @ weight.T)
    if bias is not None:
        logits_NV = logits_NV + bias
    return logits_NV if softcap is None else softcap * torch.tanh(logits_NV / softcap)
