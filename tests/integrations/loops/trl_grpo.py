"""Learn from a reward with TRL's GRPOTrainer. The rollouts come from elsewhere: they are the same in every run."""

from typing import Any

import torch
from chat_templates import make_tokenizer
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer


def main(dtype: torch.dtype = torch.float32) -> list[float]:
    set_seed(0)
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config).to(dtype)

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        completion_ids = [[3 + (7 * row + 5 * place) % 90 for place in range(8)] for row in range(len(prompts))]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
        return [float(ids[0] % 4) for ids in completion_ids]

    training_args = GRPOConfig(
        output_dir="out",
        num_generations=4,
        per_device_train_batch_size=4,
        num_iterations=2,
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    trainer: Any = GRPOTrainer(
        model,
        reward,
        args=training_args,
        train_dataset=Dataset.from_list([{"prompt": "the quick brown fox"}] * 4),
        processing_class=tokenizer,
        rollout_func=rollouts,
    )
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [entry[name] for entry in log for name in ("loss", "entropy", "grad_norm")]
