"""Locate a pretrained model, a folder or a name on the hub, before it is loaded.

The hub's client waits half a minute, once per file, for an address that does not answer. So the hub is tried once,
briefly; without an answer the model comes from the cache of an earlier download, or the run ends with one sentence.
"""

import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import constants, errors, get_session, try_to_load_from_cache
from transformers import AutoConfig, PreTrainedConfig

from lit_fused.errors import UserError

_CONFIG = "config.json"
_OTHER_FOLDERS = {
    "adapter_config.json": ": it has PEFT adapters alone, which PeftModel.from_pretrained puts around their model",
    ".metadata": ": it is a run's checkpoint, of which python -m lit_fused.export makes a model's folder",
}
# Implementations that are torch's or transformers' own code. transformers loads every other one from the Hub, by its
# name ("owner/kernel") or where a package such as flash_attn is not installed.
_OWN_CODE = {"eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm"}
_IMPLEMENTATIONS = {f"{mark}{part}_implementation" for mark in ("", "_") for part in ("attn", "experts")}
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def locate(path: str | Path, revision: str | None = None) -> str:
    """Return a folder (``~`` is the home folder), or a model's name on the hub, from which transformers can load now;
    ``revision`` is a branch, tag or commit there. UserError if there is none, or the hub does not answer and the model
    was never downloaded."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / _CONFIG).is_file():
            kind = next((kind for file, kind in _OTHER_FOLDERS.items() if (folder / file).is_file()), "")
            raise UserError(f"{path} has no {_CONFIG}{kind}; give a folder written by save_pretrained")
        return str(folder)
    if folder.exists():
        raise UserError(f"{path} is a file; give the folder that it lies in")
    if not _HUB_NAME.fullmatch(str(path)):
        raise UserError(f"there is no folder {path}, seen from {os.getcwd()}, and no model on the hub is named so")
    reason = why_the_hub_is_silent()
    if reason is None:
        return str(path)
    found = try_to_load_from_cache(str(path), _CONFIG, revision=revision)
    if not isinstance(found, str):
        raise UserError(
            f"there is no folder {path}, and no model of that name was downloaded earlier: {reason}; download it where "
            "there is a network (hf download), or give the path of a folder"
        )
    from lightning.pytorch.utilities import rank_zero_warn  # Lightning loads matplotlib.

    rank_zero_warn(f"{reason}: {path} is taken from {Path(found).parent}, as it was downloaded")
    return str(Path(found).parent)


def why_the_hub_is_silent() -> str | None:
    """Return why the hub cannot be used, as part of a sentence; None if it answers within five seconds."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=5.0, follow_redirects=False)
    except Exception as error:  # its type depends on the HTTP client of the hub's library
        return f"{constants.ENDPOINT} does not answer ({type(error).__name__})"
    return None


def config_of(path: str, revision: str | None = None) -> PreTrainedConfig:
    """Return the configuration of a model that :func:`locate` has found; UserError if transformers cannot read it.

    Names of attention or expert implementations that may bring code from the Hub are left out, with a warning: such a
    name is for the user to give."""
    try:
        config = AutoConfig.from_pretrained(path, revision=revision or "main", trust_remote_code=False)
        written, _ = PreTrainedConfig.get_config_dict(path, revision=revision or "main")
        left_out: list[str] = []
        plain = _without_foreign_code(written, left_out)
        if left_out:
            config = type(config).from_dict(plain, name_or_path=path)
    except (OSError, ValueError) as error:
        raise UserError(_sentence(path, revision, error)) from error
    if left_out:
        from lightning.pytorch.utilities import rank_zero_warn  # Lightning loads matplotlib.

        rank_zero_warn(
            f"the {_CONFIG} of {path} asks for {', '.join(dict.fromkeys(left_out))}, which could run code of the Hub; "
            "transformers' default is used instead, or the attn_implementation that you give"
        )
    return config


def _without_foreign_code(node: Any, left_out: list[str]) -> Any:
    """Return what a configuration has, at any depth, without implementations that are not torch's own; name these."""
    if isinstance(node, list):
        return [_without_foreign_code(value, left_out) for value in node]
    if not isinstance(node, dict):
        return node
    foreign = {k: v for k, v in node.items() if k in _IMPLEMENTATIONS and v is not None and not _is_own_code(v)}
    left_out += [f"{key}={value}" for key, value in foreign.items()]
    return {key: _without_foreign_code(value, left_out) for key, value in node.items() if key not in foreign}


def _is_own_code(implementation: Any) -> bool:
    """``implementation`` is a name, or a mapping from parts of the model to names."""
    names = implementation.values() if isinstance(implementation, dict) else [implementation]
    return all(name is None or (isinstance(name, str) and name in _OWN_CODE) for name in names)


def _sentence(path: str, revision: str | None, error: Exception) -> str:
    sentences = {  # the first is a kind of the second
        errors.GatedRepoError: f"{path} is gated: accept its licence at {constants.ENDPOINT}/{path}, then log in with "
        "hf auth login or set HF_TOKEN",
        errors.RepositoryNotFoundError: f"there is no folder {path}, and the hub has no model of that name that you "
        "may read; look at its spelling, or for a private one log in with hf auth login",
        errors.RevisionNotFoundError: f"{path} has no revision {revision} on the hub",
        errors.LocalEntryNotFoundError: f"{path} could not be downloaded: the hub stopped answering; try again",
    }
    causes: list[BaseException | None] = [error]
    while (cause := causes[-1]) is not None:
        causes.append(cause.__cause__ or cause.__context__)
    for kind, sentence in sentences.items():
        if any(isinstance(cause, kind) for cause in causes):
            return sentence
    if "custom code" in str(error):
        return (
            f"{path} is an architecture of its own, in code that comes with the weights, which is not run here; load "
            "it with transformers (trust_remote_code=True) in a program of your own, and pass it to FusedCausalLMModule"
        )
    return f"there is no model to be loaded at {path}: {str(error).strip().splitlines()[0]}"
