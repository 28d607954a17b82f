"""The processes of test_checkpoints.py, started by torchrun: they write checkpoints, and go on from those of others.

    torchrun --nproc-per-node N tests/helpers/checkpoint_job.py FOLDER ITEM [ITEM ...]

An item is STRATEGY, which trains two epochs and writes FOLDER/STRATEGY-N.ckpt; or CHECKPOINT>STRATEGY[+MODEL], which
trains the third from FOLDER/CHECKPOINT.ckpt; rank 0 saves its weights, or the sentence that refused it, as
FOLDER/ITEM-N.pt; or WHAT=STRATEGY, one of the functions at the end.
"""

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning_helpers import loader, quiet_trainer
from parallel_cases import CLIP, LEARNING_RATE, PER_STEP, backbone, batches
from parallel_job import whole
from peft import LoraConfig, get_peft_model
from ranks import Counted, run_cases
from torch import nn
from transformers import get_inverse_sqrt_schedule

from lit_fused import FusedCausalLMModule, UserError
from lit_fused.callbacks import FiniteWatch, RunCheckpoint, StopOnSignal
from lit_fused.errors import Stopped
from lit_fused.parallel import FSDP2Strategy, ReplicatedStrategy, local
from lit_fused.parallel.collectives import objects_of_ranks

RANKS = int(os.environ.get("WORLD_SIZE", "1"))


STRATEGIES: dict[str, Any] = {
    "auto": lambda: "auto",
    "ddp": ReplicatedStrategy,
    "lightnings_ddp": lambda: "ddp",
    "fsdp2": lambda: FSDP2Strategy(RANKS, 1),
    "fsdp2_once": lambda: FSDP2Strategy(RANKS, 1, reduce_every_micro_batch=False),
    "tp": lambda: FSDP2Strategy(tensor_parallel_size=RANKS),
}


def lora() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        targets = ["q_proj", "down_proj", "lm_head"]
        return get_peft_model(backbone("llama"), LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=targets))


