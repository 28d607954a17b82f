"""Compare train.py with loops written by hand, one choice at a time, on one GPU or several: tokens/s, MFU, GiB.

    python benchmarks/whole_step.py --out docs/evidence/whole_step
    python benchmarks/whole_step.py --model qwen3_1_7b --rows 4 --length 4096 --precision bf16-true
    python benchmarks/whole_step.py --cells train.py "train.py strategy=ddp trainer.devices=2"

A cell is a loop by hand (``HAND``), transformers' Trainer with a fused model ("Trainer", "Trainer compile=none", or
with its arguments, "Trainer dataloader_num_workers=2") or without ("Trainer fuse=false"), or train.py with overrides.
Each is a process of its own, all of them in turns; of
a cell the median of its turns is shown. Tokens per second are of all steps after the first ones, of all devices;
they are divided by those of as many devices of the first cell. Rows are of one device. Data are random tokens.
"""

import argparse
import contextlib
import csv
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from configured import ROOT, composed
from hydra.utils import instantiate
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lit_fused
from lit_fused.models.blocks import blocks
from lit_fused.models.compilation import compile_backbone

WARM_UP = 5
CALLBACKS = ("stop_on_signal", "finite", "learning_rate", "peak_memory")
HAND = {  # loops by hand: their loss, and how layers are compiled
    "by hand": ("fused", "regional"),
    "by hand, no clipping": ("fused", "regional"),
    "by hand, transformers' loss": ("transformers", "none"),
}
CELLS = [
    "by hand", "by hand, no clipping", "train.py", "train.py trainer.gradient_clip_val=null",
    "train.py trainer.log_every_n_steps=10", "train.py optimizer.fused=false",
    " ".join(["train.py", *(f"~callbacks.{name}" for name in CALLBACKS)]),
    *(" ".join(["train.py", *(f"~callbacks.{o}" for o in CALLBACKS if o != name)]) for name in CALLBACKS),
]  # fmt: skip


def model_of(name: str) -> Any:
    return composed(f"model={name}", "data=synthetic").model


def backbone_of(options: argparse.Namespace) -> Any:
    backbone = instantiate(model_of(options.model))
    lit_fused.materialize(backbone)
    return (backbone.bfloat16() if options.precision == "bf16-true" else backbone).train().cuda()


def by_hand(options: argparse.Namespace) -> dict[str, float]:
    """Train as a good loop does: autocast, fused AdamW, layers compiled one by one, the loss read at the end."""
    loss_of, compiled = HAND[options.cell]
    backbone = backbone_of(options)
    model = lit_fused.LanguageModel(backbone, lit_fused.LinearCrossEntropyLoss())
    model.prepare(torch.device("cuda"))
    compile_backbone(model, compiled)

    def loss(batch: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=options.precision != "bf16-true"):
            return backbone(**batch).loss if loss_of == "transformers" else model(batch).loss

    seconds = seconds_of_step(options, model, loss, clips="no clipping" not in options.cell)
    tokens = options.rows * options.length
    return {"tokens_per_sec": tokens / seconds, "gib": torch.cuda.max_memory_allocated() / 2**30}


def by_hand_on_ranks(options: argparse.Namespace) -> dict[str, float]:
    """Train as :func:`by_hand` in a process of torchrun's, under FSDP2 with bfloat16 copies in place of autocast."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group(device_id=device)
    model = lit_fused.LanguageModel(backbone_of(options), lit_fused.LinearCrossEntropyLoss())
    model.prepare(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in blocks(model.backbone):
        fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mp_policy=policy)
    compile_backbone(model, "regional")
    torch.manual_seed(dist.get_rank())  # Each rank has its own tokens.
    seconds = seconds_of_step(options, model, lambda batch: model(batch).loss)
    largest = torch.tensor([seconds, torch.cuda.max_memory_allocated() / 2**30], device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    seconds, gib = largest.tolist()
    tokens = options.rows * options.length * dist.get_world_size()
    dist.destroy_process_group()
    return {"tokens_per_sec": tokens / seconds, "gib": gib}


def seconds_of_step(options: argparse.Namespace, model: Any, loss_of: Any, *, clips: bool = True) -> float:
    """Train on random tokens; return the mean of all steps after the first ones."""
    parameters = [*model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = torch.randint(model.vocabulary, (8, options.rows, options.length)).pin_memory()
    losses: list[Tensor] = []
    begin = 0.0
    for step in range(options.steps):
        if step == WARM_UP:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
        tokens = batches[step % 8].to("cuda", non_blocking=True)
        loss = loss_of({"input_ids": tokens, "labels": tokens})
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / (options.steps - WARM_UP)
    assert torch.stack(losses).isfinite().all()
    return seconds


def by_trainer(options: argparse.Namespace) -> dict[str, float]:
    """Train in transformers' Trainer, which logs every ten steps, as train.py."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    words = dict(word.split("=", 1) for word in options.cell.split()[1:])
    compiled, fused = words.pop("compile", "auto"), words.pop("fuse", "true") == "true"
    given = {name: json.loads(value) for name, value in words.items()}
    model = instantiate(model_of(options.model))
    lit_fused.materialize(model)
    half = options.precision == "bf16-true"
    model = model.bfloat16() if half else model
    model = lit_fused.fuse(model, compile=compiled) if fused else model
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == WARM_UP:
                torch.cuda.reset_peak_memory_stats()
            if state.global_step in (WARM_UP, options.steps):
                torch.cuda.synchronize()
                times.append(time.perf_counter())

    tokens = torch.randint(model.config.vocab_size, (options.steps * options.rows, options.length))
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, per_device_train_batch_size=options.rows, max_steps=options.steps, learning_rate=1e-3,
            logging_steps=10, bf16=not half, save_strategy="no", report_to="none", disable_tqdm=True, **given,
        )  # fmt: skip
        data: Any = [{"input_ids": row, "labels": row} for row in tokens]
        with contextlib.redirect_stdout(sys.stderr):  # The last line of the output is the result.
            Trainer(model, settings, train_dataset=data, callbacks=[Clock()]).train()
    seconds = (times[1] - times[0]) / (options.steps - WARM_UP)
    gib = torch.cuda.max_memory_allocated() / 2**30
    return {"tokens_per_sec": options.rows * options.length / seconds, "gib": gib}


