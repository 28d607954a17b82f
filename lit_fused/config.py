"""Reject a wrong configuration before anything heavy is built, with every fault in one list.

Hydra composes ``+foo=1``, ``+loss.chunk_sz=1`` or a mandatory value left at ``???`` without a word, and a typo must
never become a default. So: unknown and missing keys are collected over the whole tree, and every node that names a
``_target_`` is bound, unbuilt, to the signature of what it names.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import lightning as L
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedConfig

from lit_fused.checkpoints import checkpoint_fault
from lit_fused.errors import UserError

_KEYS = {
    "mode": "what to do",
    "ckpt_path": "a checkpoint to resume from, to evaluate or to generate with",
    "prompt": "a text to continue",
    "generate": "how it is continued",
    "seed": "an integer",
    "compile": "what torch.compile is at: none, regional or whole",
    "kernels": "whose kernels the model's layers run in: none or liger",
    "precision": "Lightning's precision",
    "output_dir": "the run's folder",
    "objective": "the metric that a search goes by",
    "module": "a LightningModule, built from the backbone, the loss, the optimizer and the scheduler",
    "model": "the backbone",
    "data": "a LightningDataModule",
    "loss": "a loss strategy",
    "optimizer": "a partial of a torch optimizer",
    "scheduler": "a partial of a learning-rate schedule",
    "trainer": "Lightning's Trainer",
    "callbacks": "named callbacks",
    "logger": "named Lightning loggers",
    "plan": "mode=plan's options",
    "fit_batch": "mode=fit_batch's options",
}
_HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}


def check_config(cfg: DictConfig, modes: Iterable[str]) -> None:
    """Raise one :class:`UserError` that lists every unknown, missing and ill-fitting entry by its path."""
    unknown = [str(k) for k in cfg if k not in _KEYS]
    faults = [f"{key}: unknown; the top level has {', '.join(_KEYS)}" for key in unknown]
    faults += [f"{key}: missing; the run needs {_KEYS[key]}" for key in _KEYS if key not in cfg]
    missing = OmegaConf.missing_keys(cfg)
    faults += [f"{path}: has no value; give one with {path}=..." for path in sorted(missing)]
    for path, node in _targets(OmegaConf.to_container(cfg, resolve=not missing)):
        faults += _binding_faults(path, node)
    if cfg.get("mode") not in modes:
        faults.append(f"mode: must be one of {', '.join(modes)}, got {cfg.get('mode')!r}")
    elif cfg.mode == "validate" and cfg.get("ckpt_path") is None:
        faults.append("ckpt_path: mode=validate needs a checkpoint to evaluate; give one with ckpt_path=FILE")
    elif cfg.mode == "generate" and cfg.get("prompt") is None:
        faults.append("prompt: mode=generate needs a text to continue; give one with 'prompt=\"...\"'")
    faults += _checkpoint_faults(cfg)
    if faults:
        raise UserError("the configuration does not fit:\n" + "\n".join(f"  - {fault}" for fault in faults))


def _checkpoint_faults(cfg: DictConfig) -> Iterator[str]:
    fault = None if cfg.get("ckpt_path") is None else checkpoint_fault(cfg.ckpt_path)
    if fault is not None:
        yield f"ckpt_path: {fault}"


def check_precision(precision: str, trainer: L.Trainer) -> None:
    """Refuse the one precision that Lightning replaces by another."""
    if precision == "16-mixed" and trainer.precision != precision:
        raise UserError(
            f"precision=16-mixed does not exist on this device: Lightning would run {trainer.precision} in its place; "
            f"choose precision={trainer.precision} if that is what you want, or precision=32-true"
        )


def _targets(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping below ``node`` that names a ``_target_``, with its path."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield path, node
        for key, value in node.items():
            yield from _targets(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _targets(value, f"{path}[{index}]")


def _binding_faults(path: str, node: dict[str, Any]) -> Iterator[str]:
    name = node["_target_"]
    try:
        target = _locate(name)
    except (ImportError, AttributeError) as error:
        extra = "; pip install 'lit-fused[peft]'" if getattr(error, "name", None) == "peft" else ""
        yield f"{path}._target_: cannot import {name} ({error}){extra}"
        return
    given = {key: value for key, value in node.items() if key not in _HYDRA_KEYS}
    if inspect.isclass(target) and issubclass(target, PreTrainedConfig):
        known = {field.name for field in dataclasses.fields(target)}  # its signature takes anything
        if getattr(target, "is_encoder_decoder", False):
            known.add("decoder_start_token_id")  # every such model reads it, also where it is no field (T5)
    else:
        try:
            parameters = inspect.signature(target).parameters.values()
        except ValueError:  # written in C (datetime.timedelta): it refuses what it does not know itself
            return
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return
        known = {p.name for p in parameters}
        required = {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL}
        if not node.get("_partial_") and not node.get("_args_"):
            yield from (f"{path}.{key}: missing; {name} needs it" for key in sorted(required - given.keys()))
    yield from (f"{path}.{key}: unknown; {name} takes {', '.join(sorted(known))}" for key in given if key not in known)


def _locate(name: str) -> Any:
    """The object at a dotted path, as Hydra finds it: modules as far as they go, then attributes."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:index]))
        found = getattr(found, part)
    return found
