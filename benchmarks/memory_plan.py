"""Compare what ``mode=plan`` predicts beside what a GPU then takes, phase by phase, for runs that differ in everything.

Each case is planned, then trained for three steps, in one process; the measured figures are ``PeakMemoryMonitor``'s.
Prints a Markdown table after every case, and writes all figures as JSON.

python benchmarks/memory_plan.py --out memory_plan.json
python benchmarks/memory_plan.py --cases 1,3
"""

import argparse
import gc
import json
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from configured import composed
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, open_dict, read_write

from lit_fused import PeakMemoryMonitor
from lit_fused.app.commands.memory_plan import planned
from lit_fused.app.commands.training import build_module

_SYNTHETIC = ["data=synthetic", "data.num_train_batches=8", "data.num_val_batches=1", "trainer.limit_val_batches=0"]
CASES = {
    "Qwen3-0.6B, chunked, bf16-mixed, 8 x 2048": ["experiment=qwen3_memory", "loss=chunked"],
    "Qwen3-1.7B (14 layers), standard, bf16-true, 2 x 4096, checkpointing": [
        *("model=qwen3_1_7b", "model.config.num_hidden_layers=14", "memory=checkpoint"),
        *("data.vocab_size=151936", "data.batch_size=2", "data.block_size=4096"),
        *("loss=standard", "precision=bf16-true"),
    ],
    "LoRA on Qwen3-0.6B, cce, bf16-mixed, 4 x 4096": [
        *("model=lora", "model@model.model=qwen3_0_6b", "data.vocab_size=151936"),
        *("data.batch_size=4", "data.block_size=4096", "loss=cce", "precision=bf16-mixed"),
    ],
    "Gemma 2 (1152 wide, 8 layers), liger, 16-mixed, 8 x 1024, accumulate 2": [
        *("model=gemma2", "model.config.hidden_size=1152", "model.config.intermediate_size=6912"),
        *("model.config.num_hidden_layers=8", "model.config.num_attention_heads=4", "model.config.head_dim=256"),
        *("data.vocab_size=256000", "data.batch_size=8", "data.block_size=1024"),
        *("loss=liger", "precision=16-mixed", "trainer.accumulate_grad_batches=2"),
    ],
    "Llama (2048 wide, 8 layers, grouped heads), chunked, 32-true, 2 x 2048, SGD": [
        *("model=llama", "model.config.hidden_size=2048", "model.config.intermediate_size=5632"),
        *("model.config.num_hidden_layers=8", "model.config.num_attention_heads=16"),
        *("model.config.num_key_value_heads=4", "model.config.tie_word_embeddings=false"),
        *("model.config.max_position_embeddings=4096", "data.vocab_size=32000", "data.batch_size=2"),
        *("data.block_size=2048", "loss=chunked", "precision=32-true"),
        *("optimizer._target_=torch.optim.SGD", "~optimizer.betas", "~optimizer.eps"),
    ],
    "GPT-2 (768 wide, 12 layers, dropout), torch_compile, bf16-mixed, 16 x 1024": [
        *("model=llama", "model.config._target_=transformers.GPT2Config", "model.config.hidden_size=768"),
        *("~model.config.intermediate_size", "~model.config.num_key_value_heads"),
        *("model.config.num_hidden_layers=12", "model.config.num_attention_heads=12", "data.vocab_size=50257"),
        *("data.batch_size=16", "data.block_size=1024", "loss=torch_compile", "precision=bf16-mixed"),
    ],
    "Llama (1024 wide, 8 layers), eager attention, chunked, recompute, bf16-mixed, 4 x 1024, Adafactor": [
        *("model=llama", "+model.attn_implementation=eager", "model.config.hidden_size=1024"),
        *("model.config.intermediate_size=2816", "model.config.num_hidden_layers=8"),
        *("model.config.num_attention_heads=16", "model.config.num_key_value_heads=16", "data.vocab_size=128256"),
        *("data.batch_size=4", "data.block_size=1024", "loss=chunked", "loss.recompute=true"),
        *("precision=bf16-mixed", "optimizer._target_=torch.optim.Adafactor", "~optimizer.betas", "~optimizer.eps"),
    ],
    "Llama (1024 wide, 8 layers), standard, 32-true, 4 x 2048": [
        *("model=llama", "model.config.hidden_size=1024", "model.config.intermediate_size=2816"),
        *("model.config.num_hidden_layers=8", "model.config.num_attention_heads=16"),
        *("model.config.num_key_value_heads=16", "model.config.max_position_embeddings=4096"),
        *("data.vocab_size=50304", "data.batch_size=4", "data.block_size=2048", "loss=standard"),
    ],
    "Qwen3 with 32 experts (1024 wide, 8 layers), chunked, bf16-mixed, 8 x 1024": [
        *("model=llama", "model.config._target_=transformers.Qwen3MoeConfig", "model.config.hidden_size=1024"),
        *("model.config.intermediate_size=2048", "+model.config.moe_intermediate_size=512"),
        *("+model.config.num_experts=32", "+model.config.num_experts_per_tok=4", "model.config.num_hidden_layers=8"),
        *("model.config.num_attention_heads=16", "model.config.num_key_value_heads=4", "data.vocab_size=151936"),
        *("data.batch_size=8", "data.block_size=1024", "loss=chunked", "precision=bf16-mixed"),
    ],
    "Llama (1024 wide, 8 layers, untied), chunked, label smoothing, 16-mixed, 8 x 1024": [
        *("model=llama", "model.config.hidden_size=1024", "model.config.intermediate_size=2816"),
        *("model.config.num_hidden_layers=8", "model.config.num_attention_heads=16"),
        *("model.config.num_key_value_heads=16", "model.config.tie_word_embeddings=false", "data.vocab_size=128256"),
        *("data.batch_size=8", "data.block_size=1024", "loss=chunked", "loss.label_smoothing=0.1"),
        *("precision=16-mixed",),
    ],
    "Llama (1024 wide, 4 layers), torch_compile, bf16-mixed, 8 x 1024, vocabulary 100,003": [
        *("model=llama", "model.config.hidden_size=1024", "model.config.intermediate_size=2816"),
        *("model.config.num_attention_heads=16", "model.config.num_key_value_heads=16", "data.vocab_size=100003"),
        *("data.batch_size=8", "data.block_size=1024", "loss=torch_compile", "precision=bf16-mixed"),
    ],
}


