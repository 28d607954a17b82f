"""The callback of examples/seq2seq.py counts the answers that a model writes itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_helpers import loader, quiet_trainer
from torch import Tensor
from word_data import Words, tiny_t5

from lit_fused import FusedSeq2SeqLMModule


class WrittenAnswers(FusedSeq2SeqLMModule):
    """Answers each input w5 w6 ... with its first word, whatever it was trained on."""

    def generate(self, input_ids: Tensor | None = None, **options: Any) -> Tensor:
        assert input_ids is not None
        assert torch.equal(options["attention_mask"], (input_ids != 1).long())
        return torch.stack([torch.tensor([1, first, 0]) for first in input_ids[:, 0].tolist()])


class Questions(Words):
    """Two batches; the first words of three of the four inputs are the answers."""

    def val_dataloader(self) -> Any:
        inputs = torch.tensor([[5, 6, 0], [7, 0, 1], [8, 9, 0], [9, 0, 1]])
        labels = torch.tensor([[5, 0, -100], [7, 8, 0], [8, 0, -100], [9, 0, -100]])
        batch = {"input_ids": inputs, "attention_mask": (inputs != 1).long(), "labels": labels}
        return loader([{name: tensor[rows] for name, tensor in batch.items()} for rows in (slice(2), slice(2, 4))])


@pytest.mark.parametrize(("num_examples", "answered", "right"), [(100, 4, 0.75), (2, 2, 0.5)])
def test_generated_answers_are_counted_right_when_their_text_is(
    num_examples: int, answered: int, right: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    from generated_answers import GeneratedAnswers

    answers = GeneratedAnswers(num_examples, num_shown=3)
    trainer = quiet_trainer(tmp_path, callbacks=[answers])
    [metrics] = trainer.validate(WrittenAnswers(tiny_t5()), datamodule=Questions(), verbose=False)
    assert metrics["val/exact_match"] == right
    assert answers.shown == [("w5 w6", "w5", "w5"), ("w7", "w7 w8", "w7"), ("w8 w9", "w8", "w8")][:answered]
