"""The folder of a run: one process at a time has it, and nothing in it is replaced without a word."""

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from test_reporting import run_script

from lit_fused.app import run_folder
from lit_fused.app.run_folder import (
    RESUMED,
    adopt_configuration,
    check_nothing_is_replaced,
    fitted,
    give_back,
    overrides_in,
    take,
)
from lit_fused.errors import UserError, resuming

ELSEWHERE = "Choose another one with hydra.run.dir=FOLDER"


def in_use(folder: Path) -> subprocess.Popen[str]:
    """A process that has taken the folder and lives."""
    program = "import sys, time, pathlib; from lit_fused.app.run_folder import take; "
    program += "take(pathlib.Path(sys.argv[1]), ''); print('taken', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "taken\n"
    return process


def test_a_second_run_in_a_folder_is_refused_by_name_until_the_first_is_gone_however_it_ends(tmp_path):
    first = in_use(tmp_path)
    try:
        with pytest.raises(UserError, match=rf"in use by another run \(process {first.pid} on .*since .*{ELSEWHERE}"):
            take(tmp_path, ELSEWHERE)
        second = run_script(tmp_path, f"hydra.run.dir={tmp_path}")
        assert second.returncode == 1
        assert second.stderr.count("\n") == 1
        assert f"process {first.pid}" in second.stderr
        assert not (tmp_path / ".hydra").exists()
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    take(tmp_path, ELSEWHERE)
    give_back(tmp_path)


def test_a_file_system_without_locks_is_no_reason_not_to_run(tmp_path, monkeypatch):
    def unsupported(self: filelock.FileLock, timeout: float) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(run_folder.FileLock, "acquire", unsupported)
    take(tmp_path, ELSEWHERE)


def test_what_killed_processes_left_is_cleared_and_nothing_else(tmp_path):
    left = [".environment.json.4321", ".summary.json.1", "exported.partial", "checkpoints/step-000005.ckpt.partial"]
    mine = [".notes.12", "checkpoints/step-000005.ckpt", "partial", ".env"]
    for name in (*left, *mine):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "checkpoints" / "last.ckpt.partial").mkdir()
    take(tmp_path, ELSEWHERE)
    give_back(tmp_path)
    assert not [name for name in left if (tmp_path / name).exists()]
    assert all((tmp_path / name).exists() for name in mine)
    assert not (tmp_path / "checkpoints" / "last.ckpt.partial").exists()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("metrics.csv", Path.mkdir),
        ("summary.json", os.mkfifo),
        ("error.txt", Path.mkdir),
        ("report.html", Path.mkdir),
        ("checkpoints", Path.touch),
        (".hydra", Path.touch),
        ("exported", lambda path: path.symlink_to("nowhere")),
    ],
)
def test_what_is_in_the_way_is_named_before_anything_runs(name, make, tmp_path):
    make(tmp_path / name)
    with pytest.raises(UserError, match=rf"{re.escape(str(tmp_path / name))} is in the way: .*{ELSEWHERE}"):
        take(tmp_path, ELSEWHERE)
    give_back(tmp_path)


def test_a_full_disk_is_noticed_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder.tempfile, "TemporaryFile", lambda dir: io.FileIO("/dev/full", "wb"))
    with pytest.raises(UserError, match=rf"{tmp_path} cannot be written \(No space left on device\). {ELSEWHERE}"):
        take(tmp_path, ELSEWHERE)


def results(folder: Path) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    for step in (5, 10):
        (folder / "checkpoints" / f"step-{step:06d}.ckpt").write_text("whole")
        time.sleep(0.01)
    (folder / "metrics.csv").write_text("epoch,step\n")
    return folder


