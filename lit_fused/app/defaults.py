"""Decide what the configuration leaves open: the rate of an optimiser, how long a run is, and when it validates.

Rate and epochs depend on the model and the module alone, which are told by their ``_target_``. The numbers are TRL's:
its fine-tuning takes 2e-5 by default, and its examples ten times the rate of a whole model for adapters, also for
preferences; three epochs are transformers' default, and its examples for preferences have one.
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

# Factors of an optimiser's rate for new weights. AdamW's 1e-3 becomes what stands behind.
_FACTORS = {"new": 1, "pretrained": 0.02, "adapters": 0.2}  # 2e-5, 2e-4
_FACTORS_OF_ANSWERS = {"new": 0.001, "pretrained": 0.001, "adapters": 0.01}  # 1e-6, 1e-6, 1e-5
_OF_ANSWERS = {"FusedPreferenceModule", "FusedPolicyModule"}  # modules that compare a model's answers

DEFAULT_STEPS = 250
_SEVERAL = 20  # steps: a curve of the validation loss is worth its time
_NO_LIMIT = (None, -1)
_SHARES: dict[Any, float] = {1: 0.25, 2: 0.5}  # of an epoch, after which a run of few epochs validates


def rate(of_new_weights: float | str, *, _root_: Any) -> float:
    """Return an optimiser's default rate in a configuration: ``lr: ${rate:1e-3}``."""
    factors = _FACTORS_OF_ANSWERS if _compares_answers(_root_) else _FACTORS
    return float(of_new_weights) * factors[kind_of_weights(_root_)]


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


def open_values(trainer: Mapping[str, Any], epochs: int | None = None) -> dict[str, Any]:
    """Return values for the null settings of a trainer's node. ``epochs``: those of the run by default; None: it
    has 250 steps by default.

    A run by epochs validates after each, or within few; one by steps four times, or at its end if it has few steps.
    Intervals in batches count through epochs, shares within one. A GPU's steps are logged every ten, as Lightning waits
    for the GPU in a step that it logs: 3 % of the time of Qwen3-0.6B's steps on an H100, if it logs each.
    """
    steps, passes = trainer.get("max_steps"), trainer.get("max_epochs")
    interval, every = trainer.get("val_check_interval"), trainer.get("check_val_every_n_epoch")
    if steps is None and passes is None:
        passes = epochs
    by_epochs = passes not in _NO_LIMIT
    if steps is None:
        steps = -1 if by_epochs else DEFAULT_STEPS
    if interval is None:
        batches = [steps, trainer.get("accumulate_grad_batches", 1)]
        if every is None and not by_epochs and all(type(number) is int and number > 0 for number in batches):
            interval = -(-steps // (1 if epochs is None and steps < _SEVERAL else 4)) * batches[1]
        else:
            interval = _SHARES.get(passes, 1.0) if every is None else 1.0
    if every is None and isinstance(interval, float):
        every = 1
    import torch  # Help is answered without it.

    on_gpu = trainer.get("accelerator") in ("gpu", "cuda", "auto") and torch.cuda.is_available()
    logged = trainer.get("log_every_n_steps") or (10 if on_gpu else 1)
    found = {"max_steps": steps, "max_epochs": passes, "val_check_interval": interval, "check_val_every_n_epoch": every}
    found["log_every_n_steps"] = logged
    return {key: value for key, value in found.items() if key in trainer and trainer[key] != value}


OmegaConf.register_new_resolver("rate", rate, replace=True)
