"""The data of runs that were made when each kind of data was a class are read as they were."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import text_folder
from data_modules import chat_data, line_pairs_data, text_data
from hydra.utils import instantiate
from lightning.pytorch import Trainer
from lightning_helpers import quiet_trainer, tiny_llama
from omegaconf import OmegaConf

from lit_fused import FusedCausalLMModule
from lit_fused.data.old_runs import translate
from lit_fused.data.preparation_report import Report
from lit_fused.errors import UserError

COMMON = """
block_size: 64
batch_size: 4
tokenizer: null
vocab_size: 400
val_fraction: 0.05
cache_dir: null
num_workers: 0
seed: 1
"""
DOCUMENTS = COMMON + "max_bad_documents: 0\nprepare_workers: null\n"
OLD = {
    "text": DOCUMENTS
    + """
_target_: lit_fused.data.TextDataModule
path: a.txt
text_column: text
encoding: utf-8
max_bytes: null
packing: stream
""",
    "stdlib": COMMON
    + """
_target_: lit_fused.data.TextDataModule
path: null
max_bytes: 12000000
packing: stream
""",
    "chat": DOCUMENTS
    + """
_target_: lit_fused.data.ChatDataModule
path: a.jsonl
messages_column: null
chat_template: null
template_kwargs: {enable_thinking: false}
too_long: cut
encoding: utf-8
packing: documents
""",
    "instruction": DOCUMENTS
    + """
_target_: lit_fused.data.InstructionDataModule
path: a.jsonl
prompt: instruction
completion: output
too_long: skip
encoding: utf-8
packing: none
""",
    "hf": DOCUMENTS
    + """
_target_: lit_fused.data.HubDataModule
path: somebody/stories
name: null
split: train
revision: null
streaming: true
max_documents: 10
format: chat
text_column: text
messages_column: talk
chat_template: null
template_kwargs: {}
prompt: prompt
completion: null
too_long: cut
packing: null
""",
    "tokens": COMMON
    + """
_target_: lit_fused.data.TokensDataModule
path: a.npy
val_path: null
dtype: uint16
eos_token_id: null
packing: stream
""",
}


@pytest.mark.parametrize("name", OLD)
def test_an_old_configuration_builds_the_same_data_with_the_same_options(name):
    old: Any = OmegaConf.to_container(OmegaConf.create(OLD[name]))
    data = instantiate(translate(old))
    parts = (data.source, data.encoding, data.to_prepare, data)
    renamed = {"name": "config_name", "tokenizer": "tokenizer_name", "vocab_size": "max_vocab_size"}
    for key in set(map(str, old)) - {"_target_", "path", "cache_dir", "dtype", "format"}:
        holders = [part for part in parts if renamed.get(key, key) in getattr(part, "__dict__", {})]
        expected = old[key] if (key, old[key]) != ("packing", None) else "documents"
        if holders or key not in ("text_column", "prompt", "completion"):  # those of another format are nowhere
            assert expected in [getattr(part, renamed.get(key, key)) for part in holders], key
    assert str(data.source.path).endswith(str(old["path"]))


def test_what_an_old_run_has_prepared_is_found_under_the_same_name(tmp_path, monkeypatch):
    """The names are those that the earlier version gave: a hash that has no version, path or time of this machine."""
    stat = SimpleNamespace(st_size=1, st_mtime_ns=2)
    monkeypatch.setattr("lit_fused.data.file_source.stat_of_file", lambda file: stat)
    monkeypatch.setattr("os.path.isdir", lambda folder: True)
    named = []
    report = Report(source="", folder="")
    read_report = lambda folder, cached: named.append(folder.name) or report  # noqa: E731
    monkeypatch.setattr("lit_fused.data.preparation.read_report", read_report)
    for path, data in (("/corpus/a.txt", text_data), ("/corpus/a.jsonl", chat_data)):
        monkeypatch.setattr("lit_fused.data.file_source.FileSource._files", lambda self: [self.path])
        data(path=path, block_size=64, vocab_size=400, cache_dir=tmp_path).prepare()
    assert named == ["text-32d3dd62e178e9af080a622bd83b633c", "chat-294fc10b688ff9330d0be3ce6c53fd21"]


def test_other_data_are_left_alone_and_old_pairs_of_lines_are_refused_with_what_to_do():
    for target in ("lit_fused.data.SyntheticDataModule", "lit_fused.data.compose_data", "mine.Data"):
        assert translate({"_target_": target, "seed": 1}) == {"_target_": target, "seed": 1}
    with pytest.raises(UserError, match="its tokenizer cannot be made again: it is in the run's folder exported"):
        translate({"_target_": "lit_fused.data.LinePairsDataModule"})


def test_a_checkpoint_made_when_text_was_a_class_of_its_own_resumes_in_the_middle_of_an_epoch(tmp_path):
    folder, old = text_folder(tmp_path), tmp_path / "old.ckpt"

    def fit(steps: int, block_size: int, ckpt_path: Path | None = None) -> Trainer:
        trainer = quiet_trainer(tmp_path, max_steps=steps)
        data = text_data(path=folder, batch_size=2, block_size=block_size, vocab_size=300, cache_dir=tmp_path)
        trainer.fit(FusedCausalLMModule(tiny_llama(vocab_size=300)), data, ckpt_path=ckpt_path)
        return trainer

    fit(3, 32).save_checkpoint(old)
    checkpoint = torch.load(old)
    checkpoint["TextDataModule"] = checkpoint.pop("TokenDataModule")
    torch.save(checkpoint, old)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*does not say of which data")
        assert fit(5, 32, old).fit_loop.epoch_loop.batch_progress.current.completed == 5
    with pytest.raises(UserError, match=r"made after 3 batches of epoch ., .* would not give: .*block_size"):
        fit(5, 16, old)


def test_old_pairs_of_lines_are_not_resumed_with_another_tokenizer(tmp_path):
    checkpoint = {"LinePairsDataModule": {"epoch": 1, "data": {}}}
    with pytest.raises(UserError, match=r"give the run's own, data.tokenizer=RUN/exported"):
        line_pairs_data(path=tmp_path).see_checkpoint(checkpoint)
    line_pairs_data(path=tmp_path, tokenizer=tmp_path).see_checkpoint(checkpoint)
