"""Build the site of docs/ into site/: pages, examples with their output, and the API reference.

    python tools/build_site.py

Everything is staged in one folder first, because a site has only what lies in its own folder: README.md becomes the
start page, each example a page with its code and its output, and each room of the package a page of its public names.
Links between files of the checkout become links between pages. Zensical then builds the pages; a link or an anchor that
leads nowhere fails the build. It needs no network, neither to build nor to read. Beside the pages lie llms.txt and
llms-full.txt.
"""

import ast
import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import llms_text

ROOT = Path(__file__).parents[1]
LANGUAGES = {".py": "python", ".sbatch": "bash"}
ROOMS = ("ops", "losses", "training", "callbacks", "data", "heads", "metrics", "parallel")
ROLE = re.compile(r":\w+:`(?:~(?:[\w.]*\.)?)?([\w.]+)`")  # Sphinx's form of a name in a docstring
BADGE = re.compile(r"\[!(\[[^]]*\])\(https:[^)]*\)\]")  # a link around a picture from elsewhere
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(#[^)]*)?\)")


def staged_path(source: str) -> str:
    """Return where a file of the checkout lies in the site's folder."""
    if source == "README.md":
        return "index.md"
    source = source.removeprefix("docs/")
    if source.startswith("examples/") and Path(source).suffix in {*LANGUAGES, ".ipynb"}:
        return f"{source}.md"
    return source


def moved_links(text: str, source: str) -> str:
    """Turn links of the page ``source`` between files of the checkout into links between pages of the site."""

    def moved(match: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(source), match[1]))
        if not (ROOT / target).exists():
            if not target.endswith(".md"):  # Zensical looks for pages only
                sys.exit(f"{source}: {target} does not exist")
            return match[0]
        page = os.path.relpath(staged_path(target), os.path.dirname(staged_path(source)) or ".")
        return f"]({page}{match[2] or ''})"

    return LINK.sub(moved, text)


def public_names(module: str, root: Path = ROOT) -> dict[str, str]:
    """Return the public names of a package and where each is defined, both dotted, without importing anything."""
    file = root.joinpath(*module.split("."), "__init__.py")
    found = {}
    for node in ast.walk(ast.parse(file.read_text())):
        source = f"{module}.{node.module}" if isinstance(node, ast.ImportFrom) and node.level else ""
        if isinstance(node, ast.ImportFrom) and (source or (node.module or "").startswith("lit_fused")):
            source = source or str(node.module)
            for alias in node.names:
                name = alias.asname or alias.name
                package = root.joinpath(*source.split("."), "__init__.py").exists()
                defined = public_names(source, root).get(f"{source}.{alias.name}") if package else None
                found[f"{module}.{name}"] = defined or f"{source}.{alias.name}"
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            found[f"{module}.{node.name}"] = f"{module}.{node.name}"
    return dict(sorted(found.items()))


def reference_pages() -> dict[str, str]:
    """Return the API reference: a page for the package's own names, and one for each room's others."""
    own = public_names("lit_fused")
    pages, rows = {}, []
    for module in ("lit_fused", *(f"lit_fused.{room}" for room in ROOMS)):
        names = public_names(module)
        shown = names if module == "lit_fused" else {n: d for n, d in names.items() if d not in own.values()}
        entries = [f"::: {place}\n    options:\n      heading: {name}\n" for name, place in shown.items()]
        file = f"{module.replace('.', '_')}.md"
        pages[f"api/{file}"] = f"# {module}\n\n" + "\n".join(entries)
        rows.append(f"| [`{module}`]({file}) | {', '.join(f'`{name.rpartition(chr(46))[2]}`' for name in shown)} |")
    head = "# API reference\n\nEvery public name, from its docstring.\n\n| import from | names |\n|---|---|\n"
    return pages | {"api/index.md": head + "\n".join(rows) + "\n"}


def without_roles(text: str) -> str:
    """Return a docstring or a source whose names in Sphinx's roles are plain code: Markdown has no roles."""
    return ROLE.sub(r"`\1`", text)


def example_page(path: Path) -> str:
    """Return the page of an example: its docstring or first comment, what it prints, its code."""
    text, name = path.read_text(), path.relative_to(ROOT).as_posix()
    page = f"# {path.name}\n\n"
    is_python = path.suffix == ".py"
    begins = ast.get_docstring(ast.parse(text)) or "" if is_python else text.splitlines()[1].removeprefix("# ")
    page += f"{without_roles(begins)}\n\n"
    output = path.parent / "printed" / f"{path.stem}.txt"
    if output.exists():
        page += f"## Output\n\n```text\n{output.read_text()}```\n\n"
    return f'{page}## Code\n\n```{LANGUAGES[path.suffix]} title="{name}"\n{text}```\n'


def notebook_page(path: Path, folder: Path) -> str:
    """Return a notebook with its outputs as a page; its pictures are written to ``folder``."""
    parts, name = [], path.relative_to(ROOT).as_posix()
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        source = BADGE.sub(r"\1", "".join(cell["source"]))  # The site fetches nothing.
        parts.append(moved_links(source, name) if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                picture = folder / f"{path.stem}_{number}.png"
                picture.write_bytes(base64.b64decode(data["image/png"]))
                parts.append(f"![Output of the cell above]({picture.name})")
            elif printed := "".join(output.get("text", data.get("text/plain", ""))):
                parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def stage(folder: Path) -> Path:
    """Put the pages and the configuration of the site into ``folder`` and return the configuration's path."""
    pages = folder / "docs"
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("__pycache__", "*.tables.md"))
    sources = ["README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md"]
    sources += [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
    for source in sources:
        target = pages / staged_path(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(moved_links((ROOT / source).read_text(), source))
    for path in sorted((ROOT / "examples").rglob("*.*")):
        target = pages / staged_path(path.relative_to(ROOT).as_posix())
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in LANGUAGES:
            target.write_text(example_page(path))
        elif path.suffix == ".ipynb":
            target.write_text(notebook_page(path, target.parent))
    for name, text in reference_pages().items():
        (pages / name).parent.mkdir(exist_ok=True)
        (pages / name).write_text(text)
    for path in sorted((ROOT / "lit_fused").rglob("*.py")):
        copy = folder / "source" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(without_roles(path.read_text()))
    config = (ROOT / "mkdocs.yml").read_text().replace("paths: [.]", f"paths: [{json.dumps(str(folder / 'source'))}]")
    (folder / "mkdocs.yml").write_text(config)
    return folder / "mkdocs.yml"


def build(config: Path) -> subprocess.CompletedProcess[str]:
    """Build the site beside its configuration; the status is not 0 if a link leads nowhere."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", str(config)]
    return subprocess.run(command, cwd=config.parent, text=True, capture_output=True, timeout=300)


def main() -> None:
    """Build site/ anew."""
    folder = ROOT / "build" / "site"
    shutil.rmtree(folder, ignore_errors=True)
    done = build(stage(folder))
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    llms_text.write(folder, folder / "site")
    shutil.rmtree(ROOT / "site", ignore_errors=True)
    shutil.move(folder / "site", ROOT / "site")
    print("site/index.html; with its search: python -m http.server --directory site")


if __name__ == "__main__":
    main()
