"""lit_fused: train language models with large vocabularies on PyTorch Lightning without ever building the logits.

Importing this package loads nothing else. Each public name, and each room as an attribute, is loaded on first use. A
Lightning that has been imported gets the names of our strategies.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from inspect import getsource
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_fused.app.restore import load
    from lit_fused.callbacks import PeakMemoryMonitor
    from lit_fused.context import ContextStrategy
    from lit_fused.errors import UserError
    from lit_fused.evaluation.text_scores import TextScore, score
    from lit_fused.heads import identify_head
    from lit_fused.integrations.fuse import fuse, unfuse
    from lit_fused.losses import CrossEntropyLoss, LinearCrossEntropyLoss, LossOutput, ModelInternalLoss
    from lit_fused.memory import reduce_memory
    from lit_fused.models.certificate import certify, certify_folder
    from lit_fused.models.drafter import drafter_for
    from lit_fused.models.item_encoders import BidirectionalItems, SASRec
    from lit_fused.models.language_model import LanguageModel
    from lit_fused.models.load import from_config, from_pretrained, materialize
    from lit_fused.models.masked_language_model import MaskedLanguageModel
    from lit_fused.models.seq2seq_language_model import Seq2SeqLanguageModel
    from lit_fused.objectives import DistillationLoss, PolicyLoss, PreferenceLoss
    from lit_fused.objectives.score_watch import compare_scores
    from lit_fused.ops import (
        TeacherHead,
        TokenScores,
        linear_cross_entropy,
        linear_distillation,
        token_scores,
        top_items,
    )
    from lit_fused.planning import PlanOptions, plan
    from lit_fused.training import (
        FusedCausalLMModule,
        FusedDistillationModule,
        FusedMaskedLMModule,
        FusedPolicyModule,
        FusedPreferenceModule,
        FusedRecommenderModule,
        FusedSeq2SeqLMModule,
    )

__version__ = "0.1.0"


def on_first_use(package: str) -> tuple[dict[str, str], Callable[[str], Any]]:
    """Return the names that a package imports ``if TYPE_CHECKING``, with their modules, and a ``__getattr__`` for it,
    which loads each of them, and a module of the package, when it is asked for. It raises UserError where the extra
    ``train`` has what one of them needs."""
    block = next(node for node in ast.parse(getsource(sys.modules[package])).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    places = {alias.name: str(node.module) for node in imports for alias in node.names}

    def load(name: str) -> Any:
        if name in places:
            with import_module("lit_fused.errors").needing(f"{package}.{name}", "train"):
                value = getattr(import_module(places[name]), name)
        elif not name.startswith("_") and find_spec(f"{package}.{name}"):
            value = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return places, load


_PLACES, __getattr__ = on_first_use(__name__)
__all__ = sorted(_PLACES)  # pyright: ignore[reportUnsupportedDunderAll]

if "lightning.pytorch" in sys.modules:
    import_module("lit_fused.strategy_names").register()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
