"""Two processes of torchrun train on packed documents under each strategy, and say what came of it."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_helpers import loader, quiet_trainer
from packing_cases import gpt_oss, mamba, row
from parallel_job import CPUFSDPStrategy
from tiny_models import sharpen, tiny_model

from lit_fused import FusedCausalLMModule, UserError
from lit_fused.parallel import FSDP2Strategy, PipelineStrategy

STRATEGIES: dict[str, Any] = {
    "single": lambda: "auto",
    "ddp": lambda: "ddp",
    "fsdp": CPUFSDPStrategy,
    "fsdp2": lambda: FSDP2Strategy(2, 1),
    "tp": lambda: FSDP2Strategy(1, 2),
    "pp": lambda: PipelineStrategy(2),
}


def closed_mamba() -> Any:
    """Return a model whose documents are apart until its first step: its output projections are zero."""
    model = mamba()
    for name, parameter in model.named_parameters():
        if "out_proj" in name:
            torch.nn.init.zeros_(parameter)
    return model


MODELS = {"llama": lambda: tiny_model("llama"), "gpt_oss": gpt_oss, "mamba": closed_mamba}


def run(strategy: str, model: str, folder: Path) -> str:
    """Two steps and a validation: its loss, or the refusal."""
    batch = {name: value.repeat(4, 1) for name, value in row(9, 20).items()}
    devices = 1 if strategy == "single" else 2
    trainer = quiet_trainer(folder, devices=devices, strategy=STRATEGIES[strategy](), max_steps=2)
    module = FusedCausalLMModule(sharpen(MODELS[model]()))
    try:
        trainer.fit(module, loader([batch] * 2), loader([batch]))
    except UserError as refusal:
        return f"refused: {refusal}"
    return f"{module.model.packing} {trainer.callback_metrics['val/loss'].item():.5f}"


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    for case in sys.argv[2:]:
        strategy, model = case.split(":")
        print(f"{case}, rank {os.environ['RANK']}: {run(strategy, model, Path(sys.argv[1]))}\n", end="", flush=True)
        if dist.is_initialized():
            dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # without gloo's teardown, which now and then aborts
