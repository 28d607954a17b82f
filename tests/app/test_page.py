"""``report.html`` in a real browser: what it shows, that it needs nothing beside itself, and that it can be used."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tools_here
from playwright.sync_api import Browser, Page, sync_playwright
from sweep_runs import METRICS, write_run

from lit_fused.app.reporting.page import POINTS, html_page, thinned, write_report, write_run_page
from lit_fused.app.reporting.sweep import read_runs

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HOSTILE = "</script><b id=hostile>&\"'"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=tools_here.browser(), args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two losses and two seeds; one run failed with a word, one without, one has text that looks like HTML."""
    phases = {"memory/forward_gib": 1.0, "memory/backward_gib": 1.25, "memory/optimizer_gib": 0.5}
    runs = [("standard", 1, None), ("chunked", 1, METRICS | phases), ("standard", 2, None), (HOSTILE, 2, METRICS)]
    for number, (loss, seed, metrics) in enumerate(runs):
        write_run(tmp_path, number, [f"loss={loss}", f"seed={seed}"], metrics)
        folder = tmp_path / str(number)
        config = {"loss": {"impl": loss, "z_loss": 0.0}, "seed": seed, "trainer": {"max_steps": 30}}
        (folder / ".hydra" / "config.yaml").write_text(json.dumps(config))
        found = {"torch": "2.13.0", "devices": "1 x NVIDIA H200", "commit": f"abcdef{seed}"}
        (folder / "environment.json").write_text(json.dumps(found))
    (tmp_path / "0" / "error.txt").write_text("OutOfMemoryError: tried to allocate 9.27 GiB\n")
    write_report(tmp_path)
    return tmp_path


def opened(browser: Browser, path: Path, **options: Any) -> tuple[Page, list[str]]:
    """The page, and what went wrong with it: console errors, exceptions, and requests for anything else."""
    page = browser.new_page(**options)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    page.wait_for_selector("figure[data-series='train/loss'] polyline")
    return page, wrong


@pytest.mark.slow
@pytest.mark.needs_browser
def test_the_page_shows_every_run_and_loads_nothing(browser, sweep):
    page, wrong = opened(browser, sweep / "report.html")
    assert page.title() == f"Sweep {sweep.name}"
    text = page.inner_text("body")
    for shown in (
        "4 runs, 2 failed, over loss, seed",
        "OutOfMemoryError: tried to allocate 9.27 GiB",
        "it left no word: it was killed",
        "the last step in metrics.csv is 20, written 20",
        "1 x NVIDIA H200",
        "abcdef1",
        "loss.impl",
        "1.250 GiB",
        "6.1235",
        HOSTILE,
    ):
        assert shown in text, shown
    assert page.query_selector("#hostile") is None
    assert page.locator("figure[data-series='train/loss'] polyline").count() == 4
    assert page.locator("figure[data-series='val/loss'] polyline").count() == 4
    assert "trainer.max_steps" not in text, "what is the same in all runs is folded"
    page.click("text=the same in all runs")
    assert "trainer.max_steps" in page.inner_text("body")
    widths = page.locator("#memory i").evaluate_all("bars => bars.map(bar => bar.getBoundingClientRect().width)")
    assert widths[0] / widths[1] == pytest.approx(1.0 / 1.25, rel=0.01)
    assert wrong == []


