"""Training loops of other libraries, each with one line added: the same losses, gradients and weights as without it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from architectures import Entry, tiny_batch
from architectures import tiny_model as tiny_architecture
from datasets import Dataset
from tiny_models import tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

import lit_fused

LENGTHS = (24, 9, 17, 30, 5, 24, 12, 20)  # Micro-batches have different numbers of tokens.

ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 3,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 1,
    "logging_steps": 1,
    "optim": "sgd",
    "learning_rate": 0.1,
    "max_grad_norm": 1.0,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "gradient_checkpointing": True,
}


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 97, (30,), generator=generator) for _ in LENGTHS]
    masks = [torch.arange(30) < length for length in LENGTHS]
    return [
        {"input_ids": row.where(mask, 0), "attention_mask": mask.long(), "labels": row.where(mask, -100)}
        for row, mask in zip(ids, masks, strict=True)
    ]


def trainer_of(model: Any, folder: Path, **options: Any) -> Trainer:
    others = {name: options.pop(name) for name in ("compute_metrics",) if name in options}
    arguments: Any = ARGUMENTS | {"output_dir": str(folder)} | options
    settings = TrainingArguments(**arguments)
    return Trainer(model=model, args=settings, train_dataset=rows(), eval_dataset=rows(), **others)  # type: ignore[arg-type]


def by_trainer(model: Any, folder: Path) -> list[float]:
    trainer = trainer_of(model, folder)
    trainer.train()
    trained = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*trained, trainer.evaluate()["eval_loss"]]


def evaluated(model: Any) -> float:
    """The loss of a batch, as a loop reads it in an evaluation."""
    with torch.no_grad():
        return model.eval()(**{name: value[None] for name, value in rows()[0].items()}).loss.item()


def by_accelerate(model: Any, folder: Path) -> list[float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    loader = torch.utils.data.DataLoader(rows(), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, evaluated(model)]


def by_fabric(model: Any, folder: Path) -> list[float]:
    fabric = L.Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.05))
    losses = []
    for row in rows():
        loss = model(**{name: value[None] for name, value in row.items()}).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, evaluated(model)]


def by_hand(model: Any, folder: Path) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for pair in zip(rows()[::2], rows()[1::2], strict=True):
        count = sum((row["labels"][1:] != -100).sum() for row in pair)
        for row in pair:
            loss = model(**{name: value[None] for name, value in row.items()}, num_items_in_batch=count).loss
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def by_sft(model: Any, folder: Path) -> list[float]:
    from trl.trainer.sft_config import SFTConfig  # It takes two seconds.
    from trl.trainer.sft_trainer import SFTTrainer

    words = Tokenizer(WordLevel({f"w{index}": index for index in range(97)}, unk_token="w0"))
    tokens = [row["input_ids"][: row["attention_mask"].sum()].tolist() for row in rows()]
    data = Dataset.from_dict({"input_ids": tokens, "labels": tokens})
    settings = SFTConfig(**ARGUMENTS, output_dir=str(folder), dataset_kwargs={"skip_prepare_dataset": True}, bf16=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    trainer = SFTTrainer(model=model, args=settings, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
    if "fused_forward" in model.__dict__:  # TRL has given the model a head of its own, which is to be ours.
        lit_fused.fuse(model)
    trainer.train()
    logged = [*trainer.state.log_history, trainer.evaluate()]
    names = ("loss", "entropy", "mean_token_accuracy")
    return [value for entry in logged for name, value in entry.items() if name.removeprefix("eval_") in names]


LOOPS = [by_trainer, by_accelerate, by_fabric, by_hand, by_sft]
SLOW = (by_trainer, by_sft)


@pytest.mark.parametrize("loop", [pytest.param(f, marks=[pytest.mark.slow] if f in SLOW else []) for f in LOOPS])
def test_a_loop_with_one_line_added_trains_as_before(loop: Callable[[Any, Path], list[float]], tmp_path: Path) -> None:
    """After some steps both are as near to float64 as each other."""
    found: dict[str, tuple[list[float], dict[str, Tensor]]] = {}
    for kind in ("exact", "own", "fused"):
        set_seed(0)
        model = tiny_model("qwen3_tied", dtype=torch.float64 if kind == "exact" else torch.float32)
        losses = loop(lit_fused.fuse(model) if kind == "fused" else model, tmp_path)
        found[kind] = losses, {name: p.detach().double() for name, p in model.named_parameters()}
    (truth, exact), (losses, weights), (own_losses, own) = found["exact"], found["fused"], found["own"]
    usual = max(abs(a - b) for a, b in zip(own_losses, truth, strict=True))
    assert max(abs(a - b) for a, b in zip(losses, truth, strict=True)) <= 2 * usual + 1e-6
    for name, weight in exact.items():
        error, usual_error = (weights[name] - weight).norm(), (own[name] - weight).norm()
        assert error <= 2 * usual_error + 1e-6 * weight.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_an_encoder_decoder_trains_and_generates_as_before(name: str, tmp_path: Path) -> None:
    """Its own loss ignores the number of items, by which transformers' Trainer has it divide."""
    results = []
    for fused in (False, True):
        set_seed(0)
        model = tiny_architecture(Entry(name, "seq2seq"))
        batch = tiny_batch(model)
        data = [{key: values[row] for key, values in batch.items()} for row in range(len(batch["labels"]))]
        settings: Any = ARGUMENTS | {"gradient_checkpointing": False, "predict_with_generate": True}
        trainer = Seq2SeqTrainer(
            model=lit_fused.fuse(model) if fused else model,
            args=Seq2SeqTrainingArguments(**settings, output_dir=str(tmp_path), generation_max_length=6),
            train_dataset=data,  # type: ignore[arg-type]
            eval_dataset=data,  # type: ignore[arg-type]
            compute_metrics=lambda found: {"sum": float(np.sum(np.abs(found.predictions)))},
        )
        trainer.train()
        results.append((trainer.evaluate(), model.state_dict()))
    (own, weights), (found, ours) = results
    assert found["eval_sum"] == own["eval_sum"]
    assert found["eval_loss"] == pytest.approx(own["eval_loss"], rel=1e-6)
    torch.testing.assert_close(ours, weights)


@pytest.fixture
def new_state() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("new_state")
@pytest.mark.parametrize("keep_fp32_wrapper", [True, False])
def test_accelerates_mixed_precision_is_that_of_the_loss_and_can_be_taken_away(keep_fp32_wrapper: bool) -> None:
    batch = {name: torch.stack([row[name] for row in rows()]) for name in rows()[0]}
    own, fused = tiny_model("gemma2"), lit_fused.fuse(tiny_model("gemma2"))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared = [accelerator.prepare_model(model) for model in (own, fused)]
    standard, ours = [model(**batch) for model in prepared]
    assert not isinstance(ours.logits, Tensor)
    torch.testing.assert_close(ours.loss, standard.loss, rtol=2e-3, atol=0)
    unwrapped = accelerator.unwrap_model(prepared[1], keep_fp32_wrapper=keep_fp32_wrapper)
    assert unwrapped is fused
    assert not isinstance(fused(**batch).logits, Tensor)
    assert lit_fused.unfuse(fused)(**batch).logits is not None
