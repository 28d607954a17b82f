"""The callbacks around a fit: printing beside a live bar, samples, throughput, export, and how to resume."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from transformers import T5ForConditionalGeneration
from word_data import Words, tiny_t5

from lit_fused import FusedCausalLMModule, FusedSeq2SeqLMModule, UserError
from lit_fused.callbacks import (
    ExportPretrained,
    FiniteWatch,
    PeakMemoryMonitor,
    ResumeHint,
    SampleText,
    StopOnSignal,
    TokenThroughput,
    throughput,
)
from lit_fused.data import SyntheticDataModule


def test_samples_before_and_after_differ_and_do_not_disturb_training(tmp_path, capsys):
    sample = SampleText("w5", max_new_tokens=6)
    watched = FusedCausalLMModule(tiny_llama(), optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0))
    alone = FusedCausalLMModule(tiny_llama(), optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0))
    for module, callbacks in ((watched, [sample]), (alone, [])):
        torch.manual_seed(3)
        quiet_trainer(tmp_path, max_steps=4, callbacks=callbacks).fit(module, Words())
    assert all(torch.equal(p, q) for p, q in zip(watched.parameters(), alone.parameters(), strict=True))
    assert sample.samples["before training"] != sample.samples["after training"]
    assert all(text.startswith("w5") for text in sample.samples.values())
    printed = capsys.readouterr().out
    assert printed.index("Sample before training") < printed.index("Sample after training")


def test_an_encoder_decoder_answers_the_sample_and_is_exported(tmp_path):
    sample = SampleText("w5", max_new_tokens=6)
    trainer = quiet_trainer(tmp_path, max_steps=2, callbacks=[sample, ExportPretrained(tmp_path / "exported")])
    trainer.fit(FusedSeq2SeqLMModule(tiny_t5()), Words())
    assert sample.samples.keys() == {"before training", "after training"}
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path / "exported")
    assert loaded.config.decoder_start_token_id == 1


def test_throughput_counts_every_position_once_and_not_the_time_of_validation(tmp_path, monkeypatch):
    monitor, seconds = TokenThroughput(window_size=2), [0.0]
    monkeypatch.setattr(throughput, "perf_counter", lambda: seconds[0])

    class Timed(FusedCausalLMModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seconds[0] += 0.5
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int | None = None) -> None:
            seconds[0] += 100

    module = Timed(tiny_llama())
    trainer = quiet_trainer(tmp_path, max_epochs=2, callbacks=[monitor])
    trainer.fit(module, loader(ragged_batches(4)), loader(ragged_batches(2)))
    assert monitor.tokens == 2 * 4 * 2 * 12
    assert monitor.mean == 2 * 12 / 0.5
    assert trainer.callback_metrics["throughput/tokens_per_sec"] > 0


def test_tokens_and_wall_time_go_on_where_a_resumed_run_stopped_and_begin_anew_in_another_fit(tmp_path):
    def fitted(monitor: TokenThroughput, steps: int, ckpt_path: str | None = None) -> dict[str, float]:
        checkpoint = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)
        options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [monitor, checkpoint]}
        trainer = quiet_trainer(tmp_path, max_steps=steps, **options)
        trainer.fit(FusedCausalLMModule(tiny_llama()), loader(ragged_batches(8)), ckpt_path=ckpt_path)
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    monitor = TokenThroughput()
    first = fitted(monitor, 2)
    last = shutil.copy(tmp_path / "last.ckpt", tmp_path / "two.ckpt")
    resumed = fitted(TokenThroughput(), 5, str(last))
    again = fitted(monitor, 2)
    assert [metrics["throughput/tokens"] for metrics in (first, resumed, again)] == [2 * 24, 5 * 24, 2 * 24]
    assert resumed["throughput/seconds"] > first["throughput/seconds"] > 0


def test_callbacks_of_a_fit_take_a_validation_alone(tmp_path):
    callbacks = [StopOnSignal(), FiniteWatch(), PeakMemoryMonitor(), TokenThroughput(), SampleText()]
    trainer = quiet_trainer(tmp_path, callbacks=[*callbacks, ExportPretrained(tmp_path / "exported")])
    [found] = trainer.validate(FusedCausalLMModule(tiny_llama()), loader(ragged_batches(2)), verbose=False)
    assert found["val/loss"] > 0


@pytest.mark.parametrize("saved", [False, True])
def test_after_an_error_the_hint_names_the_last_checkpoint_if_there_is_one(saved, tmp_path, capsys):
    class Failing(FusedCausalLMModule):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            if self.global_step == 3:
                raise RuntimeError("out of something")

    checkpoint = ModelCheckpoint(Path(tmp_path, "a folder"), save_last=True, every_n_train_steps=2 if saved else 100)
    callbacks = [checkpoint, ResumeHint()]
    trainer = quiet_trainer(tmp_path, max_steps=9, enable_checkpointing=True, callbacks=callbacks)
    with pytest.raises(RuntimeError, match="out of something"):
        trainer.fit(Failing(tiny_llama()), loader(ragged_batches(5)))
    printed = capsys.readouterr().out
    if saved:
        assert re.search(r"Stopped at step 3. Resume with:\n  python train.py 'ckpt_path=.*/a folder/", printed)
    else:
        assert "Stopped at step 3; no checkpoint was written yet, so start again." in printed


def test_a_resume_that_is_refused_is_not_advised_again(tmp_path, capsys):
    def fit(steps: int, rows: int, ckpt_path: Path | None = None) -> None:
        data = SyntheticDataModule(61, 12, rows, num_train_batches=4, num_val_batches=1)
        trainer = quiet_trainer(tmp_path, max_steps=steps, limit_val_batches=0, callbacks=[ResumeHint()])
        trainer.fit(FusedCausalLMModule(tiny_llama()), data, ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / "two.ckpt")

    fit(2, 2)
    with pytest.raises(UserError, match="would not give"):
        fit(4, 3, tmp_path / "two.ckpt")
    assert "Resume with" not in capsys.readouterr().out
