"""The processes of test_parallel.py, started by torchrun: each case is a fit with a strategy; rank 0 saves what it did.

    torchrun --nproc-per-node N tests/parallel_job.py FOLDER run|score|resume CASE [CASE ...]

A case is STRATEGY:MODEL:LOSS:PRECISION. All its cases run with N processes. On N GPUs they are used, else gloo
and the CPU.
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
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from lightning_helpers import loader, quiet_trainer
from parallel_cases import CLIP, LEARNING_RATE, Case, backbone, batches
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import get_constant_schedule

from lit_fused import CrossEntropyLoss, FusedCausalLMModule, LinearCrossEntropyLoss, UserError
from lit_fused.parallel import block_wrap_policy


class CPUFSDPStrategy(FSDPStrategy):
    """FSDP1 on the CPU, which Lightning refuses though torch does not."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        config = self.mixed_precision_config
        return FullyShardedDataParallel(model, mixed_precision=config, device_id=torch.device("cpu"), **self.kwargs)


ON_GPUS = torch.cuda.device_count() >= int(os.environ.get("WORLD_SIZE", "1"))
FSDP1 = FSDPStrategy if ON_GPUS else CPUFSDPStrategy
STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "fsdp": lambda: FSDP1(auto_wrap_policy=block_wrap_policy, state_dict_type="sharded"),
    "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    "fsdp2_file": lambda: ModelParallelStrategy(2, 1, save_distributed_checkpoint=False),
    "fsdp_head": lambda: FSDP1(auto_wrap_policy={nn.Linear}),
    "tp": lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2),
}


class Recorder(L.Callback):
    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.losses: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: object) -> None:
        if not self.gradients:
            self.gradients = whole(trainer.strategy, pl_module, lambda p: p.grad)

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.losses.append(trainer.callback_metrics["train/loss"].item())


def whole(strategy: Strategy, module: Any, part: Any) -> dict[str, Tensor]:
    """A part of each parameter, gathered, under the parameter's name in the backbone."""
    if isinstance(strategy, FSDPStrategy):
        assert isinstance(strategy.model, FullyShardedDataParallel)
        with FullyShardedDataParallel.summon_full_params(strategy.model, with_grads=True):
            named = {n.replace("_fsdp_wrapped_module.", ""): part(p) for n, p in module.backbone.named_parameters()}
            return {name: value.detach().cpu().clone() for name, value in named.items()}
    named = {name: part(p) for name, p in module.backbone.named_parameters()}
    return {
        name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().cpu().clone() for name, v in named.items()
    }


def run(case: Case, folder: Path) -> dict[str, Any]:
    module, recorder = module_of(case), Recorder()
    trainer = trainer_of(case, folder, max_epochs=1, accumulate_grad_batches=case.accumulated, callbacks=[recorder])
    part = share_of(batches(), case)
    try:
        trainer.fit(module, loader(part), loader(part))
    except UserError as refusal:
        return {"refusal": str(refusal)}
    weights = whole(trainer.strategy, module, lambda p: p)
    prompt = batches()[0]["input_ids"][:1, :4]
    said = module.generate(prompt.to(module.device), max_new_tokens=5, do_sample=False)
    module.save_pretrained(folder / "exported")
    return {
        "gradients": recorder.gradients,
        "losses": recorder.losses,
        "weights": weights,
        "val/loss": trainer.callback_metrics["val/loss"].item(),
        "said": said.cpu(),
    }


def score(case: Case, folder: Path) -> dict[str, Any]:
    """A prediction, which no fit has preceded."""
    trainer = trainer_of(case, folder)
    try:
        trainer.predict(module_of(case), loader(batches()[:2]))
    except UserError as refusal:
        return {"refusal": str(refusal)}
    return {}


def resume(case: Case, folder: Path) -> dict[str, Any]:
    """Three epochs at once, and two with a checkpoint and the third from it by another module and trainer."""
    part = share_of(batches()[:4], case)
    modules = [module_of(case) for _ in range(3)]
    at_once = trainer_of(case, folder, max_epochs=3)
    at_once.fit(modules[0], loader(part))
    saver = ModelCheckpoint(folder / "checkpoints", save_last=True)
    first = trainer_of(case, folder, max_epochs=2, enable_checkpointing=True, callbacks=[saver])
    first.fit(modules[1], loader(part))
    second = trainer_of(case, folder, max_epochs=3)
    second.fit(modules[2], loader(part), ckpt_path=saver.last_model_path)
    assert second.global_step == at_once.global_step
    return {
        name: whole(trainer.strategy, module, lambda p: p)
        for name, trainer, module in (("at once", at_once, modules[0]), ("resumed", second, modules[2]))
    }


def share_of(batches: list[Any], case: Case) -> list[Any]:
    """The micro-batches of this process. Ranks that are neighbours share a batch, if any do."""
    return batches[int(os.environ["RANK"]) * case.data_parallel // case.ranks :: case.data_parallel]


def module_of(case: Case, model: nn.Module | None = None) -> FusedCausalLMModule:
    return FusedCausalLMModule(
        backbone(case.model) if model is None else model,
        CrossEntropyLoss() if case.loss == "standard" else LinearCrossEntropyLoss(case.loss),
        partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.1),
        get_constant_schedule,
    )


def trainer_of(case: Case, folder: Path, **options: Any) -> L.Trainer:
    return quiet_trainer(
        folder,
        accelerator="gpu" if ON_GPUS else "cpu",
        devices=case.ranks,
        strategy=STRATEGIES[case.strategy](),
        precision=case.precision,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        **options,
    )


def main(folder: Path, what: str, cases: list[str]) -> None:
    for text in cases:
        case = Case.parse(text)
        own = folder / text.replace(":", "_")
        result = {"run": run, "score": score, "resume": resume}[what](case, own)
        if dist.get_rank() == 0:
            own.mkdir(exist_ok=True, parents=True)
            torch.save(result, own / "result.pt")
        dist.barrier()
    # Without the interpreter's teardown, in which gloo's threads now and then abort a process that has done its work
    # ("terminate called without an active exception").
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
