"""Compare a fit that saves a checkpoint every 50 steps with one that never does, in turns: milliseconds per step.

    python benchmarks/save_cost.py --model qwen3_0_6b --rows 8 --length 2048 --precision bf16-mixed
    python benchmarks/save_cost.py --hidden 256 --vocabulary 8192 --rows 2 --length 128 --steps 60 --every 20

Steps are timed from ten after one save to ten after another, so that each turn has a whole number of saves. The first
save, which allocates pinned memory for the copy, is not among them; a line of its own says how long its step took.
"""

import argparse
import statistics
import tempfile
import time
from typing import Any

import lightning as L
import torch
from configured import composed
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

import lit_fused
from lit_fused.data import SyntheticDataModule


class Clock(L.Callback):
    """Notes when some steps have ended, with all that the device does in them."""

    def __init__(self, every: int, steps: int) -> None:
        self.times = dict.fromkeys((every - 1, every + 10, steps + 10), 0.0)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step in self.times:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times[trainer.global_step] = time.perf_counter()

    @property
    def ms_per_step(self) -> float:
        (_, _), (first, begun), (last, ended) = self.times.items()
        return (ended - begun) / (last - first) * 1000

    @property
    def first_save(self) -> float:
        """Seconds from before the first save to eleven steps after it, less what these steps take."""
        before, after, _ = self.times.values()
        return after - before - 11 * self.ms_per_step / 1000


def model_of(options: argparse.Namespace) -> Any:
    if options.model is None:
        sizes = {"hidden_size": options.hidden, "intermediate_size": 3 * options.hidden, "num_hidden_layers": 4}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": options.hidden // 4}
        return Qwen3ForCausalLM(Qwen3Config(vocab_size=options.vocabulary, **sizes, **heads))
    return instantiate(composed(f"model={options.model}", "data=synthetic").model)


def fit(options: argparse.Namespace, *, saves: bool) -> Clock:
    """Train, and return when its steps ended."""
    backbone = model_of(options)
    data = SyntheticDataModule(backbone.config.vocab_size, options.length, options.rows, options.steps + 18, 1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        clock = Clock(options.every, options.steps)
        saver = ModelCheckpoint(folder, every_n_train_steps=options.every, filename="{step}")
        trainer = L.Trainer(
            max_steps=options.steps + 18,  # The last save ends within the fit.
            precision=options.precision,
            callbacks=[clock, *([saver] if saves else [])],
            enable_checkpointing=saves,
            strategy=options.strategy,
            devices=options.devices,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        trainer.fit(lit_fused.FusedCausalLMModule(backbone, compile="auto"), data)
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name in conf/model; by default a small one of the two sizes below")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200, help="a multiple of --every")
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", help="where checkpoints are written for the time of a fit")
    options = parser.parse_args()
    found: dict[bool, list[Clock]] = {False: [], True: []}
    for turn in range(options.turns):
        for saves in (False, True) if turn % 2 == 0 else (True, False):
            found[saves].append(fit(options, saves=saves))
    turns = {saves: [round(clock.ms_per_step, 2) for clock in clocks] for saves, clocks in found.items()}
    never, saved = (statistics.median(turns[saves]) for saves in (False, True))
    print(f"never saved: {never:.2f} ms per step; saved every {options.every} steps: {saved:.2f} ms per step", end="")
    print(f" ({100 * (saved / never - 1):+.1f} %); all turns {turns}")
    print(f"the first save takes {found[True][0].first_save:.2f} s more")


if __name__ == "__main__":
    main()