@pytest.mark.slow
@pytest.mark.needs_browser
def test_curves_are_drawn_to_scale_and_answer_the_pointer(browser, sweep):
    page, wrong = opened(browser, sweep / "report.html", viewport={"width": 1200, "height": 900})
    figure = page.locator("figure[data-series='train/loss']")

    def heights() -> list[float]:
        points = figure.locator("polyline").first.get_attribute("points") or ""
        return [float(point.split(",")[1]) for point in points.split()]

    top, middle, bottom = heights()  # losses 9, 7, 6.5
    assert (middle - top) / (bottom - top) == pytest.approx((9 - 7) / (9 - 6.5), rel=1e-3)
    figure.locator("text=log").click()
    top, middle, bottom = heights()
    assert (middle - top) / (bottom - top) == pytest.approx(math.log(9 / 7) / math.log(9 / 6.5), rel=1e-3)
    figure.locator("svg").scroll_into_view_if_needed()
    box = figure.locator("svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 100)
    tip = figure.locator(".tip").inner_text()
    assert "step 20" in tip
    assert "standard · 1: 6.5" in tip
    page.locator("#legend button").first.click()
    assert figure.locator("polyline").count() == 3
    assert wrong == []


@pytest.mark.needs_browser
@pytest.mark.parametrize("width", [360, pytest.param(1280, marks=pytest.mark.slow)])
def test_nothing_sticks_out_of_a_phones_screen(browser, sweep, width):
    page, wrong = opened(browser, sweep / "report.html", viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    charts = page.locator("figure svg").evaluate_all("all => all.map(svg => svg.getBoundingClientRect().right)")
    assert max(charts) <= width
    assert wrong == []


@pytest.mark.slow
@pytest.mark.needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground_in_light_and_dark(browser, sweep, scheme):
    page, wrong = opened(browser, sweep / "report.html", color_scheme=scheme)
    style = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    ink, paper = (luminance(color) for color in style)
    assert (ink > paper) == (scheme == "dark")
    assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 7  # WCAG's AAA
    assert wrong == []


def luminance(color: str) -> float:
    """Relative, of "rgb(r, g, b)"."""
    channels = [int(part) / 255 for part in color[4:-1].split(",")]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.needs_browser
def test_one_run_has_the_same_page(browser, tmp_path):
    write_run(tmp_path, 0, ["loss=cce"])
    write_run_page(tmp_path / "0")
    page, wrong = opened(browser, tmp_path / "0" / "report.html")
    assert page.inner_text("h1") == "Run 0"
    assert "loss=cce" in page.inner_text("body")
    assert wrong == []


COLUMNS = "epoch,step,train/loss,val/loss,throughput/tokens,throughput/seconds,lr-AdamW"


@pytest.mark.slow
@pytest.mark.needs_browser
def test_a_run_is_drawn_over_steps_tokens_time_or_learning_rate_and_shows_samples_and_validations(browser, tmp_path):
    write_run(tmp_path, 0, ["loss=cce"])
    rows = ["0,0,9.0,,100,2.5,0.1", "0,1,7.0,,400,5.0,0.2", "0,1,,6.5,,,", "0,2,6.5,,500,10.0,0.05", "0,2,,6.0,,,"]
    (tmp_path / "0" / "metrics.csv").write_text("\n".join([COLUMNS, *rows, ""]))
    path = tmp_path / "0" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"samples": {"after training": f"\n  Once\n{HOSTILE}"}}))
    write_run_page(tmp_path / "0")
    page, wrong = opened(browser, tmp_path / "0" / "report.html", viewport={"width": 390, "height": 800})
    assert page.inner_text("#samples pre").endswith(f"  Once\n{HOSTILE}")
    assert page.query_selector("#hostile") is None
    assert page.inner_text("#validations").split() == ["step", "val/loss", "1", "6.5", "2", "6"]
    assert page.get_attribute("a[download='metrics.csv']", "href").startswith("data:text/csv")  # type: ignore[union-attr]

    def across(name: str) -> list[float]:
        points = page.locator(f"figure[data-series='{name}'] polyline").get_attribute("points") or ""
        return [float(point.split(",")[0]) for point in points.split()]

    for axis, values in {
        "optimizer step": (0, 1, 2),
        "tokens seen": (100, 400, 500),
        "wall time (s)": (2.5, 5.0, 10.0),
        "learning rate": (0.1, 0.2, 0.05),
    }.items():
        page.click(f"#axes button:text-is('{axis}')")
        assert axis in page.locator("figure[data-series='train/loss'] svg").text_content()  # type: ignore[operator]
        first, second, third = across("train/loss")
        part = (values[1] - values[0]) / (values[2] - values[0])
        assert (second - first) / (third - first) == pytest.approx(part, rel=1e-3)
    assert not page.query_selector("figure[data-series='throughput/seconds']"), "an axis is no curve"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert wrong == []


@pytest.mark.needs_browser
@pytest.mark.parametrize("width", [390, pytest.param(1366, marks=pytest.mark.slow)])
def test_memory_against_speed_is_the_first_picture_of_a_sweep_and_is_to_scale(browser, tmp_path, width):
    measured = {"standard": (1000.0, 4.0), "chunked": (3000.0, 2.0), "cce": (2000.0, 1.0), "liger": None}
    for number, (loss, place) in enumerate(measured.items()):
        names = ("throughput/tokens_per_sec", "memory/peak_allocated_gib")
        write_run(tmp_path, number, [f"loss={loss}"], dict(zip(names, place, strict=True)) if place else None)
    write_report(tmp_path)
    page, wrong = opened(browser, tmp_path / "report.html", viewport={"width": width, "height": 800})
    assert page.locator("h2").first.inner_text() == "Memory against speed"
    circles = page.locator("figure").first.locator("circle")
    centres = circles.evaluate_all("all => all.map(dot => [dot.cx.baseVal.value, dot.cy.baseVal.value])")
    x, y = zip(*centres, strict=True)
    assert (x[2] - x[0]) / (x[1] - x[0]) == pytest.approx(0.5)
    assert (y[1] - y[0]) / (y[2] - y[0]) == pytest.approx(2 / 3)
    figure = page.locator("figure").first.bounding_box()
    assert figure is not None
    texts = page.locator("figure").first.locator("svg text")
    boxes = texts.evaluate_all("all => all.map(text => text.getBoundingClientRect()).map(box => [box.left, box.right])")
    assert all(figure["x"] <= left and right <= figure["x"] + figure["width"] for left, right in boxes)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert wrong == []


@pytest.mark.needs_browser
def test_a_page_without_any_curve_says_so(browser, tmp_path):
    write_run(tmp_path, 0, ["seed=1"], None, curve=())
    path = tmp_path / "report.html"
    path.write_text(html_page(read_runs(tmp_path), "Nothing"))
    page = browser.new_page()
    page.goto(path.as_uri())
    assert "No run has logged a curve." in page.inner_text("#charts")


def test_a_long_sweep_still_makes_a_page_that_opens(tmp_path):
    for number in range(60):
        write_run(tmp_path, number, [f"seed={number}"], curve=())
        lines = ["epoch,step," + ",".join(f"train/{k}" for k in range(20))]
        lines += [f"0,{step}," + ",".join(f"{math.sin(step * k):.12f}" for k in range(20)) for step in range(150)]
        (tmp_path / str(number) / "metrics.csv").write_text("\n".join(lines))
    assert len(html_page(read_runs(tmp_path), "Many")) < 5e6


def test_a_long_curve_keeps_its_ends_and_its_extremes():
    points = [(step, math.sin(step / 1000)) for step in range(100_000)]
    points[54_321] = (54_321, 50.0)
    points[77_777] = (77_777, -50.0)
    kept = thinned(points)
    assert len(kept) <= POINTS
    assert kept == sorted(kept)
    assert {points[0], points[-1], points[54_321], points[77_777]} <= set(kept)
    assert thinned(points[:10]) == points[:10]
