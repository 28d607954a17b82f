"""Tokens, labels and their order, of chats, instructions, pairs and preferences, are those that were recorded.

`recorded_tokens.json` has, for each case, the number of documents and of learned tokens, and a hash of all. It was
written by the code of 976d888, before the encodings were rewritten; a line may change only where tokens are meant to.
"""

import hashlib
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import CHATML_UNMARKED, MISTRAL_SYSTEM, PLAIN, QWEN3, TEMPLATES, THOUGHTS_CONTINUED, make_tokenizer
from data_modules import chat_data, instruction_data, preference_data, ready

from lit_fused.data import ChatEncoding, InstructionEncoding, PairEncoding, PreferenceEncoding
from lit_fused.data.tokenizer import train_tokenizer

RECORDED = Path(__file__).with_name("recorded_tokens.json")
ANSWERS = ["I am well", "thank you! 🎉", "日本", "a  b\n\nc ", "\n42", " so", "0 "]
EDGES = [("12 = ", "42"), ("12 =", " 42"), ("How are", " you?\n"), ("fox\n", "\ndog"), ("日", "本"), ("", "fox")]
TEXTS = [{"prompt": a, "completion": b} for a, b in [*EDGES, ("the qu", "ick"), ("a ", " b"), ("12", " 3" * 40)]]
ALPACA = [{"instruction": f"Add {n}.", "input": "1 + 2" * (n % 2), "output": f"{n} "} for n in range(6)]


def turns(*texts: str, **first: Any) -> list[dict[str, Any]]:
    """Return messages of a user and an assistant in turn."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return [messages[0], {**messages[1], **first}, *messages[2:]]


CHATS = [{"messages": turns("How are ", a, b, c)} for a, b, c in product(ANSWERS, ("x", " 🎉 "), ANSWERS)]
CHATS += [
    {"messages": turns("a", "fox", "b")},
    {"messages": turns("a", "", "b", "dog")},
    {"messages": turns("a", "b" * 400)},
]
SYSTEM = [{"messages": [{"role": "system", "content": "Be brief"}, *chat["messages"]]} for chat in CHATS]
WEIGHTS = [{"messages": turns("a", "fox", "b", "dog", weight=0)}]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]}
    for a, b in product(ANSWERS, ANSWERS)
]
THOUGHTS = [
    {"messages": turns("12?", a, "well?", "<think>\ndog\n</think>\n\n" + a, reasoning_content="fox")} for a in ANSWERS
]
PREFERENCES = [{"prompt": a, "chosen": b, "rejected": " dog" * (1 + n % 3)} for n, (a, b) in enumerate(EDGES)]
PREFERENCES += [{"prompt": "a", "chosen": " fox" * n, "rejected": " fox" * 21} for n in (0, 21, 40, 90)]
SINGLE = [{"prompt": a, "completion": b, "label": n % 2 == 0} for n, (a, b) in enumerate(EDGES)]
PROMPTS = [
    {"prompt": turns("How", "x", a), "chosen": turns("", a)[1:], "rejected": turns("", "no")[1:]} for a in ANSWERS
]
WHOLE = [{name: [*r["prompt"], *r[name]] for name in ("chosen", "rejected")} for r in PROMPTS]
PAIRS = [
    {"source": a, "target": b} for a, b in [("the fox", "dog"), ("a" * 90, "b c"), ("a", " "), ("日本", "🎉 " * 40)]
]

CASES: dict[str, tuple[Any, Any, list[dict[str, Any]]]] = {
    **{
        f"chat {name} {kind}": (ChatEncoding(), (template, kind), SYSTEM if takes_system else CHATS)
        for (name, (template, _, takes_system)), kind in product(TEMPLATES.items(), ("trimmed", "lines"))
    },
    "chat of weights": (ChatEncoding(), (TEMPLATES["ours"][0], "bytes"), WEIGHTS),
    "chat of ShareGPT": (ChatEncoding(), (TEMPLATES["ours"][0], "bytes"), SHAREGPT),
    "chat without end tokens": (ChatEncoding(), (PLAIN, "bytes"), CHATS),
    "chat with a system's message that moves": (ChatEncoding(), (MISTRAL_SYSTEM, "bytes"), SYSTEM),
    "chat of SentencePiece": (ChatEncoding(), (TEMPLATES["mistral"][0], "metaspace"), CHATS),
    "chat of Llama 2": (ChatEncoding(), (TEMPLATES["mistral"][0], "llama2"), CHATS),
    "thoughts that are dropped": (ChatEncoding(), (QWEN3, "bytes"), THOUGHTS),
    "thoughts that the prompt opens": (ChatEncoding(), (THOUGHTS_CONTINUED, "lines"), CHATS),
    "thoughts that are off": (ChatEncoding(template_kwargs={"enable_thinking": False}), (QWEN3, "bytes"), CHATS),
    "skipped": (ChatEncoding(too_long="skip"), (QWEN3, "bytes"), CHATS),
    **{f"instruction {kind}": (InstructionEncoding(), (None, kind), TEXTS) for kind in ("bytes", "trimmed", "lines")},
    "instruction of SentencePiece": (InstructionEncoding(), (None, "metaspace"), [TEXTS[1], TEXTS[2]]),
    "instruction of Alpaca": (InstructionEncoding(), (None, "bytes"), ALPACA),
    "instruction in words": (InstructionEncoding("To {prompt}:"), (None, "bytes"), TEXTS),
    "preference of texts": (PreferenceEncoding(), (None, "bytes"), PREFERENCES),
    "preference of single answers": (PreferenceEncoding(), (None, "bytes"), SINGLE),
    "preference of conversations": (PreferenceEncoding(), (QWEN3, "bytes"), PROMPTS),
    "preference of whole conversations": (PreferenceEncoding(chat_template="chatml"), (None, "bytes"), WHOLE),
    "pairs": (PairEncoding(), "whole", PAIRS),
}


def documents(case: str) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each document with the labels, -100 where no loss is wanted."""
    encoding, kind, records = CASES[case]
    if kind == "whole":
        tokenizer = train_tokenizer(["the fox and the dog"] * 9, 300, whole_sequences=True)
    else:
        tokenizer = make_tokenizer(*kind)
    encoder, found = encoding.encoder(tokenizer, 512 if "Alpaca" in case else 64), []
    for record in records:
        (encoded,) = encoder([record])
        begin = 0
        for end in encoded.ends or (len(encoded.tokens),):
            tokens, wanted = encoded.tokens[begin:end], encoded.wanted[begin:end]
            found.append((tokens.tolist(), np.where(wanted, tokens, -100).tolist()))
            begin = end
    return found


