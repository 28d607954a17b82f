"""The data room: tokenizer, rows, loaders, synthetic tokens, flat options, and what its errors say."""

import pytest
import torch
from composed import composed
from data_modules import ready, text_data
from datasets import Dataset
from hydra.utils import instantiate
from lightning import Trainer
from omegaconf import OmegaConf

from lit_fused.app.config import check_config
from lit_fused.data import (
    IGNORE_INDEX,
    SyntheticDataModule,
    TextEncoding,
    TokenDataModule,
    train_tokenizer,
)


def prepared(path, **options):
    return ready(text_data(path=str(path), **{"block_size": 16, "batch_size": 4, "vocab_size": 300, **options}))


# --- tokenizer ---------------------------------------------------------------------------------------------------


def test_decoding_what_was_encoded_gives_exactly_the_text(tmp_path):
    tokenizer = train_tokenizer(["def f(x):\n    return x , y\n" * 20], 300)
    tokenizer.save_pretrained(tmp_path)
    reloaded = type(tokenizer).from_pretrained(tmp_path)
    text = "  a , b . don 't\r\n\t日本 naïve \x00\ufeff 🙂 <|endoftext|>  \n\n"
    for candidate in (tokenizer, reloaded):
        assert candidate.decode(candidate.encode(text)) == text
        assert (candidate.eos_token, candidate.eos_token_id) == ("<|endoftext|>", 0)
        assert (candidate.bos_token_id, candidate.pad_token, candidate.pad_token_id) == (0, "<|pad|>", 1)
        assert set(candidate("a")) == {"input_ids", "attention_mask"}


# --- loaders -----------------------------------------------------------------------------------------------------


def test_the_last_smaller_training_batch_is_dropped_unless_it_is_the_only_one(corpus):
    num_blocks = -(-prepared(corpus).prepared.train.num_tokens // 16)
    sizes = [len(batch["labels"]) for batch in prepared(corpus, batch_size=num_blocks - 1).train_dataloader()]
    assert sizes == [num_blocks - 1]
    sizes = [len(batch["labels"]) for batch in prepared(corpus, batch_size=num_blocks + 1).train_dataloader()]
    assert sizes == [num_blocks]


@pytest.mark.gpu
@pytest.mark.parametrize(("accelerator", "pinned"), [("gpu", True), ("cpu", False)])
def test_batches_lie_in_pinned_memory_where_a_gpu_trains_on_them(corpus, accelerator, pinned):
    data = prepared(corpus)
    data.trainer = Trainer(accelerator=accelerator, devices=1, logger=False, enable_checkpointing=False)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        assert next(iter(loader))["input_ids"].is_pinned() == pinned


# --- synthetic ---------------------------------------------------------------------------------------------------


def synthetic(**options):
    sizes = {"vocab_size": 1000, "block_size": 64, "batch_size": 4, "num_train_batches": 10, "num_val_batches": 3}
    return SyntheticDataModule(**{**sizes, **options})


def test_synthetic_batches_have_the_sizes_asked_for_and_are_the_same_every_time():
    train, val = list(synthetic().train_dataloader()), list(synthetic().val_dataloader())
    assert (len(train), len(val)) == (10, 3)
    for batch, again in zip(train, synthetic().train_dataloader(), strict=True):
        assert batch["input_ids"].shape == (4, 64)
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        assert torch.equal(batch["input_ids"], batch["labels"])
        assert torch.equal(batch["input_ids"], again["input_ids"])
    samples = torch.cat([batch["input_ids"] for batch in train + val])
    assert len(samples.unique(dim=0)) == 52
    assert samples.min() < 10
    assert 990 <= samples.max() < 1000
    assert abs(samples.double().mean() - 499.5) < 30
    assert not torch.equal(train[0]["input_ids"], next(iter(synthetic(seed=1000).train_dataloader()))["input_ids"])
    assert synthetic().tokenizer is None


# --- configuration -----------------------------------------------------------------------------------------------

CHOSEN = {
    "stdlib": ([], "Records TextEncoding stream"),
    "text": (["path=some/text"], "Records TextEncoding stream"),
    "chat": (["path=a.jsonl", "too_long=skip"], "Records ChatEncoding documents"),
    "instruction": (["path=a.jsonl"], "Records InstructionEncoding documents"),
    "pairs": (["path=a.jsonl", "source_column=question"], "Records PairEncoding pairs"),
    "hf": (["path=a/b", "format=instruction", "completion=answer"], "Records InstructionEncoding documents"),
    "tokens": (["path=some.bin", "vocab_size=50257"], "TokenArrays NoneType stream"),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_each_configuration_composes_a_source_and_an_encoding_from_flat_options(name):
    options, expected = CHOSEN[name]
    cfg = composed(f"data={name}", *(f"data.{option}" for option in options), "data.batch_size=3", "seed=5")
    mandatory = {f"data.{option.partition('=')[0]}" for option in options if option.startswith(("path", "vocab_size"))}
    assert OmegaConf.missing_keys(composed(f"data={name}").data) == mandatory
    data = instantiate(cfg.data)
    source = data.sets[0].source
    assert f"{type(source).__name__} {type(data.encoding).__name__} {data.packing}" == expected
    assert (data.batch_size, data.seed) == (3, 5)
    for key, value in (option.split("=") for option in options if not option.startswith("format")):
        parts = [part for part in (source, data.encoding) if hasattr(part, key)]
        assert [str(getattr(part, key)).endswith(value) for part in parts] == [True], key


@pytest.mark.parametrize("name", ["text", "hf", "tokens"])
def test_an_option_that_no_part_takes_is_refused_by_name_before_anything_is_built(name):
    options, _ = CHOSEN[name]
    cfg = composed(f"data={name}", *(f"data.{option}" for option in options), "+data.pth=x")
    with pytest.raises(Exception, match="data.pth is unknown"):
        instantiate(cfg.data)
    known = composed(f"data={name}", *(f"data.{option}" for option in options))
    check_config(known, ["fit"])


def test_a_dataset_of_ones_own_is_a_source():
    texts = [f"text {i} of a program that made them" for i in range(40)]
    data = ready(TokenDataModule(Dataset.from_dict({"text": texts}), TextEncoding(), vocab_size=300, block_size=8))
    assert data.prepared.train.num_documents + data.prepared.val.num_documents == 40


# --- errors ------------------------------------------------------------------------------------------------------


def test_a_text_shorter_than_a_block_is_one_padded_row(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789")
    for block_size in (10, 256):
        datamodule = prepared(tmp_path / "a.txt", block_size=block_size)
        [train], [val] = datamodule.train_dataloader(), datamodule.val_dataloader()
        assert ((train["labels"] != IGNORE_INDEX).sum(), (val["labels"] != IGNORE_INDEX).sum()) == (10, 2)
