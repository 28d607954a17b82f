"""The truth for accumulated and distributed training: one process with the one large batch."""

import torch
import torch.nn.functional as F
from head_cases import grad_of
from torch import Tensor, nn

from lit_fused.training.optimizers import weight_decay_groups

ROUNDING = 8 * torch.finfo(torch.float32).eps  # Llama's norms compute in float32 also within a float64 model


def one_large_batch_training(model: nn.Module, windows: list[list[dict[str, Tensor]]], clip: float | None = None):
    """The truth: for every window one batch, mean over its valid tokens, AdamW."""
    optimizer = torch.optim.AdamW(weight_decay_groups(model), lr=1e-2, weight_decay=0.1)
    gradients, losses = [], []
    for window in windows:
        ids, labels = (torch.cat([b[name] for b in window]) for name in ("input_ids", "labels"))
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        gradients.append({n: grad_of(p).clone() for n, p in model.named_parameters()})
        losses.append(loss.item())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return gradients, losses
