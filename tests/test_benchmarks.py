"""The benchmark of the head, on a CPU at a tiny shape: what it reports, and what it refuses to report."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torchrun import run

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import kernels_and_compile
import linear_cross_entropy as benchmark
import pipeline_memory
import train_head
from tiny_models import tiny_model

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


@pytest.mark.parametrize(
    ("loss", "note"),
    [
        (without_targets, "wrong gradients"),
        (lambda h, w, t: 1.1 * benchmark.standard(h, w, t), "loss "),
        (lambda h, w, t: (h.sum() + w.sum()) * torch.nan, "loss nan"),
    ],
    ids=["gradient", "loss", "nan"],
)
def test_a_provider_with_a_wrong_result_is_named_and_not_timed(loss, note, monkeypatch, capsys):
    monkeypatch.setitem(benchmark.PROVIDERS, "chunked", lambda: loss)
    rows = {row.provider: row for row in benchmark.main([*TINY, "--providers", "chunked"])["tiny"]}
    assert note in rows["chunked"].note
    assert rows["chunked"].ms is None
    assert rows["standard"].ms is not None
    assert note in capsys.readouterr().out


def test_a_provider_that_cannot_run_says_why(monkeypatch, capsys):
    def absent():
        raise ImportError("No module named 'liger_kernel'")

    monkeypatch.setitem(benchmark.PROVIDERS, "liger", absent)
    benchmark.main([*TINY, "--providers", "liger"])
    assert "| liger | cannot run: No module named 'liger_kernel' |" in capsys.readouterr().out


def test_hidden_states_of_a_trained_model_are_measured_too(tmp_path, monkeypatch):
    head = tmp_path / "head.pt"
    text = Path(json.__file__).parent
    arguments = f"train_head.py --text {text} --minutes 0.02 --layers 1 --vocabulary 512 --device cpu --out {head}"
    monkeypatch.setattr(sys, "argv", arguments.split())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    train_head.main()
    results = benchmark.main(
        ["--device", "cpu", "--shapes", "--turns", "1", "--providers", "standard", "--head", str(head)]
    )
    assert set(results) == {"initial", "trained", "peaked"}


def run_of_a_pipeline(folder: Path, peaks: list[float]) -> None:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text("model: {config: {vocab_size: 65536, hidden_size: 1024}}")
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


@pytest.mark.parametrize(
    ("peaks", "message"), [([], "has no peak of each rank.*per_rank=true"), ([4, 3], "a stage between")]
)
def test_runs_that_do_not_tell_are_refused(tmp_path, peaks, message):
    run_of_a_pipeline(tmp_path / "chunked", peaks)
    with pytest.raises(SystemExit, match=message):
        pipeline_memory.main(tmp_path, tmp_path / "stages.png")


def test_the_divided_head_is_checked_and_timed_against_the_whole_one():
    script = Path(__file__).parents[1] / "benchmarks" / "vocabulary_parallel.py"
    printed = run(script, 2, "--tokens", 256, "--shapes", "64x1001", "--repeats", 1, timeout=100)
    assert re.search(r"^\| 64x1001 \| [\d.]+ \| [\d.]+ \| \d+% \|$", printed, re.MULTILINE)


def test_the_benchmark_of_kernels_times_what_is_right_alone(monkeypatch, capsys):
    """On the CPU, at a tiny shape: without Liger's kernels, and with a compiled model whose gradients are wrong."""
    monkeypatch.setattr(kernels_and_compile, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(kernels_and_compile, "CELLS", [("none", "none"), ("none", "regional")])
    for name, value in {"is_available": True, "get_device_name": "a CPU", "max_memory_allocated": 2**30}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch, "autocast", lambda *_, enabled: torch.amp.autocast("cpu", torch.bfloat16, enabled))
    monkeypatch.setattr(kernels_and_compile, "built", lambda _: tiny_model("qwen3_tied"))

    def wrong(model, how):
        if how != "none":
            model.backbone.model.norm.register_full_backward_hook(lambda _, given, __: (2 * given[0],))

    monkeypatch.setattr(kernels_and_compile, "compile_backbone", wrong)
    kernels_and_compile.main(["--rows", "2", "--length", "16", "--steps", "1"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| none")]
    assert re.match(r"\| none \| none \| [\d,]+ \| 1.0 \|", rows[0])
    assert re.match(r"\| none \| regional \| WRONG, loss", rows[1])
