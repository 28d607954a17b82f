"""Compare losses over a catalogue by what they rank: NDCG@10 over all items, with time and memory.

    python benchmarks/items_quality.py --users 60000 --seconds 6.5 --batch-size 1024 --negatives 4096 --out found.json
    python benchmarks/items_quality.py --items 5000 --users 2000 --epochs 10 --sampled-epochs 30 --width 32 \\
        --batch-size 64 --negatives 64 --lr 1e-2 --device cpu

The interactions are generated: popularity follows Zipf's law, and each item has three successors of its own, one of
which comes next with probability 0.7, else an item by popularity. So the best possible ranking is known, and its NDCG
printed first. SASRec is trained on all but the last item of each user, which is the test, with the same weights at the
start, batches and optimiser for each loss; on a CPU each loss runs in a process of its own. ``--seconds`` gives every
loss the same time in place of epochs. The clock starts after three steps, in which kernels are compiled; memory is what
training takes beyond model and data. The sampled losses are written here:
sampled softmax has negatives of a batch by popularity, corrected by log q (Bengio and Senecal, 2008); BCE and gBCE
(Petrov and Macdonald, 2023, arXiv 2308.07192, t = 0.75) have uniform negatives of each position.
"""

import argparse
import functools
import gc
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from linear_cross_entropy import machine
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from lit_fused import FusedRecommenderModule, LinearCrossEntropyLoss, SASRec
from lit_fused.filtered import Filtered
from lit_fused.losses import LossOutput
from lit_fused.losses.loss import Batch
from lit_fused.training import cosine_with_warmup

FULL = ("full softmax", "filtered")
LOSSES = (*FULL, "sampled softmax, log q", "gBCE", "BCE")
FOLLOW, SUCCESSORS = 0.7, torch.tensor([0.5, 0.3, 0.2])


