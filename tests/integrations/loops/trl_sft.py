"""Fine-tune on texts with TRL's SFTTrainer."""

from typing import Any

import torch
from chat_templates import make_tokenizer
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer


def main(dtype: torch.dtype = torch.float32) -> list[float]:
    set_seed(0)
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    dataset = Dataset.from_list([{"text": f"the quick brown fox {number}" * (1 + number % 3)} for number in range(12)])
    training_args = SFTConfig(
        output_dir="out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        num_train_epochs=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    data: Any = {"train_dataset": dataset, "eval_dataset": dataset}
    trainer = SFTTrainer(model, args=training_args, processing_class=tokenizer, **data)
    trainer.train()
    logged = [*trainer.state.log_history, trainer.evaluate()]
    names = ("loss", "entropy", "mean_token_accuracy")
    return [value for entry in logged for name, value in entry.items() if name.removeprefix("eval_") in names]
