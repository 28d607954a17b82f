"""Preferences as data: texts, conversations and single answers become rows; others are told by a sentence."""

import json

import pytest
import torch
from chat_templates import make_tokenizer

from lit_fused.data import InstructionEncoding, PreferenceEncoding, TokenDataModule
from lit_fused.errors import UserError

TEXTS = [{"prompt": f"{n} +", "chosen": f" {n} fox", "rejected": " dog" * (1 + n % 3)} for n in range(12)]
USER, GOOD, BAD = ({"role": r, "content": c} for r, c in (("user", "How"), ("assistant", "fox"), ("assistant", "dog")))


def module_of(tmp_path, records, **options):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    folder = tmp_path / "tokenizer"
    make_tokenizer().save_pretrained(folder)
    settings = {"block_size": 32, "batch_size": 2, "tokenizer": folder, "cache_dir": tmp_path / "cache"} | options
    of_encoding = {name: settings.pop(name) for name in ("too_long", "chat_template") if name in settings}
    module = TokenDataModule(path, PreferenceEncoding(**of_encoding), **settings)
    module.prepare_data()
    module.setup("fit")
    return module


def test_pairs_are_neighbouring_rows_whose_tokens_are_those_of_instructions(tmp_path):
    module = module_of(tmp_path, TEXTS)
    assert module.tokenizer is not None
    encoder = InstructionEncoding().encoder(module.tokenizer, 32)
    wanted = {
        tuple(encoder([{"prompt": r["prompt"], "completion": r[side]}])[0].tokens): flag
        for r in TEXTS
        for side, flag in (("chosen", 1), ("rejected", 0))
    }
    for batch in module.train_dataloader():
        assert batch["desirable"].tolist() == [1, 0, 1, 0]
        columns = [batch[name] for name in ("input_ids", "attention_mask", "labels", "desirable")]
        for ids, mask, labels, flag in zip(*columns, strict=True):
            assert wanted[tuple(ids[mask == 1].tolist())] == flag
            assert (labels != -100).any()
            assert (labels[mask == 0] == -100).all()


def test_a_packed_batch_has_the_same_answers_in_one_row(tmp_path):
    padded, packed = (
        next(iter(module_of(tmp_path, TEXTS, packing=packing).train_dataloader())) for packing in ("padded", "packed")
    )
    assert packed["input_ids"].shape[0] == 1
    parts = packed["input_ids"][0].split(packed["lengths"][0].tolist())
    for part, ids, mask in zip(parts, padded["input_ids"], padded["attention_mask"], strict=True):
        assert torch.equal(part, ids[mask == 1])
    assert (packed["position_ids"] == 0).sum() == packed["lengths"].shape[1] == 4


@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_each_single_answers_prompt_comes_with_the_answer_before_it_in_the_set(tmp_path, packing):
    records = [{"prompt": f"{n} +", "completion": " fox" * (1 + n % 3), "label": n % 2 == 0} for n in range(12)]
    module = module_of(tmp_path, records, packing=packing, block_size=6)
    assert module.tokenizer is not None
    texts = {}
    for rows in module.rows_in_order().values():
        whole = [rows[i] for i in range(len(rows))]
        for before, row in zip([whole[-1], *whole[:-1]], whole, strict=True):
            prompt = row["input_ids"][: int((row["labels"] != -100).int().argmax())]
            answer = before["labels"][before["labels"] != -100][: 6 - len(prompt)]
            assert torch.equal(row["other_input_ids"], torch.cat([prompt, answer]))
            targets = answer if len(whole) > 1 else torch.full_like(answer, -100)
            assert torch.equal(row["other_labels"], torch.cat([torch.full_like(prompt, -100), targets]))
            texts[tuple(row["input_ids"].tolist())] = row["other_input_ids"]
    for batch in module.train_dataloader():
        rows = []
        for of in ("", "other_"):
            ids = batch[f"{of}input_ids"]
            if packing == "packed":
                rows.append(ids[0].split(batch[f"{of}lengths"][0].tolist()))
                assert (batch[f"{of}position_ids"] == 0).sum() == 2
            else:
                rows.append([row[mask == 1] for row, mask in zip(ids, batch[f"{of}attention_mask"], strict=True)])
        for own, other in zip(*rows, strict=True):
            assert torch.equal(texts[tuple(own.tolist())], other)


