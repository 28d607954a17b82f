"""The site is whole and needs no network; what its pages say of options and commands is so."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from composed import composed
from hydra.core.override_parser.overrides_parser import OverridesParser

from lit_fused.app.commands import MODES
from lit_fused.app.config import check_config
from lit_fused.ops.backends import backend_by_name, supported_options

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
RESOURCE = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//""")


def build(config: Path, site: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    done = subprocess.run(command, cwd=site.parent, text=True, capture_output=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_the_site_builds_with_every_page_and_fetches_nothing(tmp_path: Path) -> None:
    status, output = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert status == 0, output
    for page in PAGES:
        html = (tmp_path / "site" / page.relative_to(DOCS)).with_suffix(".html")
        assert html.exists(), page
    for file in [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")]:
        text = file.read_text()
        assert not RESOURCE.search(text), f"{file}: {RESOURCE.search(text)}"
        assert not re.search(r"url\(['\"]?(?:https?:)?//", text), file
    assert (tmp_path / "site" / "examples" / "pretrain.py.html").exists()


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    for name in ("docs", "examples"):
        (tmp_path / name).mkdir()
    for name in ("hooks.py", "adapters.md"):
        (tmp_path / "docs" / name).write_text((DOCS / name).read_text())
    (tmp_path / "examples" / "README.md").write_text("# Examples\n")
    (tmp_path / "docs" / "index.md").write_text("# Start\n")
    config = re.sub(r"^nav:\n(?:  .*\n)+", "", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(config)
    status, output = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert status == 0, output
    links = {"page": "no_page.md", "anchor": "adapters.md#no_anchor", "code": "../examples/no_code.py"}
    for name, link in links.items():
        (tmp_path / "docs" / f"{name}.md").write_text(f"# {name}\n\n[x]({link})\n")
    status, output = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert status == 1, output
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
    assert supported_options(backend_by_name("chunked")) - all_options == {"scale", "statistics"}


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


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=lambda page: str(page.relative_to(DOCS)))
def test_every_command_of_a_page_names_choices_that_exist(page: Path) -> None:
    for command in commands(page):
        if "--help" not in command and "--config-dir" not in command:
            check_config(composed(*overrides(command)), MODES)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "python train.py -m loss=cce,chunked optimizer.lr=1e-3,1e-4 +x=[1,2]",
            ["loss=cce", "optimizer.lr=0.001", "+x=[1,2]"],
        ),
        ("python train.py -m 'optimizer.lr=interval(1e-4,1e-2)' seed=range(1,3)", []),
        ("python train.py ckpt_path=a/b.ckpt hydra.run.dir=out", [f"ckpt_path={__file__}"]),
    ],
)
def test_of_a_sweep_the_first_run_is_composed(command: str, expected: list[str]) -> None:
    assert overrides(command) == expected
