"""Modules that are trained in all the ways in which gradients come, for replicas_job.py."""

from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, Subset

STEPS = 4
OPTIMIZER = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1)


class Numbers(Dataset[Any]):
    """Micro-batches of two ranks in turn, with their numbers."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.inputs = torch.randn(4 * STEPS, 3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.inputs[index]


class Plain(L.LightningModule):
    """Three layers, one of which no loss comes to."""

    dtype_ = torch.float64
    accumulated = 1
    optimizer: Any = OPTIMIZER

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.unused = nn.Linear(5, 4), nn.Linear(4, 2), nn.Linear(2, 2)
        self.build()
        self.to(self.dtype_)

    def build(self) -> None:
        """Add what a case has besides."""

    def loss(self, index: int, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).tanh()).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        index, inputs = batch
        return self.loss(int(index), inputs[0])

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())

    def train_dataloader(self) -> Any:
        numbers = Numbers(self.dtype_)
        return DataLoader(Subset(numbers, range(self.global_rank, len(numbers), 2)))

    def before_step(self, step: int) -> None:
        """Change what is trained."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.accumulated == 0:
            self.before_step(batch_idx // self.accumulated)


class Accumulated(Plain):
    accumulated = 2


class BFloat16(Plain):
    dtype_ = torch.bfloat16


class Float16(Plain):
    dtype_ = torch.float16
    optimizer = partial(torch.optim.SGD, lr=0.1)


class Float32(Plain):
    dtype_ = torch.float32


class OnOneRank(Plain):
    """A layer that the loss of one rank comes to, in each step of another one's or of none."""

    def build(self) -> None:
        self.sometimes = nn.Linear(4, 2)

    def loss(self, index: int, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).tanh()
        return (self.second(hidden) + (self.sometimes(hidden) if index % 3 == 0 else 0)).square().mean()


class Nowhere(Plain):
    """A loss that comes to no parameter, on one rank in every other step."""

    def loss(self, index: int, inputs: Tensor) -> Tensor:
        return super().loss(index, inputs) if index % 4 else inputs.clone().requires_grad_().sum()


class Strided(Plain):
    """Gradients that do not lie row by row, and that one rank has not in some steps."""

    def build(self) -> None:
        self.turned = nn.Parameter(torch.randn(5, 5).t())
        self.with_gaps = nn.Parameter(torch.randn(10, 5).t()[:, ::2])
        self.image = nn.Parameter(torch.randn(2, 1, 2, 2).to(memory_format=torch.channels_last))

    def loss(self, index: int, inputs: Tensor) -> Tensor:
        if index % 4:
            inputs = inputs @ self.turned @ self.with_gaps * self.image.sum()
        return super().loss(index, inputs)


class Unfrozen(Plain):
    """A layer that is trained from the third step on, and another one until then."""

    def build(self) -> None:
        self.first.requires_grad_(False)

    def before_step(self, step: int) -> None:
        self.first.requires_grad_(step >= 2)
        self.second.requires_grad_(step < 2)


class Recomputed(Plain):
    """Torch's reentrant checkpointing, which runs a backward within the backward; two of them share a layer."""

    def loss(self, index: int, inputs: Tensor) -> Tensor:
        def run(inputs: Tensor) -> Tensor:
            return self.first(inputs).tanh()

        inputs = inputs.clone().requires_grad_()
        hidden: Any = checkpoint(run, inputs, use_reentrant=True)
        other: Any = checkpoint(run, 2 * inputs, use_reentrant=True)
        return self.second(hidden + other).square().mean()


class RecomputedLate(Plain):
    """A backward within the backward that comes to a layer whose gradients are being exchanged."""

    def build(self) -> None:
        self.unused.requires_grad_(False)

    def loss(self, index: int, inputs: Tensor) -> Tensor:
        hidden: Any = checkpoint(self.second, self.first(inputs), use_reentrant=True)
        return self.second(hidden.repeat(1, 2)).square().mean()


class ByHand(Plain):
    """Manual optimization: two optimisers in turn, the second of which has two backward passes a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [self.optimizer([*self.first.parameters()]), self.optimizer([*self.second.parameters()])]

    def run_backward(self, loss: Tensor) -> None:
        self.manual_backward(loss)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        by_hand(self, [int(batch[0])], [batch[1][0]], optimizers, self.run_backward)


def by_hand(module: Plain, indices: list[int], inputs: list[Tensor], optimizers: Any, backward: Any) -> None:
    """Run a step of :class:`ByHand`; ``inputs`` are those of one rank, or of all."""

    def mean(power: int = 1) -> Tensor:
        losses = [module.loss(index, own) ** power for index, own in zip(indices, inputs, strict=True)]
        return torch.stack(losses).mean()

    first, second = optimizers
    backward(mean())
    first.step()
    first.zero_grad()
    second.zero_grad()
    backward(mean())
    backward(mean(2))
    second.step()
    first.zero_grad()
    second.zero_grad()


class Direct(ByHand):
    """``loss.backward()`` in place of Lightning's ``manual_backward``."""

    def run_backward(self, loss: Tensor) -> None:
        loss.backward()


class Normed(Plain):
    """A batch norm, whose buffers each rank has from its own batches."""

    optimizer = partial(torch.optim.SGD, lr=0.1)

    def build(self) -> None:
        self.norm = nn.BatchNorm1d(4)

    def loss(self, index: int, inputs: Tensor) -> Tensor:
        return self.second(self.norm(self.first(inputs)).tanh()).square().mean()


class Alike(Normed):
    """The first of two micro-batches of a step changes buffers as well."""

    accumulated = 2


class Other(Plain):
    """A parameter more on the second rank."""

    def configure_model(self) -> None:
        if self.global_rank:
            self.extra = nn.Linear(2, 2)


_KINDS = (Plain, OnOneRank, ByHand, Normed)
CASES = {"Plain": Plain} | {case.__name__: case for kind in _KINDS for case in kind.__subclasses__()}
