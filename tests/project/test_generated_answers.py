"""The callback of examples/seq2seq.py counts the answers that a model writes itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_helpers import loader, quiet_trainer, tiny_llama
from torch import Tensor
from word_data import Words, tiny_t5

from lit_fused import FusedCausalLMModule, FusedSeq2SeqLMModule, UserError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _examples_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def answers_of(*args: Any, **options: Any) -> Any:
    from generated_answers import GeneratedAnswers

    return GeneratedAnswers(*args, **options)


class WrittenAnswers(FusedSeq2SeqLMModule):
    """Answers each input w5 w6 ... with its first word, whatever it was trained on."""

    def generate(self, input_ids: Tensor | None = None, **options: Any) -> Tensor:
        assert input_ids is not None
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


@pytest.mark.parametrize(
    ("num_examples", "answered", "right"), [(100, 4, 0.75), (4, 4, 0.75), (3, 4, 0.75), (2, 2, 0.5)]
)
def test_generated_answers_are_counted_right_when_their_text_is(num_examples, answered, right, tmp_path, capsys):
    answers = answers_of(num_examples, num_shown=3)
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
    answers = answers_of(4, num_shown=4)
    for module, callbacks in zip(modules, ([answers], []), strict=True):
        torch.manual_seed(3)
        trainer = quiet_trainer(tmp_path, max_steps=4, val_check_interval=2, callbacks=callbacks)
        trainer.fit(module, Questions())
    assert all(torch.equal(p, q) for p, q in zip(modules[0].parameters(), modules[1].parameters(), strict=True))
    assert [text for text, _, _ in answers.shown] == ["w5 w6", "w7", "w8 w9", "w9"]


def test_generated_answers_need_a_tokenizer_and_sensible_numbers(tmp_path):
    trainer = quiet_trainer(tmp_path, callbacks=[answers_of()])
    with pytest.raises(UserError, match="the data have no tokenizer; give the datamodule a `tokenizer`, or leave"):
        trainer.validate(FusedSeq2SeqLMModule(tiny_t5()), Questions().val_dataloader(), verbose=False)
    with pytest.raises(UserError, match="num_examples must be positive and num_shown not negative, got 0 and 4"):
        answers_of(0)


def test_generated_answers_of_a_causal_model_are_refused_with_what_fits(tmp_path):
    trainer = quiet_trainer(tmp_path, callbacks=[answers_of()])
    with pytest.raises(UserError, match="GeneratedAnswers needs an encoder-decoder, FusedSeq2SeqLMModule"):
        trainer.validate(FusedCausalLMModule(tiny_llama()), datamodule=Questions(), verbose=False)
