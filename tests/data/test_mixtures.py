"""Several data sets: mixed by weights for training, evaluated each by itself and all together."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from commands import TINY_MODEL, summary, train
from data_modules import ready, text_data
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_helpers import quiet_trainer, tiny_llama

from lit_fused import FusedCausalLMModule, UserError

SIZES: dict[str, Any] = {"vocab_size": 300, "block_size": 16, "batch_size": 2, "val_fraction": 0.2, "seed": 3}


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    """A set of many documents, and one of few."""
    found = {"web": tmp_path / "web.jsonl", "code": tmp_path / "code.jsonl"}
    web = [f"The page {i} says hello to {i * 7} people in the town." for i in range(60)]
    code = [f"def f_{i}(x): return x + {i} * x" for i in range(20)]
    for path, texts in zip(found.values(), (web, code), strict=True):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return found


def mixed(paths: Any, **options: Any) -> Any:
    folder = next(iter(paths.values())).parent
    return ready(text_data(path=paths, cache_dir=folder, **{**SIZES, **options}))


def set_of(data: Any, rows: Any) -> np.ndarray:
    """The number of the set of each row."""
    return np.searchsorted(data.train_dataloader().dataset.starts, rows, side="right") - 1


def test_an_epoch_has_each_set_by_its_weight_and_repeats_no_row_before_its_set_is_used_up(paths):
    data = mixed(paths, weights={"code": 3, "web": 1})
    rows = data.train_dataloader().dataset
    web, code = (len(part) for part in rows.sets.values())
    epochs = [rows.draw(3, epoch) for epoch in range(4)]
    for epoch in epochs:
        counts = np.bincount(set_of(data, epoch))
        assert len(epoch) == len(rows) == web + code
        assert abs(counts[1] - 0.75 * len(epoch)) <= 1
        code_rows = np.bincount(epoch[epoch >= web] - web, minlength=code)
        assert code_rows.max() - code_rows.min() <= 2  # two passes may lie partly in one epoch
    over_all = np.bincount(np.concatenate(epochs), minlength=len(rows))
    assert over_all[:web].max() - over_all[:web].min() <= 1
    assert over_all[web:].max() - over_all[web:].min() <= 1
    assert all((one != other).any() for one, other in pairwise(epochs))
    assert (rows.draw(3, 1) == epochs[1]).all()
    assert (rows.draw(4, 1) != epochs[1]).any()


def test_without_weights_each_row_comes_once_and_a_weight_of_0_leaves_a_set_to_validation(paths):
    rows = mixed(paths).train_dataloader().dataset
    assert sorted(rows.draw(3, 5)) == list(range(len(rows)))
    data = mixed(paths, weights={"web": 1, "code": 0})
    assert [*data.train_dataloader().dataset.sets] == ["web"]
    assert [*data.val_dataloader()] == ["web", "code"]


def test_each_sets_metrics_are_those_of_the_set_alone_and_the_loss_is_over_all_tokens(paths, tmp_path):
    data = mixed(paths)
    module = FusedCausalLMModule(tiny_llama(vocab_size=data.vocab_size))
    trainer = quiet_trainer(tmp_path)
    (first, _) = trainer.validate(module, data, verbose=False)
    together = dict(first) | {name: float(value) for name, value in trainer.callback_metrics.items()}
    losses, counts = [], []
    for name, held_out in data.val_dataloader().items():
        (alone,) = trainer.validate(module, held_out, verbose=False)
        for metric in ("loss", "accuracy", "perplexity"):
            assert together[f"val/{metric}/{name}"] == alone[f"val/{metric}"]
        losses.append(alone["val/loss"])
        counts.append(sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in held_out))
    assert together["val/loss"] == pytest.approx(np.average(losses, weights=counts), rel=1e-6)
    assert not any("dataloader_idx" in name for name in together)
    trainer.test(module, data, verbose=False)
    assert trainer.callback_metrics["test/loss/code"] == together["val/loss/code"]


@pytest.mark.slow
def test_a_mixture_that_is_resumed_in_an_epoch_ends_with_the_bits_of_one_that_ran_through(paths, tmp_path):
    def fitted(steps: int, ckpt_path: Path | None = None, **weights: float) -> tuple[L.Trainer, dict[str, Any]]:
        L.seed_everything(1, verbose=False)
        data = mixed(paths, weights=weights or {"web": 0.25, "code": 0.75})
        module = FusedCausalLMModule(tiny_llama(vocab_size=data.vocab_size), scheduler=lambda o: constant(o))
        saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=61, save_top_k=-1)
        options: dict[str, Any] = {"callbacks": [saving], "enable_checkpointing": True, "limit_val_batches": 0}
        trainer = quiet_trainer(tmp_path, max_steps=steps, **options)
        trainer.fit(module, data, ckpt_path=ckpt_path)
        return trainer, module.state_dict()

    def constant(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)

    _, through = fitted(70)
    resumed, state = fitted(70, tmp_path / "step=61.ckpt")
    assert resumed.current_epoch > 0
    assert all(torch.equal(state[name], through[name]) for name in through)
    with pytest.raises(UserError, match=r"checksum of the order \d+ there and"):
        fitted(70, tmp_path / "step=61.ckpt", web=1.0, code=1.0)


def test_held_out_data_of_their_own_leave_all_of_the_path_to_train_on(paths, tmp_path):
    data = mixed({"web": paths["web"]}, val_path=str(paths["code"]))
    assert data.prepared.train.num_documents == 60
    assert data.prepared.val.num_documents == 20
    assert not isinstance(data.val_dataloader(), dict)
    one = ready(text_data(path=paths["web"], val_path={"code": paths["code"]}, cache_dir=tmp_path, **SIZES))
    assert [*one.val_dataloader()] == ["code"]
    assert "def f_" in one.tokenizer.decode(one.held_out_prompt()[0])
    assert one.source_names == [str(paths["web"]), str(paths["code"])]


def test_a_set_may_have_options_of_its_own(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"content": f"some words {i}"}) + "\n" for i in range(9)))
    (tmp_path / "b.txt").write_bytes("grün und blau\n".encode("latin-1") * 20)
    own = {
        "a": {"path": tmp_path / "a.jsonl", "text_column": "content"},
        "b": {"path": tmp_path / "b.txt", "encoding": "latin-1"},
    }
    data = ready(text_data(path=own, cache_dir=tmp_path, **SIZES))
    texts = [data.tokenizer.decode(store.read(0, 60)[0]) for store in data.prepared.to_train_on.values()]
    assert "some words" in texts[0]
    assert "grün" in texts[1]


@pytest.mark.slow
def test_a_mixture_by_the_command_is_prepared_trained_resumed_and_reported_by_set(paths, tmp_path):
    words = [*TINY_MODEL, "data=text", "data.path={web: web.jsonl, code: code.jsonl}", "data.block_size=16"]
    words += ["data.weights={web: 0.3, code: 0.7}", "data.vocab_size=300", "trainer.accelerator=cpu"]
    prepared = train(tmp_path, *words, "mode=prepare", "hydra.run.dir=prepared")
    assert prepared.output.count("tokens to train on") == 2
    done = train(tmp_path, *words, "trainer.max_steps=4", "hydra.run.dir=out")
    assert "Sample after training" in done.output
    assert "val/loss/code" in done.output
    (tmp_path / "elsewhere").mkdir()
    last = tmp_path / "out" / "checkpoints" / "last.ckpt"
    train(tmp_path / "elsewhere", f"ckpt_path={last}", "trainer.max_steps=6", "hydra.run.dir=on")
    metrics = summary(tmp_path / "elsewhere" / "on")["metrics"]
    assert {"val/loss", "val/loss/web", "val/loss/code"} <= metrics.keys()
    assert "web.jsonl, code.jsonl" in (tmp_path / "out" / "exported" / "README.md").read_text()
