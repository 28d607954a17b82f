"""Replace an exported folder only if this project wrote it, and nothing was put into it since."""

import json
import re
from pathlib import Path

from lit_fused.errors import UserError

_LIST = ".lit_fused.json"  # names the files that were written
# Earlier versions wrote no list; they exported files of these names into a run's folder.
_EARLIER = re.compile(
    r"(adapter/)?((model|adapter_model)[\w-]*\.safetensors(\.index\.json)?|README\.md|chat_template\.jinja|merges\.txt|"
    r"\w*config\.json|tokenizer\.(json|model)|(special_tokens_map|added_tokens|vocab)\.json|spiece\.model)"
)


def check_own(folder: Path) -> None:
    """Raise UserError if a folder is to be replaced that this project did not write, or that has other files now."""
    if not folder.exists():
        return
    other = f"give the export another folder, such as {folder.with_name(folder.name + '_new')}"
    if not folder.is_dir():
        raise UserError(f"{folder} is a file, in whose place the model would be exported; {other}")
    files, written = _files(folder), folder / _LIST
    try:
        known = set(json.loads(written.read_bytes())["files"]) if written.is_file() else None
    except (OSError, ValueError, KeyError, TypeError):
        known = set()
    if known is None and (folder.parent / ".hydra" / "config.yaml").is_file():
        known = {name for name in files if _EARLIER.fullmatch(name)}
    foreign = [name for name in files if name not in (known or ()) and name != _LIST]
    if foreign:
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise UserError(f"{folder} would be replaced by the exported model, which did not write {shown}; {other}")


def finish_own(folder: Path) -> None:
    """List a folder's files in it, and give all the permissions of a new file: some libraries restrict them."""
    written = folder / _LIST
    written.write_text(json.dumps({"files": _files(folder)}, indent=1) + "\n", encoding="utf-8")
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(written.stat().st_mode)


def _files(folder: Path) -> list[str]:
    """Return the names of everything in a folder that is no folder with files of its own."""
    inside = sorted(folder.rglob("*"))
    return [p.relative_to(folder).as_posix() for p in inside if p.is_symlink() or p.is_file() or not any(p.iterdir())]
