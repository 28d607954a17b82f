"""The report of a sweep: what its table, picture and files say, also when runs fail, and within a real Hydra sweep."""

import contextlib
import csv
import errno
import io
import json
import os
import re
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from composed import composed
from hydra.core.utils import JobReturn
from hydra.types import RunMode
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from omegaconf import OmegaConf
from sweep_runs import METRICS, write_run

from lit_fused.app.reporting import hydra_callback
from lit_fused.app.reporting.page import write_report
from lit_fused.app.reporting.plots import sweep_figure
from lit_fused.app.reporting.sweep import (
    csv_table,
    distinguishing_overrides,
    markdown_table,
    markdown_text,
    read_runs,
    read_series,
)
from lit_fused.errors import UserError


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three losses, two seeds; the first run failed."""
    for number, (loss, seed, peak) in enumerate(
        [
            ("standard", 1, 4.0),
            ("standard", 2, 4.0),
            ("chunked", 1, 2.0),
            ("chunked", 2, 2.0),
            ("cce", 1, 1.0),
            ("cce", 2, 1.0),
        ]
    ):
        metrics = None if number == 0 else {**METRICS, "memory/peak_allocated_gib": peak}
        write_run(tmp_path, number, ["trainer.max_steps=30", f"loss={loss}", f"seed={seed}"], metrics)
    return tmp_path


def markdown_rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()]


def legend_texts(axes: Axes) -> list[Text]:
    legend = axes.get_legend()
    assert legend is not None
    return legend.get_texts()


def test_runs_come_in_the_order_of_their_numbers_and_other_folders_are_left_out(tmp_path: Path) -> None:
    for number in (10, 9, 0):
        write_run(tmp_path, number, [f"seed={number}"])
    (tmp_path / "logs").mkdir()
    (tmp_path / "5").write_text("a file, not a run")
    assert [run.name for run in read_runs(tmp_path)] == ["0", "9", "10"]


def test_a_folder_that_does_not_exist_holds_no_runs(tmp_path: Path) -> None:
    assert read_runs(tmp_path / "nothing") == []


@pytest.mark.parametrize("summary", [None, '{"status": "compl'], ids=["absent", "cut off"])
def test_a_run_without_a_whole_summary_failed_and_keeps_its_overrides(tmp_path: Path, summary: str | None) -> None:
    write_run(tmp_path, 0, ["loss=standard", "+model.extra=a=b"], metrics=None)
    if summary is not None:
        (tmp_path / "0" / "summary.json").write_text(summary)
    [run] = read_runs(tmp_path)
    assert (run.status, run.overrides, run.metrics) == ("failed", {"loss": "standard", "model.extra": "a=b"}, {})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", b"[1]"),
        ("summary.json", b"{}"),
        ("summary.json", b'{"status": "completed", "overrides": {}, "metrics": []}'),
        ("summary.json", b"\xff\xfe"),
        ("environment.json", b"[]"),
        ("metrics.csv", b"epoch,train/loss\n0,1.0\n"),
        ("metrics.csv", b"step,train/loss\n1,x,y\nz,2.0\n\xff,1"),
        (".hydra/config.yaml", b"a: [1"),
        (".hydra/config.yaml", b"- 1"),
        (".hydra/overrides.yaml", b"{a: 1}"),
        (".hydra/overrides.yaml", b"- a: '\xff"),
    ],
)
def test_a_damaged_file_of_one_run_does_not_end_the_report_of_all(tmp_path: Path, name: str, content: bytes) -> None:
    for number in (0, 1):
        write_run(tmp_path, number, [f"seed={number}"])
    (tmp_path / "0" / name).write_bytes(content)
    assert write_report(tmp_path, draw=False)
    assert [row["val/loss"] for row in reported(tmp_path)][1] == str(METRICS["val/loss"])


def test_a_killed_run_is_told_from_one_that_runs_and_from_one_that_failed(tmp_path: Path) -> None:
    ends = {"failed": "sys.exit()", "killed": "os.kill(os.getpid(), 9)", "running": "print(1, flush=True); input()"}
    program = "import os, sys; from pathlib import Path; from lit_fused.app.run_folder import take"
    program += "; take(Path(sys.argv[1]), '')"
    with contextlib.ExitStack() as stack:
        for number, end in enumerate(ends.values()):
            write_run(tmp_path, number, [f"seed={number}"], None)
            command = [sys.executable, "-c", f"{program}; {end}", str(tmp_path / str(number))]
            job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path)
            stack.enter_context(job)
            stack.callback(job.kill)
            assert job.stdout is not None
            if not job.stdout.read(1):
                job.wait()
        (tmp_path / "0" / "error.txt").write_text("the memory does not suffice\n")
        shown = write_report(tmp_path, draw=False)
        failed, killed, running = read_runs(tmp_path)
    assert [run.status for run in (failed, killed, running)] == ["failed", "failed", "running"]
    assert failed.error == "the memory does not suffice"
    written = rf"{datetime.now():%Y-%m-%d} \d\d:\d\d:\d\d"
    killed_word = r"it left no word: it was killed \([^)]*\); the last step in metrics.csv is 20, written "
    assert re.fullmatch(killed_word + written, killed.error or "")
    assert re.fullmatch(rf"still running; the last step in metrics.csv is 20, written {written}", running.error or "")
    for text in (shown, (tmp_path / "report.md").read_text()):
        assert "- run 0, failed: the memory does not suffice\n" in text
        assert f"- run 1, failed: {killed.error}\n" in text


def test_only_the_overrides_that_differ_become_columns_in_the_order_given(sweep: Path) -> None:
    assert distinguishing_overrides(read_runs(sweep)) == ["loss", "seed"]


def test_a_single_run_shows_all_its_overrides(tmp_path: Path) -> None:
    write_run(tmp_path, 0, ["loss=cce", "seed=1"])
    assert distinguishing_overrides(read_runs(tmp_path)) == ["loss", "seed"]


def test_a_run_whose_overrides_are_unknown_makes_no_column_out_of_a_constant(sweep: Path) -> None:
    (sweep / "6").mkdir()
    runs = read_runs(sweep)
    assert distinguishing_overrides(runs) == ["loss", "seed"]
    assert markdown_rows(markdown_table(runs))[-1] == ["6", "–", "–", "–", "–", "–", "–", "failed"]  # noqa: RUF001


def test_the_csv_holds_full_precision_and_empty_cells_for_what_was_not_measured(tmp_path: Path) -> None:
    write_run(tmp_path, 0, ["loss=cce"])
    write_run(tmp_path, 1, ["loss=model"], {"train/loss": 3.0, "val/perplexity": 0.1 + 0.2})
    write_run(tmp_path, 2, ["loss=standard"], None)
    assert csv_table(read_runs(tmp_path)) == (
        "run,loss,val/loss,val/perplexity,throughput/tokens_per_sec,memory/peak_allocated_gib,status\n"
        "0,cce,6.123456789,1456.789,2100.25,1.25,completed\n"
        "1,model,,0.30000000000000004,,,completed\n"
        "2,standard,,,,,failed\n"
    )


def test_markdown_shows_what_a_user_wrote_as_it_is() -> None:
    for text, shown in (
        ("<img src=x onerror=alert(1)>", "&lt;img src=x onerror=alert(1)&gt;"),
        ("[here](javascript:alert(1))", r"[here]\(javascript:alert(1))"),
        ("![x](http://elsewhere/x.png)", r"![x]\(http://elsewhere/x.png)"),
        ("a|b `c` *d* ~~e~~", r"a\|b \`c\` \*d\* \~\~e\~\~"),
        ("a\\|b", "a\\\\\\|b"),
        ("two\n# lines", "two # lines"),
        ("data.betas=[0.9,0.95]", "data.betas=[0.9,0.95]"),
        ("model.config.hidden_size", "model.config.hidden_size"),
    ):
        assert markdown_text(text) == shown


def test_the_markdown_table_is_rounded_aligned_and_never_shows_the_training_loss_as_validation(tmp_path: Path) -> None:
    write_run(tmp_path, 0, ["loss=cce"])
    write_run(tmp_path, 1, ["loss=a|b"], {"train/loss": 3.0, "val/loss": float("nan")})
    assert markdown_table(read_runs(tmp_path)) == (
        "| run | loss | val loss | val perplexity | tokens/s | peak memory (GiB) | status    |\n"
        "| --: | ---- | -------: | -------------: | -------: | ----------------: | --------- |\n"
        "|   0 | cce  |   6.1235 |       1,456.79 |    2,100 |             1.250 | completed |\n"
        "|   1 | a\\|b |      nan |              – |        – |                 – | completed |\n"  # noqa: RUF001
    )


def test_what_no_run_measured_is_no_column_and_what_an_objective_is_judged_by_is_one(tmp_path: Path) -> None:
    write_run(tmp_path, 0, ["objective=dpo"], {"val/loss": 0.6, "val/reward_accuracy": 0.9})
    write_run(tmp_path, 1, ["objective=ipo"], {"val/loss": 9.0, "val/reward_accuracy": 0.75})
    headings, first, *_ = csv_table(read_runs(tmp_path)).splitlines()
    assert headings.split(",")[2:4] == ["val/loss", "val/reward_accuracy"]
    assert "val/perplexity" not in headings
    assert first.split(",")[2:4] == ["0.6", "0.9"]


def test_the_training_curve_keeps_only_rows_with_a_training_loss_and_survives_a_cut_off_row(tmp_path: Path) -> None:
    write_run(tmp_path, 0, ["seed=1"], curve=(9.0, 7.0))
    path = tmp_path / "0" / "metrics.csv"
    path.write_text(path.read_text() + "0,20")
    [run] = read_runs(tmp_path)
    assert read_series(run)["train/loss"] == [(0, 9.0), (10, 7.0)]
    path.unlink()
    assert read_series(run) == {}


def test_the_middle_panel_shows_each_runs_peak_memory_and_names_the_failed_run(sweep: Path) -> None:
    _, memory, _ = sweep_figure(read_runs(sweep)).axes
    assert [bar.get_width() for bar in memory.patches if isinstance(bar, Rectangle)] == [0.0, 4.0, 2.0, 2.0, 1.0, 1.0]
    assert [text.get_text() for text in memory.texts] == ["failed", "4.000", "2.000", "2.000", "1.000", "1.000"]
    assert [label.get_text() for label in memory.get_yticklabels()] == [
        "standard · 1",
        "standard · 2",
        "chunked · 1",
        "chunked · 2",
        "cce · 1",
        "cce · 2",
    ]
    assert memory.get_ylabel() == "loss · seed"
    assert "GiB" in memory.get_xlabel()
    top, bottom = memory.transData.transform([(0, 0), (0, 5)])[:, 1]
    assert top > bottom, "run 0 stands on top, as in the table"


def test_colour_follows_the_first_override_and_line_style_the_others(sweep: Path) -> None:
    _, memory, losses = sweep_figure(read_runs(sweep)).axes
    lines = losses.lines
    assert len(lines) == 6
    assert all(np.asarray(line.get_xydata()).tolist() == [[0, 9.0], [10, 7.0], [20, 6.5]] for line in lines)
    colors = [line.get_color() for line in lines]
    assert colors[0::2] == colors[1::2]
    assert len(set(colors)) == 3
    dashes = [vars(line)["_dash_pattern"][1] for line in lines]  # in points; matplotlib has no public name for it
    assert dashes[0::2] == [[], [], []], "the first seed is solid"
    assert dashes[1] == dashes[3] == dashes[5] == [9.0, 4.0], "dashes of any width coincide"
    assert [text.get_text() for text in legend_texts(losses)] == [
        f"{loss} · {seed}" for loss in ("standard", "chunked", "cce") for seed in (1, 2)
    ]
    assert [bar.get_facecolor() for bar in memory.patches] == [to_rgba(color) for color in colors]


def test_coinciding_curves_stay_visible_since_a_later_one_is_thinner_and_above(sweep: Path) -> None:
    *_, losses = sweep_figure(read_runs(sweep)).axes
    widths = [line.get_linewidth() for line in losses.lines[::2]]
    heights = [line.get_zorder() for line in losses.lines[::2]]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == 3
    assert heights == sorted(heights)


@pytest.mark.parametrize("count", [6, 12])
def test_no_text_of_the_picture_is_cut_or_overlaps_another(tmp_path: Path, count: int) -> None:
    models = ["qwen3_0_6b", "a_model_with_quite_a_long_name_indeed"][: count // 6]
    combinations = [
        (loss, model, seed) for loss in ("standard", "chunked", "cce") for model in models for seed in (1, 2)
    ]
    for number, (loss, model, seed) in enumerate(combinations):
        write_run(tmp_path, number, [f"loss={loss}", f"model={model}", f"seed={seed}"])
    figure = sweep_figure(read_runs(tmp_path))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    _, memory, losses = figure.axes
    texts = [
        *memory.texts,
        *memory.get_yticklabels(),
        *(text for axes in figure.axes for text in (axes.title, axes.xaxis.label, axes.yaxis.label)),
        *legend_texts(losses),
        *figure.texts,
    ]
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in texts if text.get_text()]
    width, height = canvas.get_width_height()
    assert len(boxes) > 2 * count
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height for box in boxes)
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]


def test_more_values_than_the_palette_holds_still_get_a_colour_each(tmp_path: Path) -> None:
    for number in range(12):
        write_run(tmp_path, number, [f"optimizer.lr={number + 1}e-4"])
    *_, losses = sweep_figure(read_runs(tmp_path)).axes
    assert len({line.get_color() for line in losses.lines}) == 12


@pytest.mark.slow
def test_a_picture_and_a_page_of_many_runs_draw_the_best_and_say_how_many_they_leave_out(tmp_path: Path) -> None:
    for number in range(45):
        write_run(tmp_path, number, [f"seed={number}"], {**METRICS, "val/loss": 9.0 - number / 10})
    write_run(tmp_path, 45, ["seed=45"], {**METRICS, "val/loss": float("nan")})
    write_report(tmp_path)
    figure = sweep_figure(read_runs(tmp_path))
    _, memory, _ = figure.axes
    assert [label.get_text() for label in memory.get_yticklabels()] == [str(number) for number in range(5, 45)]
    said = "the 40 with the lowest validation loss are drawn, 6 are not"
    assert [text.get_text() for text in figure.texts] == [f"Sweep over seed: 46 runs; {said}"]
    page = (tmp_path / "report.html").read_text()
    assert said in page
    assert page.count("<td>completed</td>") == 46
    assert page.count("<h3>") == 0
    assert len(json.loads(page.split('id="data">')[1].split("</script>")[0])) == 40
    assert (tmp_path / "report.csv").read_text().count("\n") == 47


def test_a_report_that_cannot_be_written_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "report.md")

    monkeypatch.setattr(hydra_callback, "write_report", write)
    write_run(tmp_path, 0, [])
    hydra_callback.SweepReport()._finish(tmp_path)
    assert "there is no new report of" in (told := capsys.readouterr().out)
    assert "the disk is full: report.md could not be written whole" in told


def test_a_second_interruption_while_the_last_report_is_drawn_prints_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    registered: list[Any] = []
    monkeypatch.setattr(hydra_callback.atexit, "register", lambda *call: registered.append(call))
    monkeypatch.setattr(hydra_callback, "write_report", interrupted)
    write_run(tmp_path / "sweep", 0, [])
    config = OmegaConf.create({"hydra": {"runtime": {"cwd": str(tmp_path)}, "sweep": {"dir": "sweep"}}})
    hydra_callback.SweepReport().on_multirun_start(config)
    ((call, *arguments),) = registered
    call(*arguments)


def test_reports_during_a_sweep_take_a_small_part_of_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, written = [0.0], []

    def write(folder: Path, *, draw: bool) -> None:
        assert not draw
        written.append(now[0])
        now[0] += 3.0

    monkeypatch.setattr(hydra_callback.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(hydra_callback, "write_report", write)
    monkeypatch.setattr(hydra_callback.SweepReport, "_next", 0.0)
    hydra = {"mode": RunMode.MULTIRUN, "runtime": {"cwd": str(tmp_path)}, "sweep": {"dir": "sweep"}}
    config = OmegaConf.create({"hydra": hydra})
    for _ in range(100):  # jobs of a second
        now[0] += 1
        hydra_callback.SweepReport().on_job_end(config, JobReturn())
    assert written == [1.0, 64.0]


@pytest.mark.slow
def test_the_report_of_a_thousand_runs_takes_less_than_a_minute(tmp_path: Path) -> None:
    config = OmegaConf.to_yaml(composed())
    for number in range(1000):
        lines = [f"optimizer.lr={number % 50 + 1}e-4", f"seed={number}"]
        write_run(
            tmp_path, number, lines, METRICS if number % 9 else None, curve=tuple(9 - k / 100 for k in range(250))
        )
        (tmp_path / str(number) / ".hydra" / "config.yaml").write_text(f"{config}job: {number}\n")
    start = time.monotonic()
    write_report(tmp_path)
    assert time.monotonic() - start < 60


def test_runs_without_memory_or_curves_still_make_a_picture(tmp_path: Path) -> None:
    write_run(tmp_path, 0, [], {}, curve=())
    write_run(tmp_path, 1, [], None, curve=())
    write_report(tmp_path)
    _, memory, _ = sweep_figure(read_runs(tmp_path)).axes
    assert [text.get_text() for text in memory.texts] == ["not measured", "failed"]
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_table_is_written_and_a_sentence_stands_for_the_picture(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # an import of it now fails
    with pytest.raises(UserError, match=re.escape("pip install 'lit-fused[report]'")):
        sweep_figure(read_runs(sweep))
    shown = write_report(sweep)
    assert {path.name for path in sweep.glob("*report*")} == {"report.md", "report.csv", "report.html"}
    for text in (shown, (sweep / "report.md").read_text()):
        assert markdown_table(read_runs(sweep)) in text
        assert "The picture of the sweep needs more than is installed (import of matplotlib" in text
        assert "report.png" not in text


SCRIPT = """
import json, os
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(cfg):
    out = Path(HydraConfig.get().runtime.output_dir)
    (out / "metrics.csv").write_text(f"epoch,step,train/loss\\n0,0,9.0\\n0,10,{cfg.seed}.5\\n")
    if cfg.loss == cfg.broken:
        raise RuntimeError("out of memory, on purpose")
    if cfg.loss == "interrupted":
        raise KeyboardInterrupt
    metrics = {"val/loss": cfg.seed + 0.125, "memory/peak_allocated_gib": 2.5}
    summary = {"status": "completed", "overrides": list(HydraConfig.get().overrides.task), "metrics": metrics}
    (out / "summary.json").write_text(json.dumps(summary))


