"""An export takes the place of an export, and of nothing else."""

import os
import shutil
from pathlib import Path

import pytest
from lightning_helpers import loader, quiet_trainer, ragged_batches
from tiny_models import tiny_model
from transformers.utils import logging

from lit_fused import FusedCausalLMModule, UserError
from lit_fused.callbacks import ExportPretrained


@pytest.fixture
def module() -> FusedCausalLMModule:
    return FusedCausalLMModule(tiny_model("llama"))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_plain_output_has_no_bar_of_transformers(module, tmp_path, capsys):
    logging.enable_progress_bar()
    module.save_pretrained(tmp_path / "exported")
    assert "Writing model shards" not in "".join(capsys.readouterr())


def test_only_what_was_exported_is_replaced_and_other_files_are_named(module, tmp_path):
    folder = tmp_path / "exported"
    module.save_pretrained(folder)
    module.save_pretrained(folder)
    for name in ("thesis.txt", "adapter/notes/a.txt", "model-00009.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious")
        before = content(folder)
        with pytest.raises(UserError, match=f"did not write {name}; give the export another folder"):
            module.save_pretrained(folder)
        assert content(folder) == before
        (folder / name).unlink()
        shutil.rmtree(folder / "adapter", ignore_errors=True)
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match="did not write empty"):
        module.save_pretrained(folder)
    (folder / "empty").rmdir()
    (folder / ".lit_fused.json").write_text("[]")
    with pytest.raises(UserError, match="did not write config.json, "):
        module.save_pretrained(folder)
    (folder / ".lit_fused.json").unlink()  # a model of another program's
    with pytest.raises(UserError, match="did not write config.json, "):
        module.save_pretrained(folder)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError, match="file is a file"):
        module.save_pretrained(tmp_path / "file")


def test_a_run_is_refused_before_it_trains(module, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    trainer = quiet_trainer(tmp_path, max_steps=1, callbacks=[ExportPretrained(tmp_path / "mine")])
    with pytest.raises(UserError, match="did not write thesis.txt"):
        trainer.fit(module, loader(ragged_batches(1)))
    assert trainer.global_step == 0


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_exported_files_have_the_permissions_of_new_files(umask, module, tmp_path):
    before = os.umask(umask)
    try:
        module.save_pretrained(tmp_path / "exported")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "exported").iterdir()} == {0o666 & ~umask}
