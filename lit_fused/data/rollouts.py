"""Rollouts as data: completions of prompts with rewards or advantages, grouped by prompt, in memory.

A line of JSON or a row of Parquet is one completion:

    prompt, completion        texts; or prompt_ids and completion_ids, lists of token ids, which log_probs need
    reward                    a number; or advantage: a number, or one for each token of the completion
    log_probs                 optional, the sampler's, one for each token of completion_ids, in nats
    group                     optional, a number or a text; completions of one prompt are a group where there is none

A completion that is a text ends with the tokenizer's end token; one that the sampler cut is given as completion_ids.

The numbers of a group are found before batches are cut: it may lie in several batches, ranks and accumulated steps.
"""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_fused.data.loader import BatchDataModule, BatchLoader, counted, pad_right
from lit_fused.data.records import load_records
from lit_fused.data.tokenized import contents_of
from lit_fused.data.tokenizer import load_tokenizer, vocab_size_of
from lit_fused.errors import UserError, checked_options
from lit_fused.models.special_tokens import closing_tokens, one_of_each
from lit_fused.ops.label_checks import IGNORE_INDEX

_EXAMPLE = '{"prompt": "2+3=", "completion": "5", "reward": 1.0}'
_NAMES = {"advantages": "advantage", "reward": "reward", "sampler_log_probs": "log_probs"}  # in batches, and in files
# Logarithms of probabilities near one may round to this much above zero, as one may in bfloat16.
_ABOVE_ZERO = 2.0**-8


