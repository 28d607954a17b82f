"""Measure the memory that a process of an FSDP2 run needs until its weights are there: whole models, late weights.

    PYTHONPATH=tests/helpers python tools/start_memory.py                # docs/evidence/devices.md: 374M parameters
    PYTHONPATH=tests/helpers python tools/start_memory.py --layers 16 --vocabulary 8000

Starts two processes for each way to build the model; each writes what its resident memory has grown by at
most (VmHWM, which Linux can set back) since before the model was built.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torchrun
from transformers import AutoModelForCausalLM, LlamaConfig

import lit_fused

WAYS = ("whole", "late", "late folder")
PROCESSES = 2


def config(layers: int, vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        max_position_embeddings=2048,
    )


def gibibytes(layers: int, vocabulary: int) -> float:
    model = lit_fused.from_config(config(layers, vocabulary))
    return sum(p.numel() * 4 for p in model.parameters()) / 2**30


def measure(folder: Path, layers: int, vocabulary: int, ways: tuple[str, ...] = WAYS) -> dict[str, list[float]]:
    """way -> GiB until the weights were there, of each process."""
    if any("folder" in way for way in ways):
        model = lit_fused.from_config(config(layers, vocabulary), seed=1)
        lit_fused.materialize(model)
        model.save_pretrained(folder / "model", max_shard_size="300MB")
        del model
    found = {}
    for way in ways:
        arguments = ("--layers", layers, "--vocabulary", vocabulary, "--way", way, "--folder", folder)
        torchrun.run(__file__, PROCESSES, *arguments, timeout=400)
        found[way] = [json.loads((folder / f"{way} {rank}.json").read_text()) for rank in range(PROCESSES)]
    return found


def run(folder: Path, layers: int, vocabulary: int, way: str) -> None:
    """One of the processes."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning_helpers import loader, quiet_trainer, ragged_batches

    from lit_fused.parallel.sharded import Sharded

    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")

    def end(self: Sharded, model: object) -> None:  # the weights are there; what follows, a step needs as well
        peak = resident("VmHWM") - before
        (folder / f"{way} {os.environ['RANK']}.json").write_text(json.dumps(peak))
        torch.distributed.barrier()
        os._exit(0)

    Sharded.prepare = end

    build: dict[str, Any] = {
        "whole": lambda: AutoModelForCausalLM.from_config(config(layers, vocabulary)),
        "late": lambda: lit_fused.from_config(config(layers, vocabulary), seed=1),
        "late folder": lambda: lit_fused.from_pretrained(folder / "model"),
    }
    trainer = quiet_trainer(folder, devices=PROCESSES, strategy=ModelParallelStrategy(PROCESSES, 1), max_steps=1)
    trainer.fit(lit_fused.FusedCausalLMModule(build[way]()), loader(ragged_batches(1)))


def resident(field: str) -> float:
    """GiB of this process: VmRSS now, VmHWM at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    shape = arguments.layers, arguments.vocabulary
    if arguments.way is not None:
        run(arguments.folder, *shape, arguments.way)
        return
    print(f"the model: {gibibytes(*shape):.2f} GiB")
    with tempfile.TemporaryDirectory() as folder:
        for way, peaks in measure(Path(folder), *shape).items():
            print(f"| {way} | {' | '.join(f'{peak:.2f}' for peak in peaks)} |")


if __name__ == "__main__":
    main()
