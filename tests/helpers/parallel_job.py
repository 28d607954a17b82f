"""The processes of test_parallel.py, started by torchrun: each case is a fit with a strategy; rank 0 saves what it did.

    torchrun --nproc-per-node N tests/helpers/parallel_job.py FOLDER run|score|resume|partial CASE [CASE ...]

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
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning_helpers import loader, quiet_trainer
from parallel_cases import CLIP, EPSILON, LEARNING_RATE, Case, backbone, batches
from ranks import run_cases
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from transformers import get_constant_schedule

from lit_fused import (
    CrossEntropyLoss,
    FusedCausalLMModule,
    FusedMaskedLMModule,
    LinearCrossEntropyLoss,
    ModelInternalLoss,
    UserError,
)
from lit_fused.filtered import Filtered
from lit_fused.parallel import FSDP2Strategy, ReplicatedStrategy
from lit_fused.pipeline import PipelineStrategy
from lit_fused.pipeline.strategy import gathered
from lit_fused.training import MuonWithAdamW

ON_GPUS = torch.cuda.device_count() >= int(os.environ.get("WORLD_SIZE", "1"))
STRATEGIES: dict[str, Any] = {
    "single": lambda: "auto",
    "ddp": ReplicatedStrategy,
    "lightnings_ddp": lambda: "ddp",
    "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    "fsdp2_kept": lambda: FSDP2Strategy(2, 1, reshard_after_forward=False),
    "tp": lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2),
    "tp_unlike": lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2),
    "fsdp2_tp": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2),
    "pp": lambda: PipelineStrategy(2),
    "pp_gpipe": lambda: PipelineStrategy(2, schedule="GPipe", microbatches=2),
    "pp_interleaved": lambda: PipelineStrategy(2, schedule="Interleaved1F1B", microbatches=2),
    "pp_zero_bubble": lambda: PipelineStrategy(2, schedule="InterleavedZeroBubble", microbatches=4),
    "pp_bfs": lambda: PipelineStrategy(2, schedule="LoopedBFS", microbatches=4),
    "pp_zbv": lambda: PipelineStrategy(2, schedule="ZBVZeroBubble", microbatches=4),
    "pp_dualpipe": lambda: PipelineStrategy(2, schedule="DualPipeV", microbatches=4),
    "pp_ddp": lambda: PipelineStrategy(2, 2, microbatches=2),
    "pp_fsdp2": lambda: PipelineStrategy(2, 2, microbatches=2, fully_shard=True),
    "pp_interleaved_fsdp2": lambda: PipelineStrategy(2, 2, "Interleaved1F1B", 2, fully_shard=True),
    "pp_bfs_fsdp2": lambda: PipelineStrategy(2, 2, "LoopedBFS", 4, fully_shard=True),
}


OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.1),
    "fused": partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.1, fused=True),
    "muon": partial(MuonWithAdamW, lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=LEARNING_RATE, weight_decay=0.1),
}


class Recorder(L.Callback):
    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] | None = None  # of the first step; empty on ranks that hold no whole ones
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: object) -> None:
        if self.gradients is None:
            self.gradients = whole(trainer.strategy, pl_module, lambda p: p.grad)

    def on_train_batch_end(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.losses.append(trainer.callback_metrics["train/loss"].item())
            self.norms.append(trainer.callback_metrics["train/gradient_norm"].item())


def whole(strategy: Strategy, module: Any, part: Any, owner: str = "backbone") -> dict[str, Tensor]:
    """A part of each parameter, gathered, under the parameter's name in the module's backbone or model."""
    named = {name: part(p) for name, p in getattr(module, owner).named_parameters()}
    if isinstance(strategy, PipelineStrategy):
        whole_ones = gathered(named, strategy.device_mesh, strategy.root_device)
        return {name: value.clone() for name, value in whole_ones.items()}
    return {
        name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().cpu().clone() for name, v in named.items()
    }


def run(case: Case, folder: Path) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    module, recorder = module_of(case), Recorder()
    trainer = trainer_of(case, folder, max_epochs=1, accumulate_grad_batches=case.accumulated, callbacks=[recorder])
    part = share_of(batches(masked=case.is_masked), case)
    try:
        trainer.fit(module, loader(part), loader(part))
    except UserError as refusal:
        return {"refusal": str(refusal)}
    weights = whole(trainer.strategy, module, lambda p: p)
    prompt = batches()[0]["input_ids"][:1, :4].to(module.device)
    can_say = not case.is_pipeline and not case.is_masked
    said = module.generate(prompt, max_new_tokens=5, do_sample=False).cpu() if can_say else None
    if case.strategy in ("fsdp2", "tp"):
        assert module(input_ids=prompt).logits.shape == (*prompt.shape, module.model.vocabulary)
    if "tp" in case.strategy and can_say:
        assert_ranks_sample_the_same(module, prompt)
    module.save_pretrained(folder / "exported")
    return {
        "gradients": recorder.gradients,
        "losses": recorder.losses,
        "norms": recorder.norms,
        "weights": weights,
        "val/loss": trainer.callback_metrics["val/loss"].item(),
        "said": said,
        "graphs": counters["stats"]["unique_graphs"],
    }


def assert_ranks_sample_the_same(module: FusedCausalLMModule, prompt: Tensor) -> None:
    torch.manual_seed(dist.get_rank())
    sampled = module.generate(prompt.to(module.device), max_new_tokens=5, do_sample=True)
    strategy: Any = module.trainer.strategy
    of_group = strategy.device_mesh["tensor_parallel"]
    sampled_by: list[Any] = [None] * of_group.size()
    dist.all_gather_object(sampled_by, sampled.tolist(), group=of_group.get_group())
    assert sampled_by == sampled_by[:1] * of_group.size()


def score(case: Case, folder: Path) -> dict[str, Any]:
    """A prediction, which no fit has preceded."""
    trainer = trainer_of(case, folder)
    try:
        scores: Any = trainer.predict(module_of(case), loader(share_of(batches()[:2], case)))
    except UserError as refusal:
        return {"refusal": str(refusal)}
    assert isinstance(scores, list)
    return {"log_likelihood": [batch["log_likelihood"].cpu() for batch in scores]}


def resume(case: Case, folder: Path) -> dict[str, Any]:
    """Three epochs at once, and two with a checkpoint and the third from it by another module and trainer."""
    part = share_of(batches(masked=case.is_masked)[:4], case)
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


class Partial(FusedCausalLMModule):
    """Trains some matrices; the others have gradients too, which are never set to zero."""

    def configure_optimizers(self) -> Any:
        parts = [p for name, p in self.named_parameters() if "q_proj" in name or "lm_head" in name]
        return torch.optim.SGD(parts, lr=1.0)


def partial_optimizer(case: Case, folder: Path) -> dict[str, Any]:
    """Three clipped steps of an optimiser that has some of the parameters: all weights, and the other gradients."""
    module = Partial(backbone(case.model, case.layers))
    trainer = trainer_of(case, folder, max_epochs=1, accumulate_grad_batches=case.accumulated)
    trainer.fit(module, loader(share_of(batches(), case)))

    def left(parameter: Tensor) -> Tensor:
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    return {"weights": whole(trainer.strategy, module, lambda p: p), "left": whole(trainer.strategy, module, left)}


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
        strategy=STRATEGIES[case.strategy](),
        precision=case.precision,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        **options,
    )


JOBS = {"run": run, "score": score, "resume": resume, "partial": partial_optimizer}


def file_of(case: str, folder: Path) -> Path:
    return folder / case.replace(":", "_") / "result.pt"


if __name__ == "__main__":
    FOLDER, JOB = Path(sys.argv[1]), JOBS[sys.argv[2]]
    run_cases(
        lambda case: JOB(Case.parse(case), file_of(case, FOLDER).parent),
        sys.argv[3:],
        lambda case: file_of(case, FOLDER),
    )
