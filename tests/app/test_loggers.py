"""The loggers beside metrics.csv: a real run with all of them, read back by their own means.

Their libraries take seconds to import, and are imported by the tests that need them.
"""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import TINY_MODEL, Finished, text_folder, train
from composed import composed
from hydra.utils import instantiate

from lit_fused import UserError
from lit_fused.app import loggers

STEPS = 7


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, Finished]:
    """A run with every logger, by somebody who is logged in nowhere."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOME", str(folder))
        environment.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        environment.setenv("WANDB_ERROR_REPORTING", "false")
        for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "NETRC"):
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
    assert finished.status == 0, finished.output
    return folder, finished


@pytest.fixture(scope="module")
def metrics(run) -> dict[str, float]:
    return json.loads((run[0] / "out" / "summary.json").read_text())["metrics"]


def test_what_a_run_logs_before_it_goes_on_is_in_its_metrics_once(tmp_path):
    for step in (0, 1):
        logger = loggers.RunCSVLogger(tmp_path)
        logger.log_metrics({"data/share_of_tokens": 0.5}, step=0)
        logger.keep(lambda row: int(row["step"]) < 1)
        logger.log_metrics({"train/loss": 1.0}, step=step)
        logger.save()
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines == ["data/share_of_tokens,step,train/loss", "0.5,0,", ",0,1.0", ",1,1.0"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [(b"\xff\n", None), (b"1,2,3,4\n", None), (b"x,1\n", None), (b"1" * 200_000 + b"\n", "move it away")],
)
def test_damaged_rows_of_metrics_are_left_out_or_named_in_a_sentence(damage, said, tmp_path):
    (tmp_path / "metrics.csv").write_bytes(b"step,train/loss\n0,1.0\n" + damage)
    logger = loggers.RunCSVLogger(tmp_path)
    if said is None:
        logger.keep(lambda row: int(row["step"]) < 3)
        assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,train/loss", "0,1.0"]
    else:
        with pytest.raises(UserError, match=said):
            logger.keep(lambda row: True)


def test_metrics_without_steps_are_named_in_a_sentence(tmp_path):
    (tmp_path / "metrics.csv").write_text("train/loss\n1.0\n")
    with pytest.raises(UserError, match=r"metrics.csv is damaged \(KeyError: 'step'\); move it away"):
        loggers.RunCSVLogger(tmp_path).keep(lambda row: True)


@pytest.mark.slow
def test_metrics_csv_is_written_whatever_else_is_chosen(run):
    assert "train/loss" in (run[0] / "out" / "metrics.csv").read_text().partition("\n")[0]


@pytest.mark.slow
def test_tags_are_in_the_summary(run):
    assert json.loads((run[0] / "out" / "summary.json").read_text())["tags"] == ["baseline", "h200"]


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


def wandb_records(path: Path) -> Iterator[Any]:
    """Read a run's file: a LevelDB log (blocks of 32 KiB, each record in one or more parts) of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    content, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            parsed = Record()
            parsed.ParseFromString(record)
            record = b""
            yield parsed


@pytest.mark.slow
def test_weights_and_biases_writes_an_offline_run_and_says_so(run, metrics):
    folder, finished = run
    assert "Nobody is logged in to Weights & Biases: the run is written to out/wandb only" in finished.plain
    assert "WARNING" not in finished.output
    [offline] = (folder / "out" / "wandb").glob("offline-run-*")
    records = list(wandb_records(next(offline.glob("run-*.wandb"))))
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [row["train/loss"] for row in rows if "train/loss" in row][-1] == pytest.approx(metrics["train/loss"])
    assert [row["val/loss"] for row in rows if "val/loss" in row] == [pytest.approx(metrics["val/loss"])]
    config = {item.key or item.nested_key[0] for r in records for part in (r.run, r) for item in part.config.update}
    assert {"optimizer", "loss", "seed"} <= config
    assert [list(record.run.tags) for record in records if record.run.tags] == [["baseline", "h200"]]
    assert any(offline.rglob("media/table/sample/*.table.json"))


@pytest.mark.slow
def test_mlflow_gives_the_run_back_to_its_client(run, metrics):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run[0] / 'mlruns' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("lit_fused")
    assert experiment is not None
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.tags["baseline"] == found.data.tags["h200"] == "true"
    assert found.data.metrics["val/loss"] == pytest.approx(metrics["val/loss"])
    assert len(client.get_metric_history(found.info.run_id, "train/loss")) == STEPS
    assert found.data.params["optimizer/lr"] == "0.001"
    sample = Path(client.download_artifacts(found.info.run_id, f"sample/after training/step-{STEPS}.txt"))
    assert sample.read_text().startswith("def read_file")


@pytest.mark.parametrize(
    ("name", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow")]
)
def test_a_logger_whose_package_is_missing_says_what_to_install(name, package, tmp_path, monkeypatch):
    if name == "tensorboard":

        def missing(*_: Any, **__: Any) -> None:
            raise ModuleNotFoundError("No module named 'tensorboard'")

        monkeypatch.setattr(loggers, "TensorBoardLogger", missing)
    else:
        monkeypatch.setitem(sys.modules, package if name == "wandb" else "mlflow.tracking", None)
    with pytest.raises(Exception, match=rf"logger={name} needs .* pip install 'lit-fused\[{name}\]'") as caught:
        instantiate(composed(f"logger={name}", f"output_dir={tmp_path}").logger)
    assert isinstance(caught.value.__cause__ if not isinstance(caught.value, UserError) else caught.value, UserError)


@pytest.mark.parametrize(
    ("settings", "netrc", "logged_in"),
    [
        ({}, None, False),
        ({}, "machine example.org login user password x\n", False),
        ({}, "machine api.wandb.ai login user password x\n", True),
        ({"api_key": "x"}, None, True),
        ({"identity_token_file": "x"}, None, True),
    ],
)
def test_who_is_logged_in_is_found_where_wandb_looks(settings, netrc, logged_in, tmp_path, monkeypatch):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if netrc is not None:
        (tmp_path / "netrc").write_text(netrc)
    found = SimpleNamespace(
        **({"api_key": None, "identity_token_file": None, "base_url": "https://api.wandb.ai"} | settings)
    )
    assert loggers._logged_in(found) is logged_in
