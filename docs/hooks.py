"""Hooks of the site's build: ``examples/`` becomes part of it.

On GitHub a page of ``docs/`` links to ``../examples/before.py``. The site has only what lies in ``docs/``, so each
example becomes a page here, its code in a block, and links to it follow. What is linked and is not there fails the
build, as any other link does.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

EXAMPLES = Path(__file__).parents[1] / "examples"
LANGUAGES = {".py": "python", ".sbatch": "bash"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every example, and examples/README.md as it is."""
    files.append(File.generated(config, "examples/README.md", abs_src_path=str(EXAMPLES / "README.md")))
    for path in sorted(EXAMPLES.rglob("*")):
        if path.suffix in LANGUAGES:
            name = path.relative_to(EXAMPLES.parent).as_posix()
            page = f"# {name}\n\n```{LANGUAGES[path.suffix]}\n{path.read_text()}```\n"
            file = File.generated(config, f"{name}.md", content=page)
            file.inclusion = file.inclusion.NOT_IN_NAV
            files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between docs/ and examples/ into links between their pages."""
    root = "../" * page.file.src_uri.count("/")
    if page.file.src_uri.startswith("examples/"):
        markdown = markdown.replace("](../docs/", f"]({root}")
    markdown = re.sub(r"\]\((?:\.\./)+examples/", f"]({root}examples/", markdown)
    return re.sub(r"\]\(([\w./]+\.(?:py|sbatch))\)", r"](\1.md)", markdown)
