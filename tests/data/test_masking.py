"""Rows with masked tokens: which ones, how they are replaced, and that the same ones come again."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY_MODEL, summary, train
from data_modules import text_data
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_helpers import quiet_trainer
from tiny_models import tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    get_constant_schedule,
    pipeline,
)

from lit_fused import FusedCausalLMModule, FusedMaskedLMModule, UserError
from lit_fused.data.loader import BatchLoader

WORDS = ["walking", "walked", "under", "understanding", "über", "don't", "(one)", "42"]
TEXT = "".join(f"{a} {b}, {c}.\n" for a, b, c in itertools.permutations(WORDS, 3))


def masked_data(folder: Path, **options: Any) -> Any:
    if not (folder / "text.txt").exists():
        (folder / "text.txt").write_text(TEXT)
    settings: dict[str, Any] = {"block_size": 32, "batch_size": 4, "vocab_size": 290, "mask_probability": 0.15}
    data = text_data(path=folder / "text.txt", cache_dir=folder / "cache", **(settings | options))
    data.prepare_data()
    data.setup("fit")
    return data


def batches_of(loader: BatchLoader) -> list[dict[str, torch.Tensor]]:
    return list(loader)


def together(batches: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    return torch.cat([batch[name].flatten() for batch in batches])


def bert_tokenizer(folder: Path) -> Path:
    """A tokenizer as BERT's: no end-of-text token, but [CLS] and [SEP] around each text, and pieces with ##."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = ["walk", "##ing", "##ed", "under", "##stand", "don", "'", "t", "(", "one", ")", "4", "##2", ",", "."]
    entries = {piece: number for number, piece in enumerate([*special, *pieces, "uber"])}
    tokenizer = Tokenizer(WordPiece(entries, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    frame = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = TemplateProcessing("[CLS] $A [SEP]", special_tokens=frame)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict(zip(names, special, strict=True)))
    fast.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def test_of_the_tokens_15_percent_are_chosen_and_become_mask_random_and_themselves_at_80_10_10(tmp_path):
    data = masked_data(tmp_path)
    loader = data.train_dataloader()
    batches = [batch for _ in range(30) for batch in loader]
    ids, labels = together(batches, "input_ids"), together(batches, "labels")
    chosen = labels != -100
    special = torch.isin(labels.where(chosen, ids), torch.tensor(data.tokenizer.all_special_ids))
    assert not (special & chosen).any()

    def expect(share: torch.Tensor, probability: float) -> None:
        deviation = (probability * (1 - probability) / len(share)) ** 0.5
        assert abs(share.double().mean().item() - probability) < 4 * deviation

    expect(chosen[~special], 0.15)
    masked = (ids == data.tokenizer.mask_token_id)[chosen]
    stays = (ids == labels)[chosen]
    expect(masked, 0.8 + 0.1 / len(data.tokenizer))
    expect(stays, 0.1 + 0.1 / len(data.tokenizer))
    assert len(set(ids[chosen][~masked & ~stays].tolist())) > len(data.tokenizer) / 2


def test_masks_change_from_epoch_to_epoch_and_those_of_validation_and_of_the_same_seed_do_not(tmp_path):
    data = masked_data(tmp_path)
    loader = data.train_dataloader()
    first, second = batches_of(loader), batches_of(loader)
    assert not torch.equal(together(first, "labels").sort()[0], together(second, "labels").sort()[0])
    again = masked_data(tmp_path, num_workers=2).train_dataloader()
    assert torch.equal(together(first, "input_ids"), together(batches_of(again), "input_ids"))
    assert torch.equal(together(second, "labels"), together(batches_of(again), "labels"))
    other = masked_data(tmp_path, seed=1)
    assert not torch.equal(together(first, "labels"), together(batches_of(other.train_dataloader()), "labels"))
    held_out = data.val_dataloader()
    assert torch.equal(together(batches_of(held_out), "labels"), together(batches_of(held_out), "labels"))


@pytest.mark.parametrize("packing", ["stream", "none", "documents"])
def test_diffusion_masks_any_number_of_a_rows_tokens_with_weights_that_add_up_to_all_of_them(packing, tmp_path):
    data = masked_data(tmp_path, packing=packing, mask_probability="diffusion")
    special, shares = torch.tensor(data.tokenizer.all_special_ids), []
    rows = data.train_dataloader().dataset
    for index in range(40 * len(rows)):
        row, plain = rows[index], rows.rows[index % len(rows)]
        tokens = ~torch.isin(plain["input_ids"], special)
        chosen = row["labels"] != -100
        assert not (chosen & ~tokens).any()
        assert (row["input_ids"][chosen] == data.tokenizer.mask_token_id).all()
        assert torch.equal(row["labels"][chosen], plain["input_ids"][chosen].long())
        assert torch.equal(row["input_ids"][~chosen], plain["input_ids"][~chosen].long())
        assert row["token_weights"][chosen].sum().item() == pytest.approx(tokens.sum().item(), rel=1e-5)
        shares.append((chosen.sum() / tokens.sum()).item())
    few, many = torch.tensor(shares).quantile(torch.tensor([0.25, 0.75])).tolist()
    assert few == pytest.approx(0.25, abs=0.08)
    assert many == pytest.approx(0.75, abs=0.08)


def test_the_loss_of_diffusion_is_its_bound_over_all_tokens(tmp_path):
    data = masked_data(tmp_path, packing="none", mask_probability="diffusion", val_fraction=0.2)
    module = FusedMaskedLMModule(tiny_model("masked_eurobert", vocab_size=len(data.tokenizer)).double())
    [found] = quiet_trainer(tmp_path).validate(module, data, verbose=False)
    special, rows = torch.tensor(data.tokenizer.all_special_ids), data.val_dataloader().dataset
    bound, count = 0.0, 0
    for index in range(len(rows)):
        ids, labels = rows[index]["input_ids"][None], rows[index]["labels"]
        tokens = (~torch.isin(rows.rows[index]["input_ids"], special)).sum().item()
        masked = labels != -100
        with torch.no_grad():
            log_p = module.backbone(ids).logits[0].log_softmax(-1)
        bound -= tokens / masked.sum().item() * log_p[masked, labels[masked]].sum().item()
        count += tokens
    assert found["val/loss"] == pytest.approx(bound / count, rel=1e-6)


@pytest.mark.parametrize("packing", ["stream", "none", "documents"])
def test_labels_are_the_tokens_that_were_there_and_padding_is_neither_seen_nor_predicted(packing, tmp_path):
    data = masked_data(tmp_path, packing=packing)
    rows = data.val_dataloader().dataset
    assert len(list(rows)) == len(rows)
    for number, row in enumerate(rows):
        plain = rows.rows[number]
        chosen = row["labels"] != -100
        assert torch.equal(row["labels"][chosen], plain["input_ids"][chosen])
        assert torch.equal(row["input_ids"][~chosen], plain["input_ids"][~chosen])
        if packing == "stream":
            assert torch.equal(row["attention_mask"] == 0, plain["labels"] == -100)
    if packing == "stream":
        assert (rows[len(rows) - 1]["attention_mask"] == 0).any()  # the last block is padded


def test_a_tokenizer_without_an_end_of_text_token_frames_documents_as_it_frames_texts(tmp_path):
    data = masked_data(tmp_path, tokenizer=bert_tokenizer(tmp_path), packing="none", block_size=2**14)
    tokens = data.prepared.train.read(0, int(data.prepared.train.ends[0]))[0]
    assert (tokens[0], tokens[-1]) == (data.tokenizer.cls_token_id, data.tokenizer.sep_token_id)
    assert not {data.tokenizer.cls_token_id, data.tokenizer.sep_token_id} & {*tokens[1:-1].tolist()}


def test_a_run_that_is_resumed_within_an_epoch_ends_with_the_weights_of_one_that_was_not(tmp_path):
    def fitted(steps: int, resume: Path | None = None) -> Any:
        saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=5, save_top_k=-1)
        trainer = quiet_trainer(tmp_path, max_steps=steps, enable_checkpointing=True, callbacks=[saver])
        module = FusedMaskedLMModule(tiny_model("masked_eurobert", vocab_size=290), scheduler=get_constant_schedule)
        data = masked_data(tmp_path, num_workers=0 if resume is None else 1)
        trainer.fit(module, datamodule=data, ckpt_path=resume)
        assert trainer.current_epoch > 0
        return module.state_dict()

    steps = len(masked_data(tmp_path).train_dataloader()) + 8
    whole = fitted(steps)
    resumed = fitted(steps, tmp_path / f"step={5 * ((steps - 3) // 5)}.ckpt")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.slow
