"""How a strategy spreads a model over devices, as far as it decides what memory each of them needs."""

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

from lit_fused.context import ContextStrategy
from lit_fused.errors import UserError
from lit_fused.models.language_model import LanguageModel
from lit_fused.parallel import FSDP2Strategy, ReplicatedStrategy
from lit_fused.parallel.sharded import stay_gathered, units


@dataclass(frozen=True)
class Spread:
    """Says how a model is spread over devices: as FSDP2 divides it, or whole on each.

    Attributes:
        name: of a report.
        shards: devices that have a part each of parameters, gradients and optimiser state.
        whole_gradients: they are divided only after the last micro-batch.
        whole_units: a unit stays whole between its forward and its backward; None: as FSDP2 chooses for the GPU.
        buckets: gradients have a copy in which they are exchanged: Lightning's DDPStrategy as it comes.
        row_parts: devices that divide the tokens of each row.
    """

    name: str = "one device"
    shards: int = 1
    whole_gradients: bool = False
    whole_units: bool | None = False
    buckets: bool = False
    row_parts: int = 1

    @classmethod
    def of(cls, strategy: Any, devices: int, accumulate_grad_batches: int) -> "Spread":
        """Return that of a strategy, Lightning's object or its name, on some devices; UserError if it is unknown."""
        if isinstance(strategy, Spread):
            return strategy
        if devices == 1 and (strategy == "auto" or isinstance(strategy, SingleDeviceStrategy)):
            return cls()
        if strategy in ("auto", "ddp"):
            strategy = DDPStrategy()
        if isinstance(strategy, ReplicatedStrategy):
            return cls(f"ddp on {devices}")
        if isinstance(strategy, DDPStrategy):
            return cls(f"ddp on {devices}", buckets=devices > 1)
        if isinstance(strategy, FSDP2Strategy) and strategy.gather_head and not strategy.mixed_precision_policy:
            late = not strategy.reduce_every_micro_batch and accumulate_grad_batches > 1
            whole = None if strategy.reshard_after_forward is None else not strategy.reshard_after_forward
            _, size = strategy.sizes_on(devices)
            if isinstance(strategy, ContextStrategy):
                return cls(f"context on {devices}, rows in {size} parts", devices, late, whole, row_parts=size)
            if size == 1:
                return cls(f"fsdp2 on {devices}", devices, late, whole)
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise UserError(
            f"a plan does not know what strategy={name} takes; it knows one device, ddp, fsdp2 and context, without "
            "tensor parallelism, mixed_precision_policy and gather_head=false. Measure this one: callbacks=measure "
            "trainer.max_steps=3"
        )

    @property
    def share(self) -> float:
        """A device's share of the divided numbers."""
        return 1.0 / self.shards

    def gathered(self, model: nn.Module, memory_mib: float) -> tuple[int, int]:
        """Return the bytes of the units that are whole in forward, and of those added in backward: the root and one
        other, then another one and the gradients of two that wait to be reduced; or all, then these gradients."""
        if self.shards == 1:
            return 0, 0
        if not isinstance(model, LanguageModel):
            raise UserError(
                f"a plan knows how fsdp2 divides the modules of lit_fused, and {type(model).__name__} is none"
            )
        parts = units(model)
        sizes = [sum(map(_size, unit)) for unit in parts]
        largest = max(sizes, default=0)
        if stay_gathered(parts, memory_mib * 2**20) if self.whole_units is None else self.whole_units:
            return _size(model), 2 * largest
        return _size(model) - sum(sizes) + largest, 3 * largest


def _size(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def capability_here() -> tuple[int, int]:
    """Return that of the GPU that is here, else Hopper's."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
