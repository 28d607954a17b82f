"""A fused model on two ranks: the weights after some steps, and what was gathered, are those without ``fuse``."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from ranks import Counted, each
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


PLACEMENTS = ("ddp", "fsdp1", "fsdp1_views", "fsdp2", "fsdp2_units", "tensor")
MODELS = ("qwen3", "gemma2")  # gemma2: a cap, and embeddings tied to the head


def cases_of(placement: str) -> list[str]:
    """Return, for each model, the standard in float64, that in float32, and ours, fused before and after `prepare`."""
    models = MODELS[:1] if placement == "fsdp2_units" else MODELS  # Tied weights are in one unit.
    kinds = ["never:float64", "never:float32", "first:float32", "prepared:float32"]
    if placement == "tensor":  # transformers divides a model when it loads it
        kinds.remove("first:float32")
    return [f"{placement}:{model}:{kind}" for model in models for kind in kinds]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    cases = [case for placement in PLACEMENTS for case in cases_of(placement)]
    cases += [f"fsdp2_bf16:gemma2:{moment}:float32" for moment in ("never", "first")]
    cases.append("fsdp1_units:qwen3:first:float32")
    return each(run, 2, cases, folder)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for p in PLACEMENTS for c in cases_of(p) if "never" not in c])
def test_weights_losses_and_gathers_are_those_without_fuse(results: dict[str, Any], case: str) -> None:
    placement, model, *_ = case.split(":")
    truth, own = results[f"{placement}:{model}:never:float64"], results[f"{placement}:{model}:never:float32"]
    found = results[case]
    usual = (own["losses"] - truth["losses"]).abs().max()
    assert (found["losses"] - truth["losses"]).abs().max() <= 2 * usual + 1e-6
    for name, weight in truth["weights"].items():
        error, usual = ((other["weights"][name] - weight).norm() for other in (found, own))
        assert error <= 2 * usual + 1e-6 * weight.norm(), name
    # The first step may have identified the head.
    assert len(found["gathers"]) == STEPS
    assert all(ours <= theirs for ours, theirs in zip(found["gathers"][1:], own["gathers"][1:], strict=True))


@pytest.mark.slow
def test_half_precision_of_sharded_units_is_no_fault_of_the_model(results: dict[str, Any]) -> None:
    own, found = (results[f"fsdp2_bf16:gemma2:{moment}:float32"] for moment in ("never", "first"))
    torch.testing.assert_close(found["losses"], own["losses"], rtol=2**-7, atol=0)


@pytest.mark.slow
def test_an_output_layer_that_fsdp1_gathers_for_itself_is_refused(results: dict[str, Any]) -> None:
    assert "FullyShardedDataParallel, not a plain linear layer" in results["fsdp1_units:qwen3:first:float32"]
