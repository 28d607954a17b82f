"""The processes of test_own_data.py: two ranks on gloo with loaders of a project's own; rank 0 saves what all found.

torchrun --nproc-per-node 2 tests/helpers/own_data_job.py FOLDER SCENARIO [SCENARIO ...]
"""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import checkpoint_job
import lightning as L
import torch
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from ranks import or_refusal, run_command
from torch.utils.data import DataLoader, IterableDataset
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, get_constant_schedule

from lit_fused import FusedCausalLMModule
from lit_fused.parallel.collectives import objects_of_ranks
from lit_fused.pipeline import PipelineStrategy

STRATEGIES = checkpoint_job.STRATEGIES | {"pp": lambda: PipelineStrategy(2)}


class Stream(IterableDataset[Any]):
    """Batches of which nobody knows the number."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def stream(batches: list[Any]) -> Any:
    return DataLoader(Stream(batches), batch_size=None)


def mine(batches: list[Any]) -> list[Any]:
    return batches[int(os.environ["RANK"]) :: 2]


def module_of(model: Any = None) -> FusedCausalLMModule:
    return FusedCausalLMModule(model or tiny_llama(), None, partial(torch.optim.SGD, lr=0.1), get_constant_schedule)


def trainer_of(strategy: str, folder: Path, **options: Any) -> L.Trainer:
    settings = {"devices": 2, "max_epochs": 1, "use_distributed_sampler": False, **options}
    return quiet_trainer(folder, strategy=STRATEGIES[strategy](), **settings)


def one_each(strategy: str, folder: Path) -> Any:
    """Validate with two loaders of which each rank has batches of one, and a third without any."""
    batches, is_first = ragged_batches(5), os.environ["RANK"] == "0"
    loaders = {"a": stream(batches[:2] if is_first else []), "b": stream([] if is_first else batches[3:])}
    trainer = trainer_of(strategy, folder)
    trainer.validate(module_of(), loaders | {"c": stream([])}, verbose=False)
    return objects_of_ranks({name: value.item() for name, value in trainer.callback_metrics.items() if "loss" in name})


def late_labels(strategy: str, folder: Path) -> Any:
    """Validate with three batches on one rank and two on the other, whose first label is in the third."""
    batches = ragged_batches(5)
    for batch in batches[:4]:
        batch["labels"].fill_(-100)
    trainer = trainer_of(strategy, folder)
    return objects_of_ranks(trainer.validate(module_of(), loader(mine(batches)), verbose=False)[0]["val/loss"])


def clipped(strategy: str, folder: Path) -> Any:
    """Fit for an epoch, with gradients clipped by their value."""
    batches = ragged_batches(4)
    module = module_of(tiny_llama(num_key_value_heads=2))
    clip: dict[str, Any] = {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}
    trainer_of(strategy, folder, **clip).fit(module, loader(mine(batches) if strategy == "fsdp2" else batches))
    with module.placement.whole_weights(module.backbone) as weights:
        return {name: weight.clone() for name, weight in weights.items()} if weights else None


def drawn_apart(strategy: str, folder: Path) -> Any:
    """Fit two epochs of rows that each rank shuffles by its own generator, from which dropout draws as well, in the
    first stage and not in the last."""
    torch.manual_seed(0)
    settings: Any = {"vocab_size": 61, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**settings, num_hidden_layers=3, hidden_dropout=0.1))
    rows: Any = [{name: value[0] for name, value in batch.items()} for batch in ragged_batches(8)]
    trainer = trainer_of(strategy, folder, max_epochs=2)
    return objects_of_ranks(or_refusal(trainer.fit, module_of(model), DataLoader(rows, 2, shuffle=True)))


SCENARIOS = {f.__name__: f for f in (one_each, late_labels, clipped, drawn_apart)}


def run(case: str, folder: Path) -> Any:
    strategy, name = case.split(":")
    return SCENARIOS[name](strategy, folder)


if __name__ == "__main__":
    run_command(run)
