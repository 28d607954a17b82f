"""Say in one sentence what is wrong with a command line that Hydra cannot compose, and what was probably meant."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from typing import Any

from hydra._internal import utils
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lit_fused.app.faults import fault_of
from lit_fused.errors import did_you_mean

_NO_NAME = "Config group override must be a string or a list"
_HYDRAS = ("hydra", "hydra/launcher", "hydra/sweeper")


def answer_in_sentences(conf: Path) -> None:
    """Let Hydra end the program with one sentence for its errors and ours, unless ``HYDRA_FULL_ERROR=1`` is set. The
    folders in ``conf`` are the groups, their files the choices."""
    report = utils.run_and_report

    def run_and_report(function: Callable[[], Any]) -> Any:
        def answered() -> Any:
            try:
                return function()
            except (HydraException, OmegaConfBaseException, ValueError) as error:
                if wants_trace() or (type(error) is ValueError and not str(error).startswith(_NO_NAME)):
                    raise
                raise SystemExit(_sentence(error, conf)) from None
            except OSError as error:  # Hydra writes files, too.
                if wants_trace() or not (fault := fault_of(error)):
                    raise
                raise SystemExit(fault) from None

        return report(answered)

    utils.run_and_report = run_and_report


def wants_trace() -> bool:
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


def _sentence(error: Exception, conf: Path) -> str:
    text = str(error).partition("\n\nConfig search path")[0]
    if isinstance(error, MissingConfigException) and "/" in str(error.missing_cfg_file):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        known = error.options or sorted(file.stem for file in (conf / group).glob("*.yaml"))
        return f"{group}={option}: no such choice{did_you_mean(option, known)}; there are {', '.join(known)}"
    if isinstance(error, OverrideParseException):
        what = text.splitlines()[-2 if text.startswith("Error parsing") else 0]
        return f"{error.override}: cannot be read ({what}); write NAME=VALUE, in quotes if it has brackets or commas"
    if text.startswith(_NO_NAME):
        override = [
            frame.f_locals["override"] for frame, _ in walk_tb(error.__traceback__) if "override" in frame.f_locals
        ]
        known = sorted(file.stem for file in (conf / override[-1].key_or_group).glob("*.yaml"))
        return f"{override[-1].input_line}: expected the name of a choice; there are {', '.join(known)}"
    if found := re.match(r"Multiple values for ([\w/]+)", text):
        return f"{found[1]} is chosen already; choose another one without the +: {found[1]}=..."
    if found := re.match("Could not (?:override|delete from config[.]) '([^']*)'|.*but config group '([^']*)'", text):
        # Hydra was applying an override to the configuration in the innermost of these frames.
        frames = [frame for frame, _ in walk_tb(error.__traceback__) if "cfg" in frame.f_locals]
        return _unknown(found[1] or found[2], frames[-1].f_locals["cfg"] if frames else {}, conf)
    cause: Any = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(cause, OmegaConfBaseException):
        return f"{cause.full_key}: {str(cause).partition(chr(10))[0]}"
    return text


def _unknown(path: str, node: Any, conf: Path) -> str:
    """Return the sentence for the first key of a path that the configuration does not have."""
    outer, keys = "", path.split(".")
    while isinstance(node, DictConfig) and keys[0] in node and len(keys) > 1:
        key = keys.pop(0)
        outer, node = f"{outer}.{key}".lstrip("."), node[key]
    known = [str(key) for key in node if key not in ("_target_", "hydra")] if isinstance(node, DictConfig) else []
    if not outer:
        known += [*_HYDRAS, *(folder.name for folder in conf.iterdir() if folder.is_dir())]
        return f"{path}: unknown{did_you_mean(keys[0], known)}; --help lists every choice and value"
    there = f"has {', '.join(known)}" if known else "has no entries of its own"
    return f"{path}: unknown{did_you_mean(keys[0], known)}; {outer} {there}; +{path}=... adds what is not listed"
