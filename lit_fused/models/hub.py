"""Read a pretrained model of a folder or of the hub, without running anything in it."""

import re
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from lit_fused.errors import UserError

# Implementations that are torch's or transformers' own code. transformers loads every other one from the Hub, by its
# name ("owner/kernel") or where a package such as flash_attn is not installed.
_OWN_CODE = {"eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm"}
_IMPLEMENTATIONS = {f"{mark}{part}_implementation" for mark in ("", "_") for part in ("attn", "experts")}
_LAYERS, _MOST_LAYERS = re.compile(r"n(um)?_.*layers?"), 10_000
_KINDS: list[tuple[Any, Any]] = [
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    (AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
    (AutoModelForMaskedLM, MODEL_FOR_MASKED_LM_MAPPING),
]


def config_of(path: str, revision: str | None = None) -> PreTrainedConfig:
    """Return the configuration of a model; UserError if transformers cannot read it, or if to build its layers would
    not end.

    Names of attention or expert implementations that may bring code from the Hub are left out, with a warning: such a
    name is for the user to give."""
    try:
        written, _ = PreTrainedConfig.get_config_dict(path, revision=revision or "main")
        left_out: list[str] = []
        plain = _without_foreign_code(written, left_out)
        config = AutoConfig.from_pretrained(path, revision=revision or "main", trust_remote_code=False)
    except (OSError, ValueError) as error:  # transformers' words also for code of the folder's own
        raise UserError(f"{path} cannot be loaded: {str(error).strip()}") from error
    if left_out:
        from lightning.pytorch.utilities import rank_zero_warn  # Lightning loads matplotlib.

        config = type(config).from_dict(plain, name_or_path=path)
        rank_zero_warn(
            f"the config.json of {path} asks for {', '.join(dict.fromkeys(left_out))}, which could run code of the "
            "Hub; transformers' default is used instead, or the attn_implementation that you give"
        )
    return config


def read(name: str, config: PreTrainedConfig, revision: str | None, **options: Any) -> PreTrainedModel:
    """Return a model, whole, on the CPU. UserError if transformers cannot load it, or
    if some of its weights are missing."""
    where = {} if revision is None else {"revision": revision}
    try:
        model, report = auto_class(config).from_pretrained(
            name, config=config, trust_remote_code=False, output_loading_info=True, **options, **where
        )
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{name} cannot be loaded: {str(error).strip()}") from error
    if report["missing_keys"]:
        raise UserError(
            f"{name} has no weights for {min(report['missing_keys'])} of {type(model).__name__}, which would be "
            "random; is it a checkpoint of this architecture and with an output layer?"
        )
    return model


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' auto class for a language model; UserError if it has none. Of the types that are causal or
    masked models, those are masked whose checkpoint is of such a class (bert-base: BertForMaskedLM), unless
    ``is_decoder`` is set. Decoders that hear (Voxtral) are among its sequence-to-sequence models."""
    fitting = {kind: mapping[type(config)] for kind, mapping in _KINDS if type(config) in mapping}
    if not fitting:
        raise UserError(
            f"transformers' auto classes have no language model for a {type(config).__name__}; if there is one, build "
            "it by its own class and pass it to the module"
        )
    if config.is_encoder_decoder and AutoModelForSeq2SeqLM in fitting:
        return AutoModelForSeq2SeqLM
    masked = getattr(fitting.get(AutoModelForMaskedLM), "__name__", None)
    causal = getattr(fitting.get(AutoModelForCausalLM), "__name__", masked)
    was_masked = masked in (config.architectures or [causal]) and not getattr(config, "is_decoder", False)
    return AutoModelForMaskedLM if masked is not None and was_masked else next(iter(fitting))


def _without_foreign_code(node: Any, left_out: list[str]) -> Any:
    """Return what a configuration has, at any depth, without implementations that are not torch's own; name these.
    ValueError for more layers than any model has."""
    if isinstance(node, list):
        return [_without_foreign_code(value, left_out) for value in node]
    if not isinstance(node, dict):
        return node
    for name, number in node.items():
        if _LAYERS.fullmatch(name) and isinstance(number, int) and number > _MOST_LAYERS:
            raise ValueError(f"{name} of its config.json is {number}, and no model has so many")
    foreign = {k: v for k, v in node.items() if k in _IMPLEMENTATIONS and v is not None and not _is_own_code(v)}
    left_out += [f"{key}={value}" for key, value in foreign.items()]
    return {key: _without_foreign_code(value, left_out) for key, value in node.items() if key not in foreign}


def _is_own_code(implementation: Any) -> bool:
    """``implementation`` is a name, or a mapping from parts of the model to names."""
    names = implementation.values() if isinstance(implementation, dict) else [implementation]
    return all(name is None or (isinstance(name, str) and name in _OWN_CODE) for name in names)
