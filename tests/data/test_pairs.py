"""Pairs for encoder-decoders: what files become, in tokens and in batches, and a T5 that learns them."""

import json
from functools import partial

import pytest
import torch
from data_modules import hub_data, pairs_data, ready
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lit_fused.data import IGNORE_INDEX, PairEncoding
from lit_fused.errors import UserError


def texts(data, split="train") -> list[tuple[str, str]]:
    """[(source, target)] of a split, decoded."""
    rows = data.rows_in_order()[split]
    decode = partial(data.tokenizer.decode, skip_special_tokens=True)
    return [(decode(row["input_ids"]), decode(row["labels"])) for row in rows]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# --- the encoding --------------------------------------------------------------------------------------------------

TEXTS = ["how are you well", "thank you", "one two three four five six seven"]


def word_tokenizer(template=None):
    """Words are tokens: <pad> 0, </s> 1, <s> 2, then words; framed by ``template``."""
    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = {token: i for i, token in enumerate(["<pad>", "</s>", "<s>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if template:
        special = [(token, vocabulary[token]) for token in ("<s>", "</s>") if token in template]
        tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", pad_token="<pad>")


def encode(tokenizer, source, target, block_size=100, **options):
    (encoded,) = PairEncoding(**options).encoder(tokenizer, block_size)([{"source": source, "target": target}])
    tokens, loss_mask = encoded.tokens, encoded.loss_mask
    assert loss_mask is not None
    named = tokenizer.convert_ids_to_tokens
    return " ".join(named(tokens[~loss_mask])), " ".join(named(tokens[loss_mask])), encoded.notes


@pytest.mark.parametrize(
    ("template", "source", "target"),
    [
        ("$A </s>", "how are you </s>", "well </s>"),  # T5
        ("<s> $A </s>", "<s> how are you </s>", "<s> well </s>"),  # BART
        (None, "how are you", "well </s>"),  # none of its own
    ],
)
def test_source_and_target_are_framed_as_the_tokenizer_does_it_and_a_target_ends(template, source, target):
    tokenizer = word_tokenizer(template)
    assert encode(tokenizer, "how are you", "well") == (source, target, ())
    assert tokenizer("how are you")["input_ids"] == tokenizer.convert_tokens_to_ids(source.split())


@pytest.mark.parametrize("template", ["$A </s>", "<s> $A </s>", None])
def test_a_long_pair_is_cut_keeping_its_ends_or_skipped(template):
    tokenizer = word_tokenizer(template)
    source, target, notes = encode(tokenizer, TEXTS[2], TEXTS[2], block_size=4)
    assert notes == ("cut to 4 tokens",)
    assert len(source.split()) == len(target.split()) == 4
    assert target.endswith("</s>")
    assert source.endswith("</s>" if template else "four")
    whole = encode(tokenizer, "thank you", "thank you", block_size=4)
    assert whole == encode(tokenizer, "thank you", "thank you", too_long="skip", block_size=4)
    assert whole[2] == ()
    skipped = ("", "", ("left out: longer than data.block_size=4",))
    assert encode(tokenizer, TEXTS[2], "you", block_size=4, too_long="skip") == skipped


def test_a_tokenizer_without_an_end_is_refused_and_one_that_is_trained_has_one():
    tokenizer = word_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="has no end-of-text token, which ends every target"):
        PairEncoding().encoder(tokenizer, 100)
    encoding = PairEncoding("q", "a")
    trained = encoding.train([{"q": "how are you", "a": "well"}] * 4, 270)
    (encoded,) = encoding.encoder(trained, 64)([{"q": "how are you", "a": "well"}])
    assert trained.decode(encoded.tokens) == "how are you<|endoftext|> well<|endoftext|>"


# --- files ---------------------------------------------------------------------------------------------------------


def test_a_file_of_pairs_becomes_padded_batches_whatever_its_columns_are_called(tmp_path):
    records = [{"question": " ".join([str(i)] * (i % 5 + 1)), "answer": f"it is {i}", "id": i} for i in range(60)]
    file = write(tmp_path / "a.jsonl", [*records, {"question": "", "answer": "x"}])
    columns = {"source_column": "question", "target_column": "answer"}
    common = {"vocab_size": 300, "batch_size": 4, "val_fraction": 0.2, "block_size": 32} | columns
    data = ready(pairs_data(path=file, **common))
    assert data.prepared.report.endswith("left out: the source is empty: 1")
    found = texts(data) + texts(data, "val")
    assert sorted(found) == sorted((record["question"], record["answer"]) for record in records)
    for loader, split in ((data.train_dataloader(), "train"), (data.val_dataloader(), "val")):
        known = {
            (tuple(row["input_ids"].tolist()), tuple(row["labels"].tolist())) for row in data.rows_in_order()[split]
        }
        for batch in loader:
            assert list(batch) == ["input_ids", "labels", "attention_mask"]
            assert all(tensor.dtype == torch.int64 for tensor in batch.values())
            lengths, targets = batch["attention_mask"].sum(1), (batch["labels"] != IGNORE_INDEX).sum(1)
            assert (lengths.max(), targets.max()) == (batch["input_ids"].shape[1], batch["labels"].shape[1])
            for ids, labels, n, t in zip(batch["input_ids"], batch["labels"], lengths, targets, strict=True):
                assert (tuple(ids[:n].tolist()), tuple(labels[:t].tolist())) in known
                assert (ids[n:] == data.pad_token_id).all()
                assert (labels[t:] == IGNORE_INDEX).all()
    with pytest.raises(UserError, match="no column source and no target; their columns are question, answer"):
        ready(pairs_data(path=file))
    hub = ready(hub_data(path=file, format="pairs", **common))
    assert sorted(texts(hub) + texts(hub, "val")) == sorted(found)
