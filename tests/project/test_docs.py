"""The site is whole and needs no network; what its pages say of options and commands is so."""

import os
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import build_site
import llms_text
import pytest
import tools_here
import yaml
from composed import composed
from hydra.core.override_parser.overrides_parser import OverridesParser
from playwright.sync_api import sync_playwright

import lit_fused
from lit_fused.app.commands import MODES
from lit_fused.app.config import check_config
from lit_fused.ops.backends import backend_by_name, supported_options

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
RESOURCE = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//""")
needs_site = pytest.mark.skipif(
    find_spec("zensical") is None and os.environ.get("CI") != "true", reason="needs Zensical (pip install -e '.[docs]')"
)


@pytest.mark.slow
@needs_site
def test_the_site_builds_with_every_page_and_fetches_nothing(tmp_path: Path) -> None:
    config = build_site.stage(tmp_path)
    done = build_site.build(config)
    assert done.returncode == 0, done.stdout + done.stderr
    listed = {page for *_, page in llms_text.pages_of(yaml.safe_load(config.read_text())["nav"])}
    site, staged = tmp_path / "site", {p.relative_to(tmp_path / "docs") for p in (tmp_path / "docs").rglob("*.md")}
    for page in staged:  # a README is its folder's index
        assert (site / page.with_name(page.name.replace("README", "index"))).with_suffix(".html").exists(), page
    codes = {page for page in staged if page.as_posix().endswith((".py.md", ".sbatch.md"))}  # linked from their index
    assert listed == {page.as_posix() for page in staged - codes}
    assert len(codes) >= 15
    for file in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = file.read_text()
        assert not RESOURCE.search(text), f"{file}: {RESOURCE.search(text)}"
        assert not re.search(r"url\(['\"]?(?:https?:)?//", text), file
    check_reference(site)
    assert re.search(r"<img[^>]*quickstart_\d+\.png", (site / "examples" / "quickstart.ipynb.html").read_text())
    assert "<img" in (site / "index.html").read_text()


def test_llms_txt_lists_every_page_with_a_sentence_and_llms_full_has_its_text(tmp_path: Path) -> None:
    build_site.stage(tmp_path)
    llms_text.write(tmp_path, tmp_path / "site")
    index, whole = ((tmp_path / "site" / name).read_text() for name in ("llms.txt", "llms-full.txt"))
    title, empty, summary, *rest = index.splitlines()
    assert (title, empty, summary[:8]) == ("# lit_fused", "", "> Train ")
    links = [re.fullmatch(r"- \[[^]]+\]\(([^)]+)\): \S.{10,}", line) for line in rest if line and line[:3] != "## "]
    assert all(links), rest
    listed = [link[1] for link in links if link]
    assert sorted(listed) == sorted(
        path.relative_to(tmp_path / "docs").as_posix() for path in (tmp_path / "docs").rglob("*.md")
    )
    assert re.findall(r"^<!-- (\S+\.md) -->$", whole, re.MULTILINE) == listed
    assert all((tmp_path / "site" / page).read_text().strip() in whole for page in listed)
    for name in lit_fused.__all__:  # of each the docstring
        assert re.search(rf"^## lit_fused\.{name}\b.*\n\n{re.escape(first_words(name))}", whole, re.MULTILINE), name


# This script returns the elements that are cut off at the right because nothing around them scrolls.
CUT_OFF = """() => [...document.querySelectorAll('.md-content *')].filter(element => {
    if (element.getBoundingClientRect().right <= document.documentElement.clientWidth + 1) return false;
    for (let box = element; box; box = box.parentElement)
        if (['auto', 'scroll'].includes(getComputedStyle(box).overflowX)) return false;
    return true;
}).map(element => element.outerHTML.slice(0, 200))"""


@pytest.mark.slow
@pytest.mark.needs_browser
@needs_site
def test_nothing_is_cut_off_on_a_phone_or_a_laptop_and_the_switch_makes_it_dark(tmp_path: Path) -> None:
    assert build_site.build(build_site.stage(tmp_path)).returncode == 0
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=tools_here.browser(), args=flags)
        for width in (390, 1366):
            page = browser.new_page(viewport={"width": width, "height": 844})
            for file in sorted((tmp_path / "site").rglob("*.html")):
                page.goto(file.as_uri())
                assert page.evaluate("document.documentElement.scrollWidth") <= width, file
                assert page.evaluate(CUT_OFF) == [], file
        page.goto((tmp_path / "site" / "index.html").as_uri())
        colours = set()
        for _ in range(3):
            page.locator(".md-header__option label:visible").first.click()
            colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert len(colours) == 2
        browser.close()


