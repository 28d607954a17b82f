"""The loggers beside metrics.csv: a real run with all of them, read back by their own means.

Their libraries take seconds to import, and are imported by the tests that need them.
"""

from pathlib import Path

import pytest
from commands import TINY_MODEL, Finished, summary, text_folder, train

STEPS = 7


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, Finished]:
    """A run with every logger."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOME", str(folder))
        environment.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        environment.setenv("WANDB_ERROR_REPORTING", "false")
        environment.setenv("WANDB_MODE", "offline")
        for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_URI", "NETRC"):
            environment.delenv(name, raising=False)
        finished = train(
            folder,
            "logger=[tensorboard,wandb,mlflow]",
            "data=text",
            f"data.path={text_folder(folder)}",
            "data.vocab_size=300",
            "data.block_size=16",
            f"trainer.max_steps={STEPS}",
            "trainer.limit_val_batches=2",
            "~callbacks.export",
            "~callbacks.checkpoint",
            "trainer.enable_checkpointing=false",
            "callbacks.sample_text.max_new_tokens=4",
            "tags=[baseline,h200]",
            "callbacks.sample_text.prompt=def read_file",
            "hydra.run.dir=out",
            *TINY_MODEL,
        )
    return folder, finished


@pytest.fixture(scope="module")
def metrics(run) -> dict[str, float]:
    return summary(run[0] / "out")["metrics"]


@pytest.mark.slow
def test_metrics_csv_is_written_whatever_else_is_chosen_and_tags_are_in_the_summary(run):
    assert "train/loss" in (run[0] / "out" / "metrics.csv").read_text().partition("\n")[0]
    assert summary(run[0] / "out")["tags"] == ["baseline", "h200"]


@pytest.mark.slow
def test_tensorboard_has_the_curves_the_configuration_and_the_samples(run, metrics):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run[0] / "out" / "tensorboard"), size_guidance={"tensors": 0, "images": 0})
    events.Reload()
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == list(range(STEPS))
    assert losses[-1].value == pytest.approx(metrics["train/loss"])
    [sample] = events.Tensors("sample/after training/text_summary")
    assert b"def read_file" in sample.tensor_proto.string_val[0]
    assert "lr: 0.001" in (run[0] / "out" / "tensorboard" / "hparams.yaml").read_text()


@pytest.mark.slow
def test_weights_and_biases_writes_an_offline_run(run):
    [offline] = (run[0] / "out" / "wandb").glob("offline-run-*")
    record = next(offline.glob("run-*.wandb")).read_bytes()
    for said in (b"train/loss", b"val/loss", b"optimizer", b"baseline", b"h200"):
        assert said in record
    assert any(offline.rglob("media/table/sample/*.table.json"))


@pytest.mark.slow
def test_mlflow_gives_the_run_back_to_its_client(run, metrics):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run[0] / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("lit_fused")
    assert experiment is not None
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.metrics["val/loss"] == pytest.approx(metrics["val/loss"])
    assert len(client.get_metric_history(found.info.run_id, "train/loss")) == STEPS
    assert found.data.params["optimizer/lr"] == "0.001"
    sample = Path(client.download_artifacts(found.info.run_id, f"sample/after training/step-{STEPS}.txt"))
    assert sample.read_text().startswith("def read_file")
