"""``mode=plan``: predict what the run would take of each GPU's memory, without building it and without a GPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

import lit_fused
from lit_fused.app.commands.training import build_module
from lit_fused.app.config import targets
from lit_fused.app.reporting.finish import write_summary
from lit_fused.errors import UserError
from lit_fused.heads import peft_model
from lit_fused.models.load import places_of
from lit_fused.ops.options import LEAST_GPU_BUDGET_MIB

_GIB = 2**30


def plan(cfg: DictConfig) -> None:
    """Print what the run would take, and write it to ``plan.json`` in the output folder."""
    options = _of_run(cfg, instantiate(cfg.plan))
    predicted = _predicted(cfg, options)
    result = _result(cfg, options, predicted)
    shape = f"{result['batch_size']} x {result['block_size']} tokens, {result['precision']}, {result['strategy']}"
    print(f"Planned peak memory of a GPU: {shape}")
    for line in predicted.lines():  # What fits takes a long model minutes to find.
        print(line, flush=True)
    if predicted.device_gib is not None:
        result |= {"device_gib": predicted.device_gib, "usable_gib": predicted.usable_gib, "fits": predicted.fits}
        result |= {"largest_batch_size": predicted.largest_batch_size, "longest_block_size": predicted.longest_sequence}
    path = Path(cfg.output_dir, "plan.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    if HydraConfig.get().mode == RunMode.MULTIRUN:  # The report shows the plans; another folder may have a trained run.
        write_summary(cfg.output_dir, {"memory/peak_allocated_gib": result["peak_gib"]}, status="planned")
    print(*result["notes"], f"written to {path}", sep="\n")


def planned(cfg: DictConfig, options: lit_fused.PlanOptions) -> dict[str, Any]:
    """Predict the memory of each device: GiB by phase and component, and assumptions. UserError for a strategy, a loss,
    a precision or a model of which nothing is known."""
    options = _of_run(cfg, options)
    return _result(cfg, options, _predicted(cfg, options))


def _result(cfg: DictConfig, options: lit_fused.PlanOptions, predicted: Any) -> dict[str, Any]:
    return {
        "batch_size": cfg.data.batch_size,
        "block_size": cfg.data.block_size,
        "precision": cfg.precision,
        "strategy": options.spread.name,
        "compute_capability": ".".join(map(str, options.capability)),
        "parameters": predicted.parameters,
        "trained": predicted.trained,
        "phases_gib": {
            phase: {name: size / _GIB for name, size in {**peak, "total": peak.total()}.items()}
            for phase, peak in predicted.phases.items()
        },
        "peak_gib": predicted.peak / _GIB,
        "between_steps_gib": predicted.between_steps / _GIB,
        "notes": _left_out(cfg, options),
    }


def _of_run(cfg: DictConfig, options: lit_fused.PlanOptions) -> lit_fused.PlanOptions:
    """Return the options with those of the run."""
    devices, strategy = cfg.trainer.devices, cfg.trainer.strategy
    if not isinstance(devices, int) or devices < 1:
        raise UserError(f"mode=plan needs trainer.devices as a number, got {devices!r}; give the number of GPUs")
    return replace(
        options,
        precision=str(cfg.precision),
        accumulate_grad_batches=cfg.trainer.accumulate_grad_batches,
        strategy=strategy if isinstance(strategy, str) else instantiate(strategy),
        devices=devices * cfg.trainer.num_nodes,
    )


def _predicted(cfg: DictConfig, options: lit_fused.PlanOptions) -> Any:
    packing = "stream" if options.spread.row_parts > 1 else cfg.data.get("packing")
    sizes = {"batch_size": cfg.data.batch_size, "sequence_length": cfg.data.block_size}
    return lit_fused.plan(options, _module_without_memory(cfg), packing=packing, **sizes)


def _left_out(cfg: DictConfig, options: lit_fused.PlanOptions) -> list[str]:
    spread = options.spread
    sized = cfg.loss.get("logits_budget_mib") or cfg.loss.get("chunk_size") or options.device_gib
    impl, compiled = str(cfg.loss.get("impl")), cfg.get("compile", "none") != "none"
    notes = {
        "sharded: gathered weights are an estimate (docs/memory.md)": spread.shards > 1,
        "compiled: what a compiler allocates is an estimate (docs/memory.md)": "torch_compile" in impl or compiled,
        f"loss.logits_budget_mib: planned as {LEAST_GPU_BUDGET_MIB:.0f}; by default up to a fiftieth of the GPU's "
        "memory: give plan.memory_gib": "logits_budget_mib" in cfg.loss and not sized,
        "trainer.strategy.reshard_after_forward: planned as true; by default false where layers are a fortieth of the "
        "GPU's memory: give plan.memory_gib": spread.whole_units is None and not options.device_gib,
        "strategy=context: planned without a mask; sdpa makes one of data.block_size x data.block_size numbers for "
        "padding and for documents, flash_attention_2 none": spread.row_parts > 1
        and cfg.data.get("packing", "stream") != "stream",
        "loss=torch_native: planned from its source, and compared with no measurement": "torch_native" in impl,
        "callbacks=ema: not planned; it takes as much as the trained weights": "weight_average" in cfg.callbacks,
    }
    return [note for note, holds in notes.items() if holds]


def _module_without_memory(cfg: DictConfig) -> Any:
    description: Any = OmegaConf.to_container(cfg.model, resolve=True)
    for _, node in targets(description):
        node |= {"at_once": False} if "at_once" in node else {}
    with torch.device("meta"):
        backbone = instantiate(description)
    if peft_model(backbone) is not None:
        _repeat_one_number(backbone)
    return build_module(cfg, instantiate(cfg.loss), backbone)


def _repeat_one_number(model: nn.Module) -> None:
    """Give a model tensors of one number each, repeated without memory: weights on the meta device would count as late,
    which adapters cannot be put around."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for _, module, name, tensor in list(places_of(model)):
        if tensor not in made:
            repeated = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[tensor] = nn.Parameter(repeated, tensor.requires_grad) if is_parameter else repeated
        setattr(module, name, made[tensor])
