"""The report of a sweep or a run: what its tables, picture and page say, also when runs fail or leave damaged files."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tools_here
from commands import SYNTHETIC, TINY_MODEL, train
from composed import composed
from omegaconf import OmegaConf
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from sweep_runs import METRICS, write_run

from lit_fused.app.reporting.page import write_report

HOSTILE = "</script><b id=hostile>&\"'"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three losses with two seeds: one failed with a word, one was killed, one ran as another, one looks like HTML."""
    jobs = [("standard", 1), ("standard", 2), ("cce", 1), ("cce", 2), (HOSTILE, 1), (HOSTILE, 2)]
    phases = {"memory/forward_gib": 1.0, "memory/backward_gib": 1.25, "memory/optimizer_gib": 0.5}
    for number, (loss, seed) in enumerate(jobs):
        metrics = None if loss == "standard" else {**METRICS, **phases, "val/loss": 6.0 + seed / 10}
        write_run(tmp_path, number, ["trainer.max_steps=30", f"loss={loss}", f"seed={seed}"], metrics)
        folder = tmp_path / str(number)
        config = {"loss": {"impl": loss, "z_loss": 0.0}, "seed": seed, "trainer": {"max_steps": 30}}
        saved = json.loads((folder / "run.json").read_text()) | {"config": config}
        (folder / "run.json").write_text(json.dumps(saved))
        if metrics:
            summary = json.loads((folder / "summary.json").read_text()) | {
                "samples": {"after training": f" Once {HOSTILE}"}
            }
            summary |= {"ran_as": "torch_compile"} if loss == "cce" else {}
            (folder / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "0" / "error.txt").write_text("OutOfMemoryError: tried to allocate 9.27 GiB\n")
    return tmp_path


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines() if line[:1] == "|"]


def test_seeds_are_aggregated_the_loss_that_ran_is_named_and_what_failed_says_why(sweep: Path) -> None:
    text = write_report(sweep)
    head, _, standard, cce, _, runs, *_ = cells(text)
    assert head == ["loss", "val loss", "val perplexity", "tokens/s", "peak memory (GiB)", "completed"]
    assert standard == ["standard", *4 * ["–"], "0 of 2"]  # noqa: RUF001
    assert cce[:2] == ["cce (ran as torch_compile)", "6.1500 ± 0.0707"]
    assert cce[-1] == "2 of 2"
    assert runs[:3] == ["run", "loss", "seed"], "only what differs"
    assert "- run 0, failed: OutOfMemoryError: tried to allocate 9.27 GiB" in text
    assert "- run 1, unfinished: it runs or was killed; the last step in metrics.csv is 20" in text
    assert "<b id=hostile>" not in text
    assert text in (sweep / "report.md").read_text()


def test_the_table_is_rounded_and_aligned_and_tells_nan_from_what_was_not_measured(tmp_path: Path) -> None:
    write_run(tmp_path, 0, ["loss=cce"])
    write_run(tmp_path, 10, ["loss=a|b"], {"train/loss": 3.0, "val/loss": float("nan")})
    write_run(tmp_path, 9, ["loss=model"], {"val/loss": 7.0})
    (tmp_path / "logs").mkdir()
    assert write_report(tmp_path) == (
        "| run | loss  | val loss | val perplexity | tokens/s | peak memory (GiB) | status    |\n"
        "| --- | ----- | -------- | -------------- | -------- | ----------------- | --------- |\n"
        "| 0   | cce   | 6.1235   | 1,456.79       | 2,100    | 1.250             | completed |\n"
        "| 9   | model | 7.0000   | –              | –        | –                 | completed |\n"  # noqa: RUF001
        "| 10  | a\\|b  | nan      | –              | –        | –                 | completed |\n"  # noqa: RUF001
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", b'{"status": "completed", "overrides": {}, "metrics": []}'),
        ("summary.json", b'{"status": 1, "metrics": {"val/loss": "x"}, "samples": {"a": 1}}'),
        ("summary.json", b"\xff\xfe"),
        ("error.txt", b"\xff\xfe"),
        ("metrics.csv", b"step,train/loss\n1,x,y\nz,2.0\n\xff,1"),
        ("metrics.csv", b"step,train/loss\n0,9.0\n0,20"),
        ("run.json", b"[1"),
        ("run.json", b'{"overrides": [], "config": 1}'),
        ("run.json", b"\xff"),
    ],
)
def test_a_damaged_file_of_one_run_does_not_end_the_report_of_all(tmp_path: Path, name: str, content: bytes) -> None:
    for number in (0, 1):
        write_run(tmp_path, number, [f"seed={number}"])
    (tmp_path / "0" / name).write_bytes(content)
    assert "6.1235" in cells(write_report(tmp_path))[-1]
    assert (tmp_path / "report.html").stat().st_size > 0


