"""Rollouts as data: completions of prompts with rewards or advantages, grouped by prompt, in memory.

A line of JSON or a row of Parquet is one completion:

    prompt, completion        texts; or prompt_ids and completion_ids, lists of token ids, which log_probs need
    reward                    a number; or advantage: a number, or one for each token of the completion
    log_probs                 optional, the sampler's, one for each token of completion_ids, in nats
    group                     optional; completions of one prompt are a group where it is absent

Each group's mean, standard deviation, size and tokens are found here, before batches are cut, so that a group may lie
in several batches, on several ranks and in several accumulated steps. A completion of text ends with the tokenizer's
end-of-text token.

T tokens of prompt and completion.
"""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_fused.data.file_source import FileSource
from lit_fused.data.loader import BatchDataModule, BatchLoader, pad_right
from lit_fused.data.source import DocumentError
from lit_fused.data.tokenizer import load_tokenizer, vocab_size_of
from lit_fused.errors import UserError
from lit_fused.ops.label_checks import IGNORE_INDEX

_PER_TOKEN = ("advantages", "sampler_log_probs")


class _Rollout(NamedTuple):
    prompt: list[int]
    completion: list[int]
    group: Any
    reward: float | None
    advantage: list[float] | None
    log_probs: list[float] | None


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
        self._entries = vocab_size
        self.rows: dict[str, list[dict[str, Tensor]]] = {}
        self.smallest_group, self.has_advantages = 0, False

    def setup(self, stage: str | None = None) -> None:
        if self.rows:
            return
        if self.tokenizer_name is not None:
            self.tokenizer = load_tokenizer(self.tokenizer_name)
        train = self._read(self.path)
        self.rows["train"] = self.rows["val"] = rows_of(train)
        if self.val_path is not None:
            self.rows["val"] = rows_of(self._read(self.val_path))
        self.has_advantages = train[0].advantage is not None
        self.smallest_group = min(int(row["group_size"]) for part in self.rows.values() for row in part)

    @property
    def vocab_size(self) -> int:
        """Return one more than the largest possible token."""
        if self._entries is not None:
            return self._entries
        if self.tokenizer is not None:
            return vocab_size_of(self.tokenizer)
        return 1 + max(int(row["input_ids"].max()) for part in self.rows.values() for row in part)

    def train_dataloader(self) -> BatchLoader:
        return self.training_batches(self.rows["train"], f"rollouts of {self.path}", collate_fn=self._collate)

    def val_dataloader(self) -> BatchLoader:
        return self.evaluation_batches(self.rows["val"], self._collate)

    def _collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return pad_right(samples, pad if isinstance(pad, int) else 0)

    def _read(self, path: str | Path) -> list[_Rollout]:
        source, found = FileSource(path).select(None), []
        for content, where in (document for piece in source.pieces() for document in source.read(piece)):
            try:
                if isinstance(content, DocumentError):
                    raise content
                assert isinstance(content, dict)
                found.append(self._rollout(content))
            except DocumentError as error:
                raise UserError(f"{where()}: {error}") from error
        if not found:
            raise UserError(f"{path} has no rollouts; give lines such as {_EXAMPLE}")
        for name in ("advantage", "reward", "log_probs"):
            absent = [getattr(rollout, name) is None for rollout in found]
            if any(absent) and not all(absent):
                raise UserError(f"{path}: rollout {absent.index(True)} has no {name}, and others have; give it to all")
        return found

    def _rollout(self, record: dict[str, Any]) -> _Rollout:
        prompt, completion = (self._tokens(record, name) for name in ("prompt", "completion"))
        if not prompt or not completion:
            raise DocumentError(f"its {'completion' if prompt else 'prompt'} is empty, and needs a token")
        if len(prompt) + len(completion) > self.block_size:
            raise DocumentError(
                f"it has {len(prompt) + len(completion)} tokens, more than data.block_size={self.block_size}; raise "
                "it, or leave the rollout out: cut, its reward would be another's"
            )
        reward, advantage, log_probs = (record.get(name) for name in ("reward", "advantage", "log_probs"))
        if reward is None and advantage is None:
            raise DocumentError(f"it has neither a reward nor an advantage; give one, as in {_EXAMPLE}")
        if log_probs is not None and record.get("completion_ids") is None:
            raise DocumentError("log_probs belong to tokens: give completion_ids, the ids that were sampled, as well")
        if advantage is not None and not isinstance(advantage, list):
            advantage = [advantage] * len(completion)
        rewards = None if reward is None else [reward]
        for name, numbers in (("reward", rewards), ("advantage", advantage), ("log_probs", log_probs)):
            if numbers is None:
                continue
            if name != "reward" and len(numbers) != len(completion):
                raise DocumentError(f"it has {len(numbers)} {name} for {len(completion)} tokens of its completion")
            wrong = [n for n in numbers if not (isinstance(n, int | float) and math.isfinite(n))]
            if wrong:
                raise DocumentError(f"its {name} must be finite numbers, got {wrong[0]}")
        group = record.get("group", tuple(prompt))
        return _Rollout(prompt, completion, group, None if reward is None else float(reward), advantage, log_probs)

    def _tokens(self, record: dict[str, Any], name: str) -> list[int]:
        ids = record.get(f"{name}_ids")
        if ids is not None:
            return list(ids)
        text = record.get(name)
        if not isinstance(text, str):
            raise DocumentError(f"it has no text {name!r} and no list {name + '_ids'!r}, as in {_EXAMPLE}")
        if self.tokenizer is None:
            raise UserError("rollouts of texts need data.tokenizer=NAME_OR_FOLDER, or the ids of their tokens")
        special = name == "prompt"
        tokens = list(self.tokenizer(text, add_special_tokens=special)["input_ids"])  # type: ignore[arg-type]
        end = self.tokenizer.eos_token_id
        if special:
            return tokens[:-1] if tokens and tokens[-1] == end and len(tokens) > 1 else tokens
        return [*tokens, end] if isinstance(end, int) and tokens[-1:] != [end] else tokens


_EXAMPLE = '{"prompt": "2+3=", "completion": "5", "reward": 1.0}'


def rows_of(rollouts: list[_Rollout]) -> list[dict[str, Tensor]]:
    """Return the samples of rollouts, with the numbers of each one's group."""
    groups: dict[Any, list[_Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group].append(rollout)
    rows = []
    for rollout in rollouts:
        ids = torch.tensor(rollout.prompt + rollout.completion)
        before = len(rollout.prompt)
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        row["labels"] = ids.masked_fill(torch.arange(len(ids)) < before, IGNORE_INDEX)
        # Position t predicts token t + 1.
        for name, numbers in zip(_PER_TOKEN, (rollout.advantage, rollout.log_probs), strict=True):
            if numbers is not None:
                row[name] = torch.tensor([0.0] * (before - 1) + [*map(float, numbers)] + [0.0])
        group = groups[rollout.group]
        row["group_size"] = torch.tensor(float(len(group)))
        row["group_tokens"] = torch.tensor(float(sum(len(other.completion) for other in group)))
        if rollout.reward is not None:
            rewards = np.array([other.reward for other in group], dtype=np.float64)
            row["reward"] = torch.tensor(rollout.reward)
            row["group_mean"] = torch.tensor(float(rewards.mean()))
            row["group_std"] = torch.tensor(float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0)
        rows.append(row)
    return rows
