"""The tokens, the order of training and the held-out documents are those that were recorded: they change only where a
change is meant to change them, and then a run of before is not resumed as it would have gone on."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from data_modules import ready, text_data

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
    return found.hexdigest()[:16]


RECORDED = {
    "folder {}": "a5c6c8b026b65389 7d761bbbab7a15a6 7e08c01078143d28",
    "folder {'packing': 'documents'}": "38d087f1f93759a4 c127cdcc8f748efb 7a64d81f9e0ba3cc",
    "folder {'packing': 'none'}": "b1182812a8f42ef8 0b320813067c2425 1945e22f2a46c2bc",
    "one file {}": "3989596819d16eec 95f94099bae8c940 41305ac93d20858e",
    "lines {'packing': 'documents'}": "75f0cc507419f7f3 b003622f4fed8e64 f8976bb30b8dcc16",
    "lines {'mask_probability': 0.15}": "0d019f85b0bb2bea 4022a74fe997dd2d 02f2613016b5d5e5",
    "lines {'mask_probability': 0.15, 'whole_words': True, 'packing': 'none'}": "6a872ca17f1d18f2 801f5cbb53017c12 5ea9a61eaf875e2c",
    "several {}": "1ed4165835f11309 a5452f639e1bdd77 cc26c3cc16b41898 b2b84f57dcc60825",
    "several {'weights': {'web': 1, 'code': 2}, 'packing': 'documents'}": "33c8bcd3eba86e21 863cccaa1c2b2865 2011306f1ec8c5ca 2969c2d22ca433a7",
    "several {'weights': {'web': 1, 'code': 2}, 'mask_probability': 0.3}": "7437362141d399b6 9169a2ff6bf76adc d5c5c3469edfb601 cdd8d2e0aee6dd8d",
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
        ("lines", {"mask_probability": 0.15, "whole_words": True, "packing": "none"}),
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
