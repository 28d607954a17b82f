"""Build a small model like one without numbers, to try a division on it before the model itself has any.

Whether a division over ranks is exact does not depend on the number of layers or vocabulary entries. So the twin has
few layers, at least one of each kind that the configuration names, and a small vocabulary. Its numbers are noise: no
gain is one and no bias zero.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lit_fused.models.load import ordinary_defaults

_VOCABULARY = 211  # a prime: no number of ranks divides it


@torch.no_grad()
def small_twin(model: PreTrainedModel, layers: int, device: torch.device) -> PreTrainedModel:
    """Return a model of about ``layers`` layers on ``device``, the same on every rank, float32 unless flash attention
    needs the model's half precision."""
    config = copy.deepcopy(model.config)
    text: Any = config.get_text_config()
    whole = text.num_hidden_layers
    kinds = list(getattr(text, "layer_types", None) or [""] * whole)
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    kept = sorted(first + [i for i in range(whole) if i not in first][: max(layers - len(first), 0)])
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == whole:
            setattr(text, name, type(value)(value[index] for index in kept))
    text.num_hidden_layers, text.vocab_size = len(kept), _VOCABULARY
    if isinstance(text.pad_token_id, int):
        text.pad_token_id %= _VOCABULARY
    with ordinary_defaults(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        twin = type(model)(config)
        for p in twin.parameters():
            noise = torch.randn(p.shape)
            p.copy_(noise / p.shape[-1] ** 0.5 if p.ndim > 1 else p + 0.1 * noise)
    dtype = model.dtype if "flash" in str(config._attn_implementation) else torch.float32
    nn.Module.to(twin, device, dtype)
    return twin.train(model.training)
