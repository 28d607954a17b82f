"""Decide the default rate and epochs of a run: of weights that have learned something already, and of recommenders.

Both depend on the model and the module alone, which are told by their ``_target_``. The numbers are TRL's: its
fine-tuning takes 2e-5 by default, and its examples ten times the rate of a whole model for adapters, also for
preferences; three epochs are transformers' default, and its examples for preferences have one.
"""

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

# Factors of an optimiser's rate for new weights. AdamW's 1e-3 becomes what stands behind.
_FACTORS = {"new": 1, "pretrained": 0.02, "adapters": 0.2}  # 2e-5, 2e-4
_FACTORS_OF_ANSWERS = {"new": 0.001, "pretrained": 0.001, "adapters": 0.01}  # 1e-6, 1e-6, 1e-5
_OF_ANSWERS = {"FusedPreferenceModule", "FusedPolicyModule"}  # modules that compare a model's answers


def rate(of_new_weights: float | str, *, _root_: Any) -> float:
    """Return an optimiser's default rate in a configuration: ``lr: ${rate:1e-3}``."""
    factors = _FACTORS_OF_ANSWERS if _compares_answers(_root_) else _FACTORS
    return float(of_new_weights) * factors[kind_of_weights(_root_)]


def with_rate(content: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration, not resolved, with the number for its optimiser's default rate."""
    optimizer = content.get("optimizer")
    if isinstance(optimizer, dict) and (found := re.fullmatch(r"\$\{rate:(\d[\d.e-]*)\}", str(optimizer.get("lr")))):
        return content | {"optimizer": optimizer | {"lr": rate(found[1], _root_=content)}}
    return content


def default_epochs(content: Mapping[str, Any]) -> int | None:
    """Return the epochs of a run whose configuration has neither steps nor epochs; None if it is one by steps."""
    if _name(content, "module") == "FusedRecommenderModule":
        return 15  # 250 steps do not see enough users of the data in docs/evidence/runs.md
    if kind_of_weights(content) == "new":
        return None
    # Pairs that are learned by heart win without getting likelier, and rollouts are of the model as it was.
    return 1 if _compares_answers(content) else 3


def kind_of_weights(content: Mapping[str, Any]) -> str:
    """Return "new", "pretrained" or "adapters"."""
    name = _name(content, "model")
    adapters = dict.fromkeys(("with_adapters", "get_peft_model"), "adapters")
    return {**adapters, "from_pretrained": "pretrained"}.get(name, "new")


def _compares_answers(content: Mapping[str, Any]) -> bool:
    return _name(content, "module") in _OF_ANSWERS


def _name(content: Mapping[str, Any], key: str) -> str:
    node = content.get(key)
    return str(node.get("_target_")).rpartition(".")[2] if isinstance(node, Mapping) else ""


OmegaConf.register_new_resolver("rate", rate, replace=True)
