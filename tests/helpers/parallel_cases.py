"""Modules, data and trainers of fits under any strategy, and their parameters gathered from all ranks."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning_helpers import quiet_trainer, ragged_batches
from tiny_models import sharpen, tiny_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import get_constant_schedule

from lit_fused import (
    CrossEntropyLoss,
    FusedCausalLMModule,
    FusedMaskedLMModule,
    LinearCrossEntropyLoss,
    ModelInternalLoss,
    reduce_memory,
)
from lit_fused.context import ContextStrategy
from lit_fused.filtered import Filtered
from lit_fused.parallel import FSDP2Strategy, ReplicatedStrategy
from lit_fused.pipeline import PipelineStrategy
from lit_fused.pipeline.strategy import gathered
from lit_fused.training import MuonWithAdamW

PER_STEP = 4  # micro-batches of an optimiser step, over all ranks
STEPS = 3
CLIP = 0.05  # far below the norm of the gradients
LEARNING_RATE = 1e-2
# AdamW divides by a gradient's own size: with its usual 1e-8 what is only rounding becomes a whole step of some
# weights, in any strategy and in one process.
EPSILON = 1e-6


def as_strategy(**options: bool) -> Any:
    """Return what code of FSDP2 reads of its strategy, over two ranks on the CPU."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    return SimpleNamespace(device_mesh=mesh, root_device=torch.device("cpu"), **options)


ON_GPUS = torch.cuda.device_count() >= int(os.environ.get("WORLD_SIZE", "1"))
# strategy -> (processes, how many of them train on different data, how to make it)
STRATEGIES: dict[str, tuple[int, int, Callable[[], Any]]] = {
    "single": (1, 1, lambda: "auto"),
    "ddp": (2, 2, ReplicatedStrategy),
    "fsdp2": (2, 2, lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)),
    "our_fsdp2": (2, 2, lambda: FSDP2Strategy(2, 1)),
    "fsdp2_kept": (2, 2, lambda: FSDP2Strategy(2, 1, reshard_after_forward=False)),
    "fsdp2_policy": (2, 2, lambda: FSDP2Strategy(2, 1, mixed_precision_policy=True)),
    "fsdp2_policy_late": (2, 2, lambda: FSDP2Strategy(2, reduce_every_micro_batch=False, mixed_precision_policy=True)),
    "fsdp2_rows": (2, 2, lambda: FSDP2Strategy(2, gather_head=False)),
    "fsdp2_rows_policy": (2, 2, lambda: FSDP2Strategy(2, mixed_precision_policy=True, gather_head=False)),
    "fsdp2_rows_of_four": (4, 4, lambda: FSDP2Strategy(gather_head=False)),
    "context_rows": (2, 1, lambda: ContextStrategy(2, gather_head=False)),
    "tp_policy": (2, 1, lambda: FSDP2Strategy(1, 2, mixed_precision_policy=True)),
    "fsdp2_tp_policy": (4, 2, lambda: FSDP2Strategy(2, 2, mixed_precision_policy=True)),
    "tp": (2, 1, lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)),
    "our_tp": (2, 1, lambda: FSDP2Strategy(1, 2)),
    "tp_unlike": (2, 2, lambda: FSDP2Strategy(1, 2)),  # ranks of one group that get different batches
    "fsdp2_tp": (4, 2, lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)),
    "context": (2, 1, lambda: ContextStrategy(2)),
    "fsdp2_context": (4, 2, lambda: ContextStrategy(2)),
    "context_policy": (2, 1, lambda: ContextStrategy(reshard_after_forward=False, mixed_precision_policy=True)),
    "context_of_one": (2, 2, lambda: ContextStrategy(1)),
    "pp": (2, 1, lambda: PipelineStrategy(2)),
    "pp_gpipe": (2, 1, lambda: PipelineStrategy(2, schedule="GPipe", microbatches=2)),
    "pp_interleaved": (2, 1, lambda: PipelineStrategy(2, schedule="Interleaved1F1B", microbatches=2)),
    "pp_bfs": (2, 1, lambda: PipelineStrategy(2, schedule="LoopedBFS", microbatches=4)),
    "pp_ddp": (4, 2, lambda: PipelineStrategy(2, 2, microbatches=2)),
    "pp_fsdp2": (4, 2, lambda: PipelineStrategy(2, 2, microbatches=2, fully_shard=True)),
    "pp_interleaved_fsdp2": (4, 2, lambda: PipelineStrategy(2, 2, "Interleaved1F1B", 2, fully_shard=True)),
    "pp_bfs_fsdp2": (4, 2, lambda: PipelineStrategy(2, 2, "LoopedBFS", 4, fully_shard=True)),
}