def test_a_fit_replaces_no_other_in_its_folder_and_goes_on_with_its_own(tmp_path):
    run, other = results(tmp_path / "run"), results(tmp_path / "other")
    newest = run / "checkpoints" / "step-000010.ckpt"
    said = rf"would replace its checkpoints, metrics.csv\. Resume that run with ckpt_path={newest}.*{ELSEWHERE}"
    for path in (None, other / "checkpoints" / "step-000010.ckpt"):
        with pytest.raises(UserError, match=said):
            check_nothing_is_replaced([tmp_path / "new", run], path, ELSEWHERE)
    check_nothing_is_replaced([run], newest, ELSEWHERE)
    check_nothing_is_replaced([tmp_path / "new"], newest, ELSEWHERE)


def test_a_command_that_is_refused_leaves_the_configuration_of_the_run_as_it_was(tmp_path):
    run = results(tmp_path / "run")
    (run / ".hydra").mkdir()
    (run / ".hydra" / "config.yaml").write_text("mode: fit\n")
    assert fitted(run)
    again = run_script(tmp_path, "hydra.run.dir=run", "seed=2")
    assert again.returncode == 1
    assert "has a run already" in again.stderr
    assert again.stderr.count("\n") == 1
    assert (run / ".hydra" / "config.yaml").read_text() == "mode: fit\n"


@pytest.mark.parametrize(
    ("runs", "subdir", "refused"), [(["0", "1"], "${hydra.job.num}", "1"), (["run-1"], "run-${seed}", "run-1")]
)
def test_a_sweep_is_not_started_over_another(runs, subdir, refused, tmp_path):
    for name in runs:
        (results(tmp_path / "sweep" / name) / ".hydra").mkdir()
        (tmp_path / "sweep" / name / ".hydra" / "config.yaml").write_text("mode: fit\n")
    if "0" in runs:  # It is finished.
        (tmp_path / "sweep" / "0" / "summary.json").touch()
    again = run_script(tmp_path, "-m", "seed=1,2", "hydra.sweep.dir=sweep", f"hydra.sweep.subdir={subdir}")
    assert again.returncode == 1
    said = rf"sweep/{refused} has a run already.*alone.*hydra.run.dir=ITS_FOLDER.*hydra.sweep.dir=FOLDER"
    assert re.search(said, again.stderr)
    assert (tmp_path / "sweep" / refused / ".hydra" / "config.yaml").read_text() == "mode: fit\n"


@pytest.mark.parametrize("name", ["plain", "a b", "a,b", "a=b (c)", "prénom", "it's", 'a\\"b', "[1]", "a\nb", "~"])
def test_the_word_that_resumes_a_run_is_read_by_a_shell_and_hydra_as_the_path(name):
    path = f"/runs/{name}/checkpoints/last.ckpt"
    (word,) = shlex.split(resuming(path))
    (override,) = OverridesParser.create().parse_overrides([word])
    assert (override.key_or_group, override.value(), override.is_sweep_override()) == ("ckpt_path", path, False)


def test_a_link_in_the_place_of_a_new_configuration_is_removed_and_not_followed(tmp_path):
    run, elsewhere = results(tmp_path / "run"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (run / ".hydra").mkdir()
    (run / RESUMED).symlink_to(elsewhere)
    take(run, ELSEWHERE)
    give_back(run)
    adopt_configuration(run)
    assert not (run / RESUMED).is_symlink()
    assert [path.name for path in elsewhere.iterdir()] == ["precious"]


def test_the_overrides_of_a_run_that_goes_on_are_its_own_and_those_of_the_command(tmp_path):
    for folder, lines in ((".hydra", "- seed=2\n- +a=1\n"), (RESUMED, "- ckpt_path=x\n- a=3\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "overrides.yaml").write_text(lines)
    adopt_configuration(tmp_path)
    assert overrides_in(tmp_path / ".hydra") == ["seed=2", "a=3"]


def test_a_checkpoint_that_is_no_path_is_left_to_the_check_of_the_configuration(tmp_path):
    assert "Callback" not in run_script(tmp_path, "+ckpt_path=[a,b]", "hydra.run.dir=run").stderr
