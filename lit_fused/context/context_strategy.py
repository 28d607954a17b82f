"""``ContextStrategy`` and its placement: FSDP2 whose neighbouring ranks divide the tokens of each row among them.

Ranks have coordinates (data, context). Ranks that differ in the second share a batch, of whose rows each has t = T / c
tokens. Parameters are sharded over all ranks, and sums and counts are added over all of them.
"""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lit_fused.context.divided_forward import DividedForward
from lit_fused.context.exchange import Ranks
from lit_fused.errors import UserError, checked_options
from lit_fused.losses.loss import Batch, Forward, LossOutput
from lit_fused.models.language_model import LanguageModel
from lit_fused.parallel.placement import Placement, has_towers
from lit_fused.parallel.sharded import Sharded
from lit_fused.parallel.strategies import FSDP2Strategy

_OTHERWISE = "choose strategy=fsdp2, which divides no row"


class ContextStrategy(FSDP2Strategy):
    """FSDP2 in which groups of neighbouring devices share each batch and divide the tokens of its rows.

    A device has T / c tokens of each row in all layers; for attention, devices exchange tokens for heads, and each
    computes its share of the heads over whole rows. Parameters, gradients and optimiser state are sharded over all
    devices. Loss, gradients and metrics are those of whole rows.

    Args:
        context_parallel_size: devices c that divide a row; it divides the model's attention heads. 1 divides none; None
            is as many as there are.
        data_parallel_size: number of such groups, which train on different data; None is as many as the devices make.
        process_group_backend, timeout: as Lightning's.
        reduce_every_micro_batch, reshard_after_forward, mixed_precision_policy, gather_head: as
            :class:`FSDP2Strategy`'s.

    Raises:
        UserError: in the trainer, if its devices cannot be grouped so.
    """

    placement_class: type[Placement]
    groups = "context_parallel"

    @checked_options(data_parallel_size=1, context_parallel_size=1)
    def __init__(
        self,
        context_parallel_size: int | None = None,
        data_parallel_size: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        *,
        reduce_every_micro_batch: bool = True,
        reshard_after_forward: bool | None = None,
        mixed_precision_policy: bool = False,
        gather_head: bool = True,
    ) -> None:
        super().__init__(
            data_parallel_size,
            1,
            process_group_backend,
            timeout,
            reduce_every_micro_batch=reduce_every_micro_batch,
            reshard_after_forward=reshard_after_forward,
            mixed_precision_policy=mixed_precision_policy,
            gather_head=gather_head,
        )
        self.sizes = data_parallel_size, context_parallel_size
        self.shards: DeviceMesh | None = None

    def setup_environment(self) -> None:
        super().setup_environment()
        self.shards = init_device_mesh(self.root_device.type, (self.world_size,), mesh_dim_names=("shards",))


class Context(Sharded):
    """FSDP2 over all ranks, of whom those of ``mesh["context_parallel"]`` divide the rows of a batch."""

    def __init__(self, strategy: ContextStrategy) -> None:
        super().__init__(strategy)
        self._ranks: Ranks | None = None
        self._forward_passes: dict[int, DividedForward] = {}

    @property
    def ranks(self) -> Ranks:
        if self._ranks is None:
            self._ranks = Ranks(self.mesh.get_group("context_parallel"))
        return self._ranks

    @property
    def shards(self) -> DeviceMesh:
        return self.strategy.shards

    @property
    def data_parallel_size(self) -> int:
        return self.mesh["data_parallel"].size()

    @property
    def data_parallel_group(self) -> None:
        return None  # All ranks have different tokens.

    @property
    def averaged_ranks(self) -> int:
        return self.strategy.world_size

    def check(self, model: LanguageModel, *, training: bool, compile: str) -> None:
        super().check(model, training=training, compile=compile)
        if self.ranks.size > 1:
            check_model(model)

    @property
    def _sharers(self) -> tuple[dist.ProcessGroup, str] | None:
        return (self.ranks.group, "ranks of one context-parallel group") if self.ranks.size > 1 else None

    def forward_pass(self, model: LanguageModel) -> Forward:
        if self.ranks.size == 1:
            return super().forward_pass(model)
        return self._forward_passes.setdefault(id(model), DividedForward(model, self.ranks))

    def evaluate(self, model: LanguageModel, batch: Batch) -> LossOutput:
        forward = self.forward_pass(model)
        return model.run_with(_sums, forward, batch) if isinstance(forward, DividedForward) else model(batch)

    def token_losses(self, model: LanguageModel, batch: Batch) -> Tensor:
        forward: Any = self.forward_pass(model)
        is_divided = isinstance(forward, DividedForward)
        return model.run_with(_token_losses, forward, batch) if is_divided else model.token_losses(batch)


ContextStrategy.placement_class = Context


def _sums(model: LanguageModel, forward: DividedForward, batch: Batch) -> LossOutput:
    return replace(model.compute(forward, batch), num_items=batch.get("num_items_in_batch"))


def _token_losses(model: LanguageModel, forward: DividedForward, batch: Batch) -> Tensor:
    return forward.token_losses(batch)


def check_model(model: LanguageModel) -> None:
    """Raise UserError for a model or a loss that divided rows are not exact for."""
    inner, loss = model.transformers_model, model.loss
    if not loss.divides_rows:
        raise UserError(
            f"{type(loss).__name__} needs whole rows of a batch, which strategy=context divides; {_OTHERWISE}"
        )
    if inner is None or inner.config.is_encoder_decoder or has_towers(model):
        kind = "no model of transformers" if inner is None else "no model of text with one list of layers"
        raise UserError(f"strategy=context divides attention of transformers, and {model.name} is {kind}; {_OTHERWISE}")
