"""Compare ways to put documents into rows: tokens that are learned a second, and peak memory, of whole training steps.

    python benchmarks/packing.py --compile regional --out packing.json
    python benchmarks/packing.py --model tiny --rows 2 --length 64 --steps 3      # on a CPU

Documents have lengths like those of web text (log-normal, median 400 tokens, at most a row's). Each cell is a process
of its own: forward, backward and fused AdamW in bfloat16 with random weights and tokens.

`none` has a document a row, padded to the longest of its batch. `documents` fills rows with whole documents, which are
kept apart as lit_fused chooses on a GPU; by masks; or by transformers' FlexAttention, for all that the model does.
`stream` lets documents attend to each other, so it needs no mask: the limit, if attention between documents cost
nothing. Padding is no token.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cells import SHAPES, WARM_UP, add_limits, begin_warm_up, end_warm_up, peak_gib, qwen3, run_cells
from torch import Tensor

from lit_fused import LanguageModel, LinearCrossEntropyLoss
from lit_fused.data.packing import best_fit
from lit_fused.models import documents_attention
from lit_fused.models.compilation import compile_backbone

CELLS = {  # rows, and what keeps documents apart
    "none": ("none", "sdpa"),
    "documents, masks": ("documents", "sdpa"),
    "documents, flex_attention": ("documents", "flex_attention"),
    "documents": ("documents", documents_attention.NAME),
    "stream": ("stream", "sdpa"),
}
MEDIAN, SPREAD, SHORTEST = 400, 1.1, 16
BATCHES = 8


def batches_of(packing: str, rows: int, length: int, vocabulary: int) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(0)
    lengths = (torch.randn(4000, generator=random).mul(SPREAD).exp() * MEDIAN).long().clamp(SHORTEST, length)
    if packing == "none":
        return [padded(lens, vocabulary, random) for lens in lengths.split(rows)[:BATCHES]]
    ids = torch.randint(vocabulary, (BATCHES, rows, length), generator=random)
    if packing == "stream":
        return [{"input_ids": part, "labels": part} for part in ids]
    order, ends = best_fit(lengths.numpy(), length)
    blocks = torch.from_numpy(order).tensor_split(torch.from_numpy(ends[:-1]))
    chosen = torch.randperm(len(blocks), generator=random)[: BATCHES * rows].tolist()
    positions = torch.stack([positions_of(lengths[blocks[number]].tolist(), length) for number in chosen])
    positions = positions.view(ids.shape)
    return [
        {"input_ids": part, "labels": part.where(places > 0, -100), "position_ids": places}
        for part, places in zip(ids, positions, strict=True)
    ]


def positions_of(lengths: list[int], length: int) -> Tensor:
    """Return the positions (T,) of documents that fill a row; the rest of it is a document that is hardly longer."""
    rest = length - sum(lengths)
    return torch.cat([torch.arange(size) for size in (*lengths, rest)])


def padded(lengths: Tensor, vocabulary: int, random: torch.Generator) -> dict[str, Tensor]:
    places = torch.arange(int(lengths.max())).expand(len(lengths), -1)
    there = places < lengths[:, None]
    ids = torch.randint(vocabulary, places.shape, generator=random)
    return {"input_ids": ids, "labels": ids.where(there, -100), "attention_mask": there.long()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    begin_warm_up(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    packing, attention = CELLS[options.cell]
    backbone = qwen3(options.model, 0, device).train()
    backbone.set_attn_implementation("sdpa" if attention == documents_attention.NAME else attention)
    model = LanguageModel(backbone, LinearCrossEntropyLoss())
    model.prepare(device)
    optimizer = torch.optim.AdamW(backbone.parameters(), lr=1e-4, fused=True)
    batches = batches_of(packing, options.rows, options.length, model.vocabulary)
    batches = [{name: part.to(device) for name, part in batch.items()} for batch in batches]
    with mock.patch.object(documents_attention, "is_possible", return_value=attention == documents_attention.NAME):
        if packing == "documents":
            model.check_packing(batches[0])
    compile_backbone(model, options.compile)
    seconds, losses, start = [], [], 0.0
    for number in range(options.steps * BATCHES + WARM_UP * BATCHES):
        if number == WARM_UP * BATCHES:
            end_warm_up(options)
        batch = batches[number % BATCHES]
        if number % BATCHES == 0:
            synchronize(device)
            start = time.perf_counter()
        loss = model(batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if number % BATCHES == BATCHES - 1:
            synchronize(device)
            seconds.append(time.perf_counter() - start)
    assert torch.stack(losses).isfinite().all()
    learned = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    positions = sum(batch["labels"].numel() for batch in batches)
    middle = statistics.median(seconds[WARM_UP:])
    return {
        "tokens_per_sec": round(learned / middle, 1),
        "positions_per_sec": round(positions / middle, 1),
        "share_of_tokens": round(learned / positions, 4),
        "attention": backbone.config._attn_implementation,
        "peak_gib": peak_gib(),
        "first_loss": losses[0].item(),
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen3_0_6b")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3, help=f"times {BATCHES} batches")
    parser.add_argument("--compile", choices=("none", "regional"), default="none")
    parser.add_argument("--cell", choices=CELLS)
    parser.add_argument("--out", type=Path)
    add_limits(parser)
    options = parser.parse_args()
    if options.cell:
        print(json.dumps(measure(options)))
    else:
        run_cells([{"cell": cell} for cell in CELLS], options.out)


if __name__ == "__main__":
    main()
