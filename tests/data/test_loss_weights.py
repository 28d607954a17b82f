"""Weights of messages, documents and data sets, and loss on prompts: from a file to the exact weighted mean."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chat_templates import PLAIN, TEMPLATES, make_tokenizer
from commands import TINY_MODEL, summary, train
from data_modules import chat_data, hub_data, instruction_data, pairs_data, preference_data, ready, text_data
from errors_of import ROUNDING, relative_error
from lightning_helpers import quiet_trainer
from pretrained_folders import word_tokenizer
from ranks import each
from test_chat import documents, runs, says
from tiny_models import VOCABULARY, tiny_model
from transformers import get_constant_schedule

from lit_fused import FusedCausalLMModule, UserError
from lit_fused.data import ChatEncoding

WEIGHTS = (0.5, 2.0, 0.25, 1.75, 1.0, 3.0)  # exact in float32
LENGTHS = {"documents": [15] * 12, "none": [7, 15, 3, 11, 5, 13, 9, 2]}  # words, and the end-of-text token


def lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def texts(lengths: Sequence[int]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    words = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    rated = enumerate(" ".join(f"w{word}" for word in row) for row in words)
    return [{"text": text, "quality": WEIGHTS[index % len(WEIGHTS)]} for index, text in rated]


def files(folder: Path, packing: str) -> Any:
    """Options of a data module: rated documents, others that are held out, and a tokenizer of words."""
    word_tokenizer(VOCABULARY).save_pretrained(folder / "words")
    path = lines(folder / "rated.jsonl", texts(LENGTHS[packing]))
    held_out = lines(folder / "held_out.jsonl", [{"text": "w5 w6 w7"}, {"text": "w8 w9"}])
    sizes = {"block_size": 48, "batch_size": 1 if packing == "documents" else 2, "packing": packing}
    return {"path": path, "val_path": held_out, "tokenizer": folder / "words", "cache_dir": folder / "cache"} | sizes


# --- the whole way -------------------------------------------------------------------------------------------------


def step_of(packing: str, folder: Path, ranks: int) -> dict[str, torch.Tensor]:
    """Return the gradient of the one step of an epoch, by SGD with a rate of 1."""
    model = tiny_model("llama")
    before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    optimizer: Any = partial(torch.optim.SGD, lr=1.0), get_constant_schedule
    data = text_data(**files(folder, packing), loss_weight="quality")
    trainer = quiet_trainer(
        folder,
        max_epochs=1,
        precision="64-true",
        accumulate_grad_batches=4 // ranks,
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        limit_val_batches=0,
    )
    trainer.fit(FusedCausalLMModule(model, None, *optimizer), data)
    assert trainer.global_step == 1
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


def expected_step(packing: str) -> dict[str, torch.Tensor]:
    """Return the gradient of sum(w * loss) / sum(w), one document after the other, by the model's own logits."""
    model, tokenizer = tiny_model("llama").double(), word_tokenizer(VOCABULARY)
    loss, total = torch.zeros((), dtype=torch.float64), 0.0
    for record in texts(LENGTHS[packing]):
        ids = torch.tensor([*tokenizer(record["text"])["input_ids"], tokenizer.eos_token_id])
        loss = loss + record["quality"] * F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="sum")
        total += record["quality"] * (len(ids) - 1)
    (loss / total).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packing", LENGTHS)
def test_accumulated_steps_are_the_weighted_mean_over_the_documents_of_a_file(packing, tmp_path):
    assert relative_error(step_of(packing, tmp_path, 1), expected_step(packing)) < ROUNDING


def test_two_ranks_step_by_the_weighted_mean_over_the_documents_of_a_file(tmp_path):
    for packing in LENGTHS:
        ready(text_data(**files(tmp_path, packing), loss_weight="quality"))
    for packing, found in each(step_of, 2, LENGTHS, tmp_path, 2).items():
        assert relative_error(found, expected_step(packing)) < ROUNDING, packing


# --- weights of documents ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["stream", "documents", "none"])
def test_every_token_of_a_document_has_its_weight_in_training_and_none_in_evaluation(packing, tmp_path):
    records = texts([6, 9, 4, 12])
    options = files(tmp_path, "none") | {"packing": packing, "block_size": 16}
    options["path"] = lines(tmp_path / "few.jsonl", records)
    data = ready(text_data(**options, loss_weight="quality"))
    found: dict[tuple[int, ...], set[float]] = {}
    of_text = {tuple(data.tokenizer(record["text"])["input_ids"]): record["quality"] for record in records}
    for row in data.train_dataloader().dataset:
        ids, weights = row["input_ids"].tolist(), row["token_weights"]
        assert weights.dtype == torch.float32
        assert not weights[row["input_ids"] == data.pad_token_id].any()
        for text in of_text:
            for start in range(len(ids)):
                if tuple(ids[start : start + len(text) + 1]) == (*text, data.tokenizer.eos_token_id):
                    found[text] = set(weights[start : start + len(text) + 1].tolist())
    assert found == {text: {weight} for text, weight in of_text.items() if text in found}
    assert len(found) >= 2
    assert all("token_weights" not in row for row in data.val_dataloader().dataset)
    assert all("token_weights" not in row for row in ready(text_data(**options)).train_dataloader().dataset)


