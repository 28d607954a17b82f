"""``mode=score`` as a user types it, and a run that trains on its file."""

import csv
import re

import pyarrow.parquet as pq
import pytest
from commands import TINY_MODEL, train

TEXT = (
    "data=text",
    "data.path=text.txt",
    "data.block_size=16",
    "data.batch_size=2",
    "data.vocab_size=300",
    "precision=32-true",
)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_teachers_scores_are_stored_and_a_student_trains_on_them_but_on_no_other_rows(tmp_path):
    (tmp_path / "text.txt").write_text(
        "".join(f"line {n} says that {n} and {n + 1} make {2 * n + 1}\n" for n in range(80))
    )
    fit = ("trainer.max_steps=4", "trainer.val_check_interval=2")
    train(tmp_path, *TINY_MODEL, *TEXT, *fit, "hydra.run.dir=teacher")
    score = ("mode=score", "ckpt_path=teacher/checkpoints/last.ckpt", "score.path=scores.parquet", "score.top_k=5")
    scored = train(tmp_path, *score)  # the data are the run's
    assert "scores.parquet" in scored.output
    assert pq.read_metadata(tmp_path / "scores.parquet").num_rows > 0

    distil = ("module=distillation", "data.scores=scores.parquet", *TINY_MODEL, *TEXT, *fit)
    train(tmp_path, *distil, "hydra.run.dir=student")
    metrics = (tmp_path / "student" / "metrics.csv").read_text()
    assert "train/divergence" in metrics
    other = train(tmp_path, *distil, "data.block_size=24", status=1)
    assert "scores.parquet" in other.plain
    assert "Traceback" not in other.output


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_student_of_stored_hidden_states_has_the_losses_of_the_teacher_beside_it_at_any_temperature(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {n} says that {n} is less than {n + 1}\n" for n in range(80)))
    fit = ("trainer.max_steps=4", "trainer.val_check_interval=2")
    train(tmp_path, *TINY_MODEL, *TEXT, *fit, "hydra.run.dir=teacher")
    scored = train(tmp_path, "mode=score", "ckpt_path=teacher/checkpoints/last.ckpt", "score.hidden=true")
    [path] = re.findall(r"(\S+scores\.parquet): [\d,]+ tokens, by", scored.plain)
    losses = []
    ways = ((f"data.scores={path}",), ("teacher=pretrained", "teacher.path=teacher/exported"))
    for name, way in zip(("stored", "beside"), ways, strict=True):
        loss = ("loss.divergence=jsd", "loss.temperature=2")
        train(tmp_path, "module=distillation", *way, *loss, *TINY_MODEL, *TEXT, *fit, f"hydra.run.dir={name}")
        lines = [*csv.DictReader((tmp_path / name / "metrics.csv").open())]
        losses.append([float(line[key]) for line in lines for key in ("train/loss", "val/loss") if line[key]])
    assert len(losses[0]) >= 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
