"""Let ``ckpt_path=X`` continue with the configuration of X's own run, and the command line on top of it.

Before Hydra starts, its primary configuration is made here: the run's as it was saved, without what the command line
chooses by group. Hydra then composes those groups and applies the overrides, as it always does.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from lit_fused.app.config import KEYS
from lit_fused.app.faults import one_sentence
from lit_fused.app.run_config import folder_of_run, node_at, saved_config, started_in
from lit_fused.app.trusted import check_trusted
from lit_fused.errors import UserError

CONTINUING = ("fit", "validate", "test")  # modes
NAME = "continued"  # The primary configuration made here has this name.
_NEW = {"mode", "ckpt_path", "trust", "prompt", "output_dir"}  # Each run has its own.
_PATHS = {"path", "val_path", "tokenizer", "cache_dir", "chat_template", "scores", "items"}  # of data and models


class _Choice(NamedTuple):
    """A group that the command line chooses, and where its option belongs."""

    key: str  # GROUP or GROUP@PACKAGE
    package: str
    content: dict[str, Any] | None  # of an option with a package other than its group: it sets these entries alone


def continued(words: Sequence[str], conf: Path, name: str = "train") -> tuple[str, list[str]]:
    """Return the name of the primary configuration for a command line, by default ``name``, and that command line.
    UserError if the run's cannot be read, could run code, or several runs are meant. ``conf`` is the project's."""
    arguments = get_args_parser().parse_args(list(words))
    if arguments.config_path or arguments.help or arguments.hydra_help or not arguments.overrides:
        return name, list(words)
    try:
        overrides = OverridesParser.create().parse_overrides(arguments.overrides)
    except HydraException:  # Hydra will say so
        return name, list(words)
    given = {override.key_or_group: override for override in overrides if not override.is_delete()}
    checkpoints = [str(value) for value in _values(given, "ckpt_path") if value is not None]
    if not checkpoints or not {*map(str, _values(given, "mode"))} <= {*CONTINUING}:
        return name, list(words)
    runs = [folder_of_run(checkpoint) for checkpoint in checkpoints]
    if len({*runs}) > 1:
        raise UserError(f"ckpt_path={','.join(checkpoints)} are of several runs; give those of one run at a time")
    run = runs[0]
    if run is None:
        if Path(checkpoints[0]).exists() and os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"No configuration of a run lies beside {checkpoints[0]}: the command line's is used alone.")
        return name, list(words)
    folders = [conf, *([Path(arguments.config_dir)] if arguments.config_dir else [])]
    primary = _read(folders, arguments.config_name or name)
    choices = {choice.key: choice for override in overrides for choice in _choices(override, folders)}
    values = [override for override in overrides if _key(override) not in choices]
    content = _primary(primary, _at_home(saved_config(run), run), choices)
    check_trusted(content, run, [*map(str, _values(given, "trust"))], [override.key_or_group for override in values])
    ConfigStore.instance().store(NAME, content)
    kept = {override.input_line: _fitting(override, content, choices) for override in values}
    flags = [word for word in words if word not in arguments.overrides]
    if arguments.config_name:  # --config-name NAME or --config-name=NAME
        flags = [f for f in flags if f != arguments.config_name and not f.startswith(("--config-name", "-cn"))]
    return NAME, [*flags, *filter(None, (kept.get(word, word) for word in arguments.overrides))]


def _values(overrides: Mapping[str, Override], key: str) -> list[Any]:
    """Return the values that the command line gives a key, several of a sweep or of a list."""
    if key not in overrides:
        return []
    override = overrides[key]
    values = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    return [one for value in values for one in (value if isinstance(value, list) else [value])]


def _key(override: Override) -> str:
    return override.key_or_group + (f"@{override.package}" if override.package else "")


def _read(folders: list[Path], name: str) -> dict[str, Any]:
    files = [folder / f"{name.removesuffix('.yaml')}.yaml" for folder in folders]
    found: Any = next((OmegaConf.to_container(OmegaConf.load(file)) for file in files if file.is_file()), None)
    return found if isinstance(found, dict) else {}


def _choices(override: Override, folders: list[Path]) -> Iterator[_Choice]:
    group = override.key_or_group
    if group.startswith("hydra/") or not any((folder / group).is_dir() for folder in folders):
        return
    if override.is_delete() or override.package:
        yield _Choice(_key(override), override.package or group, None)
        return
    for option in _values({group: override}, group):
        yield from _option(group, str(option), folders)


def _option(group: str, option: str, folders: list[Path]) -> Iterator[_Choice]:
    content, files = _read(folders, f"{group}/{option}"), [folder / group / f"{option}.yaml" for folder in folders]
    text = next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")
    header = next((line.split("@package", 1)[1].strip() for line in text.splitlines()[:5] if "@package" in line), group)
    for entry in content.pop("defaults", []):
        for key, value in entry.items() if isinstance(entry, dict) else ():
            other = key.removeprefix("override").strip().removeprefix("/").partition("@")[0]
            if header == "_global_" or key.startswith("override"):
                yield from _option(other, str(value), folders)
    package = "" if header == "_global_" else header
    yield _Choice(group, package, None if header == group else content)


def _primary(primary: dict[str, Any], tree: dict[str, Any], choices: dict[str, _Choice]) -> dict[str, Any]:
    """Return the primary configuration: the run's, with the chosen groups in its defaults list and not in itself."""
    content = primary | {key: value for key, value in tree.items() if key in KEYS and key not in _NEW}
    entries = [e for e in content.pop("defaults", []) if e == "_self_" or (isinstance(e, dict) and {*e} & {*choices})]
    named = {key for entry in entries if isinstance(entry, dict) for key in entry}
    for choice in choices.values():
        if choice.content is not None:
            _clear(node_at(content, choice.package), choice.content)
            continue
        outer, _, last = choice.package.rpartition(".")
        node = node_at(content, outer)
        if isinstance(node, dict):
            node.pop(last, None)
        inside = any(choice.package.startswith(f"{other.package}.") for other in choices.values() if other.package)
        if "@" in choice.key and choice.key not in named and not inside:
            entries.insert(0, {choice.key: None})
    return {"defaults": entries, **content}


