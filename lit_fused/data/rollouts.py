"""Rollouts as data: completions of prompts with rewards or advantages, grouped by prompt, in memory.

A record is one completion:

    prompt, completion        texts; or prompt_ids and completion_ids, lists of token ids, which log_probs need
    reward                    a number; or advantage: a number, or one for each token of the completion
    log_probs                 optional, the sampler's, one for each token of completion_ids, in nats
    group                     optional, a number or a text; completions of one prompt are a group where there is none

A completion that is a text ends with the tokenizer's end token; one that the sampler cut is given as completion_ids.

The numbers of a group are found before batches are cut: it may lie in several batches, ranks and accumulated steps.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_fused.data.loader import BatchDataModule, BatchLoader, pad_right
from lit_fused.data.records import load_records
from lit_fused.data.tokenizer import load_tokenizer, vocab_size_of
from lit_fused.errors import UserError, checked_options
from lit_fused.models.special_tokens import closing_tokens, one_of_each
from lit_fused.ops.label_checks import IGNORE_INDEX

# Names in batches, and in records. All rollouts have one of them, or none.
_NAMES = {"advantages": "advantage", "reward": "reward", "sampler_log_probs": "log_probs"}
# Logarithms of probabilities near one may round to this much above zero, as one may in bfloat16.
_ABOVE_ZERO = 2.0**-8


class RolloutDataModule(BatchDataModule):
    """Batches of given rollouts for :class:`lit_fused.objectives.PolicyLoss`, padded to the longest of each.

    Args:
        path: What :func:`lit_fused.data.records.load_records` reads; no copy of it stays in a cache.
        val_path: Rollouts to evaluate on; None: the same ones.
        tokenizer: Name or folder; None where all rollouts have token ids.
        batch_size: Completions per batch.
        block_size: The most tokens of a prompt and its completion; longer ones are refused: cut, their reward would be
            another's.
        num_workers: Worker processes of each loader.
        seed: Of the order of training batches, with the number of the epoch.
        vocab_size: Of a model that is made from a configuration; None: that of the tokens.

    ``setup`` raises UserError, with the number of the record, for numbers that are missing, not finite, or of another
    length than their completion.
    """

    @checked_options("data.", block_size=1, vocab_size=1)
    def __init__(
        self,
        path: str | Path,
        val_path: str | Path | None = None,
        tokenizer: str | Path | None = None,
        batch_size: int = 8,
        block_size: int = 1024,
        num_workers: int = 0,
        seed: int = 0,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers, seed)
        self.path, self.val_path, self.tokenizer_name, self.block_size = path, val_path, tokenizer, block_size
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self._entries = vocab_size
        self.rows: dict[str, list[dict[str, Tensor]]] = {}
        # Training completions that are alone in their group, and that have the same reward as all of it.
        self.alone, self.equal, self.has_advantages = 0, 0, False

    def setup(self, stage: str | None = None) -> None:
        if self.rows:
            return
        self.tokenizer = None if self.tokenizer_name is None else load_tokenizer(self.tokenizer_name)
        self.rows["train"] = self.rows["val"] = self._read(self.path)
        if self.val_path is not None:
            self.rows["val"] = self._read(self.val_path)
        train = self.rows["train"]
        self.has_advantages = "advantages" in train[0]
        self.alone = sum(int(row["group_size"]) == 1 for row in train)
        self.equal = sum(int(row["group_size"]) > 1 and row.get("group_std") == 0 for row in train)

    @property
    def vocab_size(self) -> int:
        """Return one more than the largest possible token."""
        if self._entries is not None:
            return self._entries
        if self.tokenizer is not None:
            return vocab_size_of(self.tokenizer)
        return 1 + max(int(row["input_ids"].max()) for part in self.rows.values() for row in part)

    def train_dataloader(self) -> BatchLoader:
        return self.training_batches(self.rows["train"], self._collate)

    def val_dataloader(self) -> BatchLoader:
        return self.evaluation_batches(self.rows["val"], self._collate)

    def _collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return pad_right(samples, pad if isinstance(pad, int) else 0)

    def _read(self, path: str | Path) -> list[dict[str, Tensor]]:
        """Return the samples of a file, with the numbers of each one's group."""
        with TemporaryDirectory() as folder:  # An online policy writes a file each round.
            records = load_records(path, cache_dir=folder).to_list()
        rows: list[dict[str, Tensor]] = []
        groups: dict[Any, list[dict[str, Tensor]]] = defaultdict(list)
        for number, record in enumerate(records):
            try:
                prompt, row = self._row(record)
            except UserError as error:
                raise UserError(f"rollout {number} of {path}: {error}") from error
            if rows and row.keys() != rows[0].keys():
                raise UserError(f"{path}: rollout {number} has other numbers than rollout 0; give them to all")
            rows.append(row)
            groups[prompt if record.get("group") is None else record["group"]].append(row)
        for group in groups.values():
            tokens = sum(int((row["labels"] != IGNORE_INDEX).sum()) for row in group)
            numbers = {"group_size": float(len(group)), "group_tokens": float(tokens)}
            if "reward" in group[0]:
                rewards = torch.stack([row["reward"] for row in group]).double()
                numbers |= {"group_mean": float(rewards.mean()), "group_std": 0.0}
                if rewards.min() < rewards.max():  # The deviation of equal numbers may round to another one than 0.
                    numbers["group_std"] = float(rewards.std())
            for row in group:
                row |= {name: torch.tensor(number) for name, number in numbers.items()}
        return rows

    def _row(self, record: Mapping[str, Any]) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """Return the tokens of a prompt, and the sample of its completion."""
        prompt, completion = self._tokens(record, "prompt"), self._tokens(record, "completion")
        length, before = len(prompt) + len(completion), len(prompt)
        if not prompt or not completion or length > self.block_size:
            raise UserError(
                f"it has {len(prompt)} tokens of a prompt and {len(completion)} of a completion; each needs one, and "
                f"data.block_size={self.block_size} is the most of both"
            )
        ids = torch.tensor(prompt + completion)
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        row["labels"] = ids.masked_fill(torch.arange(length) < before, IGNORE_INDEX)
        for name, in_record in _NAMES.items():
            if (given := record.get(in_record)) is None:
                continue
            numbers = torch.tensor(given, dtype=torch.float32)
            if name == "reward":
                row[name] = numbers
            else:  # Position t predicts token t + 1.
                if numbers.ndim and len(numbers) != len(completion):
                    raise UserError(f"it has {len(numbers)} {in_record} for {len(completion)} tokens of its completion")
                row[name] = torch.zeros(length)
                row[name][before - 1 : -1] = numbers
            if not numbers.isfinite().all() or (in_record == "log_probs" and numbers.max() > _ABOVE_ZERO):
                raise UserError(f"its {in_record} must be finite numbers, log_probs at most 0; got {str(given)[:60]}")
        return tuple(prompt), row

    def _tokens(self, record: Mapping[str, Any], name: str) -> list[int]:
        if (ids := record.get(f"{name}_ids")) is not None:
            return ids
        if self.tokenizer is None or record.get(name) is None:
            raise UserError(f"it has no {name}_ids, and no text {name} with data.tokenizer=NAME_OR_FOLDER")
        is_prompt, end = name == "prompt", self.tokenizer.eos_token_id
        tokens: Any = self.tokenizer(record[name], add_special_tokens=is_prompt)["input_ids"]
        if is_prompt:
            closing = closing_tokens(self.tokenizer) if len(tokens) > 1 else 0
            return one_of_each(tokens[: len(tokens) - closing], self.tokenizer)
        return one_of_each([*tokens, end] if isinstance(end, int) else tokens, self.tokenizer)
