"""The tokens, the order of training and the held-out documents are those that were recorded: they change only where a
change is meant to change them, and then a run of before is not resumed as it would have gone on."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML_UNMARKED, make_tokenizer
from data_modules import chat_data, pairs_data, preference_data, ready, text_data

COMMON: dict[str, Any] = {"vocab_size": 400, "block_size": 32, "batch_size": 4, "val_fraction": 0.1, "seed": 3}


def pages(kind: str, count: int) -> list[str]:
    words = ["river", "stone", "naïve", "日本", "light", "running", "1984", "…", "over the", "\tcode();"]
    return [
        "\n".join(" ".join(words[(i * 7 + j * k) % 10] for j in range(3 + i % 5)) for k in range(1, 3 + (i * 5) % 9))
        + f"\r\nend of {kind} {i}\n"
        for i in range(count)
    ]


def written(tmp_path: Path, kind: str) -> Any:
    """A path, or several, of one kind of text."""
    folder = tmp_path / "data"
    folder.mkdir()
    if kind == "folder":
        for i, page in enumerate(pages("folder", 40)):
            (folder / f"{i:02}.txt").write_bytes(page.encode())
        return folder
    if kind == "one file":
        (folder / "all.txt").write_bytes("".join(pages("file", 60)).encode())
        return folder / "all.txt"
    for name, count in (("web", 70), ("code", 15)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": p}) + "\n" for p in pages(name, count)))
    return folder / "web.jsonl" if kind == "lines" else {name: folder / f"{name}.jsonl" for name in ("web", "code")}


def checksum(batches: Any) -> str:
    found = hashlib.sha256()
    for batch in batches:
        for name, values in sorted(batch.items()):
            found.update(f"{name} {tuple(values.shape)}".encode() + values.numpy().tobytes())
    return found.hexdigest()[:8]


RECORDED = {
    "folder {}": "a5c6c8b0 7d761bbb 7e08c010",
    "folder {'packing': 'documents'}": "38d087f1 c127cdcc 7a64d81f",
    "folder {'packing': 'none'}": "b1182812 0b320813 1945e22f",
    "one file {}": "39895968 95f94099 41305ac9",
    "lines {'packing': 'documents'}": "75f0cc50 b003622f f8976bb3",
    "lines {'mask_probability': 0.15}": "0d019f85 4022a74f 02f26130",
    "several {}": "1ed41658 a5452f63 cc26c3cc b2b84f57",
    "several {'weights': {'web': 1, 'code': 2}, 'packing': 'documents'}": "33c8bcd3 863cccaa 2011306f 2969c2d2",
    "several {'weights': {'web': 1, 'code': 2}, 'mask_probability': 0.3}": "74373621 9169a2ff d5c5c346 cdd8d2e0",
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("folder", {}),
        ("folder", {"packing": "documents"}),
        ("folder", {"packing": "none"}),
        ("one file", {}),
        ("lines", {"packing": "documents"}),
        ("lines", {"mask_probability": 0.15}),
        ("several", {}),
        ("several", {"weights": {"web": 1, "code": 2}, "packing": "documents"}),
        ("several", {"weights": {"web": 1, "code": 2}, "mask_probability": 0.3}),
    ],
)
def test_batches_of_two_epochs_and_held_out_ones_are_those_recorded(tmp_path, kind, options):
    data = ready(text_data(path=written(tmp_path, kind), cache_dir=tmp_path, **COMMON, **options))
    training, held_out = data.train_dataloader(), data.val_dataloader()
    held_out = held_out if isinstance(held_out, dict) else {"": held_out}
    found = [checksum(training), checksum(training), *map(checksum, held_out.values())]
    assert " ".join(found) == RECORDED[f"{kind} {options}"]


def said(number: int, what: str) -> str:
    return f"{number} {what} " + "fox 🎉 " * (number % 5) + "\n" * (number % 3)


def messages(number: int) -> list[dict[str, str]]:
    turns = [said(number, "asks"), said(number, "says"), "well?", said(number, "knows")]
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns)]


PAIRED: dict[str, tuple[Any, Any, str]] = {
    "chats": (chat_data, lambda n: {"messages": messages(n)}, "ef8ff92e ad17bf73 3f1d669e"),
    "preferences": (
        preference_data,
        lambda n: {"prompt": said(n, "asks"), "chosen": said(n, "yes"), "rejected": said(n, "no")},
        "c6fbceca 8112c6a8 d813f762",
    ),
    "single answers": (
        preference_data,
        lambda n: {"prompt": said(n, "asks"), "completion": said(n, "says"), "label": n % 3 == 0},
        "48651146 34db8fcb 0212ed97",
    ),
    "pairs": (
        pairs_data,
        lambda n: {"source": said(n, "asks"), "target": said(n, "says")},
        "df3fedcf 5857c0a9 a3a44074",
    ),
}


@pytest.mark.parametrize("kind", PAIRED)
def test_batches_of_answers_are_those_recorded(tmp_path, kind):
    module, record, recorded = PAIRED[kind]
    make_tokenizer(CHATML_UNMARKED).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record(n)) + "\n" for n in range(60)))
    options = {"tokenizer": tmp_path / "tokenizer", "cache_dir": tmp_path / "cache"}
    data = ready(module(path=tmp_path / "data.jsonl", **{**COMMON, "block_size": 64}, **options))
    training = data.train_dataloader()
    assert " ".join(map(checksum, (training, training, data.val_dataloader()))) == recorded
