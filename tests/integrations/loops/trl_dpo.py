"""Learn preferences with TRL's DPOTrainer."""

import torch
from chat_templates import make_tokenizer
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer


def main(dtype: torch.dtype = torch.float32) -> list[float]:
    set_seed(0)
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model, ref_model = (AutoModelForCausalLM.from_config(config).to(dtype) for _ in range(2))
    ref_model.load_state_dict(model.state_dict())
    pairs = [{"prompt": f"{n} + {n} =", "chosen": f" {2 * n}", "rejected": f" {3 * n} or more"} for n in range(1, 13)]
    dataset = Dataset.from_list(pairs)
    training_args = DPOConfig(
        output_dir="out",
        per_device_train_batch_size=4,
        num_train_epochs=1,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    trainer = DPOTrainer(model, ref_model, args=training_args, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