def test_a_prompt_and_another_answer_fit_into_a_block_as_well(tmp_path):
    records = [{"prompt": "", "completion": f"fox {n} dog", "label": n % 2 == 0} for n in range(8)]
    batches = [*module_of(tmp_path, records, block_size=2).train_dataloader()]
    assert batches
    for batch in batches:
        assert (batch["attention_mask"].sum(-1) <= 2).all()
        assert (batch["other_attention_mask"].sum(-1) <= 2).all()


@pytest.mark.parametrize("form", ["prompt", "whole", "UltraFeedback", "prompt and whole"])
def test_loss_is_on_the_last_answer_of_a_conversation_alone(tmp_path, form):
    records = []
    for n in range(8):
        before = [USER, {"role": "assistant", "content": "the lazy dog"}, {"role": "user", "content": f"and {n}?"}]
        given = {"prompt": before, "chosen": [GOOD], "rejected": [BAD]}
        whole = {"chosen": [*before, GOOD], "rejected": [*before, BAD]}
        text = {"prompt": before[-1]["content"]}
        forms = {"prompt": given, "whole": whole, "UltraFeedback": text | whole, "prompt and whole": given | whole}
        records.append(forms[form])
    module = module_of(tmp_path, records, block_size=128, chat_template="chatml")
    batch = next(iter(module.train_dataloader()))
    assert module.tokenizer is not None
    said = [str(module.tokenizer.decode(labels[labels != -100])).strip() for labels in batch["labels"]]
    assert said[:2] == ["fox<|im_end|>", "dog<|im_end|>"]
    assert all("the lazy dog" in module.tokenizer.decode(ids) for ids in batch["input_ids"])


def test_a_text_beside_answers_that_are_messages_is_the_users_message():
    records = [{"prompt": "How?", "chosen": [GOOD], "rejected": [BAD]}]
    tokenizer = make_tokenizer()
    (encoded,) = PreferenceEncoding(chat_template="chatml").encoder(tokenizer, 100)(records)
    text = tokenizer.decode(encoded.tokens)
    assert text.count("<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n") == 2


def test_a_label_is_true_or_false_or_one_or_zero():
    encoder = PreferenceEncoding().encoder(make_tokenizer(), 100)
    single = {"prompt": "a", "completion": " fox"}
    found = [encoder([single | {"label": label}])[0] for label in (True, 1, False, 0)]
    assert [len(one.tokens[: one.ends[0]]) > 1 for one in found] == [True, True, False, False]
    with pytest.raises(KeyError, match="false"):
        encoder([single | {"label": "false"}])


def test_a_labelled_answer_among_pairs_is_named_by_its_line(tmp_path):
    with pytest.raises(UserError, match="record 6: it has no chosen and no rejected, which others have"):
        module_of(tmp_path, [*TEXTS[:5], {"prompt": "a", "completion": " b", "label": True}, *TEXTS[5:]])


@pytest.mark.parametrize(
    ("record", "note"),
    [
        (
            {"prompt": "a", "chosen": " fox", "rejected": " fox"},
            "left out: the chosen and the rejected answer are the s",
        ),
        ({"prompt": "a", "chosen": "", "rejected": " fox"}, "left out: the completion is empty"),
        (
            {"prompt": "fox " * 40, "chosen": " fox", "rejected": " dog"},
            "left out: no answer begins within data.block_size",
        ),
        ({"prompt": "a", "chosen": " fox" * 40, "rejected": " dog"}, "cut to 32 tokens"),
        (
            {"prompt": "a", "chosen": " fox" * 40, "rejected": " fox" * 41},
            "both answers are the same within data.block",
        ),
    ],
)
def test_what_cannot_be_learned_from_is_left_out_or_cut_and_counted(tmp_path, record, note):
    module = module_of(tmp_path, [*TEXTS, record])
    assert note in module.prepared.report