def as_run(overrides: list[str], folder: str) -> DictConfig:
    measured = ["callbacks=measure", "trainer.max_steps=3", "trainer.enable_checkpointing=false"]
    base = [] if overrides[0].startswith("experiment") else _SYNTHETIC
    everything = [*overrides[:1], *base, *overrides[1:], *measured, f"output_dir={folder}"]
    cfg = composed(*everything, with_hydra=True)
    with read_write(cfg), open_dict(cfg):
        HydraConfig.instance().set_config(cfg)
        own = cfg.copy()
        del own["hydra"]
    return own


def measured(cfg: DictConfig) -> dict[str, float]:
    """GiB by phase of three steps on this GPU."""
    L.seed_everything(cfg.seed, workers=True)
    trainer: L.Trainer = instantiate(cfg.trainer)
    trainer.fit(build_module(cfg, instantiate(cfg.loss)), instantiate(cfg.data))
    monitor = next(c for c in trainer.callbacks if isinstance(c, PeakMemoryMonitor))  # type: ignore[attr-defined]
    return monitor.peaks


def table(results: dict[str, Any]) -> str:
    lines = [
        "| | forward: planned, measured | backward | optimizer | peak | error |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, result in results.items():
        if "error" in result:
            lines.append(f"| {name} | {result['error']} | | | | |")
            continue
        plan, found = result["planned"], result["measured"]
        if not found:
            cells = [f"{plan[phase]:.2f}, " for phase in ("forward", "backward", "optimizer")]
            lines.append(f"| {name} | {' | '.join(cells)} | {max(plan.values()):.2f}, | |")
            continue
        cells = [f"{plan[phase]:.2f}, {found[phase]:.2f}" for phase in ("forward", "backward", "optimizer")]
        most = max(plan.values()), max(found.values())
        cells.append(f"{most[0]:.2f}, {most[1]:.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} | {100 * (most[0] / most[1] - 1):+.1f} % |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="memory_plan.json", help="file for all figures")
    parser.add_argument("--cases", default="", help="numbers from 1 on; by default all")
    parser.add_argument("--plan-only", action="store_true", help="no GPU: print the plans")
    arguments = parser.parse_args()
    wanted = [int(n) - 1 for n in arguments.cases.split(",") if n] or range(len(CASES))
    results: dict[str, Any] = {}
    for name, overrides in [list(CASES.items())[index] for index in wanted]:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                cfg = as_run(overrides, folder)
                plan = planned(cfg, instantiate(cfg.plan))
                phases = {phase: found["total"] for phase, found in plan["phases_gib"].items()}
                took = time.perf_counter() - start
                figures = {} if arguments.plan_only else measured(cfg)
                results[name] = {"planned": phases, "measured": figures, "plan": plan, "plan_seconds": took}
            except Exception as error:  # the other cases are worth running
                traceback.print_exc()
                results[name] = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            print(f"left allocated: {torch.cuda.memory_allocated() / 2**20:.0f} MiB")
        print(
            f"{name}: {time.perf_counter() - start:.0f} s, of which the plan {results[name].get('plan_seconds', 0):.0f}"
        )
        print(table(results), flush=True)
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "lightning": L.__version__}
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        Path(arguments.out).write_text(json.dumps({"device": device, **versions, "cases": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
