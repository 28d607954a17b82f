"""Make a drafter for speculative decoding (EAGLE, arXiv:2401.15077) of its target.

It has the target's embeddings and output layer, which are not trained, and few layers, which begin as the target's
first ones. At token t it sees the embedding of token t and the target's hidden state of token t - 1, and learns by
``FusedDistillationModule`` to predict token t + 1 as the target does.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_fused.losses.loss import PREVIOUS
from lit_fused.models.hub import config_of, read


def drafter_for(path: str | Path, num_layers: int = 1) -> PreTrainedModel:
    """Return a causal language model whose forward also takes "previous_hidden_states" (B, T, D): the input of the
    target's output layer at the token before. Without it they are zeros.

    Args:
        path: of the target, a folder or a name on the hub. No more of its weights is read than the drafter has.
        num_layers: of the drafter.
    """
    config = config_of(str(path))
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    drafter: Any = read(str(path), config, None, dtype=torch.float32)
    for layer in (drafter.get_input_embeddings(), drafter.get_output_embeddings()):
        layer.requires_grad_(False)
    width = drafter.get_output_embeddings().weight.shape[1]
    drafter.both = nn.Linear(2 * width, width, bias=False)
    drafter.register_forward_pre_hook(_see_both, with_kwargs=True)
    return drafter


def is_drafter(model: nn.Module | None) -> bool:
    return isinstance(getattr(model, "both", None), nn.Linear)


def _see_both(drafter: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a forward pass inputs of both embeddings and states."""
    named = dict(zip(("input_ids",), arguments, strict=False)) | named
    embeddings: Tensor = drafter.get_input_embeddings()(named.pop("input_ids"))
    states = named.pop(PREVIOUS, None)
    states = torch.zeros_like(embeddings) if states is None else states.to(embeddings.dtype)
    return (), named | {"inputs_embeds": drafter.both(torch.cat([embeddings, states], -1))}