def _clear(node: Any, new: dict[str, Any]) -> None:
    for key, value in new.items() if isinstance(node, dict) else ():
        if isinstance(value, dict) and "_target_" not in value and isinstance(node.get(key), dict):
            _clear(node[key], value)
        else:
            node.pop(key, None)


def _fitting(override: Override, content: dict[str, Any], choices: dict[str, _Choice]) -> str | None:
    """Return an override as it fits the run's configuration, which has what the run's command line added or deleted."""
    line, outer, last = override.input_line or "", *override.key_or_group.rpartition(".")[::2]
    if not override.is_delete():
        return f"+{line}" if override.is_add() and not override.is_force_add() else line
    nodes = [node_at(content, outer)]
    for choice in choices.values():
        if f"{override.key_or_group}.".startswith(f"{choice.package}." if choice.package else ""):
            inner = outer.removeprefix(choice.package).strip(".")
            nodes.append({last: None} if choice.content is None else node_at(choice.content, inner))
    return line if any(last in node for node in nodes if isinstance(node, dict)) else None


def _at_home(tree: dict[str, Any], run: Path) -> dict[str, Any]:
    """Make a run's configuration one that can be used in this folder, in place."""
    folder = started_in(run)
    nodes = [node_at(tree, path) for path in ("data", "model", "model.model", "teacher", "teacher.model")]
    for node in nodes if folder != os.getcwd() else ():
        for key in _PATHS & node.keys() if isinstance(node, dict) else ():
            node[key] = _placed(key, node[key], folder)
    return tree


def _placed(key: str, value: Any, folder: str) -> Any:
    """Return a relative path, or those of several sets by name, as a path below a folder, if it is one there."""
    if isinstance(value, dict):
        sets = {name: part if isinstance(part, dict) else {"": part} for name, part in value.items()}
        placed = {
            name: {inner: _placed(key, path, folder) if inner in ("", "path") else path for inner, path in part.items()}
            for name, part in sets.items()
        }
        return {name: part.get("", part) for name, part in placed.items()}
    if not isinstance(value, str) or "$" in value:
        return value
    there = os.path.join(folder, os.path.expanduser(value))
    return there if key == "cache_dir" or os.path.exists(os.path.join(folder, value)) else value


_INCIDENTAL = {"weights", "batch_size", "num_workers", "prepare_workers", "cache_dir", "seed"}


def different_data(data: Any, checkpoint: str) -> str | None:
    """Return a sentence on how data, resolved, differ from those of a checkpoint's run; None if they do not."""
    run = folder_of_run(checkpoint)
    if run is None:
        return None
    try:
        cfg = OmegaConf.create(_at_home(saved_config(run), run))
        theirs = OmegaConf.to_container(cfg.data, resolve=True)
    except Exception as error:  # whatever a strange configuration raises, the evaluation goes on
        return f"the data of {run} are unknown ({type(error).__name__}), so these may be others"
    assert isinstance(theirs, dict)
    keys = [key for key in {**theirs, **data} if key not in _INCIDENTAL and theirs.get(key) != data.get(key)]
    if not keys:
        return None
    both = [(key, str(data.get(key)), str(theirs.get(key))) for key in keys[:4]]
    listed = "; ".join(f"data.{key} is {ours:.200} in place of {other:.200}" for key, ours, other in both)
    anew = data.get("tokenizer") is None and theirs.get("tokenizer") is None and "encode" in data
    own = f"; a tokenizer is trained anew on them: data.tokenizer={run / 'exported'} is the run's" if anew else ""
    return f"these are not the data of {run}: {listed}{own}"


def continue_run(conf: Path, name: str) -> str:
    """Change this process's command line as :func:`continued` does, and return the primary configuration's name. A
    UserError, or a file that cannot be read, ends the process with its sentence."""
    with one_sentence():
        name, sys.argv[1:] = continued(sys.argv[1:], conf, name)
    return name