def test_the_command_trains_resumes_validates_and_exports_a_model_that_fills_in_masks(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    small = ("data.block_size=32", "data.vocab_size=300", "optimizer.lr=4e-3", "trainer.accelerator=cpu")
    masked = ("module=masked_lm", "data=text", "data.path=text.txt", *small, *TINY_MODEL)
    train(tmp_path, *masked, "trainer.max_steps=20", "hydra.run.dir=out")
    train(tmp_path, "ckpt_path=out/checkpoints/last.ckpt", "trainer.max_steps=40", "hydra.run.dir=more")
    metrics = summary(tmp_path / "more")["metrics"]
    assert metrics["val/loss"] < math.log(300) - 1  # a nat below the uniform guess
    train(tmp_path, "mode=validate", "ckpt_path=more/checkpoints/last.ckpt", "hydra.run.dir=again")
    again = summary(tmp_path / "again")["metrics"]
    assert again["val/loss"] == pytest.approx(metrics["val/loss"], rel=1e-6)
    model: Any = AutoModelForMaskedLM.from_pretrained(tmp_path / "more" / "exported")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "more" / "exported")
    fill: Any = pipeline("fill-mask", model, tokenizer=tokenizer)
    assert len(fill(f"walking{tokenizer.mask_token} under", top_k=3)) == 3


def test_masked_data_for_a_module_that_fills_in_nothing_are_refused(tmp_path):
    module = FusedCausalLMModule(tiny_model("llama"))
    with pytest.raises(UserError, match="mask_probability hides tokens, which FusedCausalLMModule does not fill in"):
        quiet_trainer(tmp_path, max_steps=1).fit(module, datamodule=masked_data(tmp_path))
