"""``ReplicatedStrategy`` averages gradients where they lie: two ranks train as one process does, or as torch's DDP."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning_helpers import quiet_trainer
from parallel_cases import ON_GPUS
from ranks import Refusal, each
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, Subset

from lit_fused.parallel import ReplicatedStrategy, replicas
from lit_fused.parallel.collectives import objects_of_ranks

STEPS = 4
GROUPS = (1, 100, 10**9)  # bytes: one gradient, two or three, all of them


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

    accumulated = 1
    optimizer: Any = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1, eps=1e-3)  # 1e-8 is zero in float16

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.unused = nn.Linear(5, 4), nn.Linear(4, 2), nn.Linear(2, 2)
        self.build()
        self.numbers = Numbers(dtype)
        self.to(dtype)

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
        return DataLoader(Subset(self.numbers, range(self.global_rank, len(self.numbers), 2)))

    def before_step(self, step: int) -> None:
        """Change what is trained."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.accumulated == 0:
            self.before_step(batch_idx // self.accumulated)


class OnOneRank(Plain):
    """A layer that the loss of one rank comes to, in each step of another one's or of none."""

    def build(self) -> None:
        self.sometimes = nn.Linear(4, 2)

    def loss(self, index: int, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).tanh()
        return (self.second(hidden) + (self.sometimes(hidden) if index % 3 == 0 else 0)).square().mean()


class OnOneRankAccumulated(OnOneRank):
    """In some steps only the first micro-batch comes to the layer."""

    accumulated = 2


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


class RecomputedLate(Plain):
    """Torch's reentrant checkpointing, whose backward comes to a layer whose gradients are being exchanged."""

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
        self.steps([batch[0]], [batch[1][0]], self.optimizers(), self.run_backward)

    def steps(self, indices: list[Any], inputs: list[Tensor], optimizers: Any, backward: Any) -> None:
        """Step both optimisers; ``inputs`` are those of one rank, or of all."""

        def mean(power: int = 1) -> Tensor:
            return torch.stack([self.loss(int(i), x) ** power for i, x in zip(indices, inputs, strict=True)]).mean()

        first, second = optimizers
        backward(mean())
        first.step()
        self.zero_grad()
        backward(mean())
        backward(mean(2))
        second.step()
        self.zero_grad()


class Direct(ByHand):
    """``loss.backward()`` in place of Lightning's ``manual_backward``."""

    def run_backward(self, loss: Tensor) -> None:
        loss.backward()


class Normed(Plain):
    """A batch norm, whose buffers each rank has from its own batches, of two micro-batches a step."""

    optimizer = partial(torch.optim.SGD, lr=0.1)
    accumulated = 2

    def build(self) -> None:
        self.norm = nn.BatchNorm1d(4)

    def loss(self, index: int, inputs: Tensor) -> Tensor:
        return self.second(self.norm(self.first(inputs)).tanh()).square().mean()


class Other(Plain):
    """A parameter more on the second rank."""

    def configure_model(self) -> None:
        if self.global_rank:
            self.extra = nn.Linear(2, 2)


def state(module: Plain) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def in_one_process(module: Plain) -> dict[str, Tensor]:
    """Return the weights after the same steps, from the mean of all ranks' losses."""
    optimizers = module.configure_optimizers()
    for step in range(STEPS):
        module.before_step(step)
        indices = range(2 * module.accumulated * step, 2 * module.accumulated * (step + 1))
        if isinstance(module, ByHand):
            inputs = [module.numbers[i][1] for i in indices]
            module.steps([*indices], inputs, optimizers, lambda loss: loss.backward())
            continue
        for index in indices:
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            (module.loss(index, module.numbers[index][1]) / len(indices)).backward()
            for name, buffer in module.named_buffers() if index % 2 else ():  # The second rank's are not kept.
                buffer.copy_(buffers[name])
        optimizers.step()
        optimizers.zero_grad()
    return state(module)


def fit(case: tuple[Any, ...], folder: Path) -> list[dict[str, Tensor]]:
    """Return the state of each rank after a fit of (class of a module, bytes of a group or another strategy)."""
    kind, how, *dtype = case
    module: Plain = kind(*dtype)
    if isinstance(how, int):
        replicas.GROUP_BYTES = how
    trainer = quiet_trainer(
        folder,
        accelerator="gpu" if ON_GPUS else "cpu",
        devices=2,
        strategy=ReplicatedStrategy() if isinstance(how, int) else how,
        use_distributed_sampler=False,
        max_epochs=1,
        limit_train_batches=STEPS * module.accumulated,
        **({} if isinstance(module, ByHand) else {"accumulate_grad_batches": module.accumulated}),
    )
    trainer.fit(module)
    return objects_of_ranks(state(module))


def test_two_ranks_train_as_one_process_whichever_gradients_are_there(tmp_path):
    cases = [(kind, 1) for kind in (Nowhere, OnOneRankAccumulated, Strided, Unfrozen, ByHand, Normed)]
    cases += [(kind, size) for kind in (Plain, OnOneRank) for size in GROUPS]
    for (kind, size), found in each(fit, 2, cases, tmp_path).items():
        assert not isinstance(found, Refusal), (kind, found)
        for name, value in in_one_process(kind()).items():
            for of_rank in found:
                torch.testing.assert_close(of_rank[name], value, rtol=1e-12, atol=1e-12, msg=f"{kind} {size} {name}")


def test_numbers_of_any_dtype_are_those_of_torchs_ddp(tmp_path):
    """The mean of two ranks' numbers is rounded in the same places."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    cases = [(Plain, how, dtype) for dtype in dtypes for how in (1, "ddp_find_unused_parameters_true")]
    found = [of_ranks[0] for of_ranks in each(fit, 2, cases, tmp_path).values()]
    for ours, theirs in zip(found[::2], found[1::2], strict=True):
        for name in ours:
            if not name.startswith("unused"):  # To DDP it has a gradient of zeros, and decays.
                assert torch.equal(ours[name], theirs[name]), (name, ours[name].dtype)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Other, "rank 1 has other parameters than rank 0; build the same model on every rank"),
        (RecomputedLate, "use_reentrant=False"),
        (Direct, "self.manual_backward(loss)"),
    ],
)
def test_what_would_average_other_gradients_is_refused(kind, words, tmp_path):
    assert words in each(fit, 2, [(kind, 1)], tmp_path)[kind, 1]
