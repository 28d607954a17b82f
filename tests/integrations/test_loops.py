"""Training loops of other libraries, each with one line added: the same losses, gradients and weights as without it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from architectures import Entry, tiny_batch
from architectures import tiny_model as tiny_architecture
from tiny_models import tiny_model
from torch import Tensor
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

import lit_fused

LENGTHS = (24, 9, 17, 30, 5, 24, 12, 20)  # Micro-batches have different numbers of tokens.


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 97, (30,), generator=generator) for _ in LENGTHS]
    masks = [torch.arange(30) < length for length in LENGTHS]
    return [
        {"input_ids": row.where(mask, 0), "attention_mask": mask.long(), "labels": row.where(mask, -100)}
        for row, mask in zip(ids, masks, strict=True)
    ]


def test_a_loop_of_accelerates_with_one_line_added_trains_as_before() -> None:
    """After some steps both are as near to float64 as each other."""
    found: dict[str, tuple[list[float], dict[str, Tensor]]] = {}
    for kind in ("exact", "own", "fused"):
        set_seed(0)
        model: Any = tiny_model("qwen3_tied", dtype=torch.float64 if kind == "exact" else torch.float32)
        model = lit_fused.fuse(model) if kind == "fused" else model
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        loader: Any = torch.utils.data.DataLoader(rows(), batch_size=2)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.05), loader)
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            losses.append(model.eval()(**next(iter(loader))).loss.item())
        found[kind] = losses, {name: p.detach().double() for name, p in model.named_parameters()}
    (truth, exact), (losses, weights), (own_losses, own) = found["exact"], found["fused"], found["own"]
    usual = max(abs(a - b) for a, b in zip(own_losses, truth, strict=True))
    assert max(abs(a - b) for a, b in zip(losses, truth, strict=True)) <= 2 * usual + 1e-6
    for name, weight in exact.items():
        error, usual_error = (weights[name] - weight).norm(), (own[name] - weight).norm()
        assert error <= 2 * usual_error + 1e-6 * weight.norm(), name


ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 3,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 1,
    "optim": "sgd",
    "learning_rate": 0.1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "predict_with_generate": True,
    "generation_max_length": 6,
}


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
        trainer = Seq2SeqTrainer(
            model=lit_fused.fuse(model) if fused else model,
            args=Seq2SeqTrainingArguments(**ARGUMENTS, output_dir=str(tmp_path)),
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
