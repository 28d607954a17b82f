"""Supervised fine-tuning on a chat: loss on the assistant's answers alone, by the chat template's own mask.

python examples/finetune_chat.py

You see which tokens are trained, those of the answers with their ends of turn, and the greedy answer to a question
before and after: nonsense, then what was taught.
"""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

from lit_fused import FusedCausalLMModule
from lit_fused.data import ChatEncoding, TokenDataModule

ANSWERS = {
    "Which colour is the sky?": "It is blue.",
    "Which colour is grass?": "It is green.",
    "Which colour is snow?": "It is white.",
    "How many days has a week?": "A week has seven days.",
    "How many legs has a spider?": "A spider has eight legs.",
    "How many legs has a cat?": "A cat has four legs.",
    "What do bees make?": "Bees make honey.",
    "What do cows eat?": "Cows eat grass.",
    "Where do fish live?": "Fish live in water.",
    "Where do birds live?": "Birds live in trees.",
}
ASKED = "How many days has a week?"


def write_chats(file: Path) -> None:
    """One conversation a line."""
    with file.open("w") as stream:
        for question, answer in ANSWERS.items():
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"messages": messages}) + "\n")


def build_model(tokenizer: Any) -> LlamaForCausalLM:
    """Stands in for AutoModelForCausalLM.from_pretrained(NAME), whose tokenizer is TokenDataModule(tokenizer=NAME)."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def answer(module: FusedCausalLMModule, tokenizer: Any, question: str) -> str:
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokens = module.generate(**prompt, max_new_tokens=12, do_sample=False, eos_token_id=end)
    return tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :])


def main() -> None:
    print("a few conversations, of which the answers alone are trained", flush=True)
    L.seed_everything(0)
    with tempfile.TemporaryDirectory() as folder:
        write_chats(Path(folder, "chats.jsonl"))
        data = TokenDataModule(
            Path(folder, "chats.jsonl"),
            ChatEncoding(),
            block_size=64,
            batch_size=4,
            val_fraction=0.1,
            vocab_size=400,  # of the tokenizer, which is trained on the chats and has the template ChatML
            cache_dir=folder,
        )
        data.prepare_data()
        data.setup("fit")
        tokenizer: Any = data.tokenizer
        [batch] = data.train_dataloader()
        wanted = batch["labels"] != -100
        print(f"{wanted.sum()} of {(batch['input_ids'] != tokenizer.pad_token_id).sum()} tokens are trained:")
        print(tokenizer.decode(batch["labels"][wanted]))

        module = FusedCausalLMModule(build_model(tokenizer), optimizer=partial(AdamW, lr=5e-3))
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=60,
            gradient_clip_val=1.0,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        print(f"before: {answer(module, tokenizer, ASKED)!r}")
        trainer.fit(module, data)
        print(f"after:  {answer(module, tokenizer, ASKED)!r}")
        print(f"train/loss {trainer.callback_metrics['train/loss']:.4f}")


if __name__ == "__main__":
    main()