def first_words(name: str) -> str:
    """Return how the docstring of a public name begins, up to the first piece of code."""
    line = build_site.without_roles((getattr(lit_fused, name).__doc__ or "").splitlines()[0])
    words = line.split("`")[0].strip()
    assert words, name
    return words


def check_reference(site: Path) -> None:
    """Every public name has an entry under the name by which it is imported, with its parameters and its docstring."""
    pages = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    text = re.sub(r"<[^>]+>", "", pages)
    for name in lit_fused.__all__:
        definition = getattr(lit_fused, name)
        assert re.search(rf'<h2 id="{re.escape(definition.__module__)}\.{name}"[^>]*>', pages), name
        assert f"lit_fused.{name}" in text
        first = first_words(name)
        assert " ".join(first.split()[:4]) in text, name


@pytest.mark.slow
@needs_site
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "adapters.md").write_text("# Adapters\n")
    config = re.sub(r"^nav:\n(?:  .*\n)+", "", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(re.sub(r"^extra_css:\n.*\n", "", config, flags=re.MULTILINE))
    assert build_site.build(tmp_path / "mkdocs.yml").returncode == 0
    with pytest.raises(SystemExit, match=r"docs/code.md: examples/no_code.py does not exist"):
        build_site.moved_links("[x](../examples/no_code.py)", "docs/code.md")
    links = {"page": "no_page.md", "anchor": "adapters.md#no_anchor"}
    for name, link in links.items():
        text = build_site.moved_links(f"# x\n\n[x]({link})\n", f"docs/{name}.md")
        (tmp_path / "docs" / f"{name}.md").write_text(text)
    done = build_site.build(tmp_path / "mkdocs.yml")
    output = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    assert done.returncode, output
    for name in links:
        assert f"no_{name}" in output, output


def test_the_table_of_options_is_what_each_loss_takes() -> None:
    text = (DOCS / "losses.md").read_text()
    [table] = re.findall(r"\n\n(\| option \|.*?)\n\n", text, re.DOTALL)
    [header, _, *rows] = table.splitlines()
    losses = re.findall(r"`(\w+)`", header)
    shown = {loss: set() for loss in losses}
    for row in rows:
        option, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        for loss, cell in zip(losses, cells, strict=True):
            if cell == "yes":
                shown[loss].add(re.findall(r"`(\w+)`", option)[0])
    all_options = set().union(*shown.values())
    for loss in losses:
        assert shown[loss] == supported_options(backend_by_name(loss)) & all_options, loss
    assert supported_options(backend_by_name("chunked")) - all_options == {"scale", "statistics", "invariant"}


def commands(page: Path) -> list[str]:
    found = []
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
        lines = (line.strip().partition(" # ")[0] for line in block.replace("\\\n", " ").splitlines())
        found += [line for line in lines if re.match(r"(?:python train\.py|lit-fused)\s", line)]
    return found


def overrides(command: str) -> list[str]:
    """Return what a command chooses, of a sweep its first run; without placeholders for checkpoints and Hydra's own."""
    chosen = []
    for word in shlex.split(command):
        if "=" not in word or word.startswith(("-", "ckpt_path=", "hydra.", "hydra/")):
            continue
        override = OverridesParser.create().parse_override(word.replace("$loss", "chunked"))
        if override.is_choice_sweep():
            chosen.append(f"{override.get_key_element()}={next(override.sweep_string_iterator())}")
        elif not override.is_sweep_override():
            chosen.append(override.input_line)
    return chosen + [f"ckpt_path={__file__}"] * ("ckpt_path=" in command)


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=lambda page: str(page.relative_to(DOCS)))
def test_every_command_of_a_page_names_choices_that_exist(page: Path) -> None:
    for command in commands(page):
        if not {"--help", "--config-dir", "my_package"} & {*re.split(r"[ =.]", command)}:
            check_config(composed(*overrides(command)), MODES)
