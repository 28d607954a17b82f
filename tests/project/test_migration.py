"""The guides of docs/migration run as they stand, and what comes after gives the losses of what came before."""

import csv
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning_helpers import tiny_llama
from safetensors.torch import load_file

from lit_fused.ops.logits.divergence_rows import Divergence

PAGES = Path(__file__).parents[2] / "docs" / "migration"
EPS = torch.finfo(torch.float32).eps


def blocks(page: str) -> dict[str, list[str]]:
    """The Python of a page by what stands before it: "shared", "Before" or "After"."""
    text = (PAGES / f"{page}.md").read_text()
    found: dict[str, list[str]] = {"shared": [], "Before": [], "After": []}
    for match in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        title = re.search(r"\*\*(Before|After)\*\*\s*$", text[: match.start()])
        found[title[1] if title else "shared"].append(match[1])
    return found


def run(*code: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in code:
        exec(block, namespace)
    return namespace


def logged(folder: Path) -> list[float]:
    """The training loss of every step, from a CSV logger's newest version."""
    newest = max(folder.glob("lightning_logs/version_*/metrics.csv"), key=lambda file: int(file.parent.name[8:]))
    with newest.open() as stream:
        return [float(row["train/loss"]) for row in csv.DictReader(stream) if row["train/loss"]]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_hugging_faces_trainer_and_ours_take_the_same_losses_to_the_same_weights() -> None:
    page = blocks("hf_trainer")
    before = run(*page["shared"], *page["Before"])["trainer"].state.log_history
    run(*page["shared"], *page["After"])
    losses = [entry["loss"] for entry in before if "loss" in entry]
    assert len(losses) == 10
    assert logged(Path("after")) == pytest.approx(losses, rel=1e-5)

    ours, theirs = (load_file(f"{name}/model/model.safetensors") for name in ("after", "before"))
    start = run(*page["shared"])["model"].state_dict()
    assert ours.keys() == theirs.keys() == start.keys()
    for name, value in theirs.items():
        moved = (value - start[name]).norm()
        assert moved > 0
        assert (ours[name] - value).norm() <= 1e-3 * moved, name
    assert list(Path("after").rglob("last.ckpt"))


def test_our_module_has_the_losses_of_the_module_before() -> None:
    page = blocks("lightning")
    losses = []
    for code in (page["Before"], page["After"]):
        run(*page["shared"], *code)
        losses.append(logged(Path()))
    before, after = losses
    assert len(before) == 10
    assert before[-1] != before[0]
    assert after == pytest.approx(before, rel=1e-5)


def test_the_loss_of_forgathers_name_is_cross_entropy_of_the_models_logits() -> None:
    page = blocks("forgather")
    after = run(*page["shared"], *page["After"])
    reference = run(*page["shared"])
    logits = reference["model"](reference["tokens"]).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), reference["labels"][:, 1:].flatten())
    expected.backward()
    assert after["loss"].item() == pytest.approx(expected.item(), rel=4 * EPS)
    torch.testing.assert_close(after["logits"], logits[:, -1])
    for ours, theirs in zip(after["model"].parameters(), reference["model"].parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm()


def test_weights_that_litgpt_has_converted_load() -> None:
    llama = tiny_llama()
    Path("converted").mkdir()
    llama.config.save_pretrained("converted")
    torch.save(llama.state_dict(), "converted/model.pth")
    after = run(*blocks("litgpt")["After"])
    assert after["trainer"].accumulate_grad_batches == 16
    after["module"].save_pretrained("again")
    again = load_file("again/model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in llama.state_dict().items())


def test_trls_settings_and_ours_are_the_same_ones() -> None:
    page = blocks("trl")
    (before, after), (teacher, student) = (
        (run(before)["arguments"], run(after)["loss"])
        for before, after in zip(page["Before"], page["After"], strict=True)
    )
    parts = (after.objective, after.kl_weight, after.parts.clip_low, after.parts.clip_high, after.kl_bias_correction)
    expected = (before.loss_type, before.beta, before.epsilon, before.epsilon_high, before.use_bias_correction_kl)
    assert expected == parts
    assert student.of_loss == Divergence("jsd", beta=teacher.beta)


def test_the_defaults_of_trl_are_those_of_the_table() -> None:
    import trl
    from trl.experimental import cpo, gkd, orpo

    rows = re.findall(
        r"^\| `(\w+)\.(\w+)`([^|]*)\| ([^|]+) \|", (PAGES.parent / "trl_defaults.md").read_text(), re.MULTILINE
    )
    assert len(rows) == 20
    for first, name, others, value in rows:
        for config in (first, *re.findall(r"`(\w+)`'s", others)):
            place: Any = next(place for place in (trl, cpo, gkd, orpo) if hasattr(place, config))
            default = {field.name: field.default for field in fields(getattr(place, config))}[name]
            assert str(getattr(default, "value", default)) == value, (config, name)
