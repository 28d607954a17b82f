"""Give another environment what a wheel requires, and what that requires in turn, by links to this environment's files.

python .ci/link_requirements.py WHEEL SITE_PACKAGES [EXTRA ...]
"""

import importlib.util
import os
import shutil
import sys
import zipfile
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

from packaging.requirements import Requirement


def required(found: Distribution, extras: set[str]) -> list[Requirement]:
    """Return the requirements that hold here."""
    all_of_them = map(Requirement, found.requires or [])
    return [r for r in all_of_them if not r.marker or any(r.marker.evaluate({"extra": e}) for e in {"", *extras})]


def link(source: Path, target: Path) -> None:
    if target.exists():  # of an earlier call, or a compiled file that the package lists among its own
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def main(wheel: Path, site: Path, extras: set[str]) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    [info] = {name.split("/")[0] for name in names if name.split("/")[0].endswith(".dist-info")}
    waiting = required(PathDistribution(zipfile.Path(wheel, f"{info}/")), extras)
    linked: dict[str, set[str]] = {}
    while waiting:
        requirement = waiting.pop()
        found = distribution(requirement.name)
        name = found.metadata["Name"]
        if name in linked and requirement.extras <= linked[name]:
            continue
        if name not in linked:
            for file in found.files or []:
                if ".." not in file.parts:
                    source = Path(str(file.locate()))
                    link(source, site / file)
                    if source.suffix == ".py" and (compiled := Path(importlib.util.cache_from_source(source))).exists():
                        link(compiled, (site / file).parent / "__pycache__" / compiled.name)
        linked[name] = linked.get(name, set()) | requirement.extras
        waiting += required(found, linked[name])
    print(f"linked {len(linked)} packages")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), set(sys.argv[3:]))
