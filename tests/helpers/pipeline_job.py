"""The scenarios that test_pipeline.py runs on two ranks."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import architectures
import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_helpers import loader, quiet_trainer
from ranks import or_refusal
from tiny_models import VOCABULARY, TinyBackbone, sharpen, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, LlamaForCausalLM, T5Config, get_constant_schedule

from lit_fused import (
    FusedCausalLMModule,
    FusedSeq2SeqLMModule,
    LinearCrossEntropyLoss,
    ModelInternalLoss,
    PeakMemoryMonitor,
)
from lit_fused.callbacks.sample_text import SampleText
from lit_fused.filtered import Filtered
from lit_fused.parallel import FSDP2Strategy
from lit_fused.parallel.collectives import objects_of_ranks
from lit_fused.pipeline import PipelineStrategy

SETTINGS: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


def ragged() -> list[dict[str, Tensor]]:
    """Five batches: rows and lengths differ, one has padding, one positions, one no valid label."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for index, (rows, length) in enumerate([(3, 12), (2, 12), (5, 9), (1, 7), (4, 12)]):
        ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
        labels = ids.clone()
        labels[:, : (0, 3, length, 5, 8)[index]] = -100
        batches.append({"input_ids": ids, "labels": labels})
    mask = torch.ones_like(batches[0]["input_ids"])
    mask[1, -4:] = 0
    batches[0] |= {"attention_mask": mask, "labels": batches[0]["labels"].masked_fill(mask == 0, -100)}
    packed = torch.cat([torch.arange(5), torch.arange(7)])
    batches[1]["position_ids"] = packed.expand(2, -1)  # two documents in a row
    batches[4]["position_ids"] = packed[None]  # of all rows
    return batches


def module(name: str, loss: Any = None) -> FusedCausalLMModule:
    model = sharpen(tiny_model(name, num_hidden_layers=4), 5.0)
    optimizer = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    return FusedCausalLMModule(model, loss, optimizer, get_constant_schedule)


def trainer_of(folder: Path, strategy: PipelineStrategy | None = None, **options: Any) -> L.Trainer:
    return quiet_trainer(
        folder,
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy or PipelineStrategy(2),
        use_distributed_sampler=False,
        **(SETTINGS | options),
    )


