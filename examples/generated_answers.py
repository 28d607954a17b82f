"""Count the answers that an encoder-decoder gets right when it writes them itself, and show some of them.

The accuracy that comes with the loss is teacher-forced: each token is predicted after the *right* ones before it. Here
the model answers alone, by greedy generation, and a single wrong token makes an answer wrong.

The callback logs val/exact_match, the fraction of answers whose text equals the expected one, over all ranks.
"""

from typing import Any

import lightning as L
import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_fused.callbacks.sample_text import log_text
from lit_fused.callbacks.training_progress import console_beside_bar
from lit_fused.errors import UserError
from lit_fused.ops.label_checks import IGNORE_INDEX
from lit_fused.parallel import placement_of
from lit_fused.training import FusedSeq2SeqLMModule


class GeneratedAnswers(L.Callback):
    """Answer the first inputs of every rank in each validation, log how many answers are right, and print a few.

    Args:
        num_examples: The number of inputs to answer, rounded up to whole batches.
        num_shown: The number of answers to print.

    Attributes:
        shown: (input, expected answer, generated answer) of the answers printed last.
    """

    def __init__(self, num_examples: int = 512, num_shown: int = 4) -> None:
        if num_examples < 1 or num_shown < 0:
            raise UserError(
                f"num_examples must be positive and num_shown not negative, got {num_examples} and {num_shown}"
            )
        self.num_examples = num_examples
        self.num_shown = num_shown
        self.shown: list[tuple[str, str, str]] = []

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.shown = []
        self._answered = self._right = 0

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._answered >= self.num_examples:
            return
        if not isinstance(pl_module, FusedSeq2SeqLMModule):
            raise UserError(
                f"GeneratedAnswers needs an encoder-decoder, FusedSeq2SeqLMModule, not {type(pl_module).__name__}; "
                "leave the callback out"
            )
        tokenizer = _tokenizer(trainer)
        labels = batch["labels"]
        expected = labels.masked_fill(labels == IGNORE_INDEX, tokenizer.pad_token_id)
        with trainer.precision_plugin.forward_context():
            generated = pl_module.generate(
                batch["input_ids"],
                attention_mask=batch.get("attention_mask"),
                max_new_tokens=labels.shape[1],  # an answer that is longer than the longest is wrong anyway
                do_sample=False,
            )
        inputs, answers, texts = (_texts(tokenizer, tokens) for tokens in (batch["input_ids"], expected, generated))
        self._answered += len(answers)
        self._right += sum(text == answer for text, answer in zip(texts, answers, strict=True))
        room = self.num_shown - len(self.shown)
        self.shown += list(zip(inputs, answers, texts, strict=True))[:room]

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        counts = torch.tensor([self._right, self._answered], dtype=torch.float32, device=pl_module.device)
        counts = placement_of(trainer.strategy).sum_over_data(counts)
        exact_match = counts[0] / counts[1].clamp(min=1)
        pl_module.log("val/exact_match", exact_match, prog_bar=True, sync_dist=True)  # the same number on all ranks
        if trainer.is_global_zero and self.shown and not trainer.sanity_checking:
            console = console_beside_bar(trainer)
            console.print(f"Answers after {trainer.global_step} steps: {exact_match:.1%} of {counts[1]:.0f} are right")
            console.print(_table(self.shown))
            lines = (" | ".join(example) for example in (("input", "answer", "generated"), *self.shown))
            log_text(trainer.loggers, "answers", "\n".join(lines), trainer.global_step)


def _tokenizer(trainer: L.Trainer) -> PreTrainedTokenizerBase:
    tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
    if tokenizer is None:
        raise UserError(
            "GeneratedAnswers compares texts, and the data have no tokenizer; give the datamodule a `tokenizer`, or "
            "leave the callback out"
        )
    return tokenizer


def _texts(tokenizer: PreTrainedTokenizerBase, tokens: Tensor) -> list[str]:
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return [text.strip() for text in texts]


def _table(examples: list[tuple[str, str, str]]) -> Table:
    table = Table("input", "answer", "generated")
    for example in examples:
        table.add_row(*map(Text, example))
    return table
