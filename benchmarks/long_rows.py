"""Train one long row a step on one device, by several ways to save memory: tokens/s, GiB of the GPU and of the host.

    python benchmarks/long_rows.py --model qwen3_0_6b --lengths 65536 131072 262144 524288
    python benchmarks/long_rows.py --ways memory=checkpoint memory=long liger --out docs/evidence/long_rows.json
    python benchmarks/long_rows.py --model lora --set model@model.model=llama_1b --steps 0   # adapters
    python benchmarks/long_rows.py --tiny --lengths 512 1024 --steps 2   # on a CPU, to try the script

A way is an override of train.py's group, or several joined by commas (memory=long,mlp_chunk_tokens=8192), or "liger":
Liger's kernels and its fused loss with transformers' own checkpointing. Each length of a way is a process of its own,
so that one without enough memory ends alone; longer ones of that way are then left out. Data are random tokens.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from configured import composed
from hydra.utils import instantiate
from torch import nn

import lit_fused
from lit_fused.models.compilation import compile_backbone
from lit_fused.models.precision import RotaryHalfPrecision

GIB = 2**30
TINY = ["hidden_size=32", "intermediate_size=64", "num_hidden_layers=2", "num_attention_heads=2", "vocab_size=512"]


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Take steps in this process, after one to warm up, which alone is timed if there are no others."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    length, is_liger = options.lengths[0], options.ways[0] == "liger"
    words = ["memory=checkpoint"] if is_liger else options.ways[0].split(",")
    words = [word if word.startswith("memory") else f"memory.{word}" for word in words]
    config = "model.model.config" if options.model == "lora" else "model.config"
    sizes = [f"{config}.{word}" for word in [*TINY, "num_key_value_heads=1"]] if options.tiny else []
    positions = f"++{config}.max_position_embeddings={length}"
    cfg = composed(f"model={options.model}", "data=synthetic", *options.set, *sizes, positions, *words)
    with device:  # adapters need weights at once
        backbone: Any = instantiate(cfg.model)
    lit_fused.materialize(backbone)
    backbone = instantiate(cfg.memory)(backbone).train()
    RotaryHalfPrecision("bf16-true").convert_module(backbone)
    backbone = backbone.to(device)
    loss_of = with_liger(backbone) if is_liger else with_lit_fused(backbone, device, options.compile)
    trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
    torch.manual_seed(0)
    tokens = torch.randint(backbone.config.vocab_size, (1, length), device=device)
    seconds, value = [], 0.0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # Adapters' models are built in float32.
    for _ in range(options.steps + 1):
        begin = time.perf_counter()
        loss = loss_of(tokens) / length
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()  # It waits for the GPU.
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    return {"tokens_per_sec": length / min(seconds[1:] or seconds), "gpu_gib": peak, "host_gib": host, "loss": value}


def with_lit_fused(backbone: nn.Module, device: torch.device, compiled: str) -> Any:
    model = lit_fused.LanguageModel(backbone, lit_fused.LinearCrossEntropyLoss())
    model.prepare(device)
    compile_backbone(model, compiled if device.type == "cuda" else "none")
    return lambda tokens: model({"input_ids": tokens, "labels": tokens}).loss_sum


def with_liger(backbone: Any) -> Any:
    from transformers.integrations.liger import apply_liger_kernel

    apply_liger_kernel(backbone, None)
    return lambda tokens: backbone(input_ids=tokens, labels=tokens).loss * tokens.numel()


def in_a_process(way: str, length: int, given: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, *given, "--ways", way, "--lengths", str(length), "--here"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
    said = [line for line in lines if "Error" in line] or lines
    return {"failed": said[-1][:300]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3_0_6b", help="a choice of conf/model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 131072, 262144, 524288])
    parser.add_argument("--ways", nargs="+", default=["memory=checkpoint", "memory=long"])
    parser.add_argument("--steps", type=int, default=2, help="after the first, which compiles; 0: the first is timed")
    parser.add_argument("--compile", default="regional", choices=["regional", "none"])
    parser.add_argument("--set", nargs="+", default=[], help="further overrides of train.py's configuration")
    parser.add_argument("--tiny", action="store_true", help="another width and depth, for a CPU")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--here", action="store_true", help="in this process, one way and one length")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measured(options)))
        return
    given = ["--model", options.model, "--steps", str(options.steps), "--compile", options.compile]
    given += ["--tiny"] if options.tiny else []
    given += ["--set", *options.set] if options.set else []
    rows: list[dict[str, Any]] = []
    for way in options.ways:
        for length in sorted(options.lengths):
            row = {"way": way, "length": length} | in_a_process(way, length, given)
            rows.append(row)
            print(json.dumps(row), flush=True)
            if "failed" in row:
                break
    if options.out is not None:
        options.out.write_text(json.dumps({"options": given, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