class Hooks(L.Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_before_backward(self, *_: Any, **__: Any) -> None:
        self.calls.append("before backward")

    def on_after_backward(self, *_: Any, **__: Any) -> None:
        self.calls.append("after backward")

    def on_before_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.calls.append("step")


def numbers(trainer: L.Trainer) -> dict[str, float]:
    return {name: value.item() for name, value in trainer.callback_metrics.items() if not name.startswith("memory")}


def state(trainer: L.Trainer, part: FusedCausalLMModule) -> dict[str, Tensor]:
    assert isinstance(trainer.strategy, PipelineStrategy)
    return {name: value.clone() for name, value in trainer.strategy.whole_state_dict(part.backbone).items()}


def ragged_batches(folder: Path) -> dict[str, Any]:
    """Rows and lengths that differ, masks and positions, a batch without labels, an incomplete window; then tests and
    predictions, and the callbacks of a usual run."""
    part, hooks, peak = module("llama_tied"), Hooks(), PeakMemoryMonitor(summary=False)
    best = ModelCheckpoint(folder / "best", monitor="val/loss")
    callbacks = [hooks, peak, best, SampleText("a")]
    trainer = trainer_of(folder, callbacks=callbacks, enable_checkpointing=True, num_sanity_val_steps=1)
    trainer.fit(part, loader(ragged()), loader(ragged()[:2]))
    fitted = numbers(trainer)
    assert best.best_model_path
    assert peak.peaks["backward"] > 0
    trainer.test(part, loader(ragged()), verbose=False)
    tested = numbers(trainer)
    predictions = trainer.predict(part, loader(ragged()))
    return {
        "weights": state(trainer, part),
        "fitted": objects_of_ranks(fitted),
        "tested": objects_of_ranks(tested),
        "predictions": objects_of_ranks(predictions),
        "hooks": hooks.calls,
    }


def moves(folder: Path) -> dict[str, Any]:
    """An epoch under 1F1B, another from its folder with four stages, another from the one file of these; and an epoch
    from a file of a single device."""
    first, second, third, fourth = (module("qwen3_tied") for _ in range(4))
    trainer = trainer_of(folder)
    trainer.fit(first, loader(ragged()))
    trainer.save_checkpoint(folder / "folder.ckpt")
    result: dict[str, Any] = {"val/loss": trainer.validate(first, loader(ragged()), verbose=False)[0]["val/loss"]}
    again = trainer_of(folder).validate(
        module("qwen3_tied"), loader(ragged()), ckpt_path=folder / "folder.ckpt", verbose=False
    )
    result["again val/loss"] = again[0]["val/loss"]
    interleaved = PipelineStrategy(2, 1, "Interleaved1F1B", 4)
    trainer = trainer_of(folder, interleaved, max_epochs=2)
    trainer.fit(second, loader(ragged()), ckpt_path=folder / "folder.ckpt")
    trainer.save_checkpoint(folder / "file.ckpt")
    trainer = trainer_of(folder, max_epochs=3)
    trainer.fit(third, loader(ragged()), ckpt_path=folder / "file.ckpt")
    result["moved"] = state(trainer, third)
    trainer = trainer_of(folder, max_epochs=2)
    trainer.fit(fourth, loader(ragged()), ckpt_path=folder / "single.ckpt")
    result["from a single device"] = state(trainer, fourth)
    sharded = module("qwen3_tied")  # on both ranks with the same batches: as often as one process sees them
    trainer = quiet_trainer(
        folder, **(SETTINGS | {"max_epochs": 2}), devices=2, strategy=FSDP2Strategy(2, 1), use_distributed_sampler=False
    )
    trainer.fit(sharded, loader(ragged()), ckpt_path=folder / "folder.ckpt")
    trainer.save_checkpoint(folder / "fsdp2.ckpt")
    fifth = module("qwen3_tied")
    trainer = trainer_of(folder, PipelineStrategy(2, schedule="Interleaved1F1B"), max_epochs=3)
    trainer.fit(fifth, loader(ragged()), ckpt_path=folder / "fsdp2.ckpt")
    result["by way of FSDP2"] = state(trainer, fifth)
    refused = []
    for name in ("folder.ckpt", "file.ckpt"):
        other = FusedCausalLMModule(tiny_model("qwen3_tied", num_hidden_layers=6))
        validate = partial(trainer_of(folder).validate, other, loader(ragged()), ckpt_path=folder / name)
        refused.append(or_refusal(validate))
    return result | {"refused": refused}


class Scaled(LlamaForCausalLM):
    """Does something to its hidden states that is no layer."""

    def forward(self, input_ids: Any = None, *_: Any, **options: Any) -> Any:
        hidden_states = self.model(input_ids, **(options | {"use_cache": False})).last_hidden_state
        from transformers.modeling_outputs import CausalLMOutputWithPast

        return CausalLMOutputWithPast(logits=self.lm_head(0.5 * hidden_states))  # type: ignore[arg-type]


class OwnStep(FusedCausalLMModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 2 * super().training_step(batch, batch_idx)


class OwnLoss(FusedCausalLMModule):
    def compute_loss(self, batch: Any) -> Any:
        return super().compute_loss(batch)


class OwnBackward(FusedCausalLMModule):
    def backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        (loss / 2).backward()


def wrong(hidden_states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return 1.1 * F.cross_entropy(hidden_states @ weight.T, targets, reduction="sum")


def llama(layers: int = 4) -> Any:
    return tiny_model("llama", num_hidden_layers=layers)


def seq2seq() -> FusedSeq2SeqLMModule:
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 61}
    sizes["decoder_start_token_id"] = 0
    return FusedSeq2SeqLMModule(AutoModelForSeq2SeqLM.from_config(T5Config(**sizes)))


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))


