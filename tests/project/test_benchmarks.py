"""The benchmark of the head, on a CPU at a tiny shape: what it reports, and what it refuses to report."""

import argparse
import json
import math
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torchrun import run

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import filtered_curve
import filtered_training
import items
import items_quality
import linear_cross_entropy as benchmark
import pipeline_memory
import train_head
import whole_step

TINY = ["--device", "cpu", "--shapes", "tiny", "--turns", "1"]


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    monkeypatch.setattr(benchmark, "TURN_SECONDS", 0.01)


def test_it_writes_json_markdown_and_a_picture(tmp_path):
    out = tmp_path / "reports" / "head"
    benchmark.main([*TINY, "--providers", "standard", "chunked", "--out", str(out)])
    report = json.loads(out.with_suffix(".json").read_text())
    rows = {row["provider"]: row for row in report["shapes"]["tiny"]}
    assert set(rows) == {"floor: the products alone", "standard", "chunked"}
    assert all(row["ms"] > 0 and row["times"]["steps"] >= 3 for row in rows.values())
    assert 0 < rows["chunked"]["weight_error"] <= 2 * rows["standard"]["weight_error"]
    assert "| chunked |" in out.with_suffix(".tables.md").read_text()
    assert (
        report["machine"]["torch"] == torch.__version__.split("+")[0] or report["machine"]["torch"] in torch.__version__
    )
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def without_targets(hidden, weight, targets):
    """A loss of the right value whose gradient lacks the targets' term."""
    logits = (hidden @ weight.T).float()
    right = torch.nn.functional.cross_entropy(logits, targets)
    return logits.logsumexp(-1).mean() + (right - logits.logsumexp(-1).mean()).detach()


def test_a_provider_with_a_wrong_result_is_named_and_not_timed(monkeypatch, capsys):
    wrong = {
        "chunked": (without_targets, "wrong gradients"),
        "cce": (lambda h, w, t: 1.1 * benchmark.standard(h, w, t), "loss "),
        "liger": (lambda h, w, t: (h.sum() + w.sum()) * torch.nan, "loss nan"),
    }
    for provider, (loss, _) in wrong.items():
        monkeypatch.setitem(benchmark.PROVIDERS, provider, partial(lambda loss: loss, loss))
    rows = {row.provider: row for row in benchmark.main([*TINY, "--providers", *wrong])["tiny"]}
    printed = capsys.readouterr().out
    for provider, (_, note) in wrong.items():
        assert note in rows[provider].note
        assert rows[provider].ms is None
        assert note in printed
    assert rows["standard"].ms is not None


