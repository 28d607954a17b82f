"""``mode=plan``: predict what the run would take of each GPU's memory, without building it and without a GPU."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from lit_fused.app.commands.training import build_module
from lit_fused.app.config import targets
from lit_fused.app.planning.ledger import COMPONENTS
from lit_fused.app.planning.step import Spread, predict, stand_in
from lit_fused.app.reporting.run import leave
from lit_fused.errors import UserError
from lit_fused.objectives import PreferenceLoss
from lit_fused.ops.operands import LEAST_GPU_BUDGET_MIB, PlannedGPU
from lit_fused.parallel import FSDP2Strategy, ReplicatedStrategy, placement_class
from lit_fused.parallel.placement import Replicated
from lit_fused.parallel.sharded import Sharded
from lit_fused.training.optimizers import build_optimizer, weight_decay_groups

_GIB = 2**30
_USABLE = 0.95  # The rest is for the CUDA context, the kernels and fragmentation.
_MAX_BATCH_SIZE = 4096


@dataclass(frozen=True)
class PlanOptions:
    """The GPU that a plan is made for.

    Args:
        memory_gib: GiB of one device, to say what fits; None: of the GPU that is here, if there is one.
        compute_capability: decides which kernels run; None: that of the GPU that is here, else 9.0 (Hopper).
    """

    memory_gib: float | None = None
    compute_capability: float | None = None

    @property
    def capability(self) -> tuple[int, int]:
        if self.compute_capability is not None:
            return int(self.compute_capability), round(self.compute_capability * 10) % 10
        return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)

    @property
    def device_gib(self) -> float | None:
        if self.memory_gib is not None or not torch.cuda.is_available():
            return self.memory_gib
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / _GIB


def plan(cfg: DictConfig) -> None:
    """Print what the run would take, and write it to ``plan.json`` in the output folder."""
    options: PlanOptions = instantiate(cfg.plan)
    result = planned(cfg, options)
    memory = options.device_gib
    if memory is not None:
        result |= _fitting(cfg, options, result, memory)
    path = leave(cfg, result, {"memory/peak_allocated_gib": result["peak_gib"]})
    console = Console()
    console.print(_table(result))
    for note in result["notes"]:
        console.print(note)
    console.print(f"written to {path}", soft_wrap=True)


def planned(cfg: DictConfig, options: PlanOptions, batch_size: int | None = None) -> dict[str, Any]:
    """Predict the memory of each device: GiB by phase and component, and assumptions; for ``batch_size``, if given.
    UserError for a strategy, a loss, a precision or a model of which nothing is known."""
    batch, sequence = cfg.data.get("batch_size"), cfg.data.get("block_size")
    if batch is None or sequence is None:
        raise UserError(
            f"mode=plan needs data.batch_size and data.block_size, the shape of a batch, and {cfg.data._target_} does "
            "not have both; mode=fit works with any data, and logs its memory"
        )
    batch = batch if batch_size is None else batch_size
    name, division, notes = _division(cfg)
    notes += _left_out(cfg, options, division)
    module = _module_without_memory(cfg)
    loss, packing = module.model.loss, cfg.data.get("packing", "stream")
    if isinstance(loss, PreferenceLoss) and loss.objective.single:
        raise UserError(
            f"mode=plan does not know what objective={loss.name} takes; mode=fit with callbacks=measure does"
        )
    answers = batch * loss.rows_together if isinstance(loss, PreferenceLoss) else None
    rows, length = (1, answers * sequence) if answers and packing == "packed" else (answers or batch, sequence)

    def make_batch() -> dict[str, Tensor]:
        made = {key: torch.zeros(rows, length, dtype=torch.int64) for key in ("input_ids", "labels")}
        if packing != "stream":  # transformers makes one for padding and for positions that begin anew
            made["attention_mask"] = torch.zeros(rows, 1, length, length, dtype=torch.bool)
        if answers:
            parts = {"desirable": True, "lengths": packing == "packed", "reference_log_prob": loss.reference is None}
            names = (name for name, is_there in parts.items() if is_there)
            made |= {name: torch.zeros(rows, answers // rows, dtype=torch.int64).squeeze(1) for name in names}
        return made

    fused = cfg.precision != "16-mixed"
    prediction = predict(
        module.model,
        lambda model: build_optimizer(module.make_optimizer, weight_decay_groups(model), model, model, fused=fused),
        make_batch,
        precision=cfg.precision,
        accumulate_grad_batches=cfg.trainer.accumulate_grad_batches,
        gpu=PlannedGPU(options.capability, 1024 * (options.device_gib or 0)),
        division=division,
        frozen=[frozen.model for frozen in module.frozen],
    )
    return {
        "batch_size": batch,
        "block_size": sequence,
        "precision": cfg.precision,
        "strategy": name,
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


def _division(cfg: DictConfig) -> tuple[str, Spread, list[str]]:
    """Return the strategy's name, how it spreads the model over devices, and notes about it."""
    devices, nodes = cfg.trainer.devices, cfg.trainer.num_nodes
    if not isinstance(devices, int) or devices < 1:
        raise UserError(f"mode=plan needs trainer.devices as a number, got {devices!r}; give the number of GPUs")
    ranks = devices * nodes
    strategy: Any = cfg.trainer.strategy
    if strategy in ("auto", "ddp"):
        return (f"ddp on {ranks}", Spread(buckets=True), []) if ranks > 1 else ("one device", Spread(), [])
    kind = None if isinstance(strategy, str) else get_class(strategy._target_)
    placement = None if kind is None else placement_class(kind)
    if placement not in (Sharded, Replicated) or cfg.trainer.strategy.get("tensor_parallel_size", 1) != 1:
        raise UserError(
            f"mode=plan does not know what {strategy if kind is None else kind.__name__} takes; it knows strategy=auto"
            ", ddp and fsdp2, without tensor parallelism. Measure this one: callbacks=measure trainer.max_steps=3"
        )
    if placement is Replicated:
        in_buckets = kind is not ReplicatedStrategy and not cfg.trainer.strategy.get("gradient_as_bucket_view", False)
        return f"ddp on {ranks}", Spread(buckets=in_buckets), []
    near = ["sharded: gathered weights are an estimate (docs/memory.md)"]
    late = not cfg.trainer.strategy.get("reduce_every_micro_batch", True) and cfg.trainer.accumulate_grad_batches > 1
    reshards = cfg.trainer.strategy.get("reshard_after_forward", None if kind is FSDP2Strategy else True)
    kept = None if reshards is None else not reshards
    return f"fsdp2 on {ranks}", Spread(shards=ranks, whole_gradients=late, whole_units=kept), near


def _left_out(cfg: DictConfig, options: PlanOptions, spread: Spread) -> list[str]:
    sized = cfg.loss.get("logits_budget_mib") or cfg.loss.get("chunk_size") or options.device_gib
    impl, compiled = str(cfg.loss.get("impl")), cfg.get("compile", "none") not in ("none", "auto")
    notes = {
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
    with warnings.catch_warnings():  # copies of fake tensors, for a reference
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        return build_module(cfg, instantiate(cfg.loss), stand_in(backbone))


def _fitting(cfg: DictConfig, options: PlanOptions, result: dict[str, Any], memory: float) -> dict[str, Any]:
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
    for component in (*COMPONENTS, "total"):
        if any(component in found for found in phases.values()):
            cells = (f"{found.get(component, 0.0):.3f}" for found in phases.values())
            table.add_row(component, *cells, style="bold" if component == "total" else None)
    table.add_section()
    table.add_row("peak", f"{result['peak_gib']:.3f}", style="bold")
    if "fits" in result:
        table.add_row(f"of {result['device_gib']:.1f} GiB", "fits" if result["fits"] else "does not fit")
        table.add_row("largest data.batch_size", str(result["largest_batch_size"]))
    return table
