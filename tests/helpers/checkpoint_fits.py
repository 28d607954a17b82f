"""Fits that write checkpoints, and go on from them, under any strategy and on any number of ranks."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning_helpers import loader, quiet_trainer
from parallel_cases import CLIP, LEARNING_RATE, PER_STEP, backbone, batches, whole
from torch import nn
from transformers import get_inverse_sqrt_schedule

from lit_fused import FusedCausalLMModule
from lit_fused.context import ContextStrategy
from lit_fused.parallel import FSDP2Strategy, ReplicatedStrategy
from lit_fused.pipeline import PipelineStrategy

RANK, RANKS = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
STRATEGIES: dict[str, Any] = {
    "auto": lambda: "auto",
    "ddp": ReplicatedStrategy,
    "fsdp2": lambda: FSDP2Strategy(RANKS, 1),
    "fsdp2_rows": lambda: FSDP2Strategy(RANKS, 1, gather_head=False),
    "fsdp2_once": lambda: FSDP2Strategy(RANKS, 1, reduce_every_micro_batch=False),
    "tp": lambda: FSDP2Strategy(tensor_parallel_size=RANKS),
    "context": ContextStrategy,
    "pp": lambda: PipelineStrategy(RANKS),
    "pp_fsdp2": lambda: PipelineStrategy(RANKS // 2, 2, microbatches=2, fully_shard=True),
}


def rows_of(strategy: str) -> list[Any]:
    """This rank's micro-batches of an epoch."""
    divided = {"tp": 1, "context": 1, "pp": 1, "pp_fsdp2": 2}.get(strategy, RANKS)
    mine = RANK % divided if strategy == "pp_fsdp2" else RANK * divided // RANKS
    return batches()[: 2 * PER_STEP][mine::divided]


def train(
    strategy: str,
    folder: Path,
    epochs: int,
    model: str | nn.Module = "llama_tied",
    data: tuple[list[Any], ...] | None = None,
    rate: float = LEARNING_RATE,
    **options: Any,
) -> tuple[L.Trainer, FusedCausalLMModule]:
    """Two optimiser steps an epoch, of four micro-batches over all ranks; a schedule that never stands still."""
    module = FusedCausalLMModule(
        backbone(model) if isinstance(model, str) else model,
        optimizer=partial(torch.optim.AdamW, lr=rate, weight_decay=0.1),
        scheduler=partial(get_inverse_sqrt_schedule, num_warmup_steps=2),
    )
    checkpoint = options.pop("ckpt_path", None)
    data = data or (rows_of(strategy),)
    trainer = quiet_trainer(
        folder,
        devices=RANKS,
        strategy=STRATEGIES[strategy](),
        max_epochs=epochs,
        accumulate_grad_batches=len(rows_of(strategy)) // 2,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        **options,
    )
    loaders: Any = map(loader, data)
    trainer.fit(module, *loaders, ckpt_path=checkpoint)
    return trainer, module


def weights_of(trainer: L.Trainer, module: FusedCausalLMModule) -> dict[str, Any]:
    return whole(trainer.strategy, module, lambda p: p)
