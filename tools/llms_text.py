"""Write the site for programs that read text, as llmstxt.org describes: llms.txt lists the pages, each with its first
sentence, and llms-full.txt has their text. tools/build_site.py calls it.

The pages lie beside them in Markdown. Those of the API reference, which name the docstrings that they show, get their
text.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

SHOWN = re.compile(r"^::: (\S+)\n    options:\n      heading: (\S+)\n", re.MULTILINE)  # as build_site makes it
LINK = re.compile(r"!?\[([^]]*)\]\([^)]*\)")


def pages_of(navigation: Any, section: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield each page of a navigation: its section, its title, and its path."""
    for entry in navigation:
        for title, below in entry.items():
            if isinstance(below, str):
                yield section or title, title, below
            else:
                yield from pages_of(below, title)


def first_sentence(page: str) -> str:
    """Return the first sentence of a page's first paragraph, without its links: of an API reference the names."""
    if names := SHOWN.findall(page):
        return ", ".join(f"`{name.rpartition('.')[2]}`" for _, name in names)
    for paragraph in re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE).split("\n\n"):
        text = "" if LINK.fullmatch(paragraph.strip()) else LINK.sub(r"\1", " ".join(paragraph.split()))
        if text and text[0] not in "#<|-!":
            return re.split(r"(?<=[.]) ", text)[0].rstrip(":.") + "."
    raise ValueError(f"a page without a paragraph: {page[:80]}")


def reference(place: str, name: str, source: Path) -> str:
    """Return the text of a public name that is defined at ``place``, dotted: its signature and its docstring."""
    module, _, own_name = place.rpartition(".")
    file = source.joinpath(*module.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == own_name:
            methods = [node] if isinstance(node, ast.FunctionDef) else node.body
            makers = [f for f in methods if isinstance(f, ast.FunctionDef) and f.name in (own_name, "__init__")]
            given = ast.unparse(makers[0].args).removeprefix("self").removeprefix(", ") if makers else ""
            return f"## {name}{f'({given})' * bool(makers)}\n\n{ast.get_docstring(node) or ''}\n"
        if isinstance(node, ast.ImportFrom) and own_name in (alias.name for alias in node.names):
            return reference(f"{node.module}.{own_name}", name, source)
    return f"## {name}\n"


def text_of(page: Path, source: Path) -> str:
    """Return a page without layout, and with the docstrings that it shows."""
    text = re.sub(r"^</?div.*\n", "", page.read_text(), flags=re.MULTILINE)
    return SHOWN.sub(lambda shown: reference(shown[1], shown[2], source), text)


def write(folder: Path, site: Path) -> None:
    """Write llms.txt, llms-full.txt and the pages in Markdown into ``site``, of a folder that build_site has staged."""
    config, pages = yaml.safe_load((folder / "mkdocs.yml").read_text()), folder / "docs"
    listed = [*pages_of(config["nav"])]
    scripts = {path.relative_to(pages).as_posix() for path in pages.rglob("*.md")} - {page for *_, page in listed}
    place = max(index for index, (section, *_) in enumerate(listed) if section == "Examples") + 1
    listed[place:place] = [("Examples", Path(script).name.removesuffix(".md"), script) for script in sorted(scripts)]

    lines, whole, before = [f"# {config['site_name']}", "", f"> {config['site_description']}"], [], None
    for section, title, page in listed:
        text = text_of(pages / page, folder / "source")
        lines += ["", f"## {section}", ""] if section != before else []
        lines.append(f"- [{title}]({page}): {first_sentence((pages / page).read_text())}")
        whole.append(f"<!-- {page} -->\n\n{text.strip()}\n")
        (site / page).parent.mkdir(parents=True, exist_ok=True)
        (site / page).write_text(text)
        before = section
    (site / "llms.txt").write_text("\n".join(lines) + "\n")
    (site / "llms-full.txt").write_text("\n".join(whole))