def changed(**changes: Any) -> list[Any]:
    return [batch | changes for batch in ragged()[:1]]


def refusals(folder: Path) -> dict[str, Any]:
    """Return what each of these is refused with, on every rank."""

    def fit(part: L.LightningModule, batches: list[Any] | None = None, **options: Any) -> Any:
        return lambda: trainer_of(folder, **options).fit(part, loader(ragged() if batches is None else batches))

    fused = FusedCausalLMModule
    ids = ragged()[0]["input_ids"]
    divided, sharded = fused(llama()), fused(llama())
    runs = {
        "encoder-decoder": fit(seq2seq()),
        "adapters": fit(fused(adapted())),
        "compiled": fit(fused(torch.compile(llama()))),  # type: ignore[arg-type]
        "plain module": fit(fused(TinyBackbone())),
        "other shape": fit(fused(tiny_model("gpt2"))),
        "scaled": fit(fused(Scaled(llama().config))),
        "several streams": fit(fused(architectures.tiny_model(architectures.Entry("qwen4_exp", "causal")))),
        "router": fit(fused(tiny_model("mixtral", num_hidden_layers=2))),
        "loss=model": fit(fused(llama(), ModelInternalLoss())),
        "training_step": fit(OwnStep(llama())),
        "compute_loss": fit(OwnLoss(llama())),
        "backward": fit(OwnBackward(llama())),
        "few layers": fit(fused(llama(2)), strategy=PipelineStrategy(2, schedule="Interleaved1F1B")),
        "other inputs": fit(fused(llama()), changed(token_type_ids=torch.zeros_like(ids))),
        "different batches": fit(fused(llama()), changed(input_ids=ids.roll(int(os.environ["RANK"]), 0))),
        "labels": fit(fused(llama()), changed(labels=ids + 1000)),
        "wrong loss": fit(fused(llama(), LinearCrossEntropyLoss(wrong))),
        "divided": fit(divided),
        "divided otherwise": fit(divided, strategy=PipelineStrategy(2, schedule="Interleaved1F1B")),
        "sharded": fit(sharded, strategy=PipelineStrategy(2, fully_shard=True)),
        "sharded otherwise": fit(sharded),
        "generate": lambda: divided.generate(ids[:1]),
    }
    return {name: objects_of_ranks(or_refusal(run)) for name, run in runs.items()}


def own_losses(folder: Path) -> dict[str, Any]:
    """A callable, and options of the fused loss; what is logged of a filtered one."""

    def mean(hidden_states: Tensor, labels: Tensor) -> Tensor:
        logits = (hidden_states @ part.backbone.get_output_embeddings().weight.T)[:, :-1]  # type: ignore[operator]
        labels = labels[:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / (labels != -100).sum().clamp(min=1)

    result = {}
    for name, loss in (("callable", mean), ("smoothed", LinearCrossEntropyLoss(label_smoothing=0.1, z_loss=1e-3))):
        part = module("llama", loss)
        trainer = trainer_of(folder)
        trainer.fit(part, loader(ragged()))
        result[name] = state(trainer, part)
    part = module("llama", LinearCrossEntropyLoss(Filtered(0.0)))
    trainer = trainer_of(folder, num_sanity_val_steps=1)
    trainer.fit(part, loader(ragged()), loader(ragged()[:2]))
    result["filtered"] = state(trainer, part)
    result["of the filter"] = objects_of_ranks(numbers(trainer))
    return result


SCENARIOS = {f.__name__: f for f in (ragged_batches, moves, refusals, own_losses)}


def run(name: str, folder: Path) -> Any:
    return SCENARIOS[name](folder)
