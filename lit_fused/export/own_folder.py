"""Replace an exported folder only if this project wrote it, and nothing was put into it since."""

import json
from pathlib import Path

from lit_fused.errors import UserError

_LIST = ".lit_fused.json"  # names the files that were written


def check_own(folder: Path) -> None:
    """Raise UserError if a folder is to be replaced that this project did not write, or that has other files now."""
    if not folder.exists():
        return
    other = f"give the export another folder, such as {folder.with_name(folder.name + '_new')}"
    if not folder.is_dir():
        raise UserError(f"{folder} is a file, in whose place the model would be exported; {other}")
    try:
        known = {_LIST, *json.loads((folder / _LIST).read_bytes())["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        known = {_LIST}
    foreign = [name for name in _files(folder) if name not in known]
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
    """Return the names of files in a folder, and of its empty folders, at any depth."""
    inside = sorted(folder.rglob("*"))
    return [p.relative_to(folder).as_posix() for p in inside if p.is_symlink() or p.is_file() or not any(p.iterdir())]
