"""The processes of test_checkpoints.py, started by torchrun: they write checkpoints, and go on from those of others.

    torchrun --nproc-per-node N tests/checkpoint_job.py FOLDER ITEM [ITEM ...]

An item is STRATEGY, which trains two epochs and writes FOLDER/STRATEGY-N.ckpt, or CHECKPOINT>STRATEGY[+MODEL], which
trains the third from FOLDER/CHECKPOINT.ckpt; rank 0 saves its weights, or the sentence that refused it, as
FOLDER/ITEM-N.pt.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_helpers import loader, quiet_trainer
from parallel_cases import CLIP, LEARNING_RATE, PER_STEP, backbone, batches
from parallel_job import CPUFSDPStrategy, whole
from transformers import get_inverse_sqrt_schedule

from lit_fused import FusedCausalLMModule, UserError
from lit_fused.parallel import FSDP1Strategy, FSDP2Strategy, block_wrap_policy

RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class CPUFSDP1Strategy(FSDP1Strategy, CPUFSDPStrategy):
    """Ours, on the CPU."""


STRATEGIES: dict[str, Any] = {
    "auto": lambda: "auto",
    "ddp": lambda: "ddp",
    "fsdp": lambda: CPUFSDP1Strategy(auto_wrap_policy=block_wrap_policy, state_dict_type="sharded"),
    "fsdp2": lambda: FSDP2Strategy(RANKS, 1),
    "fsdp2_file": lambda: FSDP2Strategy(RANKS, 1, save_distributed_checkpoint=False),
    "lightnings_fsdp2": lambda: ModelParallelStrategy(RANKS, 1),
    "lightnings_fsdp": lambda: CPUFSDPStrategy(auto_wrap_policy=block_wrap_policy, state_dict_type="sharded"),
}


def train(
    strategy: str, folder: Path, epochs: int, model: str = "llama_tied", **options: Any
) -> tuple[L.Trainer, FusedCausalLMModule]:
    """Two optimiser steps an epoch, of four micro-batches over all ranks; a schedule that never stands still."""
    module = FusedCausalLMModule(
        backbone(model),
        optimizer=partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.1),
        scheduler=partial(get_inverse_sqrt_schedule, num_warmup_steps=2),
    )
    checkpoint = options.pop("ckpt_path", None)
    trainer = quiet_trainer(
        folder,
        devices=RANKS,
        strategy=STRATEGIES[strategy](),
        max_epochs=epochs,
        accumulate_grad_batches=PER_STEP // RANKS,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        **options,
    )
    share = batches()[: 2 * PER_STEP][int(os.environ.get("RANK", "0")) :: RANKS]
    trainer.fit(module, loader(share), ckpt_path=checkpoint)
    return trainer, module


def weights_of(trainer: L.Trainer, module: FusedCausalLMModule) -> dict[str, Any]:
    return whole(trainer.strategy, module, lambda p: p)


def run(item: str, folder: Path) -> Any:
    source, _, strategy = item.rpartition(">")
    if not source:
        saver = ModelCheckpoint(folder, filename=f"{strategy}-{RANKS}")
        train(strategy, folder, epochs=2, enable_checkpointing=True, callbacks=[saver])
        return None
    strategy, _, model = strategy.partition("+")
    try:
        trainer, module = train(strategy, folder, 3, model or "llama_tied", ckpt_path=folder / f"{source}.ckpt")
    except UserError as refusal:
        return str(refusal)
    assert trainer.global_step == 6
    return weights_of(trainer, module)


def main(folder: Path, items: list[str]) -> None:
    for item in items:
        result = run(item, folder)
        if dist.get_rank() == 0 and result is not None:
            torch.save(result, folder / f"{item}-{RANKS}.pt")
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as parallel_job.py


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