def test_runs_without_any_measurement_still_make_a_report_and_no_run_none(tmp_path: Path) -> None:
    assert write_report(tmp_path) == ""
    assert not any(tmp_path.iterdir())
    write_run(tmp_path, "a/b", [], {}, curve=())
    write_run(tmp_path, "a/c", [], None, curve=())
    assert [row[0] for row in cells(write_report(tmp_path))[2:]] == ["a/b", "a/c"]
    assert Image.open(tmp_path / "report.png").width > 500


@pytest.mark.slow
def test_of_many_runs_the_best_are_drawn_and_the_report_takes_less_than_a_minute(tmp_path: Path) -> None:
    config: Any = OmegaConf.to_container(composed(), resolve=True)
    for number in range(500):
        metrics = {**METRICS, "val/loss": 9.0 - number / 500} if number % 9 else None
        lines = [f"optimizer.lr={number % 50 + 1}e-4", f"seed={number}"]
        write_run(tmp_path, number, lines, metrics, curve=tuple(9 - k / 100 for k in range(250)))
        saved = {"overrides": lines, "config": config | {"job": number}}
        (tmp_path / str(number) / "run.json").write_text(json.dumps(saved))
    start = time.monotonic()
    write_report(tmp_path)
    assert time.monotonic() - start < 60
    page = (tmp_path / "report.html").read_text()
    assert len(page) < 5e6
    assert "The 40 with the lowest validation loss are drawn" in page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=tools_here.browser(), args=FLAGS)
        yield launched
        launched.close()


def opened(browser: Browser, path: Path, **options: Any) -> tuple[Page, list[str]]:
    """The page, and what went wrong with it: console errors, exceptions, and requests for anything else."""
    page, wrong = browser.new_page(**options), list[str]()
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    return page, wrong


@pytest.mark.needs_browser
def test_the_page_shows_every_run_loads_nothing_and_fits_a_phone(browser: Browser, sweep: Path) -> None:
    write_report(sweep)
    page, wrong = opened(browser, sweep / "report.html", viewport={"width": 390, "height": 800})
    assert page.title() == f"Sweep {sweep.parent.name}/{sweep.name}"
    text = page.inner_text("body")
    for words in ("6 runs over loss, seed, 2 not completed", "tried to allocate 9.27 GiB", "6.1500 ± 0.0707", HOSTILE):
        assert words in text, words
    panels = str(page.locator("img").get_attribute("alt"))
    assert panels == "memory against speed, peak memory per phase (GiB), train/loss, val/loss"
    assert page.evaluate("document.querySelector('img').naturalWidth") > 1000
    assert page.query_selector("#hostile") is None
    assert "max_steps: 30" not in text, "a run's samples and configuration are folded"
    page.locator("details").last.click()
    assert f"Once {HOSTILE}" in page.inner_text("body")
    assert "max_steps: 30" in page.inner_text("body")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert wrong == []


def test_a_sweep_ends_with_its_report_also_after_a_failure_and_a_run_that_goes_on_renews_it(tmp_path: Path) -> None:
    job = [*SYNTHETIC, *TINY_MODEL, "trainer.max_steps=2", "~callbacks.sample_text", "~callbacks.export"]
    loss = "loss=liger,standard"  # liger needs a GPU
    swept = train(tmp_path, "-m", loss, *job, "hydra.sweep.dir=sweep", status=1)
    text = (tmp_path / "sweep" / "report.md").read_text()
    assert [row[-1] for row in cells(text)[2:]] == ["failed", "completed"]
    assert "- run 0, failed: loss=liger cannot run here" in text
    assert write_report(tmp_path / "sweep") in swept.output
    assert "sweep/report.html" in swept.output
    train(tmp_path, "ckpt_path=sweep/1", "hydra.run.dir=sweep/1", "trainer.max_steps=3")
    assert "trainer.max_steps=3" in (tmp_path / "sweep" / "report.html").read_text()
    assert (tmp_path / "sweep" / "report.md").read_text() != text
