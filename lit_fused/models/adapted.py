"""Put adapters (PEFT) around a model that is built here, or around a pretrained one."""

import re
from collections.abc import Callable
from typing import Any

from peft import PeftConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from lit_fused.models.load import from_pretrained

_SCALES = re.compile(r"\.weight\.(absmax|quant_map|nested_\w+|quant_state\.\w+)$")


def with_adapters(
    model: Callable[[], nn.Module], peft_config: PeftConfig, path: str | None = None, load_in_4bit: bool = False
) -> Any:
    """Return a model with adapters, whose own weights are frozen.

    Args:
        model: builds the model, unless a path is given.
        peft_config: PEFT's.
        path: of a pretrained model, a folder or a name on the hub.
        load_in_4bit: hold the pretrained weights, but those of the embedding and the output layer, in 4 bits
            (bitsandbytes, NF4).
    """
    own = getattr(model, "keywords", {}).get("path")  # of a pretrained model that is built with further options
    around = None if path == own else path
    base: Any = from_pretrained(around, at_once=True, load_in_4bit=load_in_4bit) if around else model()
    assert isinstance(base, PreTrainedModel)
    if getattr(base, "is_loaded_in_4bit", False):
        base.register_load_state_dict_pre_hook(_without_scales)
    return get_peft_model(base, peft_config)


def _without_scales(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Leave out what bitsandbytes saves beside its weights and does not load: the model has it from its own files."""
    for name in [name for name in state if name.startswith(prefix) and _SCALES.search(name)]:
        del state[name]
