"""The first generation of fully sharded data parallelism (``FSDPStrategy``).

A unit's parameters are gathered for its forward and backward. Every repeated block is a unit; what is left, the input
embedding and the output layer, tied or not, belongs to the root. The root is the whole module, whose forward ends with
the loss, so the loss reads a plain, whole weight at call time.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_fused.errors import UserError
from lit_fused.losses.loss import Batch
from lit_fused.models.language_model import LanguageModel
from lit_fused.parallel.placement import Placement
from lit_fused.weights import materialize


def block_wrap_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Make every layer of a transformers model a unit, as FSDP1's ``auto_wrap_policy``."""
    return recurse or isinstance(module, GradientCheckpointingLayer)


class FSDP1(Placement):
    """FSDP1, in which every rank has a shard of each unit's parameters."""

    is_sharded = True

    def check(self, model: LanguageModel, *, training: bool, compile: str, kernels: str) -> None:
        if compile != "none":
            raise UserError(f"compile={compile} was never compared under FSDP1; choose strategy=fsdp2, or compile=none")
        super().check(model, training=training, compile=compile, kernels=kernels)

    def _materialize(self, model: LanguageModel) -> None:
        materialize(model, "cpu")  # FSDP1 shards a whole model, layer by layer on the device

    def check_batch(self, model: LanguageModel, batch: Batch, index: int) -> None:
        """Refuse units that have gathered and freed the output layer's weight before the loss reads it.

        Raises:
            UserError: the output layer, or a layer whose weight it shares, is a unit or inside one.
        """
        root, head = self.strategy.model, model.head
        if index or not isinstance(root, FullyShardedDataParallel) or head is None:
            return
        weight = getattr(head.layer, "weight", None)
        for unit in FullyShardedDataParallel.fsdp_modules(root):
            inside = unit is not root and any(
                m is head.layer or getattr(m, "weight", 0) is weight for m in unit.modules()
            )
            if inside:
                raise UserError(
                    f"FSDP's auto_wrap_policy has made a unit of {type(unit.module).__name__}, to which the output "
                    "layer's weight belongs; the loss, which runs in the root, needs it there. Wrap the model's layers "
                    "alone: auto_wrap_policy=lit_fused.parallel.block_wrap_policy"
                )

    def generating(self, device: torch.device) -> AbstractContextManager[Any]:
        # The root's own parameters are whole, the other units gather theirs as always.
        return self._summoned(recurse=False)

    @contextmanager
    def whole_weights(self, backbone: nn.Module) -> Iterator[Mapping[str, Tensor] | None]:
        # No unit may run in here: where it computes in another precision than it keeps, FSDP1 forgets to free the whole
        # copy then, and reads that, long outdated, whenever it is asked for whole parameters again.
        with self._summoned(recurse=True):
            state = backbone.state_dict() if self.is_global_zero else {}
            yield {name: value.detach().cpu().clone() for name, value in state.items()}

    @contextmanager
    def _summoned(self, *, recurse: bool) -> Iterator[None]:
        """Gather parameters to be read; all ranks have to enter it."""
        root = self.strategy.model
        if not isinstance(root, FullyShardedDataParallel):
            yield
            return
        summoned = FullyShardedDataParallel.summon_full_params(root, recurse=recurse, writeback=False)
        with summoned, self.strategy.precision_plugin.forward_context():
            yield

    def clip_by_norm(self, gradients: object, max_norm: float) -> None:
        assert isinstance(self.strategy.model, FullyShardedDataParallel)
        self.strategy.model.clip_grad_norm_(max_norm)

    def check_weight_average(self) -> None:
        raise UserError("FSDP1 cannot exchange its weights between steps for their average; choose strategy=fsdp2")