@pytest.mark.slow
def test_hidden_states_of_a_trained_model_are_measured_too(tmp_path, monkeypatch):
    head = tmp_path / "head.pt"
    text = Path(json.__file__).parent
    arguments = f"train_head.py --text {text} --minutes 0.02 --layers 1 --hidden-size 64 --vocabulary 512"
    monkeypatch.setattr(sys, "argv", [*arguments.split(), "--device", "cpu", "--out", str(head)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    train_head.main()
    results = benchmark.main(
        ["--device", "cpu", "--shapes", "--turns", "1", "--providers", "standard", "--head", str(head)]
    )
    assert set(results) == {"initial", "trained", "peaked"}


@pytest.fixture
def peaked_head(tmp_path) -> Path:
    """A file as ``train_head.py`` writes it, of hidden states whose softmax is that of a trained model."""
    tensors = benchmark.inputs((512, 64, 2048), torch.device("cpu"))
    path = tmp_path / "head.pt"
    torch.save({"trained": tensors, "initial": (0.01 * tensors[0], *tensors[1:])}, path)
    return path


@pytest.mark.slow
def test_the_curve_of_a_filter_has_errors_that_fall_with_eps_and_rise_without_the_correction(peaked_head, tmp_path):
    out = tmp_path / "curve"
    sizes = ["--eps", "6", "10", "--groups", "256", "--turns", "1", "--peers", "standard", "chunked"]
    results = filtered_curve.main(["--head", str(peaked_head), "--device", "cpu", *sizes, "--out", str(out)])
    points = {point.name: point for point in results["trained"]}
    coarse, fine, plain = (points[f"2^-{x}, groups of 256{y}"] for x, y in ((6, ""), (10, ""), (6, ", no correction")))
    assert fine.hidden_error < coarse.hidden_error < plain.hidden_error
    assert coarse.kept is not None
    assert fine.kept is not None
    assert coarse.kept < fine.kept
    assert points["chunked"].hidden_error <= fine.hidden_error
    assert all(point.ms > 0 for point in points.values())
    assert len(json.loads(out.with_suffix(".json").read_text())["points"]["initial"]) == len(points)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def trained(tmp_path: Path, *arguments: str) -> dict:
    """Return what ``filtered_training.py`` writes for a tiny model."""
    out = tmp_path / "training"
    sizes = {"steps": 12, "tokens": 256, "length": 64, "vocabulary": 512, "hidden-size": 64, "layers": 1}
    options = ["--device=cpu", *(f"--{name}={value}" for name, value in sizes.items())]
    text = ["--text", str(Path(json.__file__).parent), "--max-bytes", "100000"]
    filtered_training.main([*text, *options, *arguments, "--out", str(out)])
    return json.loads(out.with_suffix(".json").read_text())


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("no_cache")
def test_training_with_two_heads_is_compared_by_seeds_and_goes_on_where_it_stopped(tmp_path, capsys):
    first = trained(tmp_path, "--losses", "exact", "recompute", "--seeds", "0")["runs"]
    record = trained(tmp_path, "--losses", "exact", "recompute", "--seeds", "0", "1")
    printed = capsys.readouterr().out
    runs = {(run["loss"], run["seed"]): run for run in record["runs"]}
    assert record["runs"][:2] == first
    assert set(runs) == {("exact", 0), ("recompute", 0), ("exact", 1), ("recompute", 1)}
    for seed in (0, 1):  # the same weights, the same data, another exact head
        assert runs["recompute", seed]["train"] == pytest.approx(runs["exact", seed]["train"], abs=0.01)
    assert runs["exact", 0]["train"] != pytest.approx(runs["exact", 1]["train"], abs=0.01)
    assert len(runs["exact", 0]["train"]) == 12
    assert runs["exact", 0]["validation"][-1] < runs["exact", 0]["validation"][0] - 0.1
    assert re.search(r"^\| recompute \| [\d.]+ \| [\d.]+ \| [+-]0.00\d\d \|", printed, re.MULTILINE)
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert "| exact | 0 |" in (tmp_path / "training.tables.md").read_text()


def run_of_a_pipeline(folder: Path, peaks: list[float]) -> None:
    folder.mkdir(parents=True)
    config = {"model": {"config": {"vocab_size": 65536, "hidden_size": 1024}}}
    (folder / "run.json").write_text(json.dumps({"overrides": [], "config": config}))
    metrics = {f"memory/rank_{rank}_gib": peak for rank, peak in enumerate(peaks)}
    (folder / "summary.json").write_text(json.dumps({"metrics": metrics}))


def test_a_pipelines_stages_are_a_table_a_line_and_a_picture(tmp_path, capsys):
    run_of_a_pipeline(tmp_path / "runs" / "standard", [4, 3, 2, 9])
    run_of_a_pipeline(tmp_path / "runs" / "chunked", [4, 3, 2, 3.5])
    pipeline_memory.main(tmp_path / "runs", tmp_path / "stages.png")
    printed = capsys.readouterr().out
    assert "| `standard` | 4.0 | 3.0 | 2.0 | 9.0 |" in printed
    assert "the head's own state (1.00 GiB) and 1 GiB: 4.0 GiB" in printed
    assert (tmp_path / "stages.png").read_bytes().startswith(b"\x89PNG")


def test_the_divided_head_is_checked_and_timed_against_the_whole_one():
    script = Path(__file__).parents[2] / "benchmarks" / "vocabulary_parallel.py"
    printed = run(script, 2, "--tokens", 256, "--shapes", "64x1001", "--repeats", 1, timeout=100)
    assert re.search(r"^\| 64x1001 \| [\d.]+ \| [\d.]+ \| \d+% \|$", printed, re.MULTILINE)


def test_train_py_and_the_loop_by_hand_are_compared_by_the_mean_over_all_steps(monkeypatch):
    """Six steps of 1 s, of which the second of those that count takes 3 s: a median of windows would not see it."""

    def run(command: list[str], **_: object) -> None:
        (folder,) = (o.removeprefix("output_dir=") for o in command if o.startswith("output_dir="))
        seconds = [11, 12, 15, 16, 17, 18]
        rows = [f"{11 + i},{100 * (i + 1)},{s},100.0,1.5,0.25" for i, s in enumerate(seconds)]
        header = "step,throughput/tokens,throughput/seconds,unused,memory/peak_allocated_gib,throughput/mfu"
        Path(folder, "metrics.csv").write_text("\n".join([header, *rows]))

    monkeypatch.setattr(whole_step.subprocess, "run", run)
    monkeypatch.setattr(whole_step, "composed", lambda _: SimpleNamespace(config=SimpleNamespace(vocab_size=97)))
    options = argparse.Namespace(cell="train.py", model="m", precision="p", rows=1, length=1, steps=6, overrides=[])
    assert whole_step.by_command(options) == {"tokens_per_sec": 500 / 7, "gib": 1.5, "mfu": 0.25}


def test_a_catalogue_is_trained_on_and_ranked(capsys):
    items.main(["--shapes", "32,8,500", "--device", "cpu", "--dtype", "float32"])
    lines = capsys.readouterr().out.splitlines()
    names = [re.sub(r"^32,8,500 +", "", line) for line in lines]
    assert [re.split(r" {2,}", name)[0] for name in names] == [
        "loss and gradients", "top_items", "top_items, some excluded", "from the matrix",
    ]  # fmt: skip


@pytest.mark.slow
def test_losses_over_a_catalogue_are_compared_with_the_best_possible_ranking(capsys):
    sizes = "--items 60 --users 150 --epochs 15 --sampled-epochs 15 --width 16 --batch-size 32 --negatives 16 --lr 1e-2"
    losses = ["full softmax", "sampled softmax, log q", "gBCE"]
    items_quality.main([*sizes.split(), "--device", "cpu", "--seeds", "1", "--losses", *losses])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    found = {row[0]: float(row[1]) for row in rows[2:]}
    at_random = sum(1 / math.log2(place + 1) for place in range(1, 11)) / 60
    # In so few steps from small rows, gBCE learns which items are popular, and no more.
    assert at_random < found["gBCE"] < found["full softmax"]
    for loss in losses[:2]:
        assert 2 * at_random < found[loss] < found["the best possible ranking"] < 1
