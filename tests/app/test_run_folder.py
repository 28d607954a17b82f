"""The folder of a run: no run replaces another one, and one that was refused leaves none."""

import json
import os

import pytest
from commands import SYNTHETIC, TINY_MODEL, train

from lit_fused.app.run_folder import claim, leave_nothing, metric_rows, new_folder, read_run_file
from lit_fused.errors import UserError


def test_a_run_takes_no_folder_of_another_and_goes_on_in_its_own(tmp_path):
    descriptor = claim(tmp_path / "run", {"overrides": ["seed=1"]}, None)
    with pytest.raises(UserError, match="of a process that writes into it"):
        claim(tmp_path / "run", {"overrides": []}, str(tmp_path / "run" / "last.ckpt"))
    os.close(descriptor)
    newest = tmp_path / "run" / "checkpoints" / "step-000010.ckpt"
    newest.parent.mkdir()
    newest.touch()
    (tmp_path / "run" / "metrics.csv").write_text("step,a\n")
    for path in (None, str(tmp_path / "other" / "last.ckpt")):
        with pytest.raises(
            UserError, match=rf"has a run already; resume it with ckpt_path={newest}, or choose another"
        ):
            claim(tmp_path / "run", {"overrides": []}, path)
    os.close(claim(tmp_path / "run", {"overrides": ["seed=2"]}, str(newest)))
    assert read_run_file(tmp_path / "run")["overrides"] == ["seed=2"]
    assert [path.name for path in (tmp_path / "run").glob("*.csv")] == ["metrics.1.csv"]


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = [new_folder("outputs/day/10-20-30") for _ in range(3)]
    assert found == ["outputs/day/10-20-30", "outputs/day/10-20-30-2", "outputs/day/10-20-30-3"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert new_folder("outputs/day/10-20-30") == "outputs/day/10-20-30", "a further rank is told the first one's"


@pytest.mark.slow
def test_two_sweeps_and_two_runs_at_once_do_not_meet(tmp_path):
    second = "hydra.run.dir=${new_folder:outputs/day/second}", "hydra.sweep.dir=${new_folder:multirun/day/second}"
    job = [*SYNTHETIC, *TINY_MODEL, "trainer.max_steps=2", "callbacks=measure", "trainer.enable_checkpointing=false"]
    for words in ([], ["trainer.devices=2", "strategy=ddp", "trainer.accelerator=cpu"], ["-m", "seed=1,2"], ["-m"]):
        train(tmp_path, *words, *job, *second)
    ended = {str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("summary.json")}
    runs = {"outputs/day/second", "outputs/day/second-2"}
    assert ended == runs | {f"multirun/day/second{job}" for job in ("/0", "/1", "-2/0")}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/day/*")} == runs | {
        "multirun/day/second",
        "multirun/day/second-2",
    }


def test_a_run_takes_the_folder_of_one_that_failed_without_results(tmp_path):
    os.close(claim(tmp_path, {"overrides": []}, None))
    with pytest.raises(UserError, match="has a run already; choose another folder"):
        claim(tmp_path, {}, None)
    for name in ("error.txt", "run.json.partial"):
        (tmp_path / name).touch()
    os.close(claim(tmp_path, {"overrides": []}, None))
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("claimed", "name", "content", "stays"),
    [
        (True, "metrics.csv", "step,train/loss\n0,9.5\n", True),
        (True, "metrics.csv", "step,data/share_of_tokens\n0,0.9\n", False),  # refused before its first step
        (False, "run.json", "{}", True),
        (True, "run.json", "{}", False),
    ],
)
def test_a_folder_with_results_stays(claimed, name, content, stays, tmp_path):
    folder = tmp_path / "day" / "run"
    folder.mkdir(parents=True)
    (folder / name).write_text(content)
    leave_nothing(folder, claimed=claimed)
    assert folder.exists() == folder.parent.exists() == stays


def test_rows_of_a_run_that_went_on_are_read_as_those_of_one(tmp_path):
    def write(name: str, *lines: str) -> None:
        (tmp_path / name).write_text("epoch,step,train/loss,val/loss\n" + "".join(f"{line}\n" for line in lines))

    write("metrics.1.csv", "0,7,6.0,", "0,7,,8.0", "0,8,5.0,", "0,9,4.0")  # It was killed after step 9, and saved at 7.
    write("metrics.csv", "0,7,,8.5", "0,8,5.5,", "0,9,4.5,")
    found = [(row["step"], row["train/loss"], row["val/loss"]) for row in metric_rows(tmp_path)]
    assert found == [("7", "6.0", ""), ("7", "", "8.5"), ("8", "5.5", ""), ("9", "4.5", "")]


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["+foo=1"], 1),
        (["mode=validate", "ckpt_path=no.ckpt"], 1),
        (["data.block_size=-1"], 1),
        (["loss=liger"], 1),
        (["mode=generate"], 1),
        (["mode=generate", "prompt=a"], 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_refused_command_leaves_no_folder(words, status, tmp_path):
    train(tmp_path, *SYNTHETIC, *TINY_MODEL, *words, status=status)
    left = [path for path in (tmp_path / "outputs").rglob("*") if path.is_file()]
    assert not left, left
    assert not (tmp_path / "outputs").is_dir() or not [*(tmp_path / "outputs").iterdir()]


def test_a_run_says_its_overrides_and_its_configuration(tmp_path):
    train(tmp_path, *SYNTHETIC, *TINY_MODEL, "trainer.max_steps=2", "callbacks=measure", "hydra.run.dir=run")
    found = json.loads((tmp_path / "run" / "run.json").read_text())
    assert found["overrides"] == [*SYNTHETIC, *TINY_MODEL, "trainer.max_steps=2", "callbacks=measure"]
    assert found["cwd"] == str(tmp_path)
    assert found["config"]["trainer"]["max_steps"] == 2
    assert not (tmp_path / "run" / ".hydra").exists()