def test_a_document_without_a_weight_has_1_and_one_of_weight_0_is_left_out_and_counted(tmp_path):
    records = [{"text": "w3 w4 w5", "quality": None}, {"text": "w6 w7 w8", "quality": 0}, {"text": "w9", "quality": 2}]
    options = files(tmp_path, "none") | {"path": lines(tmp_path / "few.jsonl", records)}
    data = ready(text_data(**options, loss_weight="quality"))
    rows = [(len(row["input_ids"]), set(row["token_weights"].tolist())) for row in data.train_dataloader().dataset]
    assert rows == [(4, {1.0}), (2, {2.0})]
    assert "left out: its quality is 0: 1" in data.prepared.report


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), "much"])
def test_weights_of_documents_that_are_no_factors_are_named(wrong, tmp_path):
    records = [{"text": "w3", "quality": wrong}] if isinstance(wrong, str) else [{"text": "w4", "quality": 1.0}]
    records += [{"text": "w5 w6", "quality": wrong}]
    options = files(tmp_path, "none") | {"path": lines(tmp_path / "few.jsonl", records)}
    with pytest.raises(UserError, match=r"record [12]: the column 'quality' must be a number of 0 or more"):
        ready(text_data(**options, loss_weight="quality"))


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path):
    with pytest.raises(UserError, match="loss_weight=qualty is no column of the data, which have text"):
        ready(text_data(**files(tmp_path, "none"), loss_weight="qualty"))


def test_pairs_and_prompts_with_completions_have_the_weights_of_their_records(tmp_path):
    options = files(tmp_path, "none") | {"val_path": None, "val_fraction": 0.5}
    del options["packing"]
    pairs = [{"source": f"w{i} w4", "target": f"w{i} w6 w7", "rating": 1 + i} for i in range(3, 7)]
    for made, records in (
        (pairs_data, pairs),
        (
            instruction_data,
            [{"prompt": p["source"], "completion": " " + p["target"], "rating": p["rating"]} for p in pairs],
        ),
    ):
        options["path"] = lines(tmp_path / f"{len(records[0])}{made.args[1].__name__}.jsonl", records)
        data = ready(made(**options, loss_weight="rating"))
        for row in data.train_dataloader().dataset:
            learned = row["labels"] >= 0
            first = int(row["labels"][learned][0])
            assert row["token_weights"][learned].tolist() == [1.0 + first] * 4


def test_preferences_take_no_weights_and_no_loss_on_prompts(tmp_path):
    with pytest.raises(UserError, match="loss_weight is for texts"):
        preference_data(path=tmp_path, loss_weight="weight")
    with pytest.raises(UserError, match="train_on_prompt is not for preferences"):
        hub_data(path=tmp_path, format="preference", train_on_prompt=True)


# --- weights of data sets ------------------------------------------------------------------------------------------


def test_a_number_weighs_a_whole_set_and_a_set_without_one_has_1(tmp_path):
    options = files(tmp_path, "none") | {"val_path": None, "val_fraction": 0.5}
    paths = {name: lines(tmp_path / f"{name}.jsonl", texts([4, 6, 8, 5])) for name in ("web", "code", "chat")}
    options["path"] = {
        "web": {"path": paths["web"], "loss_weight": 0.5},
        "code": {"path": paths["code"], "loss_weight": "quality"},
        "chat": {"path": paths["chat"]},
    }
    rows = ready(text_data(**options)).train_dataloader().dataset
    weights = {name: {w for row in part for w in row["token_weights"].tolist()} for name, part in rows.sets.items()}
    assert weights["web"] == {0.5}
    assert weights["code"] <= set(WEIGHTS)
    assert weights["chat"] == {1.0}
    options["path"]["web"]["loss_weight"] = -1
    with pytest.raises(UserError, match="data.loss_weight of web must be a number of 0 or more"):
        ready(text_data(**options)).train_dataloader()


# --- weights of messages, and loss on prompts ----------------------------------------------------------------------

TALK = [
    says("user", "one"),
    says("assistant", "two", weight=0.5),
    says("user", "three"),
    says("assistant", "four", weight=0),
    says("user", "five"),
    says("assistant", "six", weight=2),
    says("user", "seven"),
    says("assistant", "eight"),
]


