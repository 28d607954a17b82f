"""Fully sharded data parallelism (FSDP2) and tensor parallelism.

Every repeated block, or a few small ones together, is a unit, whose parameters are gathered for its forward and
backward. The input embedding and the output layer, tied or not, belong to the root, the :class:`LanguageModel`, whose
forward ends with the loss. So the loss reads a plain, whole weight at call time, and its gradient is averaged over the
ranks and sharded like any other; unless each rank keeps its rows of the output layer (own_rows.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from lit_fused.errors import UserError
from lit_fused.losses.loss import Batch
from lit_fused.models.blocks import closed_blocks
from lit_fused.models.language_model import LanguageModel
from lit_fused.parallel.collectives import check_same_batch
from lit_fused.parallel.own_rows import check_own_rows, divide_head
from lit_fused.parallel.placement import Placement, has_towers, reshard
from lit_fused.parallel.tensor import check_plan, divide, is_distributed

# Parameters of a unit. For less, the host works longer on gathering and reducing than a GPU on the layers themselves.
_ENOUGH = 48_000_000
_LITTLE = 1 / 40  # of a device's memory, which a run does not miss for 1 to 2 % of its time


def units(model: LanguageModel) -> list[list[nn.Module]]:
    """Return the units of FSDP2: each block, or as many neighbours as have :data:`_ENOUGH` parameters together.

    Blocks that share a part are none: they are left to the root. Blocks of a unit run in each forward pass, all of
    them, in their order. So only one list of layers is grouped, of a transformers model of text alone that drops none
    of them.
    """
    found, inner = closed_blocks(model.backbone), model.transformers_model
    lists = [set(part) for part in model.backbone.modules() if isinstance(part, nn.ModuleList)]
    settings = {} if inner is None else vars(inner.config)
    drops = any("layer" in name and "drop" in name and share for name, share in settings.items())
    if inner is None or drops or has_towers(model) or set(found) not in lists:
        return [[block] for block in found]
    grouped: list[list[nn.Module]] = []
    size = _ENOUGH
    for block in found:
        if size >= _ENOUGH:
            grouped, size = [*grouped, []], 0
        grouped[-1].append(block)
        size += sum(p.numel() for p in block.parameters())
    return grouped


def stay_gathered(parts: Sequence[Sequence[nn.Module]], memory: float, *, in_bfloat16: bool = False) -> bool:
    """Return whether FSDP2 keeps these units gathered until their backward where nobody has chosen: their parameters
    together, as they are or as bfloat16 copies, are little of a device's memory, in bytes."""
    tensors = {p: p.to_local() if isinstance(p, DTensor) else p for unit in parts for m in unit for p in m.parameters()}
    most = 2 if in_bfloat16 else 8  # bytes of a number
    return sum(t.numel() * min(t.itemsize, most) for t in tensors.values()) <= _LITTLE * memory


