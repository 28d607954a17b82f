"""lit_fused: train language models with large vocabularies on PyTorch Lightning without ever building the logits.

Importing this package loads nothing else. Each public name, and each room as an attribute, is loaded on first use.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_fused.app.restore import load
    from lit_fused.callbacks import PeakMemoryMonitor
    from lit_fused.errors import UserError
    from lit_fused.heads import identify_head
    from lit_fused.integrations import fuse, unfuse
    from lit_fused.losses import CrossEntropyLoss, LinearCrossEntropyLoss, LossOutput, ModelInternalLoss
    from lit_fused.models.language_model import LanguageModel, Seq2SeqLanguageModel
    from lit_fused.modules import FusedCausalLMModule, FusedSeq2SeqLMModule
    from lit_fused.parallel import PipelineStrategy
    from lit_fused.weights import from_config, from_pretrained, materialize

# The module of each public name; a test compares this table with the imports above.
_PLACES = {"PeakMemoryMonitor": "callbacks", "PipelineStrategy": "parallel", "UserError": "errors"} | {
    **dict.fromkeys(("CrossEntropyLoss", "LinearCrossEntropyLoss", "LossOutput", "ModelInternalLoss"), "losses"),
    **dict.fromkeys(("LanguageModel", "Seq2SeqLanguageModel"), "models.language_model"),
    **dict.fromkeys(("FusedCausalLMModule", "FusedSeq2SeqLMModule"), "modules"),
    **dict.fromkeys(("from_config", "from_pretrained", "materialize"), "weights"),
    **dict.fromkeys(("fuse", "unfuse"), "integrations"),
    "identify_head": "heads",
    "load": "app.restore",
}
__all__ = sorted(_PLACES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        value = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
