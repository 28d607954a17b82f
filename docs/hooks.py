"""Hooks of the site's build: ``examples/``, CONTRIBUTING.md and CHANGELOG.md become part of it.

On GitHub a page of ``docs/`` links to ``../examples/before.py``. The site has only what lies in ``docs/``, so each
example becomes a page here, with its code in a block, and links to it change accordingly. A link to a file that does
not exist fails the build, as any other link does.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
LANGUAGES = {".py": "python", ".sbatch": "bash"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every example, and the pages that lie outside of docs/ as they are."""
    for name in ("examples/README.md", *ROOT_PAGES):
        if (ROOT / name).exists():
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for path in sorted(EXAMPLES.rglob("*")):
        if path.suffix in LANGUAGES:
            name = path.relative_to(EXAMPLES.parent).as_posix()
            page = f"# {name}\n\n```{LANGUAGES[path.suffix]}\n{path.read_text()}```\n"
            file = File.generated(config, f"{name}.md", content=page)
            file.inclusion = file.inclusion.NOT_IN_NAV
            files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between docs/, examples/ and the root into links between their pages."""
    root = "../" * page.file.src_uri.count("/")
    if page.file.src_uri.startswith("examples/"):
        markdown = markdown.replace("](../docs/", f"]({root}")
    if page.file.src_uri in ROOT_PAGES:
        markdown = markdown.replace("](docs/", "](")
    markdown = re.sub(r"\]\((?:\.\./)+(examples/|CONTRIBUTING.md|CHANGELOG.md)", rf"]({root}\1", markdown)
    return re.sub(r"\]\(([\w./]+\.(?:py|sbatch))\)", r"](\1.md)", markdown)
