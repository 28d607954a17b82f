"""``mode=plan``: predict what the run would take of each GPU's memory, without building it and without a GPU."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Column, Table
from torch import nn

import lit_fused
from lit_fused.app.commands.training import build_module
from lit_fused.app.config import targets
from lit_fused.app.reporting.finish import write_summary
from lit_fused.errors import UserError
from lit_fused.heads import peft_model
from lit_fused.models.load import places_of
from lit_fused.objectives import PreferenceLoss
from lit_fused.ops.options import LEAST_GPU_BUDGET_MIB

_GIB = 2**30
_USABLE = 0.95  # The rest is for the CUDA context, the kernels and fragmentation.
_MAX_BATCH_SIZE = 4096


def plan(cfg: DictConfig) -> None:
    """Print what the run would take, and write it to ``plan.json`` in the output folder."""
    options: lit_fused.PlanOptions = instantiate(cfg.plan)
    result = planned(cfg, options)
    memory = options.device_gib
    if memory is not None:
        result |= _fitting(cfg, options, result, memory)
    path, hydra = Path(cfg.output_dir, "plan.json"), HydraConfig.get()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    if hydra.mode == RunMode.MULTIRUN:  # The report shows the plans; another folder may have a run that trained.
        measured = {"memory/peak_allocated_gib": result["peak_gib"]}
        write_summary(cfg.output_dir, hydra.overrides.task, measured, status="planned")
    console = Console()
    console.print(_table(result))
    for note in result["notes"]:
        console.print(note)
    console.print(f"written to {path}", soft_wrap=True)


def planned(cfg: DictConfig, options: lit_fused.PlanOptions, batch_size: int | None = None) -> dict[str, Any]:
    """Predict the memory of each device: GiB by phase and component, and assumptions; for ``batch_size``, if given.
    UserError for a strategy, a loss, a precision or a model of which nothing is known."""
    batch, sequence = cfg.data.get("batch_size"), cfg.data.get("block_size")
    if batch is None or sequence is None:
        raise UserError(
            f"mode=plan needs data.batch_size and data.block_size, the shape of a batch, and {cfg.data._target_} does "
            "not have both; mode=fit works with any data, and logs its memory"
        )
    batch = batch if batch_size is None else batch_size
    options = _of_run(cfg, options)
    notes = _left_out(cfg, options)
    module = _module_without_memory(cfg)
    loss, packing = module.model.loss, cfg.data.get("packing", "stream")
    if isinstance(loss, PreferenceLoss) and loss.objective.single:
        raise UserError(
            f"mode=plan does not know what objective={loss.name} takes; mode=fit with callbacks=measure does"
        )
    answers = batch * loss.rows_together if isinstance(loss, PreferenceLoss) else None
    rows, length = (1, answers * sequence) if answers and packing == "packed" else (answers or batch, sequence)

    integers = partial(torch.empty, dtype=torch.int64, device="meta")
    made = {key: integers(rows, length) for key in ("input_ids", "labels")}
    if packing != "stream":  # transformers makes one for padding and for positions that begin anew
        made["attention_mask"] = torch.empty(rows, 1, length, length, dtype=torch.bool, device="meta")
    if answers:
        parts = {"desirable": True, "lengths": packing == "packed", "reference_log_prob": loss.reference is None}
        names = (name for name, is_there in parts.items() if is_there)
        made |= {name: integers(rows, answers // rows).squeeze(1) for name in names}
    prediction = lit_fused.plan(module, options, made)
    return {
        "batch_size": batch,
        "block_size": sequence,
        "precision": cfg.precision,
        "strategy": options.spread.name,
        "compute_capability": ".".join(map(str, options.capability)),
        "parameters": prediction.parameters,
        "trained": prediction.trained,
        "phases_gib": {
            phase: {name: size / _GIB for name, size in {**peak, "total": peak.total()}.items()}
            for phase, peak in prediction.phases.items()
        },
        "peak_gib": prediction.peak / _GIB,
        "between_steps_gib": prediction.between_steps / _GIB,
        "notes": notes,
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


def _left_out(cfg: DictConfig, options: lit_fused.PlanOptions) -> list[str]:
    spread = options.spread
    sized = cfg.loss.get("logits_budget_mib") or cfg.loss.get("chunk_size") or options.device_gib
    impl, compiled = str(cfg.loss.get("impl")), cfg.get("compile", "none") not in ("none", "auto")
    notes = {
        "sharded: gathered weights are an estimate (docs/memory.md)": spread.shards > 1,
        "compiled: what a compiler allocates is an estimate (docs/memory.md)": "torch_compile" in impl or compiled,
        "compile=auto: planned without; on a GPU compiled layers take less": cfg.get("compile") == "auto",
        f"loss.logits_budget_mib: planned as {LEAST_GPU_BUDGET_MIB:.0f}; by default a hundredth of the GPU's memory if "
        "that is more: give plan.memory_gib": "logits_budget_mib" in cfg.loss and not sized,
        "trainer.strategy.reshard_after_forward: planned as true; by default false where layers are a fortieth of the "
        "GPU's memory: give plan.memory_gib": spread.whole_units is None and not options.device_gib,
        "loss=torch_native: planned from its source, and compared with no measurement": "torch_native" in impl,
        "callbacks=ema: not planned; it takes as much as the weights once more": "weight_average" in cfg.callbacks,
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


def _fitting(cfg: DictConfig, options: lit_fused.PlanOptions, result: dict[str, Any], memory: float) -> dict[str, Any]:
    usable, last = memory * _USABLE, result["batch_size"]
    before, peaks = 0, {0: result["between_steps_gib"], last: result["peak_gib"]}
    fits = peaks[last] <= usable
    low, high = (last, _MAX_BATCH_SIZE + 1) if fits else (0, last)  # fits, does not fit
    while high - low > 1:
        # Memory grows about linearly: a line through the last two sizes predicts the largest. Every third size halves
        # the range instead, in case the line does not fit.
        slope = (peaks[last] - peaks[before]) / (last - before)
        size = (low + high) // 2
        if slope > 0 and len(peaks) % 3 != 1:
            size = min(max(last + int((usable - peaks[last]) // slope), low + 1), high - 1)
        peaks[size] = planned(cfg, options, size)["peak_gib"]
        low, high = (size, high) if peaks[size] <= usable else (low, size)
        before, last = last, size
    return {"device_gib": memory, "usable_gib": usable, "fits": fits, "largest_batch_size": low}


def _table(result: dict[str, Any]) -> Table:
    phases = result["phases_gib"]
    title = (
        f"Planned peak memory of a GPU (GiB): {result['batch_size']} x {result['block_size']} tokens, "
        f"{result['precision']}, {result['strategy']}"
    )
    table = Table("component", *(Column(phase, justify="right") for phase in phases), title=title)
    components = dict.fromkeys(name for found in phases.values() for name in found if name != "total")
    for component in (*components, "total"):
        cells = (f"{found.get(component, 0.0):.3f}" for found in phases.values())
        table.add_row(component, *cells, style="bold" if component == "total" else None)
    table.add_section()
    table.add_row("peak", f"{result['peak_gib']:.3f}", style="bold")
    if "fits" in result:
        table.add_row(f"of {result['device_gib']:.1f} GiB", "fits" if result["fits"] else "does not fit")
        table.add_row("largest data.batch_size", str(result["largest_batch_size"]))
    return table