class RolloutDataModule(BatchDataModule):
    """Batches of given rollouts for :class:`lit_fused.objectives.PolicyLoss`, padded to the longest of each.

    Args:
        path: a .jsonl or .parquet file, also compressed, or a folder of them.
        val_path: rollouts to evaluate on; None: the same ones.
        tokenizer: name or folder; None where all rollouts have token ids.
        batch_size: completions per batch.
        block_size: the most tokens of a prompt and its completion; longer ones are refused.
        num_workers: worker processes of each loader.
        seed: of the order of training batches, with the number of the epoch.
        vocab_size: of a model that is made from a configuration; None: that of the tokens.

    ``setup`` raises UserError, with the line, for rollouts that cannot be read: no numbers, NaN rewards, or
    log-probabilities of another length than their completion.
    """

    @checked_options("data.", block_size=1, vocab_size=1)
    def __init__(
        self,
        path: str | Path,
        val_path: str | Path | None = None,
        tokenizer: str | Path | None = None,
        *,
        batch_size: int = 8,
        block_size: int = 1024,
        num_workers: int = 0,
        seed: int = 0,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers, seed)
        self.path, self.val_path, self.tokenizer_name, self.block_size = path, val_path, tokenizer, block_size
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self._entries, self._closing = vocab_size, 0
        self.rows: dict[str, list[dict[str, Tensor]]] = {}
        self.alone, self.has_advantages = 0, False  # training completions that are a group alone

    def setup(self, stage: str | None = None) -> None:
        if self.rows:
            return
        if self.tokenizer_name is not None:
            self.tokenizer = load_tokenizer(self.tokenizer_name)
            self._closing = closing_tokens(self.tokenizer)
        self.rows["train"] = self.rows["val"] = self._read(self.path)
        if self.val_path is not None:
            self.rows["val"] = self._read(self.val_path)
        self.has_advantages = "advantages" in self.rows["train"][0]
        self.alone = sum(int(row["group_size"]) == 1 for row in self.rows["train"])

    @property
    def vocab_size(self) -> int:
        """Return one more than the largest possible token."""
        if self._entries is not None:
            return self._entries
        if self.tokenizer is not None:
            return vocab_size_of(self.tokenizer)
        return 1 + max(int(row["input_ids"].max()) for part in self.rows.values() for row in part)

    def train_dataloader(self) -> BatchLoader:
        rows = self.rows["train"]
        contents = counted(len(rows), "rollout")
        return self.training_batches(rows, contents, collate_fn=self._collate)

    def val_dataloader(self) -> BatchLoader:
        return self.evaluation_batches(self.rows["val"], self._collate)

    def _collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return pad_right(samples, pad if isinstance(pad, int) else 0)

    def _read(self, path: str | Path) -> list[dict[str, Tensor]]:
        """Return the samples of a file, with the numbers of each one's group."""
        rows = []
        groups: dict[Any, list[tuple[dict[str, Tensor], dict[str, Any]]]] = defaultdict(list)
        for number, content in enumerate(contents_of(load_records(path), None)):
            try:
                group, row = self._row(content)
            except UserError as error:
                raise UserError(f"{path}, record {number}: {error}") from error
            rows.append(row)
            groups[group].append((row, content))
        if not rows:
            raise UserError(f"{path} has no rollouts; give lines such as {_EXAMPLE}")
        for name, in_file in _NAMES.items():
            absent = [name not in row for row in rows]
            if any(absent) and not all(absent):
                where = absent.index(True)
                raise UserError(f"{path}: rollout {where} has no {in_file}, and others have; give it to all")
        for group in groups.values():
            tokens = sum(int((row["labels"] != IGNORE_INDEX).sum()) for row, _ in group)
            numbers = {"group_size": float(len(group)), "group_tokens": float(tokens)}
            if "reward" in group[0][0]:
                rewards = np.array([content["reward"] for _, content in group], dtype=np.float64)
                numbers["group_mean"] = float(rewards.mean())
                numbers["group_std"] = float(rewards.std(ddof=1)) if len(group) > 1 else 0.0
            for row, _ in group:
                row |= {name: torch.tensor(number) for name, number in numbers.items()}
        return rows

    def _row(self, record: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
        """Return which group a completion is in, and its sample."""
        prompt, completion = (self._tokens(record, name) for name in ("prompt", "completion"))
        if not prompt or not completion:
            raise UserError(f"its {'completion' if prompt else 'prompt'} is empty, and needs a token")
        if len(prompt) + len(completion) > self.block_size:
            raise UserError(
                f"it has {len(prompt) + len(completion)} tokens, more than data.block_size={self.block_size}; raise "
                "it, or leave the rollout out: cut, its reward would be another's"
            )
        reward, advantage, log_probs = (record.get(name) for name in ("reward", "advantage", "log_probs"))
        if reward is None and advantage is None:
            raise UserError(f"it has neither a reward nor an advantage; give one, as in {_EXAMPLE}")
        if log_probs is not None and record.get("completion_ids") is None:
            raise UserError("log_probs belong to tokens: give completion_ids, the ids that were sampled, as well")
        if advantage is not None and not isinstance(advantage, list):
            advantage = [advantage] * len(completion)
        rewards = None if reward is None else [reward]
        for name, numbers in (("reward", rewards), ("advantage", advantage), ("log_probs", log_probs)):
            if numbers is None:
                continue
            if not isinstance(numbers, list):
                raise UserError(f"its {name} must be a list of numbers, one for each token; got {_shown(numbers)}")
            if name != "reward" and len(numbers) != len(completion):
                raise UserError(f"it has {len(numbers)} {name} for {len(completion)} tokens of its completion")
            wrong = [n for n in numbers if not _is_number(n)]
            if wrong:
                raise UserError(f"its {name} must be finite numbers, got {_shown(wrong[0])}")
        if log_probs is not None and max(log_probs) > _ABOVE_ZERO:
            raise UserError(
                f"its log_probs must be at most 0, as logarithms of probabilities are; got {max(log_probs)}"
            )
        group = record.get("group")
        if group is not None and not (isinstance(group, str) or _is_number(group)):
            raise UserError(f"its group must be a number or a text, got {_shown(group)}")
        ids, before = torch.tensor(prompt + completion), len(prompt)
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        row["labels"] = ids.masked_fill(torch.arange(len(ids)) < before, IGNORE_INDEX)
        for name, numbers in (("advantages", advantage), ("sampler_log_probs", log_probs)):
            if numbers is not None:  # Position t predicts token t + 1.
                row[name] = torch.tensor([0.0] * (before - 1) + [*map(float, numbers)] + [0.0])
        if reward is not None:
            row["reward"] = torch.tensor(float(reward))
        return tuple(prompt) if group is None else group, row

    def _tokens(self, record: dict[str, Any], name: str) -> list[int]:
        ids = record.get(f"{name}_ids")
        if ids is not None:
            if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
                raise UserError(f"its {name}_ids must be a list of token ids, integers from 0; got {_shown(ids)}")
            return ids
        text = record.get(name)
        if not isinstance(text, str):
            raise UserError(f"it has no text {name!r} and no list {name + '_ids'!r}, as in {_EXAMPLE}")
        if self.tokenizer is None:
            raise UserError("rollouts of texts need data.tokenizer=NAME_OR_FOLDER, or the ids of their tokens")
        special = name == "prompt"
        tokens = list(self.tokenizer(text, add_special_tokens=special)["input_ids"])  # type: ignore[arg-type]
        end = self.tokenizer.eos_token_id
        if special:
            return one_of_each(tokens[: len(tokens) - (self._closing if len(tokens) > 1 else 0)], self.tokenizer)
        return one_of_each([*tokens, end] if isinstance(end, int) else tokens, self.tokenizer)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _shown(value: Any) -> str:
    return str(value)[:60]
