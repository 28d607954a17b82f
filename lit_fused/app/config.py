"""Check a composed configuration: each entry is one that its target takes, and none is missing.

Hydra accepts ``+loss.chunk_sz=1`` and a mandatory value left at ``???``, and a typo must never become a default. Values
are checked by the objects that take them.
"""

import inspect
import re
from collections.abc import Iterable, Iterator
from pkgutil import resolve_name
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lit_fused.errors import UserError, did_you_mean

_BUILT = ("module", "model", "memory", "data", "loss", "optimizer", "scheduler", "trainer", "generate", "plan", "score")
_PLAIN = ("mode", "ckpt_path", "test", "prompt", "tags", "seed", "compile", "precision", "output_dir")
KEYS = (*_PLAIN, "metric", "mask_probability", "teacher", *_BUILT, "recommend", "callbacks", "logger")
_ASKING = re.compile(r"transformers\.(\w+\.)*Auto\w+\.from_(config|pretrained)")
_HYDRAS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}


def check_config(cfg: DictConfig, modes: Iterable[str]) -> None:
    """Raise one :class:`UserError` that lists every unknown, missing or empty entry by its path.

    Each target is imported. ``mode=prepare`` builds the data alone, and the other targets are not asked for.
    """
    missing = OmegaConf.missing_keys(cfg)
    content: Any = OmegaConf.to_container(cfg, resolve=not missing)
    faults = [f"{path}: has no value; give one with {path}=..." for path in sorted(missing)]
    faults += [f"{key}: missing; the run needs it, see conf/train.yaml" for key in KEYS if key not in cfg]
    for key in (str(key) for key in cfg if key not in KEYS):
        hint = "; its file needs the first line # @package _global_" if key in ("experiment", "debug") else ""
        faults.append(f"{key}: unknown{did_you_mean(key, KEYS)}; the top level has {', '.join(KEYS)}{hint}")
    if content.get("mode") not in modes:
        meant = did_you_mean(content.get("mode"), modes)
        faults.append(f"mode: must be one of {', '.join(modes)}, got {content.get('mode')!r}{meant}")
    for path, node in targets(content):
        if content.get("mode") != "prepare" or path.partition(".")[0] == "data":
            faults += _entry_faults(path, node)
    if faults:
        raise UserError("the configuration does not fit:\n" + "\n".join(f"  - {fault}" for fault in faults))


def targets(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every mapping in ``node`` that names a ``_target_``, with its path."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield path, node
        for key, value in node.items():
            yield from targets(value, f"{path}.{key}".lstrip("."))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from targets(value, f"{path}[{index}]")


def _entry_faults(path: str, node: dict[str, Any]) -> Iterator[str]:
    """Yield the keys of a node that its target does not take, and those that it needs."""
    name, given = node["_target_"], node.keys() - _HYDRAS
    try:
        target = resolve_name(name)
        parameters = inspect.signature(target).parameters
    except (ImportError, AttributeError) as error:
        package = getattr(error, "name", None)
        extra = f"; pip install 'lit-fused[{package}]'" if package in ("peft", "bitsandbytes") else ""
        yield f"{path}._target_: cannot import {name} ({error}){extra}"
        return
    except ValueError:  # It is written in C, and refuses what it does not take itself.
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = {*parameters}
    if getattr(target, "is_encoder_decoder", False):  # transformers' configurations of those read it, field or not.
        known |= {"decoder_start_token_id"}
    for key in sorted(given - known):
        yield f"{path}.{key}: unknown{did_you_mean(key, known)}; {name} takes {', '.join(sorted(known))}"
    if not node.get("_partial_") and not node.get("_args_"):
        needed = (key for key, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL)
        yield from (f"{path}.{key}: missing; {name} needs it" for key in sorted({*needed} - given))


def refuse_code_of_folders(cfg: DictConfig) -> None:
    """Give transformers' auto classes ``trust_remote_code=False`` where it has no value: they would ask at the terminal
    whether the code in a folder may run."""
    for path, node in [*targets(OmegaConf.to_container(cfg, resolve=False))]:
        if _ASKING.fullmatch(node["_target_"]) and "trust_remote_code" not in node:
            OmegaConf.update(cfg, f"{path}.trust_remote_code", False, force_add=True)


def leave_mps(cfg: DictConfig) -> None:
    """Choose the CPU, with one warning, where ``trainer.accelerator=auto`` would be MPS, which has no float64."""
    from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
    from lightning.pytorch.utilities import rank_zero_warn

    is_left_open = cfg.trainer.get("accelerator") == "auto" and not CUDAAccelerator.is_available()
    if is_left_open and MPSAccelerator.is_available():
        cfg.trainer.accelerator = "cpu"
        rank_zero_warn("MPS has no float64, which exact token counts need: this run uses the CPU")
