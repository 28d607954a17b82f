"""``lit-fused``, as a user runs it; ``.ci/check_wheel.sh`` installs it and runs it from the wheel."""

import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from commands import SYNTHETIC, TINY_MODEL, environment, run_forked

from lit_fused.app.commands import MODES

ROOT = Path(__file__).parents[2]


def lit_fused(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = environment(folder) | {"PYTHONPATH": f"{ROOT}:{folder}"}
    command = [sys.executable, "-m", "lit_fused", *arguments]
    return subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True, timeout=120)


def test_the_package_installs_the_script() -> None:
    [script] = entry_points(group="console_scripts", name="lit-fused")
    assert script.value == "lit_fused.app.cli:main"


def test_help_names_every_mode_and_choice(tmp_path: Path) -> None:
    shown = lit_fused(tmp_path, "--help").stdout
    for mode in MODES:
        assert f"mode={mode}" in shown
    for file in (ROOT / "conf" / "loss").glob("*.yaml"):
        assert re.search(rf"^loss: .*\b{file.stem}\b", shown, re.MULTILINE)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("sweep", [(), ("-m", "seed=1,2")])
def test_ctrl_c_outside_of_a_job_prints_no_trace(sweep: tuple[str, ...], tmp_path: Path) -> None:
    interrupt = "+hydra.callbacks.interrupt={_target_: signal.raise_signal, _args_: [2]}"
    done = run_forked(ROOT / "train.py", tmp_path, [*sweep, interrupt, *SYNTHETIC], status=130)
    assert "Traceback" not in done.output


STOPS = """
import lightning as L

class Stops(L.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 4:
            raise KeyboardInterrupt
"""


@pytest.mark.slow
def test_it_trains_with_the_users_own_choices_and_the_hint_resumes_as_it_was_started(tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text(STOPS)
    mine = tmp_path / "my conf" / "experiment"
    mine.mkdir(parents=True)
    values = "callbacks: {stops: {_target_: stops.Stops}, checkpoint: {every_n_train_steps: 2}}\n"
    (mine / "mine.yaml").write_text(f"# @package _global_\n{values}")
    script = tmp_path / "lit-fused"  # as an installation makes it
    script.write_text("from lit_fused.app.cli import main\n\nif __name__ == '__main__':\n    main()\n")
    words = ["--config-dir", "my conf", "experiment=mine", *SYNTHETIC, *TINY_MODEL]
    stopped = run_forked(script, tmp_path, words, status=130)
    hint = re.search(r"Stopped at step 4. Resume with:\n  (\S*lit-fused .*)\n", stopped.output)
    assert hint, stopped.output
    words = shlex.split(hint[1])
    assert words[1:3] == ["--config-dir", "my conf"]
    assert words[3].startswith("ckpt_path="), "the rest lies beside the checkpoint"

    more = ["~callbacks.stops", "trainer.max_steps=6", "hydra.run.dir=resumed"]
    resumed = run_forked(script, tmp_path, [*words[1:], *more])
    assert "Restored all states" in resumed.output
    assert '"steps": 6' in (tmp_path / "resumed" / "summary.json").read_text()
