"""Supervised fine-tuning on a chat: loss on the assistant's answers alone, by the chat template's own mask.

python examples/finetune_chat.py

You see the greedy answer to a question of the chat before and after: nonsense, then the answer that was taught, with
its end of turn. The question's tokens have no loss: the number of trained tokens is that of the answers.
"""

from functools import partial
from typing import Any

import lightning as L
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lit_fused import FusedCausalLMModule
from lit_fused.data.tokenizer import train_tokenizer

CHATS = [
    [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for question, answer in [
        ("Which colour is the sky?", "It is blue."),
        ("Which colour is grass?", "It is green."),
        ("How many days has a week?", "A week has seven days."),
        ("How many legs has a spider?", "A spider has eight legs."),
        ("What do bees make?", "Bees make honey."),
        ("Where do fish live?", "Fish live in water."),
    ]
]
# {% generation %} marks what the model is to say; a published chat template often has it already.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def build() -> tuple[LlamaForCausalLM, Any]:
    """Stands in for AutoModelForCausalLM.from_pretrained(...) and AutoTokenizer.from_pretrained(...)."""
    tokenizer: Any = train_tokenizer([m["content"] for chat in CHATS for m in chat], 400)
    tokenizer.chat_template = TEMPLATE
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
    return LlamaForCausalLM(config), tokenizer


def collate(chats: list[list[dict[str, str]]], tokenizer: Any) -> dict[str, Tensor]:
    """Tokens, padded on the right, and labels: -100 wherever the assistant does not speak."""
    batch = tokenizer.apply_chat_template(
        chats, return_assistant_tokens_mask=True, return_dict=True, return_tensors="pt", padding=True
    )
    spoken = batch.pop("assistant_masks").bool()
    return {**batch, "labels": batch["input_ids"].masked_fill(~spoken, -100)}


def answer(module: FusedCausalLMModule, tokenizer: Any, question: str) -> str:
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    tokens = module.generate(**prompt, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :])


def main() -> None:
    L.seed_everything(0)
    model, tokenizer = build()
    loader = DataLoader(CHATS, batch_size=3, shuffle=True, collate_fn=partial(collate, tokenizer=tokenizer))  # type: ignore[arg-type]
    module = FusedCausalLMModule(model, optimizer=partial(AdamW, lr=5e-3))
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=60,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    question = CHATS[2][0]["content"]
    print(f"before: {answer(module, tokenizer, question)!r}")
    trainer.fit(module, loader)
    print(f"after:  {answer(module, tokenizer, question)!r}")

    everything = collate(CHATS, tokenizer)
    trained, all_of_them = (everything["labels"] != -100).sum(), everything["attention_mask"].sum()
    print(f"train/loss {trainer.callback_metrics['train/loss']:.4f} on {trained} of {all_of_them} tokens")


if __name__ == "__main__":
    main()