def weights_of(tokenizer: Any, messages: Any, **options: Any) -> list[tuple[str, float]]:
    """The text and the weight of each unbroken run of tokens of one weight, of all documents."""
    found = list[tuple[str, float]]()
    for tokens, mask in documents(tokenizer, messages, **options):
        for token, weight in zip(tokens, mask, strict=True):
            if found and found[-1][1] == float(weight):
                found[-1] = found[-1][0] + tokenizer.decode([token]), float(weight)
            else:
                found.append((tokenizer.decode([token]), float(weight)))
    return found


@pytest.mark.parametrize("name", ["chatml", "llama3", "llama3_marked"])
def test_each_answer_has_the_weight_of_its_message(name):
    template, end, _ = TEMPLATES[name]
    tokenizer = make_tokenizer(template, "bytes")
    found = [(text, weight) for text, weight in weights_of(tokenizer, TALK) if weight]
    assert found == [(f"two{end}", 0.5), (f"six{end}", 2.0), (f"eight{end}", 1.0)]


@pytest.mark.parametrize("name", ["chatml", "llama3_marked"])
def test_with_loss_on_prompts_all_is_learned_but_what_an_answer_of_weight_0_says(name):
    template, end, _ = TEMPLATES[name]
    tokenizer = make_tokenizer(template, "bytes")
    found = weights_of(tokenizer, TALK, train_on_prompt=True)
    assert [(text, weight) for text, weight in found if weight != 1] == [
        (f"two{end}", 0.5),
        (f"four{end}", 0.0),
        (f"six{end}", 2.0),
    ]
    whole: Any = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert "".join(text for text, _ in found).strip() == whole.strip()
    plain = [message | {"weight": 1} for message in TALK]
    ((_, mask),) = documents(tokenizer, plain, train_on_prompt=True)
    assert mask.all()
    assert mask.dtype == bool


def test_loss_on_the_prompt_of_a_completion_is_on_all_of_it(tmp_path):
    records = [{"prompt": f"w{i} w4", "completion": " w6"} for i in range(3, 9)]
    messages = [{"prompt": [says("user", f"w{i}")], "completion": [says("assistant", "w6")]} for i in range(3, 9)]
    options = files(tmp_path, "none") | {"val_path": None, "val_fraction": 0.5, "chat_template": "chatml"}
    for name, data in {"texts": records, "messages": messages}.items():
        options["path"] = lines(tmp_path / f"{name}.jsonl", data)
        for row in ready(instruction_data(**options, train_on_prompt=True)).train_dataloader().dataset:
            assert (row["labels"][1:] >= 0).all()


def test_a_fraction_as_a_messages_weight_is_refused_where_nobody_asked_for_it_and_learned_where_somebody_did(tmp_path):
    tokenizer = make_tokenizer(PLAIN, "bytes")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    talks = [{"messages": [says("user", f"{i}"), says("assistant", f"say {i}", weight=0.5 + i)]} for i in range(6)]
    options: dict[str, Any] = {"path": lines(tmp_path / "talks.jsonl", talks), "tokenizer": tmp_path / "tokenizer"}
    options |= {"cache_dir": tmp_path / "cache", "val_fraction": 0.5, "packing": "none"}
    with pytest.raises(UserError, match=r"record 1: a message has a weight that is neither 0 nor 1; data.loss_weight="):
        ready(chat_data(**options))
    data = ready(chat_data(**options, loss_weight="weight"))
    for row in data.train_dataloader().dataset:
        (answer,) = runs(data.tokenizer, row["input_ids"].tolist(), (row["labels"] >= 0).tolist())
        number = int(answer.split()[1][0])
        assert set(row["token_weights"][row["labels"] >= 0].tolist()) == {0.5 + number}
    with pytest.raises(UserError, match="the weight of a message must be a number of 0 or more, got -1"):
        ChatEncoding().encoder(tokenizer, 100)([{"messages": [says("user", "1"), says("assistant", "2", weight=-1)]}])


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_command_learns_a_file_with_weights_and_prompts(tmp_path):
    talks = [{"messages": [says("user", f"say {i}"), says("assistant", f"{i}!", weight=i / 4)]} for i in range(40)]
    lines(tmp_path / "talks.jsonl", talks)
    words = ["data=chat", "data.path=talks.jsonl", "data.loss_weight=weight", "data.train_on_prompt=true"]
    words += [
        "data.block_size=32",
        "data.vocab_size=300",
        "trainer.max_steps=2",
        "~callbacks.export",
        "hydra.run.dir=out",
    ]
    train(tmp_path, *words, *TINY_MODEL)
    assert summary(tmp_path / "out")["metrics"]["train/loss"] > 0
