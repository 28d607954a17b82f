"""Whether the auxiliary loss that a mixture of experts returns is all that its own loss has beside cross entropy.

Most models return their router's loss with every forward pass. Some compute it only when they are given labels, or add
another one, a z-loss of the router's logits: trained on cross entropy they would lose it without a word. So the model
is asked, once, with eight tokens: its own loss must be cross entropy plus the weighted loss that it returns.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.heads.probe import evaluation_mode, labels_are_shifted_by, probe_batch


def router_loss(model: PreTrainedModel, output: Any) -> Tensor | None:
    """() the router's loss in a model's output, weighted as the model's own loss weights it; None if there is none."""
    aux_loss = getattr(output, "aux_loss", None)
    if not isinstance(aux_loss, Tensor):
        return None
    weight = getattr(model, "router_aux_loss_coef", None)
    if weight is None:
        raise UserError(
            f"{type(model).__name__} returns an auxiliary loss without router_aux_loss_coef, so that its weight is "
            "unknown; switch it off (output_router_logits=False) or choose loss=model"
        )
    return weight * aux_loss


@torch.no_grad()
def check_router_loss(model: PreTrainedModel) -> None:
    """Refuse a mixture of experts whose own loss is more than cross entropy and :func:`router_loss`.

    Raises:
        UserError: with the class, both numbers and what to do.
    """
    if not getattr(model.config.get_text_config(), "output_router_logits", False):
        return
    batch = probe_batch(model)
    labels = batch["input_ids"]
    shifted = labels_are_shifted_by(model)
    with evaluation_mode(model), torch.compiler.set_stance("force_eager"):
        own = model(**batch, labels=labels).loss.float()
        output = model(**batch)
    targets = F.pad(labels[:, 1:], (0, 1), value=-100) if shifted else labels
    cross_entropy = F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())
    aux_loss = router_loss(model, output)
    known = cross_entropy if aux_loss is None else cross_entropy + aux_loss
    tolerance = 1e-4 + 4 * torch.finfo(output.logits.dtype).eps * output.logits.abs().max().float()
    if (own - known).abs() > tolerance:
        raise UserError(
            f"the own loss of {type(model).__name__} has a term that its output does not show: it is {own:.6g}, but "
            f"cross entropy and auxiliary loss are {known:.6g}; switch the router's loss off "
            "(output_router_logits=False) or choose loss=model"
        )