@functools.cache
def interactions(users: int, items: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return items (users, length), numbers from 1 on, and the best ten items to follow each row's last but one."""
    generator = torch.Generator().manual_seed(seed)
    popularity = 1 / torch.randperm(items, generator=generator).add(10.0)
    popularity /= popularity.sum()
    draw = partial(torch.multinomial, replacement=True, generator=generator)
    successors = draw(popularity.sqrt(), items * 3).view(items, 3)
    rows = torch.empty(users, length, dtype=torch.int64)
    rows[:, 0] = draw(popularity, users)
    for column in range(1, length):
        followed = successors[rows[:, column - 1]].gather(1, draw(SUCCESSORS, users)[:, None])[:, 0]
        follows = torch.rand(users, generator=generator) < FOLLOW
        rows[:, column] = followed.where(follows, draw(popularity, users))
    followed = successors[rows[:, -2]]
    candidates = torch.cat([followed, popularity.topk(13).indices.expand(users, 13)], 1)
    is_followed = candidates[:, :, None] == followed[:, None]
    chances = (1 - FOLLOW) * popularity[candidates] + FOLLOW * (is_followed * SUCCESSORS).sum(-1)
    repeated = (candidates[:, :, None] == candidates[:, None]).tril(-1).any(-1)
    best = candidates.gather(1, chances.masked_fill(repeated, -1).topk(10).indices)
    return rows + 1, best + 1


def ndcg(best: Tensor, targets: Tensor) -> float:
    places = torch.arange(2, best.shape[1] + 2).log2()
    return float(((best == targets[:, None]) / places).sum(1).mean())


class Sampled(LinearCrossEntropyLoss):
    """A loss over each target and a few negatives, in training; evaluation has the full softmax."""

    def __init__(self, negatives: int, popularity: Tensor | None = None, t: float = 0.0) -> None:
        super().__init__()
        self.negatives, self.popularity, self.t = negatives, popularity, t

    def compute(self, model: Any, batch: Batch) -> LossOutput:
        if not torch.is_grad_enabled():
            return super().compute(model, batch)
        targets = model.targets(batch).flatten()
        states, head, _ = model.hidden_states(batch)
        valid = targets >= 0
        targets, (states, weight, _) = targets[valid], head.operands(states.flatten(0, -2)[valid])
        losses = (self._softmax if self.popularity is not None else self._binary)(states, weight, targets)
        return LossOutput(losses.sum(), valid.sum())

    def _softmax(self, states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        assert self.popularity is not None
        q = self.popularity.to(weight)
        drawn = torch.multinomial(q, self.negatives, replacement=True)
        # The target is in every sample, and needs no correction.
        positive = (states * weight[targets]).sum(-1, keepdim=True)
        negative = states @ weight[drawn].T - (self.negatives * q[drawn]).log()
        negative = negative.masked_fill(drawn == targets[:, None], -torch.inf)
        return F.cross_entropy(torch.cat([positive, negative], 1), torch.zeros_like(targets), reduction="none")

    def _binary(self, states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        drawn = torch.randint(len(weight), (len(targets), self.negatives), device=weight.device)
        rate = self.negatives / (len(weight) - 1)
        beta = rate * (self.t * (1 - 1 / rate) + 1 / rate)
        positive = beta * F.logsigmoid((states * weight[targets]).sum(-1))
        negative = F.logsigmoid(-torch.einsum("nd,nkd->nk", states, weight[drawn]))
        negative = negative.masked_fill(drawn == targets[:, None], 0)
        return -(positive + negative.sum(-1)) / (self.negatives + 1)


def loss_of(name: str, options: argparse.Namespace, popularity: Tensor) -> LinearCrossEntropyLoss:
    if name in FULL:
        return LinearCrossEntropyLoss(Filtered() if name == "filtered" else "chunked")
    if name == "sampled softmax, log q":
        return Sampled(options.negatives, popularity)
    return Sampled(options.binary_negatives, t=0.75 if name == "gBCE" else 0.0)


WARM = 3  # steps before the clock starts


class Watch(L.Callback):
    """Times the steps, by the process's own time on a CPU, has the most memory beyond what came before them, and stops
    after ``limit`` seconds, if it is not zero."""

    def __init__(self, limit: float) -> None:
        self.limit, self.steps, self.seconds, self.start = limit, 0, 0.0, 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.clock = time.perf_counter if pl_module.device.type == "cuda" else time.process_time
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.before = memory(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.steps += 1
        if self.steps == WARM:
            memory(trainer)
            self.start = self.clock()
        self.seconds = self.clock() - self.start if self.steps > WARM else 0.0
        trainer.should_stop = bool(self.limit) and self.seconds >= self.limit

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.extra, self.seconds = memory(trainer) - self.before, self.clock() - self.start

    def schedule(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """Return a rate that falls to zero over the seconds."""
        return LambdaLR(optimizer, lambda _: max(0.0, 1 - self.seconds / self.limit))


def memory(trainer: L.Trainer) -> float:
    """Return the most memory so far in MiB, after all work: of the GPU, or of this process."""
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


class Batches:
    """Batches of rows in a new order in each epoch, or of whole rows in their own whose last item is to be found."""

    def __init__(self, rows: Tensor, size: int, seed: int | None = None) -> None:
        self.rows, self.size, self.seed = rows, size, seed
        self.generator = torch.Generator().manual_seed(seed or 0)

    def __len__(self) -> int:
        return -(-len(self.rows) // self.size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        shuffled, rows = self.seed is not None, len(self.rows)
        order = torch.randperm(rows, generator=self.generator) if shuffled else torch.arange(rows)
        for part in order.to(self.rows.device).split(self.size):
            ids = self.rows[part]
            labels = ids.clone()
            labels[:, : 0 if shuffled else -1] = -100
            yield {"input_ids": ids, "labels": labels}


def run(name: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Return NDCG, coverage, seconds and MiB of the runs with each seed."""
    torch.set_num_threads(options.threads)
    found = []
    for seed in range(options.seeds):
        gc.collect()  # the run before must not free memory during this one
        rows = interactions(options.users, options.items, options.length, seed)[0].to(options.device)
        popularity = torch.bincount(rows[:, :-1].flatten() - 1, minlength=options.items).add(1.0)
        torch.manual_seed(seed)
        sizes: Any = {"num_layers": 2, "num_heads": 2, "max_length": options.length, "dropout": 0.1}
        watch = Watch(options.seconds)
        module = FusedRecommenderModule(
            SASRec(options.items, options.width, **sizes),
            loss=loss_of(name, options, popularity / popularity.sum()),
            optimizer=partial(torch.optim.AdamW, lr=options.lr, weight_decay=0.01),
            scheduler=watch.schedule if options.seconds else cosine_with_warmup,
        )
        quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(
            max_epochs=-1 if options.seconds else options.epochs if name in FULL else options.sampled_epochs,
            precision="bf16-mixed" if options.device == "cuda" else "32-true",
            accelerator="gpu" if options.device == "cuda" else "cpu",
            devices=1,
            enable_model_summary=False,
            callbacks=[watch],
            **quiet,
        )
        trainer.fit(module, Batches(rows[:, :-1], options.batch_size, seed))
        trainer.validate(module, Batches(rows, options.batch_size), verbose=False)
        logged = {part: float(trainer.callback_metrics[f"val/{part}_at_10"]) for part in ("ndcg", "coverage")}
        found.append(logged | {"seconds": watch.seconds, "MiB": watch.extra, "steps": watch.steps})
    return found


def shown(values: list[float], digits: int) -> str:
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--length", type=int, default=21)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--sampled-epochs", type=int, default=60, help="of the losses with negatives, whose steps cost less"
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="of training for each loss, in place of epochs")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--negatives", type=int, default=256, help="of a batch, for the sampled softmax")
    parser.add_argument("--binary-negatives", type=int, default=4, help="of each position, for gBCE and BCE")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--losses", nargs="+", default=[*LOSSES], choices=LOSSES)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write all runs as JSON")
    options = parser.parse_args(arguments)
    ceilings = []
    for seed in range(options.seeds):
        rows, best = interactions(options.users, options.items, options.length, seed)
        ceilings.append(ndcg(best, rows[:, -1]))
    command = "python benchmarks/items_quality.py " + " ".join(arguments or sys.argv[1:])
    results: dict[str, Any] = {"command": command, "machine": machine(torch.device(options.device))}
    results |= {"best possible": ceilings, "losses": {}}
    print("| loss | NDCG@10 | coverage@10 | steps | seconds | MiB more |\n|---|---:|---:|---:|---:|---:|")
    print(f"| the best possible ranking | {shown(ceilings, 3)} | | | | |", flush=True)
    for name in options.losses:
        if options.device == "cuda":
            found = run(name, options)
        else:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found = pool.apply(run, (name, options))
        columns = {key: [one[key] for one in found] for key in found[0]}
        quality = f"{shown(columns['ndcg'], 3)} | {statistics.mean(columns['coverage']):.2f}"
        cost = f"{statistics.mean(columns['steps']):.0f} | {shown(columns['seconds'], 1)} | {max(columns['MiB']):.0f}"
        print(f"| {name} | {quality} | {cost} |", flush=True)
        results["losses"][name] = columns
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
