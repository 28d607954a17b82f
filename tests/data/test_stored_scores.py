"""Files of scores: what is written comes back with its row, and scores of anything else are refused."""

import pickle
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from data_modules import ready, text_data
from torch import Tensor

from lit_fused.data import TokenDataModule
from lit_fused.data.stored_scores import ScoreHeader, ScoreWriter, StoredScores, write_output_layer
from lit_fused.errors import UserError

K = 3
WORDS = ["the", "student", "learns", "what", "its", "teacher", "knows", "and", "no", "more", "than", "that"]


def data_of(folder: Path, text: str | None = None, **options: Any) -> TokenDataModule:
    folder.mkdir(exist_ok=True)
    for number in range(12):
        words = [WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(20 + number)]
        (folder / f"{number:02}.txt").write_text(" ".join(words) if text is None else text * (number + 20))
    settings = {"path": str(folder), "vocab_size": 300, "block_size": 16, "batch_size": 4, "val_fraction": 0.25}
    settings |= {"cache_dir": str(folder.parent / "cache"), "prepare_workers": 0}
    return ready(text_data(**(settings | options)))


def numbers_of(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers of each position that its labels determine."""
    entries = (labels[:, None] * 5 + torch.arange(K)).clamp(min=0) % 97
    return entries, -(entries.float() + 1) / 7, -labels.float().abs() / 3


def scored(folder: Path, data: TokenDataModule) -> Path:
    sets = data.rows_in_order()
    counts = {name: len(rows) for name, rows in sets.items()}
    header: dict[str, Any] = {
        "k": K,
        "temperature": 1.0,
        "vocabulary": 300,
        "model": "a teacher",
        "shifted": True,
        "rows": counts,
    }
    with ScoreWriter.open(folder / "scores.parquet", ScoreHeader(**header)) as file:
        for rows in sets.values():
            for index in range(len(rows)):
                file.add(rows[index], numbers_of(rows[index]["labels"]))
    return folder / "scores.parquet"


@pytest.mark.parametrize(("packing", "workers"), [("stream", 0), ("documents", 0), ("none", 0), ("none", 1)])
def test_shuffled_batches_have_the_scores_of_their_rows(packing, workers, tmp_path):
    path = scored(tmp_path, data_of(tmp_path / "text", packing=packing))
    data = data_of(tmp_path / "text", packing=packing, scores=path, num_workers=workers)
    rows = 0
    for batch in [*data.train_dataloader(), *data.val_dataloader()]:
        targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        expected = [numbers_of(row) for row in batch["labels"]]
        for place, name in enumerate(("teacher_entries", "teacher_log_probs", "teacher_target_log_prob")):
            wanted = torch.stack([numbers[place] for numbers in expected])
            valid = targets >= 0 if wanted.ndim == 2 else (targets >= 0)[..., None]
            assert torch.equal(batch[name], wanted.where(valid, -1 if place == 0 else 0)), name
        rows += len(targets)
    assert rows > 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("workers", [0, 1])
def test_hidden_states_come_back_to_the_bit_with_the_output_layer(dtype, workers, tmp_path):
    def states(labels: Tensor) -> Tensor:
        return torch.sin(labels[:, None] * torch.arange(1, 9) / 7).to(dtype)

    sets, path = data_of(tmp_path / "text").rows_in_order(), tmp_path / "scores.parquet"
    counts = {name: len(rows) for name, rows in sets.items()}
    header = ScoreHeader(0, 1.0, 300, "a teacher", True, counts, width=8, dtype=str(dtype).removeprefix("torch."))
    layer = {"weight": torch.randn(300, 8, dtype=dtype), "bias": None, "scale": 0.5, "softcap": 30.0}
    with ScoreWriter.open(path, header) as file:
        write_output_layer(path, layer)
        for rows in sets.values():
            for index in range(len(rows)):
                file.add(rows[index], [states(rows[index]["labels"])])
    data = data_of(tmp_path / "text", scores=path, num_workers=workers)
    for batch in data.train_dataloader():
        targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        wanted = torch.stack([states(labels) for labels in batch["labels"]])
        assert torch.equal(batch["teacher_hidden_states"], wanted.where((targets >= 0)[..., None], 0))
        assert batch["teacher_hidden_states"].dtype == dtype
    found = StoredScores(path).output_layer()
    assert torch.equal(found.pop("weight"), layer.pop("weight"))
    assert found == layer


def test_several_sets_have_their_own_scores(tmp_path):
    for name in ("one", "two"):
        data_of(tmp_path / name)
    paths = {"path": {name: str(tmp_path / name) for name in ("one", "two")}, "weights": {"one": 1, "two": 2}}
    plain = data_of(tmp_path / "one", **paths)
    assert [*plain.rows_in_order()] == ["train/one", "train/two", "val/one", "val/two"]
    path = scored(tmp_path, plain)
    batch = next(iter(data_of(tmp_path / "one", **paths, scores=path).train_dataloader()))
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    wanted = torch.stack([numbers_of(row)[2] for row in batch["labels"]])
    assert torch.equal(batch["teacher_target_log_prob"], wanted.where(targets >= 0, 0))


def refusal(data: Any) -> str:
    with pytest.raises(UserError) as raised:
        data().train_dataloader()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_scores_of_other_data_and_of_another_order_are_refused(tmp_path):
    first = data_of(tmp_path / "text")
    path = scored(tmp_path, first)
    longer = refusal(lambda: data_of(tmp_path / "text", block_size=24, scores=path))
    assert re.search(
        r"are of other data: these have \d+ rows in train, and it .'train': \d+, 'val': \d+.; score", longer
    )
    assert "other data" in refusal(lambda: data_of(tmp_path / "other", text="what else ", block_size=16, scores=path))
    rows = pq.ParquetFile(path)
    order = [rows.read_row_group(i) for i in reversed(range(rows.num_row_groups))]
    pq.write_table(pa.concat_tables(order).replace_schema_metadata(rows.schema_arrow.metadata), path, row_group_size=1)
    moved = refusal(lambda: data_of(tmp_path / "text", scores=path))
    assert "or of these in another order (row 0)" in moved


def half_written(path: Path, header: ScoreHeader, row: dict[str, Tensor]) -> None:
    with ScoreWriter.open(path, header) as file:
        for part in (row, {}):
            file.add(part, numbers_of(row["labels"]))


def test_an_unfinished_file_does_not_appear_and_an_open_one_pickles(tmp_path):
    data = data_of(tmp_path / "text")
    path = scored(tmp_path, data)
    again = pickle.loads(pickle.dumps(StoredScores(path)))
    assert again.header == StoredScores(path).header
    before = path.read_bytes()
    header = again.header
    row = data.rows_in_order()["train"][0]
    with pytest.raises(KeyError):
        half_written(path, header, row)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.glob("*.parquet*")] == ["scores.parquet"]


def test_a_file_with_damaged_bytes_is_no_other_teacher(tmp_path):
    data = data_of(tmp_path / "text")
    path, row = scored(tmp_path, data), data.rows_in_order()["train"][0]
    column = pq.ParquetFile(path).metadata.row_group(0).column(2)
    numbers = bytearray(path.read_bytes())
    numbers[column.data_page_offset - 3] ^= 0x40  # of a stored value
    path.write_bytes(numbers)
    with pytest.raises(OSError, match="CRC checksum verification failed"):
        StoredScores(path).read(0, row)
