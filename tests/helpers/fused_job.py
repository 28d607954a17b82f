"""The processes of test_fused_on_ranks.py: a loop by Accelerate, with and without ``fuse``; rank 0 saves what it did.

    torchrun --nproc-per-node 2 tests/helpers/fused_job.py FOLDER CASE [CASE ...]

A case is PLACEMENT:MODEL:MOMENT:DTYPE, where MOMENT is when the model is fused: "first", "prepared" or "never".
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from ranks import Counted, run_command
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from transformers.distributed.configuration_utils import DistributedConfig

import lit_fused

ROWS, LENGTH, STEPS = 2, 12, 3


def batch_of(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(3, 97, (ROWS, LENGTH), generator=generator)
    labels = ids.masked_fill(torch.arange(LENGTH) >= 5 + 4 * rank, -100)  # Ranks have different numbers of tokens.
    return {"input_ids": ids, "labels": labels}


def accelerator_of(placement: str) -> Accelerator:
    """Return an accelerator that shards on a CPU, which torch does and Accelerate asks a GPU for."""
    AcceleratorState._reset_state()
    version = {"fsdp1": 1, "fsdp1_views": 1, "fsdp2": 2, "fsdp2_bf16": 2}.get(placement)
    accelerator = Accelerator(cpu=True)
    if version is not None:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version,
            auto_wrap_policy="transformer_based_wrap",
            use_orig_params=None if version == 2 else placement == "fsdp1",
            cpu_ram_efficient_loading=False,
        )
        if placement.endswith("bf16"):
            accelerator.state._mixed_precision = "bf16"
            plugin.set_mixed_precision("bf16")
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.__dict__["device"] = torch.device("cpu")  # without a number, as FSDP1 has it
    return accelerator


def divided(model: Any, folder: Path) -> Any:
    """Return the model with its weights divided by transformers."""
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    plan = DistributedConfig(tp_plan="auto")
    return type(model).from_pretrained(folder, distributed_config=plan, dtype=model.dtype)


def placed(model: Any, accelerator: Accelerator, placement: str) -> Any:
    if placement == "tensor":
        return model
    if placement == "fsdp2_units":  # as one writes it by hand: the head is a unit of its own
        for unit in (*model.model.layers, model.lm_head):
            fully_shard(unit)
        fully_shard(model, reshard_after_forward=True)
        return model
    if placement == "fsdp1_units":
        policy = partial(lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, nn.Linear))
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    return accelerator.prepare(model, torch.optim.SGD(model.parameters()))[0]  # FSDP2 asks for an optimizer


def whole(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            state = {name: value.clone() for name, value in model.module.state_dict().items()}
    else:
        state = model.state_dict()
    full = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    return {name.removeprefix("module."): value.detach().double() for name, value in full.items()}


def run(case: str, folder: Path) -> dict[str, Any]:
    placement, name, moment, dtype = case.split(":")
    set_seed(0)
    model: Any = tiny_model(name, dtype=getattr(torch, dtype))
    accelerator = accelerator_of(placement)
    model = divided(model, folder / name) if placement == "tensor" else model
    rank = 0 if placement == "tensor" else accelerator.process_index
    if moment == "first":
        lit_fused.fuse(model)
    wrapped: Any = placed(model, accelerator, placement)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    if moment == "prepared":
        lit_fused.fuse(model)
    losses, gathers = [], []
    for step in range(STEPS):
        wrapped.train()
        with Counted("allgather", "all_gather") as gathered:
            loss = wrapped(**batch_of(step, rank), num_items_in_batch=8).loss
            accelerator.backward(loss)
        gathers.append(gathered.count)
        optimizer.step()
        optimizer.zero_grad()
        wrapped.eval()
        with torch.no_grad():
            evaluated = wrapped(**batch_of(step, rank))
        losses += [loss.detach().double(), evaluated.loss.double()]
        assert isinstance(evaluated.logits, torch.Tensor) == (moment == "never")
    return {"losses": torch.stack(losses), "weights": whole(wrapped), "gathers": gathers}


if __name__ == "__main__":
    run_command(run)
