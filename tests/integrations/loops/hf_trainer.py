"""Fine-tune a causal language model with transformers' Trainer."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed


def main(dtype: torch.dtype = torch.float32) -> list[float]:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=503, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    rows = torch.randint(503, (16, 24))
    lengths = torch.arange(16) % 7 + 9
    ragged = rows.where(torch.arange(24) < lengths[:, None], -100)
    train_dataset = [{"input_ids": row, "labels": labels} for row, labels in zip(rows, ragged, strict=True)]

    training_args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        num_train_epochs=1,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    data: Any = {"train_dataset": train_dataset, "eval_dataset": train_dataset[:5]}
    trainer = Trainer(model=model, args=training_args, **data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]]
