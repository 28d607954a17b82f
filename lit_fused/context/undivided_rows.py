"""Find out, by experiment, whether a model that is divided over ranks gives what it gives undivided.

Attention is exchanged between ranks. What else mixes the tokens of a row (a convolution, a recurrence, positions that a
layer counts itself) would see a part for a whole, and no error would show it. So a short row is run both ways, without
and with padding, before the first batch. The weights get noise meanwhile, as a path between tokens can be closed by
those that a model starts with.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.heads.model_state import probing
from lit_fused.models.documents_apart import noise_in, rounding
from lit_fused.models.language_model import LanguageModel

if TYPE_CHECKING:
    from lit_fused.context.divided_forward import DividedForward

_OTHERWISE = "choose strategy=fsdp2, which divides no row"


@torch.no_grad()
def check_undivided(forward: "DividedForward") -> None:
    """Raise UserError, the same on all ranks, if the hidden states of a divided row are not those of a whole one. Call
    it in the precision's context, where the model's weights are whole."""
    model = forward.model
    device = next(model.parameters()).device
    with probing(model.backbone):
        with noise_in(model.backbone):
            fault = _fault(forward, device)
        if fault is None:
            fault = _fault(forward, device)
    if fault:
        raise _refusal(model, fault)


def _refusal(model: LanguageModel, fault: str) -> UserError:
    return UserError(f"{model.name} is not the same with its rows divided over ranks: {fault}; {_OTHERWISE}")


def _batches(model: LanguageModel, size: int, device: torch.device) -> list[dict[str, Tensor]]:
    """Return two rows of a length that the ranks do not divide, without padding and with padding on the left."""
    length = 4 * size + 3
    tokens = torch.arange(2 * length, device=device).square().mul(7).add(3).remainder(min(model.vocabulary, 4096))
    tokens = tokens.view(2, length)
    mask = torch.ones_like(tokens)
    mask[1, : length // 4] = 0
    plain = {"input_ids": tokens, "labels": tokens}
    return [plain, plain | {"attention_mask": mask}]


def _fault(forward: "DividedForward", device: torch.device) -> str | None:
    """Return what differs, "" for nothing; None if the numbers are not finite."""
    model = forward.model
    by_logits = model.loss.builds_logits
    undivided, divided = (m.logits if by_logits else m.hidden_states for m in (model, forward))
    for batch in _batches(model, forward.ranks.size, device):
        whole = undivided(batch)[0].float()
        alone = undivided({name: value[1:] for name, value in batch.items()})[0].float()
        try:
            found = forward.ranks.whole(divided(batch)[0], whole.shape[1]).float()
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # The model raised it because of the parts that it was given.
            raise _refusal(forward.model, f"it cannot run on a part ({type(error).__name__}: {error})") from error
        if not whole.isfinite().all():
            return None
        seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])) != 0
        size = whole.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        noise = ((alone - whole[1:]).norm(dim=-1) / size[1:]).where(seen[1:], 0).max().item()
        worst = ((found - whole).norm(dim=-1) / size).where(seen, 0).max().item()
        if not worst <= max(16 * rounding(model.backbone, device), 1e-4, 4 * noise):
            padded = " of a padded row" if "attention_mask" in batch else ""
            return f"the output of a token{padded} differs by {worst:.2g} of it"
    return ""
