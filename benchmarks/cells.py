"""Run each cell of a benchmark of whole steps in a process of its own, with models of Qwen3's shapes.

So a cell's peak of memory is its own, and one that fails, or takes longer than its limit, is a row like the others.
The limit of the warm-up, which compiles, is another one than that of the measured steps.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPES = {
    "tiny": {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    "tiny_wide": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "qwen3_0_6b": {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "qwen3_1_7b": {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
}
WARM_UP = 3  # steps
WARM = "the warm-up is over"


def qwen3(shape: str, seed: int, device: torch.device) -> Any:
    """Return a model with random weights in bfloat16."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    heads = heads if "tiny" in shape else {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    config = AutoConfig.for_model("qwen3", tie_word_embeddings=True, use_cache=False, **SHAPES[shape], **heads)
    torch.manual_seed(seed)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def compile_layers(*models: Any) -> None:
    for model in models:
        for layer in model.model.layers:
            layer.compile()


def add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--warm-up-limit", type=int, default=180, help="seconds of a cell before its measured steps")
    parser.add_argument("--limit", type=int, default=60, help="seconds of a cell's measured steps")


def begin_warm_up(options: argparse.Namespace) -> None:
    """End this process when its warm-up takes longer than its limit: the system does, even inside a compilation."""
    signal.alarm(options.warm_up_limit)


def end_warm_up(options: argparse.Namespace) -> None:
    """End this process when what follows takes longer than the limit of measured steps, and forget the peak so far."""
    print(WARM, flush=True)
    signal.alarm(options.limit)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float | None:
    return round(torch.cuda.max_memory_allocated() / 2**30, 3) if torch.cuda.is_available() else None


def run_cells(cells: Sequence[dict[str, str]], out: Path | None, minutes: float = float("inf")) -> list[dict[str, Any]]:
    """Run this script again for each cell, whose names and values are options; return what each printed last, as JSON.

    ``out`` is written after each cell. No cell begins after ``minutes``.
    """
    results: list[dict[str, Any]] = []
    end = time.monotonic() + 60 * minutes
    for cell in cells:
        if time.monotonic() > end:
            results.append(cell | {"error": f"not begun within {minutes:g} minutes"})
        else:
            own = [text for name, value in cell.items() for text in (f"--{name}", value)]
            done = subprocess.run([sys.executable, *sys.argv, *own], capture_output=True, text=True, check=False)
            results.append(cell | _found(done))
        print(results[-1], flush=True)
        if out:
            out.write_text(json.dumps(results, indent=1) + "\n")
    return results


def _found(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    if done.returncode == 0:
        return json.loads(done.stdout.strip().splitlines()[-1])
    if done.returncode == -signal.SIGALRM:
        return {"error": f"the {'measured steps' if WARM in done.stdout else 'warm-up'} took longer than the limit"}
    return {"error": done.stderr.strip()[-300:]}
