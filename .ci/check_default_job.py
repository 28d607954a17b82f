"""Judge the default job by what it left: a loss that fell by 30 %, metrics, a checkpoint, a model that loads."""

import csv
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

[summary_file] = Path(sys.argv[1]).rglob("summary.json")
run = summary_file.parent
summary = json.loads(summary_file.read_text())

with (run / "metrics.csv").open() as stream:
    losses = [float(row["train/loss"]) for row in csv.DictReader(stream) if row["train/loss"]]
first, last = losses[0], sum(losses[-25:]) / 25  # one batch of source code is much easier than another
assert last < 0.7 * first, f"the loss fell from {first:.2f} to {last:.2f} only: less than 30 %"

for name in ("val/loss", "val/perplexity", "throughput/tokens_per_sec", "memory/peak_allocated_gib"):
    assert summary["metrics"][name] > 0, name

torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
model = AutoModelForCausalLM.from_pretrained(run / "exported")
tokenizer = AutoTokenizer.from_pretrained(run / "exported")
assert model.config.vocab_size >= len(tokenizer)
print(f"the default job: loss {first:.2f} -> {last:.2f}, val/loss {summary['metrics']['val/loss']:.2f}")
