"""Benchmarks on a CPU at tiny shapes: what they report, and that a wrong result has no speed."""

import argparse
import json
import re
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torchrun import run

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import distillation_run
import filtered_curve
import items
import items_quality
import linear_cross_entropy as benchmark
import planned_lengths
import policy_loss
import token_scores as scores_benchmark

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
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
    assert torch.__version__.startswith(report["machine"]["torch"])
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


@pytest.fixture
def installed_verl(tmp_path, monkeypatch):
    """A package of verl's layout that cannot be imported as a whole; its chunks are ours."""
    kernel = tmp_path / "verl" / "utils" / "kernel"
    experimental = tmp_path / "verl" / "utils" / "experimental"
    for folder in (kernel, experimental):
        folder.mkdir(parents=True)
    for folder in (tmp_path / "verl", tmp_path / "verl" / "utils"):
        (folder / "__init__.py").write_text("import a_package_that_nobody_has")
    (kernel / "linear_cross_entropy.py").write_text(
        "from verl.utils.kernel import kernels\ndef linear_cross_entropy(*tensors):\n    assert kernels.ON_GPU"
    )
    (kernel / "kernels.py").write_text("ON_GPU = False")
    (experimental / "torch_functional.py").write_text(
        "from lit_fused.ops import token_scores\n"
        "class FusedLinearForPPO:\n"
        "    def __call__(self, *tensors):\n"
        "        scores = token_scores(*tensors, entropy=True)\n"
        "        return scores.log_prob, scores.entropy\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "verl"}
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
        del sys.modules[name]
    sys.modules.update(before)


def test_scores_of_a_policy_are_judged_beside_verls_files_without_its_dependencies(installed_verl, capsys):
    providers = ["token_scores, entropy", "verl, chunks, entropy", "verl, Triton, entropy"]
    rows = {row["provider"]: row for row in scores_benchmark.main([*TINY, "--providers", *providers])["tiny"]}
    ours, chunks, kernels = (rows[name] for name in providers)
    assert ours["tokens_per_sec"] == pytest.approx(512e3 / ours["ms"])
    assert chunks["weight_error"] == ours["weight_error"] < 0.01
    assert kernels["note"] == "cannot run: AssertionError"
    assert kernels["note"] in capsys.readouterr().out
    assert "ms" not in kernels


def test_the_loss_of_a_policy_is_as_near_to_float64_as_that_of_whole_logits_under_trls_formula(tmp_path):
    out = tmp_path / "policy"
    policy_loss.main([*TINY, "--providers", "lit_fused", "logits", "--out", str(out)])
    rows = {row["provider"]: row for row in json.loads(out.with_suffix(".json").read_text())["shapes"]["tiny"]}
    ours, logits = rows["lit_fused"], rows["logits"]
    for error in ("hidden_error", "weight_error"):
        assert 0 < ours[error] <= 1.2 * logits[error] < 0.02
    assert ours["tokens_per_sec"] == pytest.approx(512e3 / ours["ms"])
    assert "| lit_fused |" in out.with_suffix(".tables.md").read_text()


@pytest.fixture
def tiny():
    """Options of a cell with tiny models, whose limit ends with the test."""
    sizes = {"tiny": True, "rows": 2, "length": 16, "steps": 2, "compile": "none", "checkpointing": False}
    yield argparse.Namespace(**sizes, loss="jsd", warm_up_limit=60, limit=60)
    signal.alarm(0)


@pytest.mark.slow
@pytest.mark.parametrize("loss", distillation_run.LOSSES)
def test_a_distillation_in_lightning_has_the_references_loss_and_gradient(tiny, loss):
    tiny.cell, tiny.loss = "lit_fused", loss
    row = distillation_run.measure(tiny)
    assert row["loss_error"] < 0.001
    assert row["gradient_error"] < 0.02
    assert row["tokens_per_sec"] > 0


def test_a_provider_with_a_wrong_distillation_has_no_speed(tiny, monkeypatch):
    right = distillation_run.mean_loss

    def mean_loss(name, student, teacher, targets):
        loss = right(name, student, teacher, targets)
        return loss if student.dtype == torch.float64 else loss + 0.5 * (loss - loss.detach())

    monkeypatch.setattr(distillation_run, "mean_loss", mean_loss)
    tiny.cell = "plain"
    row = distillation_run.measure(tiny)
    assert row["error"].startswith("wrong")
    assert "tokens_per_sec" not in row


@pytest.mark.slow
def test_the_curve_of_a_filter_has_errors_that_fall_with_eps_and_rise_without_the_correction(tmp_path):
    tensors = benchmark.inputs((512, 64, 2048), torch.device("cpu"))
    torch.save({"trained": tensors, "initial": (0.01 * tensors[0], *tensors[1:])}, tmp_path / "head.pt")
    sizes = ["--eps", "6", "10", "--groups", "256", "--turns", "1", "--peers", "standard", "chunked"]
    arguments = ["--head", str(tmp_path / "head.pt"), "--device", "cpu", "--out", str(tmp_path / "curve")]
    points = {point.name: point for point in filtered_curve.main([*arguments, *sizes])["trained"]}
    coarse, fine, plain = (points[f"2^-{x}, groups of 256{y}"] for x, y in ((6, ""), (10, ""), (6, ", no correction")))
    assert points["chunked"].hidden_error <= fine.hidden_error < coarse.hidden_error < plain.hidden_error
    assert coarse.kept is not None
    assert fine.kept is not None
    assert coarse.kept < fine.kept


@pytest.mark.slow
def test_the_divided_head_is_checked_and_timed_against_the_whole_and_the_gathered_one():
    script, size = BENCHMARKS / "vocabulary_parallel.py", ["--tokens", 256, "--shapes", "64x1001", "--repeats", 1]
    for scores in ([], ["--scores"]):
        printed = run(script, 2, *size, *scores, timeout=100)
        assert re.search(r"^\| 256 x 64 x 1001( \| [\d.]+){4} \| \d+% \| needs GPUs \| \|$", printed, re.MULTILINE)
    printed = run(script, 2, *size, "--own-tokens", timeout=100)
    assert re.search(r"^\| 256 x 64 x 1001( \| [\d.]+){4} \|$", printed, re.MULTILINE)


@pytest.mark.slow
def test_losses_over_a_catalogue_are_timed_and_compared_with_the_best_possible_ranking(capsys):
    items.main(["--shapes", "32,8,500", "--device", "cpu", "--dtype", "float32"])
    assert len(capsys.readouterr().out.splitlines()) == 4
    sizes = "--items 60 --users 150 --epochs 15 --sampled-epochs 15 --width 16 --batch-size 32 --negatives 16 --lr 1e-2"
    losses = ["full softmax", "sampled softmax, log q", "gBCE"]
    items_quality.main([*sizes.split(), "--device", "cpu", "--seeds", "1", "--losses", *losses])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    found = {row[0]: float(row[1]) for row in rows[2:]}
    # In so few steps from small rows, gBCE learns which items are popular, and no more.
    assert found["gBCE"] < found["sampled softmax, log q"] < found["the best possible ranking"] < 1
    assert found["gBCE"] < found["full softmax"] < found["the best possible ranking"]


@pytest.mark.slow
def test_memory_over_lengths_is_planned_and_drawn_for_each_way(tmp_path):
    out = tmp_path / "lengths.json"
    planned_lengths.main(["--tiny", "--lengths", "256", "2048", "--out", str(out)])
    found = json.loads(out.read_text())
    assert all(few < many for few, many in found["peak_gib"].values())
    assert found["peak_gib"]["loss=standard memory=none"][1] > found["peak_gib"]["memory=long"][1]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