def by_command(options: argparse.Namespace) -> dict[str, float]:
    """Run the command, without what writes files after and between steps."""
    vocabulary = model_of(options.model).config.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"model={options.model}", f"precision={options.precision}", f"output_dir={folder}",
            f"hydra.run.dir={folder}", "data=synthetic", f"data.vocab_size={vocabulary}",
            f"data.batch_size={options.rows}", f"data.block_size={options.length}", "data.num_val_batches=1",
            f"trainer.max_steps={options.steps}", "trainer.enable_checkpointing=false", "~callbacks.checkpoint",
            "~callbacks.export", "~callbacks.sample_text", *options.overrides, *options.cell.split()[1:],
        ]  # fmt: skip
        subprocess.run([sys.executable, str(ROOT / "train.py"), *overrides], check=True, stdout=subprocess.DEVNULL)
        with Path(folder, "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
    tokens, seconds, peaks, utilisations = (
        [float(row[name]) for row in rows if row.get(name) and int(row["step"]) > 2 * WARM_UP]
        for name in ("throughput/tokens", "throughput/seconds", "memory/peak_allocated_gib", "throughput/mfu")
    )
    speed = (tokens[-1] - tokens[0]) / (seconds[-1] - seconds[0])  # the mean over all steps, as by hand
    utilisation = statistics.median(utilisations) if utilisations else math.nan
    return {"tokens_per_sec": speed, "gib": max(peaks, default=math.nan), "mfu": utilisation}


def devices_of(cell: str) -> int:
    given = (word.removeprefix("trainer.").partition("=") for word in cell.split())
    return int(next((value for name, _, value in given if name == "devices"), "1"))


def is_on_ranks(cell: str) -> bool:
    return cell.startswith("by hand fsdp2")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3_0_6b", help="a name in conf/model")
    parser.add_argument("--precision", default="bf16-mixed", choices=["bf16-mixed", "bf16-true"])
    for name, default in (("rows", 8), ("length", 2048), ("steps", 60), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--overrides", nargs="*", default=[], help="of train.py, in all of its cells")
    parser.add_argument("--out", type=Path, help="writes OUT.json")
    parser.add_argument("--cell", help="measure this one in this process, and print it as JSON")
    options = parser.parse_args(arguments)
    if options.cell:
        ways = {"by": by_hand_on_ranks if is_on_ranks(options.cell) else by_hand, "Trainer": by_trainer}
        result = ways.get(options.cell.split()[0], by_command)(options)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(result))
        return
    found: dict[str, list[dict[str, float]]] = {cell: [] for cell in options.cells}
    own = list(sys.argv[1:] if arguments is None else arguments)
    for turn in range(options.turns):
        for cell in options.cells if turn % 2 == 0 else reversed(options.cells):
            ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices_of(cell)}"]
            command = [sys.executable, *(ranks if is_on_ranks(cell) else ()), __file__, *own, "--cell", cell]
            said = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if said.returncode:
                sys.exit(f"{cell} failed")
            found[cell].append(json.loads(said.stdout.splitlines()[-1]))
            print(f"turn {turn + 1}: {cell:<34}{found[cell][-1]['tokens_per_sec']:>10,.0f} tokens/s", flush=True)
    first = options.cells[0]
    print(f"\n| | tokens/s | of as many devices of {first} | MFU | peak GiB |\n|---|---:|---:|---:|---:|")
    medians = {cell: statistics.median(turn["tokens_per_sec"] for turn in turns) for cell, turns in found.items()}
    for cell, turns in found.items():
        share = medians[cell] / devices_of(cell) / (medians[first] / devices_of(first))
        utilisation = statistics.median(turn.get("mfu", math.nan) for turn in turns)
        peak = max(turn["gib"] for turn in turns)
        print(f"| {cell} | {medians[cell]:,.0f} | {share:.3f} | {utilisation:.1%} | {peak:.1f} |")
    if options.out:
        record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cells": found}
        options.out.with_suffix(".json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
