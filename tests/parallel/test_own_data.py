"""Two ranks with loaders of a project's own: as many batches as each has, exact, or refused on all ranks together."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from parallel_cases import STRATEGIES
from ranks import each
from torch.utils.data import DataLoader, IterableDataset
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, get_constant_schedule

from lit_fused import FusedCausalLMModule
from lit_fused.parallel.collectives import objects_of_ranks

pytestmark = pytest.mark.slow


class Stream(IterableDataset[Any]):
    """Batches of which nobody knows the number."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def stream(batches: list[Any]) -> Any:
    return DataLoader(Stream(batches), batch_size=None)


def module_of(model: Any = None) -> FusedCausalLMModule:
    return FusedCausalLMModule(model or tiny_llama(), None, partial(torch.optim.SGD, lr=0.1), get_constant_schedule)


def trainer_of(strategy: str, folder: Path, **options: Any) -> Any:
    settings = {"devices": 2, "max_epochs": 1, "use_distributed_sampler": False, **options}
    return quiet_trainer(folder, strategy=STRATEGIES[strategy][2](), **settings)


def mine(batches: list[Any]) -> list[Any]:
    return batches[int(os.environ["RANK"]) :: 2]


def mean_loss(batches: list[Any], model: Any = None) -> torch.Tensor:
    ids, labels = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
    logits = (model or tiny_llama()).double()(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def one_each(strategy: str, folder: Path) -> Any:
    """Validate with two loaders of which each rank has batches of one, and a third without any."""
    batches, is_first = ragged_batches(5), os.environ["RANK"] == "0"
    loaders = {"a": stream(batches[:2] if is_first else []), "b": stream([] if is_first else batches[3:])}
    trainer = trainer_of(strategy, folder)
    trainer.validate(module_of(), loaders | {"c": stream([])}, verbose=False)
    return objects_of_ranks({name: value.item() for name, value in trainer.callback_metrics.items() if "loss" in name})


def test_ranks_that_have_batches_of_different_loaders_log_each_loaders_loss(tmp_path):
    batches = ragged_batches(5)
    first, second = each(one_each, 2, ["ddp"], tmp_path)["ddp"]
    assert first == second
    parts = {"val/loss/a": batches[:2], "val/loss/b": batches[3:], "val/loss": batches[:2] + batches[3:]}
    assert first == pytest.approx({name: mean_loss(part).item() for name, part in parts.items()}, rel=1e-6)


def late_labels(strategy: str, folder: Path) -> Any:
    """Validate with three batches on one rank and two on the other, whose first label is in the third."""
    batches = ragged_batches(5)
    for batch in batches[:4]:
        batch["labels"].fill_(-100)
    trainer = trainer_of(strategy, folder)
    return objects_of_ranks(trainer.validate(module_of(), loader(mine(batches)), verbose=False)[0]["val/loss"])


def test_a_rank_that_has_no_label_in_validation_does_not_wait_for_those_of_others(tmp_path):
    expected = mean_loss(ragged_batches(5)[4:]).item()
    assert each(late_labels, 2, ["ddp"], tmp_path)["ddp"] == pytest.approx([expected] * 2, rel=1e-6)


def clipped(strategy: str, folder: Path) -> Any:
    """Fit for an epoch, with gradients clipped by their value."""
    batches = ragged_batches(4)
    module = module_of(tiny_llama(num_key_value_heads=2))
    clip: dict[str, Any] = {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}
    trainer_of(strategy, folder, **clip).fit(module, loader(mine(batches) if strategy == "our_fsdp2" else batches))
    with module.placement.whole_weights(module.backbone) as weights:
        return {name: weight.clone() for name, weight in weights.items()} if weights else None


def test_gradients_that_are_clipped_by_value_are_those_of_one_process(tmp_path):
    for strategy, weights in each(clipped, 2, ["our_fsdp2", "our_tp", "pp"], tmp_path).items():
        model, batches = tiny_llama(num_key_value_heads=2).double(), ragged_batches(4)
        optimizer, together = torch.optim.SGD(model.parameters(), lr=0.1), 2 if strategy == "our_fsdp2" else 1
        for start in range(0, 4, together):
            part = batches[start : start + together]
            if all((batch["labels"] == -100).all() for batch in part):
                continue
            optimizer.zero_grad()
            mean_loss(part, model).backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.001)
            optimizer.step()
        for name, weight in model.named_parameters():
            torch.testing.assert_close(weights[name].double(), weight.detach(), rtol=1e-5, atol=1e-6, msg=name)


def drawn_apart(strategy: str, folder: Path) -> None:
    """Fit two epochs of rows that each rank shuffles by its own generator, from which dropout draws as well, in the
    first stage and not in the last."""
    torch.manual_seed(0)
    settings: Any = {"vocab_size": 61, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**settings, num_hidden_layers=3, hidden_dropout=0.1))
    rows: Any = [{name: value[0] for name, value in batch.items()} for batch in ragged_batches(8)]
    trainer_of(strategy, folder, max_epochs=2).fit(module_of(model), DataLoader(rows, 2, shuffle=True))


def test_stages_that_get_different_batches_in_a_later_epoch_are_refused(tmp_path):
    assert "the ranks of a pipeline got different batches" in each(drawn_apart, 2, ["pp"], tmp_path)["pp"]