def dist_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def train(
    strategy: str,
    folder: Path,
    epochs: int,
    model: str = "llama_tied",
    data: tuple[list[Any], ...] | None = None,
    rate: float = LEARNING_RATE,
    **options: Any,
) -> tuple[L.Trainer, FusedCausalLMModule]:
    """Two optimiser steps an epoch, of four micro-batches over all ranks; a schedule that never stands still."""
    module = FusedCausalLMModule(
        lora() if model == "lora" else backbone(model),
        optimizer=partial(torch.optim.AdamW, lr=rate, weight_decay=0.1),
        scheduler=partial(get_inverse_sqrt_schedule, num_warmup_steps=2),
    )
    checkpoint = options.pop("ckpt_path", None)
    shares = 1 if strategy == "tp" else RANKS
    trainer = quiet_trainer(
        folder,
        devices=RANKS,
        strategy=STRATEGIES[strategy](),
        max_epochs=epochs,
        accumulate_grad_batches=PER_STEP // shares,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        **options,
    )
    data = data or (batches()[: 2 * PER_STEP][dist_rank() * shares // RANKS :: shares],)
    loaders: Any = map(loader, data)
    trainer.fit(module, *loaders, ckpt_path=checkpoint)
    return trainer, module


def weights_of(trainer: L.Trainer, module: FusedCausalLMModule) -> dict[str, Any]:
    return whole(trainer.strategy, module, lambda p: p)


def run(item: str, folder: Path) -> Any:
    what, _, strategy = item.rpartition("=")
    if what:
        functions = (adapters, agree, asked, die_in_save, die_in_step, generated, poisoned, reductions)
        return next(function for function in functions if function.__name__ == what)(strategy, folder)
    source, _, strategy = item.rpartition(">")
    weights_only, strategy = strategy.startswith("weights_of_"), strategy.removeprefix("weights_of_")
    if not source:
        name = f"weights_of_{strategy}" if weights_only else strategy
        saver = ModelCheckpoint(folder, filename=f"{name}-{RANKS}", save_weights_only=weights_only)
        train(strategy, folder, epochs=2, enable_checkpointing=True, callbacks=[saver])
        return None
    strategy, _, model = strategy.partition("+")
    try:
        trainer, module = train(strategy, folder, 3, model or "llama_tied", ckpt_path=folder / f"{source}.ckpt")
    except Exception as refusal:
        if "+" not in item and not isinstance(refusal, UserError):
            raise
        return f"{type(refusal).__name__}: {refusal}"
    assert trainer.global_step == 6
    return weights_of(trainer, module)


def agree(strategy: str, folder: Path) -> Any:
    """Return what each rank thinks of a run that gets worse, whose ranks validate with different data.

    Rank 1 has no valid label in its first batch, on which the spot check runs the model.
    """
    share = batches()[: 2 * PER_STEP][dist_rank() :: RANKS]
    stopping = EarlyStopping("val/loss", patience=1)
    best = ModelCheckpoint(folder / strategy, monitor="val/loss", filename="{epoch}")
    _, module = train(
        strategy,
        folder,
        8,
        data=(share[-1:] + share[:-1], share[:1]),
        rate=0.3,
        enable_checkpointing=True,
        callbacks=[stopping, best],
    )
    with torch.no_grad():
        own = module.compute_loss(share[0])
    opinion = {
        "own": (own.loss_sum / own.num_tokens).item(),
        "stopped": stopping.stopped_epoch,
        "best": str(best.best_model_path),
        "score": None if best.best_model_score is None else best.best_model_score.item(),
    }
    return objects_of_ranks(opinion)


def adapters(strategy: str, folder: Path) -> None:
    """LoRA on the layers and the output layer; exported."""
    _, module = train(strategy, folder, 1, "lora")
    module.save_pretrained(folder / f"lora-{strategy}")


class GeneratesFirst(L.Callback):
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, FusedCausalLMModule)
        prompt = torch.arange(5)[None]
        mask = torch.ones_like(prompt)
        pl_module.generate(prompt, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)


def generated(strategy: str, folder: Path) -> Any:
    """The weights after training, without and with a text that the model wrote before it."""
    return [weights_of(*train(strategy, folder, 2, callbacks=c)) for c in ([], [GeneratesFirst()])]


def reductions(strategy: str, folder: Path) -> Any:
    """Return how often an epoch's gradients were reduced, and to what weights that led after three."""
    with Counted("reduce_scatter") as counted:
        trained = train(strategy, folder, 3)
    return {"count": counted.count / 3, "weights": weights_of(*trained)}


class DiesInStep(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        if trainer.global_step == 5 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def die_in_step(strategy: str, folder: Path) -> Any:
    """Rank 1 is gone in the middle of the third epoch."""
    saver = ModelCheckpoint(folder / strategy, filename="{epoch}", save_last=True)
    train(strategy, folder, 100, enable_checkpointing=True, callbacks=[saver, DiesInStep()])


def die_in_save(strategy: str, folder: Path) -> Any:
    """Rank 0 is gone at the end of the third epoch, in the middle of the last file that it saves."""
    whole_save, count = torch.save, 0

    def save(content: object, file: Any, *arguments: Any, **options: Any) -> None:
        nonlocal count
        count += isinstance(file, Path)
        if count == 6:  # of two an epoch
            file.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        whole_save(content, file, *arguments, **options)

    if dist_rank() == 0:
        torch.save = save
    saver = ModelCheckpoint(folder / strategy, filename="{epoch}", save_last=True)
    train(strategy, folder, 100, enable_checkpointing=True, callbacks=[saver])


class AsksItself(L.Callback):
    """Sends SIGTERM to rank 1, among the micro-batches of the fourth step."""

    def on_before_backward(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 1 and not trainer.fit_loop._should_accumulate():
            os.kill(os.getpid(), signal.SIGTERM)


def asked(strategy: str, folder: Path) -> Any:
    """Return how each rank ends if rank 1 is asked to stop."""
    saver = RunCheckpoint(folder / strategy, every_n_train_steps=100)
    callbacks = [StopOnSignal(), AsksItself(), saver]
    try:
        train(strategy, folder, 100, enable_checkpointing=True, callbacks=callbacks)
    except Stopped as stopped:
        return objects_of_ranks((stopped.code, stopped.sentence))


class Poisons(L.Callback):
    """Makes one gradient of rank 1 infinite in the third step."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: object) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            gradient = next(p.grad for p in pl_module.parameters() if p.grad is not None and local(p.grad).numel())
            local(gradient).view(-1)[0] = float("inf")


def poisoned(strategy: str, folder: Path) -> Any:
    """Return what each rank says of gradients that are infinite on one of them: watched, and then saved."""
    said: list[str] = []
    for name, watch in (("watched", FiniteWatch()), ("saved", FiniteWatch(patience=9))):
        path = folder / strategy / name
        every = {"watched": 2, "saved": 1}[name]
        saver = RunCheckpoint(path, every_n_train_steps=every)
        try:
            train(strategy, folder, 4, enable_checkpointing=True, callbacks=[Poisons(), watch, saver])
        except UserError as error:
            said.append(str(error))
    return objects_of_ranks(said)


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    run_cases(lambda item: run(item, FOLDER), sys.argv[2:], lambda item: FOLDER / f"{item}-{RANKS}.pt")
