"""Add a mixture of experts' auxiliary loss, and refuse models whose own loss has further terms.

Most models return their router's loss with every forward pass. Some compute it only when they get labels, or add
another one, such as a z-loss of the router or of the logits; trained on cross entropy they would lose it silently. So
a model whose configuration mentions such a loss is tried once with eight tokens: its own loss must equal cross entropy
plus the weighted loss that it returns.
"""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.heads.evaluation import evaluation_mode
from lit_fused.heads.probe import labels_are_shifted_by, probe_batch

_OF_AN_AUXILIARY_LOSS = re.compile("output_router_logits|aux_loss|z_loss")


def router_loss(model: PreTrainedModel, output: Any) -> Tensor | None:
    """Return the router's loss () in a model's output, with the weight that the model's own loss gives it, or None."""
    aux_loss = getattr(output, "aux_loss", None)
    if not isinstance(aux_loss, Tensor):
        return None
    weight = getattr(model, "router_aux_loss_coef", getattr(model, "aux_loss_coef", None))
    if weight is None:
        raise UserError(
            f"{type(model).__name__} returns an auxiliary loss without router_aux_loss_coef, so that its weight is "
            "unknown; switch it off (output_router_logits=False) or choose loss=model"
        )
    return weight * aux_loss


@torch.no_grad()
def check_router_loss(model: PreTrainedModel) -> None:
    """Raise UserError if the model's own loss has terms besides cross entropy and :func:`router_loss`."""
    if not any(_OF_AN_AUXILIARY_LOSS.search(name) and value for name, value in _settings(model)):
        return
    batch = probe_batch(model)
    labels = batch["input_ids"]
    with evaluation_mode(model), torch.compiler.set_stance("force_eager"):
        aux_loss = router_loss(model, model(**batch))
        labelled = model(**batch, labels=labels)
    if labelled.loss is None:
        return
    shifted = labels_are_shifted_by(model)
    targets = F.pad(labels[:, 1:], (0, 1), value=-100) if shifted else labels
    cross_entropy = F.cross_entropy(labelled.logits.flatten(0, 1).float(), targets.flatten())
    own, known = labelled.loss.float(), cross_entropy if aux_loss is None else cross_entropy + aux_loss
    more = [name for name in labelled if name.endswith("_loss") and name != "aux_loss" and labelled[name] is not None]
    tolerance = (1e-5 + torch.finfo(labelled.loss.dtype).eps) * own.abs()
    if more or (own - known).abs() > tolerance:
        term = f"a term ({', '.join(more)})" if more else "a term that its output does not show"
        raise UserError(
            f"the own loss of {type(model).__name__} has {term}: it is {own:.6g}, but cross entropy and auxiliary loss "
            f"are {known:.6g}; switch this term off in the model's configuration (output_router_logits=False for a "
            "router's loss) or choose loss=model"
        )


def _settings(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Return names and values of the configuration, including those of a text model inside it."""
    return [*vars(model.config.get_text_config()).items(), *vars(model.config).items()]
