"""Draw random tokens for benchmarks: no text, no tokenizer, no disk.

A generator of its own, seeded with ``seed + i``, draws sample ``i``: the data do not depend on the number of workers,
on the order of access, or on the global seed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lit_fused.data.loader import BatchDataModule, BatchLoader
from lit_fused.errors import checked_options


class SyntheticDataModule(BatchDataModule):
    """Batches of uniform random tokens: ``input_ids`` and ``labels``, int64 ``(batch_size, block_size)``.

    Args:
        vocab_size: Tokens are drawn from ``[0, vocab_size)``.
        num_train_batches, num_val_batches: Of each split. Nothing is shuffled: every epoch has the same batches.
    """

    tokenizer = None

    @checked_options("data.", vocab_size=2, block_size=2, num_train_batches=1, num_val_batches=1)
    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        batch_size: int,
        num_train_batches: int,
        num_val_batches: int,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, seed=seed)
        self.vocab_size = vocab_size
        num_train, num_val = num_train_batches * batch_size, num_val_batches * batch_size
        self._train = _RandomTokens(vocab_size, block_size, num_train, seed)
        self._val = _RandomTokens(vocab_size, block_size, num_val, seed + num_train)

    def train_dataloader(self) -> BatchLoader:
        return self.training_batches(self._train, shuffle=False)

    def val_dataloader(self) -> BatchLoader:
        return self.evaluation_batches(self._val)


@dataclass(frozen=True)
class _RandomTokens(Dataset[dict[str, Tensor]]):
    vocab_size: int
    block_size: int
    num_samples: int
    seed: int

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed + index)
        input_ids = torch.randint(self.vocab_size, (self.block_size,), generator=generator)
        return {"input_ids": input_ids, "labels": input_ids.clone()}
