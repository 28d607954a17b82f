"""The callbacks around a fit: printing beside a live bar, samples, throughput, export, and how to resume."""

import re
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning_helpers import VOCABULARY, loader, quiet_trainer, ragged_batches, tiny_llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from lit_fused import FusedCausalLMModule, FusedSeq2SeqLMModule, UserError
from lit_fused.callbacks import ExportPretrained, GeneratedAnswers, ResumeHint, SampleText, TokenThroughput
from lit_fused.callbacks.progress import RunProgressBar, console_beside_bar


class Words(L.LightningDataModule):
    """Batches, and a tokenizer whose entries are w0, w1, ..."""

    def __init__(self) -> None:
        super().__init__()
        words = {f"w{i}": i for i in range(VOCABULARY)}
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), eos_token="w0", pad_token="w1"
        )

    def train_dataloader(self) -> Any:
        return loader(ragged_batches(4))


def test_while_a_rich_bar_is_live_others_print_through_its_console(tmp_path):
    found = []

    class Printer(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            bar = trainer.progress_bar_callback
            assert isinstance(bar, RichProgressBar)
            assert bar.progress is not None
            found.append(console_beside_bar(trainer) is bar.progress.console)

    bar = RunProgressBar()
    trainer = quiet_trainer(tmp_path, max_steps=1, enable_progress_bar=True, callbacks=[bar, Printer()])
    trainer.fit(FusedCausalLMModule(tiny_llama()), Words())
    assert found == [True]


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


def test_a_sample_of_no_tokens_is_refused():
    with pytest.raises(UserError, match="max_new_tokens must be positive"):
        SampleText("w5", max_new_tokens=0)


class WrittenAnswers(FusedSeq2SeqLMModule):
    """Answers each input w5 w6 ... with its first word, whatever it was trained on."""

    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        assert options["max_new_tokens"] == 3
        assert torch.equal(options["attention_mask"], (input_ids != 1).long())
        return torch.stack([torch.tensor([1, first, 0]) for first in input_ids[:, 0].tolist()])


class Questions(Words):
    """Two batches; the first words of three of the four inputs are the answers."""

    def val_dataloader(self) -> Any:
        inputs = torch.tensor([[5, 6, 0], [7, 0, 1], [8, 9, 0], [9, 0, 1]])
        labels = torch.tensor([[5, 0, -100], [7, 8, 0], [8, 0, -100], [9, 0, -100]])
        batch = {"input_ids": inputs, "attention_mask": (inputs != 1).long(), "labels": labels}
        return loader([{name: tensor[rows] for name, tensor in batch.items()} for rows in (slice(2), slice(2, 4))])


def tiny_t5() -> T5ForConditionalGeneration:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    special = {"pad_token_id": 1, "eos_token_id": 0, "decoder_start_token_id": 1}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes, **special))


@pytest.mark.parametrize(
    ("num_examples", "answered", "right"), [(100, 4, 0.75), (4, 4, 0.75), (3, 4, 0.75), (2, 2, 0.5)]
)
def test_generated_answers_are_counted_right_when_their_text_is(num_examples, answered, right, tmp_path, capsys):
    answers = GeneratedAnswers(num_examples, num_shown=3)
    trainer = quiet_trainer(tmp_path, callbacks=[answers])
    [metrics] = trainer.validate(WrittenAnswers(tiny_t5()), datamodule=Questions(), verbose=False)
    assert metrics["val/exact_match"] == right
    shown = [("w5 w6", "w5", "w5"), ("w7", "w7 w8", "w7"), ("w8 w9", "w8", "w8")]
    assert answers.shown == shown[:answered]
    printed = capsys.readouterr().out
    assert f"Answers after 0 steps: {right:.1%} of {answered} are right" in printed
    assert "w7 w8" in printed