@dataclass(frozen=True)
class Case:
    strategy: str
    model: str
    loss: str = "chunked"
    precision: str = "32-true"
    optimizer: str = "adamw"
    compile: str = "none"
    reduced: bool = False

    @property
    def ranks(self) -> int:
        return STRATEGIES[self.strategy][0]

    @property
    def data_parallel(self) -> int:
        return STRATEGIES[self.strategy][1]

    @property
    def is_pipeline(self) -> bool:
        return self.strategy.startswith("pp")

    @property
    def is_masked(self) -> bool:
        return self.model.startswith("masked")

    @property
    def layers(self) -> int:
        """As many as four stages need; two stages get one and two of them."""
        if not self.is_pipeline:
            return 2
        return 3 if self.strategy in ("pp", "pp_ddp", "pp_fsdp2") else 4

    @property
    def accumulated(self) -> int:
        """Micro-batches of a rank in one optimiser step."""
        return PER_STEP // self.data_parallel

    def __str__(self) -> str:
        own = () if (self.optimizer, self.compile) == ("adamw", "none") else (self.optimizer, self.compile)
        return ":".join((self.strategy, self.model, self.loss, self.precision, *own, *["reduced"] * self.reduced))


def backbone(name: str, layers: int = 2) -> nn.Module:
    if name == "qwen3_wrong_plan":  # the gradients of the norms inside of attention are not summed over ranks
        model = tiny_model("qwen3")
        model._tp_plan = {name: style for name, style in model.tp_plan.items() if not name.endswith("_norm")}
        return model
    return sharpen(tiny_model(name, num_hidden_layers=layers), 5.0)


def batches(*, masked: bool = False) -> list[dict[str, Tensor]]:
    """Ragged; two of them have no valid label, and each is the whole of one rank's micro-batch."""
    made = ragged_batches(PER_STEP * STEPS)
    for batch in made if masked else ():
        batch["input_ids"] = batch["input_ids"].masked_fill(batch["labels"] != -100, 3)
    return made


OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.1),
    "fused": partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.1, fused=True),
    "muon": partial(MuonWithAdamW, lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=LEARNING_RATE, weight_decay=0.1),
}


def share_of(batches: list[Any], case: Case) -> list[Any]:
    """The micro-batches of this process. Ranks that are neighbours share a batch, if any do; in a pipeline, those that
    are as far apart as there are pipelines."""
    rank = int(os.environ["RANK"])
    mine = rank % case.data_parallel if case.is_pipeline else rank * case.data_parallel // case.ranks
    return batches[mine :: case.data_parallel]


def module_of(case: Case, model: nn.Module | None = None) -> Any:
    model = backbone(case.model, case.layers) if model is None else model
    if "tp" in case.strategy and os.environ["RANK"] != "0":
        for p in model.parameters():  # ranks that divide a model take the first one's
            p.data.add_(1)
    if case.reduced:
        reduce_memory(model, checkpointing="offload", mlp_chunk_tokens=5)
    losses: dict[str, Any] = {"standard": CrossEntropyLoss, "model": ModelInternalLoss}
    losses["filtered"] = partial(LinearCrossEntropyLoss, Filtered())  # keeps all of so small a vocabulary
    return (FusedMaskedLMModule if case.is_masked else FusedCausalLMModule)(
        model,
        losses[case.loss]() if case.loss in losses else LinearCrossEntropyLoss(case.loss),
        OPTIMIZERS[case.optimizer],
        get_constant_schedule,
        compile=case.compile,
    )


def trainer_of(case: Case, folder: Path, **options: Any) -> L.Trainer:
    return quiet_trainer(
        folder,
        accelerator="gpu" if ON_GPUS else "cpu",
        devices=case.ranks,
        strategy=STRATEGIES[case.strategy][2](),
        precision=case.precision,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        **options,
    )


def whole(strategy: Strategy, module: Any, part: Any, owner: str = "backbone") -> dict[str, Tensor]:
    """A part of each parameter, gathered, under the parameter's name in the module's backbone or model."""
    named = {name: part(p) for name, p in getattr(module, owner).named_parameters()}
    if isinstance(strategy, PipelineStrategy):
        whole_ones = gathered(named, strategy.device_mesh, strategy.root_device)
        return {name: value.clone() for name, value in whole_ones.items()}
    return {
        name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().cpu().clone() for name, v in named.items()
    }
