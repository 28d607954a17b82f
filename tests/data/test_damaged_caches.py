"""Prepared data that were damaged, cut or left behind: named in one sentence, and never trained on without a word."""

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import TINY_MODEL, text_folder, train
from data_modules import text_data, tokens_data
from filelock import FileLock

from lit_fused.data import Encoded, TokenStore
from lit_fused.data.cache import prepare_once
from lit_fused.errors import UserError


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The cache of a small text; a test damages a copy."""
    folder = tmp_path_factory.mktemp("prepared")
    text_folder(folder)
    prepared(folder / "corpus", folder / "cache")
    return folder


def prepared(corpus: Path, cache: Path):
    module = text_data(path=corpus, block_size=16, vocab_size=300, val_fraction=0.2, cache_dir=cache)
    return module, module.prepare()


def rewrite(change):
    def damage(file: Path) -> None:
        content = json.loads(file.read_text())
        file.write_text(json.dumps(change(content)))

    return damage


def with_ends(change):
    def damage(file: Path) -> None:
        ends = np.load(file)
        np.save(file, change(ends))

    return damage


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def swap(ends):
    return np.concatenate([ends[1::-1], ends[2:]])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train/tokens.bin", flip),
        ("val/tokens.bin", flip),
        ("train/ends.npy", flip),
        ("train/ends.npy", with_ends(swap)),
        ("train/ends.npy", with_ends(lambda ends: ends + 7)),
        ("train/ends.npy", with_ends(lambda ends: ends.astype(float))),
        ("train/ends.npy", os.unlink),
        ("train/tokens.bin", lambda file: os.truncate(file, 100)),
        ("train/store.json", rewrite(lambda content: [content])),
        ("train/store.json", rewrite(lambda content: content | {"num_tokens": "many"})),
        ("train/store.json", rewrite(lambda content: content | {"dtype": 3})),
        ("train/store.json", rewrite(lambda content: content | {"crc32": 3})),
        ("train/store.json", lambda file: file.write_bytes(b"\xff\x00")),
        ("report.json", lambda file: file.write_text("[1")),
        ("report.json", rewrite(lambda content: [content])),
        ("report.json", rewrite(lambda content: {"documents": content})),
        ("report.json", rewrite(lambda content: content | {"documents": {}})),
        ("report.json", os.unlink),
        ("tokenizer", shutil.rmtree),
        ("tokenizer/tokenizer.json", lambda file: file.write_text("{")),
        ("tokenizer/tokenizer.json", rewrite(lambda content: [content])),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", "").strip("<>"),
)
def test_damage_of_the_cache_is_one_sentence_that_names_the_folder_to_delete(cache, tmp_path, name, damage):
    shutil.copytree(cache / "cache", tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    damage(folder / name)
    with pytest.raises(UserError) as caught:
        prepared(cache / "corpus", tmp_path / "cache")
    assert f"delete {folder}, and the next run prepares it again" in str(caught.value)
    assert "\n" not in str(caught.value)
    shutil.rmtree(folder)
    assert not prepared(cache / "corpus", tmp_path / "cache")[1].cached


def test_the_array_of_another_program_has_a_checksum_too(tmp_path):
    def module():
        options = {"path": tmp_path / "tokens.bin", "vocab_size": 60, "block_size": 8, "cache_dir": tmp_path / "cache"}
        return tokens_data(**options, eos_token_id=0)

    np.arange(3000, dtype=np.uint16).__mod__(50).tofile(tmp_path / "tokens.bin")
    status = (tmp_path / "tokens.bin").stat()
    assert not module().prepare().cached
    assert module().prepare().cached
    flip(tmp_path / "tokens.bin")
    os.utime(tmp_path / "tokens.bin", ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(UserError, match=r"tokens.bin is not what was written \(its CRC32 differs\)"):
        module().prepare()


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path):
    store = TokenStore.write(tmp_path / "store", [Encoded(np.arange(2**17))], 2**17)
    other = pickle.loads(pickle.dumps(store))
    os.truncate(tmp_path / "store" / "tokens.bin", 400)
    assert store.read(90, 100)[0].tolist() == [*range(90, 100)]
    for reader in (store, other):
        with pytest.raises(UserError, match="tokens.bin was cut while it was read"):
            reader.read(2**16, 2**16 + 8)


@pytest.mark.slow
def test_a_resumed_run_verifies_its_data(tmp_path):
    text_folder(tmp_path)
    words = ["data=text", "data.path=corpus", "data.vocab_size=300", "data.block_size=16", "hydra.run.dir=run"]
    words += [*TINY_MODEL, "trainer.limit_val_batches=1", "callbacks.checkpoint.every_n_train_steps=1"]
    words += ["~callbacks.sample_text", "~callbacks.export"]
    first = train(tmp_path, *words, "trainer.max_steps=2")
    assert first.status == 0, first.output
    (tokens,) = (tmp_path / "cache").rglob("train/tokens.bin")
    flip(tokens)
    resumed = train(tmp_path, *words, "trainer.max_steps=4", "ckpt_path=run/checkpoints/last.ckpt")
    assert resumed.status == 1
    assert "the content of tokens.bin is not what was written" in resumed.plain
    assert "Traceback" not in resumed.output


def test_work_that_no_living_process_uses_is_cleared_by_the_next_preparation(tmp_path):
    for name in (".text-dead.work", ".text-alive.work", ".folder.work"):
        (tmp_path / name / "pieces" / "one").mkdir(parents=True)
        (tmp_path / name / "pieces" / "one" / "outcome.json").touch()
        (tmp_path / name / "lock").touch()
    (tmp_path / ".another-program.work").mkdir()
    kept = []
    with FileLock(tmp_path / ".text-alive.work" / "lock"):
        prepare_once(tmp_path / "folder", lambda result: kept.extend(result.parent.glob("pieces/*")))
    assert [path.name for path in kept] == ["one"]  # its own pieces are taken up
    assert sorted(path.name for path in tmp_path.iterdir()) == [".another-program.work", ".text-alive.work", "folder"]
    (tmp_path / ".folder.work").mkdir()
    (tmp_path / ".folder.work" / "lock").touch()  # killed after the rename
    assert prepare_once(tmp_path / "folder", lambda result: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".another-program.work", "folder"]
