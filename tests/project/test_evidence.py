"""The pages of docs/evidence/ are what their tools make of the figures stored there."""

import json

import evidence
import parallel_table
import pytest


@pytest.mark.parametrize("name", evidence.PAGES)
def test_a_page_of_measurements_is_made_of_stored_figures(name: str) -> None:
    page = (evidence.FOLDER / f"{name}.md").read_text()
    assert page == evidence.PAGES[name](), "run `python tools/evidence.py` and look at what changed"


def test_the_page_of_strategies_is_made_of_all_stored_cells() -> None:
    cells = json.loads(parallel_table.STORED.read_text())
    assert parallel_table.DOCUMENT.read_text() == parallel_table.document(cells)


def test_the_figures_of_the_readme_are_those_of_the_picture() -> None:
    readme = (evidence.FOLDER.parents[1] / "README.md").read_text()
    runs = [run for sweep in evidence.stored("qwen3_memory")["sweeps"] for run in sweep["runs"] if "shown" in run]
    assert len(runs) > 5
    for run in runs:
        assert f"| {run['gib']:.1f} | {round(run['tokens_per_sec'], -2):,} |" in readme, run


def test_the_page_of_long_rows_names_the_planned_and_the_measured_figures() -> None:
    found = evidence.stored("long_context")
    page = (evidence.FOLDER.parent / "long_context.md").read_text()
    assert found["planned"]
    assert "planned by `mode=plan`" in page
    for row in evidence.stored("long_rows")["rows"]:
        if row["length"] > 10_000:
            assert f"| {row['length']:,} |" in page
            assert f"| {row['gpu_gib']:.1f} | {row['host_gib']:.1f} | {row['tokens_per_sec']:,.0f}" in page
    for gib in found["commands_peak_gib"].values():
        assert f"{gib:.1f} GiB" in page