def test_generated_answers_are_the_models_own_and_leave_training_as_it_is(tmp_path):
    modules = [FusedSeq2SeqLMModule(tiny_t5()) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    answers = GeneratedAnswers(4, num_shown=4)
    for module, callbacks in zip(modules, ([answers], []), strict=True):
        torch.manual_seed(3)
        trainer = quiet_trainer(tmp_path, max_steps=4, val_check_interval=2, callbacks=callbacks)
        trainer.fit(module, Questions())
    assert all(torch.equal(p, q) for p, q in zip(modules[0].parameters(), modules[1].parameters(), strict=True))
    assert [text for text, _, _ in answers.shown] == ["w5 w6", "w7", "w8 w9", "w9"]


def test_generated_answers_need_a_tokenizer_and_sensible_numbers(tmp_path):
    trainer = quiet_trainer(tmp_path, callbacks=[GeneratedAnswers()])
    with pytest.raises(UserError, match="the data have no tokenizer; give the datamodule a `tokenizer`, or leave"):
        trainer.validate(FusedSeq2SeqLMModule(tiny_t5()), Questions().val_dataloader(), verbose=False)
    with pytest.raises(UserError, match="num_examples must be positive and num_shown not negative, got 0 and 4"):
        GeneratedAnswers(0)


def test_generated_answers_of_a_causal_model_are_refused_with_what_fits(tmp_path):
    trainer = quiet_trainer(tmp_path, callbacks=[GeneratedAnswers()])
    with pytest.raises(UserError, match="GeneratedAnswers needs an encoder-decoder, module=seq2seq_lm"):
        trainer.validate(FusedCausalLMModule(tiny_llama()), datamodule=Questions(), verbose=False)


def test_an_encoder_decoder_answers_the_sample_and_is_exported(tmp_path):
    sample = SampleText("w5", max_new_tokens=6)
    trainer = quiet_trainer(tmp_path, max_steps=2, callbacks=[sample, ExportPretrained(tmp_path / "exported")])
    trainer.fit(FusedSeq2SeqLMModule(tiny_t5()), Words())
    assert sample.samples.keys() == {"before training", "after training"}
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path / "exported")
    assert loaded.config.decoder_start_token_id == 1


def test_throughput_counts_every_position_once_and_not_the_time_of_validation(tmp_path):
    throughput = TokenThroughput(window_size=2)

    class SlowValidation(FusedCausalLMModule):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            time.sleep(0.5)

    module = SlowValidation(tiny_llama())
    trainer = quiet_trainer(tmp_path, max_epochs=2, callbacks=[throughput])
    trainer.fit(module, loader(ragged_batches(4)), loader(ragged_batches(2)))
    assert throughput.tokens == 2 * 4 * 2 * 12
    slowest_without_validation = 7 * 2 * 12 / 1.0  # two validations of a second in all would make it slower than this
    assert throughput.mean > slowest_without_validation
    assert trainer.callback_metrics["throughput/tokens_per_sec"] > 0


def test_the_export_holds_model_and_tokenizer(tmp_path):
    data = Words()
    trainer = quiet_trainer(tmp_path, max_steps=1, callbacks=[ExportPretrained(tmp_path / "exported")])
    trainer.fit(FusedCausalLMModule(tiny_llama()), data)
    assert AutoTokenizer.from_pretrained(tmp_path / "exported")("w7")["input_ids"] == [7]
    assert (tmp_path / "exported" / "model.safetensors").exists()


@pytest.mark.parametrize("saved", [False, True])
def test_after_an_error_the_hint_names_the_last_checkpoint_if_there_is_one(saved, tmp_path, capsys):
    class Failing(FusedCausalLMModule):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 3:
                raise RuntimeError("out of something")

    checkpoint = ModelCheckpoint(Path(tmp_path, "a folder"), save_last=True, every_n_train_steps=2 if saved else 100)
    callbacks = [checkpoint, ResumeHint(["loss=standard", "ckpt_path=old.ckpt"])]
    trainer = quiet_trainer(tmp_path, max_steps=9, enable_checkpointing=True, callbacks=callbacks)
    with pytest.raises(RuntimeError, match="out of something"):
        trainer.fit(Failing(tiny_llama()), loader(ragged_batches(5)))
    printed = capsys.readouterr().out
    if saved:
        assert re.search(
            r"Stopped at step 3. Resume with:\n  python train.py loss=standard 'ckpt_path=.*/a folder/", printed
        )
        assert "old.ckpt" not in printed
    else:
        assert "Stopped at step 3; no checkpoint was written yet, so start again." in printed