main()
"""

CONFIG = """
loss: standard
seed: 1
broken: none
hydra:
  callbacks:
    sweep_report: {_target_: lit_fused.app.SweepReport}
    output_folder: {_target_: lit_fused.app.OutputFolderCheck}
"""


def run_script(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    (folder / "config.yaml").write_text(CONFIG)
    return subprocess.run(
        [sys.executable, "script.py", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


SWEEP = ("-m", "loss=standard,cce", "seed=1,2", "hydra.sweep.dir=sweep")


def reported(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((folder / "report.csv").read_text())))


@pytest.mark.parametrize("chdir", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_a_hydra_sweep_ends_with_its_report(tmp_path: Path, chdir: str) -> None:
    result = run_script(tmp_path, *SWEEP, f"hydra.job.chdir={chdir}")
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    rows = reported(tmp_path / "sweep")
    assert [(row["run"], row["loss"], row["seed"]) for row in rows] == [
        *[("0", "standard", "1"), ("1", "standard", "2")],
        *[("2", "cce", "1"), ("3", "cce", "2")],
    ]
    assert [(row["val/loss"], row["status"]) for row in rows] == [("1.125", "completed"), ("2.125", "completed")] * 2
    assert result.stdout.count(markdown_table(read_runs(tmp_path / "sweep"))) == 1
    for name in ("report.md", "report.csv", "report.html", "report.png"):
        assert str(tmp_path / "sweep" / name) in result.stdout
        assert (tmp_path / "sweep" / name).stat().st_size > 0


def test_runs_in_folders_of_other_names_are_reported_in_the_order_in_which_they_ran(tmp_path: Path) -> None:
    named = ("-m", "hydra.sweep.dir=sweep", "hydra.sweep.subdir=${loss}/seed-${seed}")
    for sweep in (("loss=standard,cce", "seed=2"), ("loss=cce", "seed=1")):  # the second adds to the first
        result = run_script(tmp_path, *named, *sweep)
        assert result.returncode == 0, result.stderr
        assert "Warning" not in result.stderr
        assert markdown_table(read_runs(tmp_path / "sweep")) in result.stdout
    names = ["standard/seed-2", "cce/seed-2", "cce/seed-1"]
    rows = reported(tmp_path / "sweep")
    assert [(row["run"], row["val/loss"], row["status"]) for row in rows] == [
        (name, f"{name[-1]}.125", "completed") for name in names
    ]
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert all(name in page for name in names)
    folder = tmp_path / "sweep" / names[1]
    (folder / "summary.json").unlink()
    alone = run_script(tmp_path, "loss=cce", "seed=7", f"hydra.run.dir={folder}", f"+ckpt_path={folder}/last.ckpt")
    assert alone.returncode == 0, alone.stderr
    assert [row["val/loss"] for row in reported(tmp_path / "sweep")] == ["2.125", "7.125", "1.125"]


def test_a_list_of_runs_that_is_damaged_or_leads_elsewhere_names_only_folders_of_the_sweep(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    for folder in (tmp_path, sweep):
        write_run(folder, "run-1", ["seed=1"])
    lines = ["../run-1", str(tmp_path / "run-1"), ".", "", "run-2", "run-1", "run-1"]
    (sweep / ".runs").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '[1]\n"run')
    assert [run.folder for run in read_runs(sweep)] == [sweep / "run-1"]


@pytest.mark.slow
def test_a_sweep_with_a_failed_job_still_ends_with_its_report_and_with_the_failure(tmp_path: Path) -> None:
    result = run_script(tmp_path, *SWEEP, "broken=standard")
    assert result.returncode == 1
    assert "out of memory, on purpose" in result.stderr
    rows = reported(tmp_path / "sweep")
    assert [(row["loss"], row["seed"], row["val/loss"], row["status"]) for row in rows] == [
        ("standard", "1", "", "failed"),
        ("standard", "2", "", "failed"),
        ("cce", "1", "1.125", "completed"),
        ("cce", "2", "2.125", "completed"),
    ]
    table = markdown_table(read_runs(tmp_path / "sweep"))
    assert result.stdout.count(table) == 1
    assert table in (tmp_path / "sweep" / "report.md").read_text()
    assert (tmp_path / "sweep" / "report.png").exists()
    alone = run_script(tmp_path, "loss=standard", "hydra.run.dir=sweep/0", "+ckpt_path=sweep/0/last.ckpt")
    assert alone.returncode == 0, alone.stderr
    assert [row["status"] for row in reported(tmp_path / "sweep")] == ["completed", "failed", "completed", "completed"]


@pytest.mark.parametrize(
    ("losses", "runs"), [pytest.param("cce,interrupted,chunked", 2, marks=pytest.mark.slow), ("interrupted,cce", 1)]
)
def test_an_interrupted_sweep_shows_the_report_of_what_ran(tmp_path: Path, losses: str, runs: int) -> None:
    result = run_script(tmp_path, "-m", f"loss={losses}", "hydra.sweep.dir=sweep")
    assert result.returncode != 0
    assert "Exception ignored" not in result.stderr
    rows = reported(tmp_path / "sweep")
    assert len(rows) == runs
    assert (rows[-1]["loss"], rows[-1]["status"]) == ("interrupted", "failed")
    assert markdown_table(read_runs(tmp_path / "sweep")) in result.stdout
    assert (tmp_path / "sweep" / "report.png").exists()


def test_a_single_run_gets_no_report(tmp_path: Path) -> None:
    result = run_script(tmp_path, "hydra.run.dir=run")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "summary.json").exists()
    assert not list(tmp_path.rglob("report.*"))
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("setting", "arguments"), [("hydra.run.dir", ()), ("hydra.sweep.dir", ("-m", "seed=1,2"))], ids=["run", "sweep"]
)
def test_an_output_folder_that_cannot_be_written_ends_in_one_sentence(
    tmp_path: Path, setting: str, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "outputs"
    result = run_script(tmp_path, *arguments, f"{setting}={folder}")
    assert result.returncode == 1
    assert result.stderr.strip() == (
        f"The output folder {folder} cannot be written (Not a directory). Choose another one with {setting}=FOLDER"
    )
    assert result.stdout == ""


def test_seeds_are_aggregated_and_the_loss_that_really_ran_is_named(tmp_path: Path) -> None:
    values = {"chunked": (6.0, 6.2), "cce": (6.4, None)}
    jobs = [(loss, seed, value) for loss, found in values.items() for seed, value in enumerate(found, start=1)]
    for number, (loss, seed, value) in enumerate(jobs):
        metrics = None if value is None else {"val/loss": value, "throughput/tokens_per_sec": 1000.0 * seed}
        write_run(tmp_path, number, [f"loss={loss}", f"seed={seed}"], metrics)
        if value is not None:
            summary = json.loads((tmp_path / str(number) / "summary.json").read_text())
            summary |= {"loss": "torch_compile" if loss == "cce" else loss, "seconds": 75}
            (tmp_path / str(number) / "summary.json").write_text(json.dumps(summary))
            (tmp_path / str(number) / ".hydra" / "config.yaml").write_text(f"loss: {{impl: {loss}}}\n")
    (tmp_path / "3" / "error.txt").write_text("the memory does not suffice\n")
    table = write_report(tmp_path, draw=False)
    mean = next(line for line in table.splitlines() if "6.1000 ± 0.1414" in line)
    assert [cell.strip() for cell in mean.split("|")][1] == "chunked"
    assert "1,500 ± 707" in mean
    assert "2 of 2" in mean
    assert "cce (ran as torch_compile)" in table
    assert "1 of 2" in table, "the seed that failed"
    page = (tmp_path / "report.html").read_text()
    assert "6.1000 ± 0.1414" in page
    assert "the memory does not suffice" in page
    assert "0:01:15" in page, "the duration"
    assert "data:text/csv;charset=utf-8,run%2Closs" in page
