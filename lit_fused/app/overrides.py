"""Let a path be enough: the overrides of a checkpoint's run come before those that are typed, of which the later win.

A run writes its overrides, and the folder that it was started in, into ``RUN/run.json``. They choose among the files of
the installed ``conf/``, so nothing that a stranger's folder describes is ever built. An override that names code, or a
place where data would be written or sent, is refused unless it is typed.
"""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from lit_fused.app.config import refuse_code_of_folders
from lit_fused.app.run_folder import RUN_FILE, read_run_file
from lit_fused.atomic import is_whole, newest_in, whole_checkpoint
from lit_fused.errors import UserError, resuming
from lit_fused.ops.user_error import printable

_OF_ONE_RUN = {"mode", "ckpt_path", "output_dir", "prompt", "hydra"}
_PATHS = {"path", "val_path", "tokenizer", "cache_dir", "chat_template", "scores", "items"}
_PLAIN = re.compile(r"(\+\+?|~)?[A-Za-z]")  # Anything else could be a flag of the command line.
_UNSAFE = re.compile(
    r"^\W*hydra|_(target|partial|args|recursive|convert)_|\$\{"  # what is built
    r"|trust_remote|code_revision|auto_map|(attn|experts)_impl|kernel|megatron|weights_only|\bimpl\W*[=:].*\."  # code
    r"|prox(y|ies)|tracking_uri|registry|space_id|_url|\bhost|\bentity\b"  # where data are sent
    r"|\b(dirpath|(save|log|sub)_dir|dir|\w*root_dir|(\w+_)?folder)\W*[=:]|^\W*(recommend|score)\b.*(output|path)"
    r"|\b((file|adapter_)?name|version)\W*[=:].*(/|\.\.)",  # where is written
    re.DOTALL,
)
_WORDS = re.compile(r"""('[^']*'|"[^"]*"|[^\s{}\[\],:='"]+)(?=\s*([,}\]]|$))""")  # of an override's value


def with_run(words: Sequence[str]) -> list[str]:
    """Return a command line whose ``ckpt_path``, a file, its run's folder or ``last``, is that of a checkpoint, and
    which has the run's overrides before its own. UserError if there is no such checkpoint."""
    words, first = list(words), next((i for i, word in enumerate(words) if _is_override(word)), 0)
    place = next((i for i, word in enumerate(words) if re.match(r"\+*ckpt_path=(?!null$).", word)), None)
    if place is None:
        return words
    value = words[place].partition("=")[2]
    is_plain = value[:1] in "'\"" or os.path.exists(value)  # Hydra reads other names with backslashes.
    found = checkpoint_of(value.strip("'\"") if is_plain else value.replace("\\", ""))
    words[place], run = shlex.split(resuming(found))[0], run_of(found)
    if run is None:
        print(f"No {RUN_FILE} of a run lies beside {found}: the command line's configuration is used alone.")
        return words
    return [*words[:first], *overrides_of(run, words), *words[first:]]


def overrides_of(run: Path, typed: Sequence[str] = ()) -> list[str]:
    """Return the overrides of a run that those ``typed`` leave; a group chosen anew drops what was set below it.

    Relative paths of data and models are those of the folder that the run was started in. Raises UserError for an
    override that names code, or a place, and for a configuration folder of the user's own, which has to be typed again.
    """
    saved, now = read_run_file(run), [_key(word) for word in typed if _is_override(word)]
    flags = [str(word) for word in saved.get("flags", [])]
    if any(flag.startswith("--") and not any(word.startswith(flag) for word in typed) for flag in flags):
        raise UserError(
            f"{run} was started with {shlex.join(flags)}, whose files can name code; if you trust them, type that again"
        )
    kept = []
    for override in map(str, saved.get("overrides", [])):
        key = _key(override)
        if re.split(r"[./@]", key)[0] in _OF_ONE_RUN or any(key == k or key.startswith(f"{k}.") for k in now):
            continue
        if _is_unsafe(override):
            raise UserError(
                f"{run / RUN_FILE} has {override[:100]!r}, which could run code, or write or send data elsewhere; "
                "if you trust it, type it again"
            )
        kept.append(_placed(override, str(saved.get("cwd", ""))))
    return kept


@contextmanager
def configuration_of(run: Path, typed: Sequence[str] = (), config_dir: str | None = None) -> Iterator[DictConfig]:
    """Yield the configuration of a run, with further overrides, over the installed ``conf/``."""
    own = [] if config_dir is None else [f"hydra.searchpath=[file://{Path(config_dir).absolute()}]"]
    flags = [] if config_dir is None else ["--config-dir"]
    words = [*overrides_of(run, [*flags, *typed]), *typed, *own]
    program = GlobalHydra.instance().hydra  # of a program that loads a run and uses Hydra itself
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("lit_fused.conf", version_base="1.3"):
            cfg = compose("train", words)
            refuse_code_of_folders(cfg)
            yield cfg
    finally:
        GlobalHydra.instance().hydra = program


def run_of(checkpoint: str | Path) -> Path | None:
    """Return the folder of the run that wrote RUN/checkpoints/NAME or RUN/NAME; None if it has no ``run.json``."""
    folder = Path(checkpoint).absolute().parent
    folders = [folder, folder.parent] if folder.name == "checkpoints" else [folder]
    return next((run for run in folders if (run / RUN_FILE).is_file()), None)


def checkpoint_of(path: str) -> Path:
    """Return the checkpoint that a path means: itself, or the newest of a run's folder, or of the newest run (last)."""
    folder = Path(path).expanduser()
    if path == "last":
        places = (*Path("outputs").glob(f"*/*/{RUN_FILE}"), *Path("multirun").glob(f"*/*/*/{RUN_FILE}"))
        trained = [place for place in places if newest_in(place.with_name("checkpoints"))]
        if not trained:
            raise UserError("ckpt_path=last: no run in outputs/ or multirun/ has a checkpoint; give the path of one")
        folder = max(trained, key=lambda place: place.stat().st_mtime).parent
    if (folder / RUN_FILE).is_file():
        last = folder / "checkpoints" / "last.ckpt"
        newest = last if is_whole(last) else newest_in(folder / "checkpoints")
        if newest is None:
            raise UserError(f"ckpt_path: the run {folder} has no checkpoint; its exported model is model=pretrained")
        return newest
    whole_checkpoint(folder)
    return folder


def _is_override(word: str) -> bool:
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def _key(override: str) -> str:
    """Return the name that an override sets; of a group with a package (``model@model.model``), the package."""
    return override.lstrip("+~").partition("=")[0].rpartition("@")[2]


def _is_unsafe(override: str) -> bool:
    name, _, value = override.partition("=")
    leaves = "." not in name.partition("@")[0] and ".." in value  # the folder of a group in conf/
    is_odd = printable(override) != override  # Hydra would print it as it is.
    return leaves or is_odd or not _PLAIN.match(override) or bool(_UNSAFE.search(override))


def _placed(override: str, start: str) -> str:
    """Return an override whose paths, if they exist below the folder ``start``, can be used in this folder."""
    name, equals, value = override.partition("=")
    if not os.path.isdir(start) or start == os.getcwd() or not _PATHS & {*name.split(".")}:
        return override

    def there(found: re.Match[str]) -> str:
        path = os.path.join(start, found[1].strip("'\""))
        return f"'{path}'" if os.path.exists(path) else found[0]

    return name + equals + _WORDS.sub(there, value)