class Sharded(Placement):
    """FSDP2 over ``mesh["data_parallel"]``, tensor parallelism over ``mesh["tensor_parallel"]``, or both."""

    is_sharded = True
    _compared = False  # a batch with that of the ranks that share it; a run that was resumed begins with any index

    @property
    def mesh(self) -> DeviceMesh:
        return self.strategy.device_mesh

    @property
    def shards(self) -> DeviceMesh:
        """The ranks that parameters are sharded over."""
        return self.mesh["data_parallel"]

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """The ranks that compute every token together; None where each rank computes its own."""
        names = self.mesh.mesh_dim_names or ()
        if "tensor_parallel" not in names or self.mesh["tensor_parallel"].size() == 1:
            return None
        return self.mesh["tensor_parallel"]

    @property
    def computes_in_copies(self) -> bool:
        """Return whether forward and backward see bfloat16 copies of parameters; Lightning's own never do."""
        return getattr(self.strategy, "mixed_precision_policy", False)

    @property
    def gathers_head(self) -> bool:
        return getattr(self.strategy, "gather_head", True)

    @property
    def data_parallel_size(self) -> int:
        return dist.get_world_size(self.data_parallel_group)

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        return self.mesh.get_group("data_parallel")  # Every step asks, and mesh["data_parallel"] would make a mesh.

    def set_up(self, model: LanguageModel, *, training: bool, compile: str) -> None:
        reshard(model)  # An evaluation may have left bfloat16 copies in the places of the root's float32 parameters.
        super().set_up(model, training=training, compile=compile)

    def check(self, model: LanguageModel, *, training: bool, compile: str) -> None:
        ranks, precision = self.tensor_mesh, self.strategy.precision_plugin.precision
        if self.computes_in_copies and precision != "bf16-mixed":
            raise UserError(
                "mixed_precision_policy=true computes with bfloat16 copies of float32 parameters, got "
                f"precision={precision}; choose precision=bf16-mixed, or mixed_precision_policy=false"
            )
        if not self.gathers_head:
            if ranks is not None:
                raise UserError(
                    "gather_head=false divides the output layer over all devices, as tensor parallelism "
                    "does over some; choose one of them"
                )
            check_own_rows(model)
        if ranks is not None:
            check_never_compared(compile)
        elif compile == "whole":
            raise UserError("compile=whole would be cut at every layer by FSDP2's hooks; choose compile=regional")
        super().check(model, training=training, compile=compile)
        if ranks is not None:
            check_plan(model, ranks.size(), training=training)

    def _divide(self, model: LanguageModel) -> None:
        tensor, data = self.tensor_mesh, self.shards
        if tensor is not None and not is_distributed(model):
            divide(model, tensor, self.strategy.root_device)
        copies = self.computes_in_copies
        if (data.size() > 1 or tensor is None or copies) and not isinstance(model, FSDPModule):
            reshards = getattr(self.strategy, "reshard_after_forward", True)  # Lightning's own has no such option.
            parts = units(model)
            if reshards is None:
                reshards = not self._units_stay_gathered(parts, data.get_group())
            # No input is cast: bfloat16 would round a batch's weights, ALiBi's biases and OLMo's rotary embedding.
            half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            policy = half if copies else MixedPrecisionPolicy()
            for unit in parts:
                fully_shard(unit, mesh=data, reshard_after_forward=reshards, mp_policy=policy)
            apart = None if self.gathers_head else divide_head(model, data, torch.bfloat16 if copies else None)
            fully_shard(model, mesh=data, mp_policy=policy, ignored_params=apart)
            # They run forward, too.
            for method in ("prepare", "spot_check", "check_packing", "token_losses", "run_with"):
                register_fsdp_forward_method(model, method)

    def _units_stay_gathered(self, parts: list[list[nn.Module]], group: dist.ProcessGroup) -> bool:
        """Return whether the units stay gathered, the same on all ranks: their devices may differ."""
        device = self.strategy.root_device
        if device.type != "cuda":
            return False
        memory = torch.cuda.get_device_properties(device).total_memory
        stay = torch.tensor(int(stay_gathered(parts, memory, in_bfloat16=self.computes_in_copies)), device=device)
        dist.all_reduce(stay, dist.ReduceOp.MIN, group=group)
        return bool(stay)

    @property
    def _sharers(self) -> tuple[dist.ProcessGroup, str] | None:
        """The ranks that share each batch, and what to call them."""
        mesh = self.tensor_mesh
        return None if mesh is None else (mesh.get_group(), "ranks of one tensor-parallel group")

    def check_batch(self, model: LanguageModel, batch: Batch, index: int) -> None:
        super().check_batch(model, batch, index)
        # On a CPU, layers with dropout draw from the generator that loaders take their order from.
        if (index == 0 or not self._compared or self.strategy.root_device.type == "cpu") and self._sharers is not None:
            check_same_batch(batch, *self._sharers)
            self._compared = True

    @contextmanager
    def generating(self, device: torch.device) -> Iterator[None]:
        if self.tensor_mesh is None:
            yield
            return
        # Ranks that compute a token together draw the same random numbers; each has its own again afterwards.
        seed = torch.randint(2**62, (), device="cpu").to(device)
        dist.broadcast(seed, group=self.tensor_mesh.get_group(), group_src=0)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int(seed))
            yield


def check_never_compared(compile: str) -> None:
    """Raise UserError for ways to compile layers that were never tested."""
    if compile not in ("none", "regional", "where possible"):
        raise UserError(
            f"compile={compile} was never tested with layers divided so; choose compile=regional, or strategy=ddp or "
            "fsdp2"
        )