def summary(found: list[tuple[list[int], list[int]]]) -> list[Any]:
    learned = sum(label != -100 for _, labels in found for label in labels)
    return [len(found), learned, hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]]


def numbered(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**record, "prompt": f"{n} {record['prompt']}"} for n, record in enumerate(records)]


MODULES: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "batches of chats": (chat_data, CHATS),
    "batches of instructions": (instruction_data, numbered(TEXTS * 9)),
    "batches of preferences": (preference_data, numbered(PREFERENCES * 4)),
    "batches of single answers": (preference_data, numbered(SINGLE * 5)),
}


def rows_of_batches(case: str, folder: Path) -> list[tuple[list[int], list[int]]]:
    """Return the rows of two epochs of training batches and of validation, in order."""
    module, records = MODULES[case]
    make_tokenizer(CHATML_UNMARKED).save_pretrained(folder / "tokenizer")
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = {"path": folder / "data.jsonl", "tokenizer": folder / "tokenizer", "cache_dir": folder / "cache"}
    data = ready(module(**options, block_size=64, batch_size=3, val_fraction=0.2))
    training, validation = data.train_dataloader(), data.val_dataloader()
    batches = [batch for loader in (training, training, validation) for batch in loader]
    return [
        (a.tolist(), b.tolist()) for batch in batches for a, b in zip(batch["input_ids"], batch["labels"], strict=True)
    ]


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_labels_are_those_that_were_recorded(case):
    assert summary(documents(case)) == json.loads(RECORDED.read_text())[case]


@pytest.mark.parametrize("case", MODULES)
def test_batches_are_those_that_were_recorded(case, tmp_path):
    assert summary(rows_of_batches(case, tmp_path)) == json.loads(RECORDED.read_text())[case]


if __name__ == "__main__":  # writes the file
    found = {case: summary(documents(case)) for case in CASES}
    for case in MODULES:
        with tempfile.TemporaryDirectory() as folder:
            found[case] = summary(rows_of_batches(case, Path(folder)))
    RECORDED.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()) + "\n}\n")
