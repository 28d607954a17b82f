"""Losses, gradients and weights that are not finite stop a run, and never take the place of a good checkpoint."""

import json
import math
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from checkpoint_fits import train
from commands import SYNTHETIC, TINY_MODEL
from commands import train as run_training
from lightning.pytorch.plugins import MixedPrecision
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from ranks import each
from transformers import get_constant_schedule

from lit_fused import FusedCausalLMModule, UserError
from lit_fused.app.reporting.finish import write_summary
from lit_fused.app.reporting.runs import read_run
from lit_fused.callbacks import ExportPretrained, FiniteWatch, RunCheckpoint
from lit_fused.parallel import local
from lit_fused.parallel.checkpoint import read_weights
from lit_fused.parallel.collectives import objects_of_ranks


class Poisons(L.Callback):
    """Makes a gradient, or a weight, NaN in some steps."""

    def __init__(self, *steps: int, what: str = "grad") -> None:
        self.steps, self.what = steps, what

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.global_step + 1 in self.steps and self.what == "grad":
            pl_module.backbone.lm_head.weight.grad[0, 0] = math.nan

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step + 1 in self.steps and self.what == "weight":
            pl_module.backbone.lm_head.weight.data[0, 0] = math.nan


def fit(folder: Path, *callbacks: Any, **options: Any) -> FusedCausalLMModule:
    module = FusedCausalLMModule(tiny_llama(), None, None, get_constant_schedule, check_every_n_steps=0)
    every, save = options.pop("every", 2), options.pop("save", True)
    savers = [RunCheckpoint(folder, every_n_train_steps=every)] * save
    options = {"max_steps": 6, "enable_checkpointing": save} | options
    quiet_trainer(folder, callbacks=[*callbacks, *savers], **options).fit(module, loader(ragged_batches(8)[3:]))
    return module


def assert_good(folder: Path, step: int) -> None:
    """Assert that what is there is whole, finite, and of ``step``."""
    assert [path.name for path in folder.glob("*.ckpt*")] == ["last.ckpt"]
    for path in folder.glob("*.ckpt"):
        assert torch.load(path)["global_step"] == step
        assert all(weight.isfinite().all() for weight in read_weights(path).values())


@pytest.mark.parametrize(
    ("poison", "options", "sentence", "saved"),
    [
        (Poisons(3), {}, "the gradients of step 3 were not finite; try a smaller optimizer.lr, a larger", 2),
        (
            Poisons(4, what="weight"),
            {"every": 3},
            "the loss and the gradients of step 4 were not finite; try a smaller",
            3,
        ),
        (Poisons(4), {}, r"the weights are not finite after step 4 \(model.backbone.lm_head.weight is the first", 2),
        (
            Poisons(6),
            {"every": 5},
            "the weights are not finite after step 6 .* no checkpoint is written and the last",
            5,
        ),
        (Poisons(3), {"accumulate_grad_batches": 2}, "the gradients of step 3 were not finite", 2),
    ],
)
def test_what_is_not_finite_stops_the_fit_and_the_last_good_checkpoint_stays(
    poison, options, sentence, saved, tmp_path
):
    with pytest.raises(UserError, match=sentence):
        fit(tmp_path, poison, FiniteWatch(), **options)
    assert_good(tmp_path, saved)


def test_a_float16_run_may_skip_steps_until_its_patience_ends(tmp_path):
    def half(scale: float) -> MixedPrecision:
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=scale)  # pyright: ignore[reportPrivateImportUsage]
        return MixedPrecision("16-mixed", "cpu", scaler)

    with pytest.raises(UserError, match=r"of step 3 were not finite, and in the 2 before it \(float16's loss scale is"):
        fit(tmp_path / "a", FiniteWatch(patience=2), plugins=[half(2.0**60)], max_steps=50)
    module = fit(tmp_path / "b", FiniteWatch(), plugins=[half(2.0**20)], max_steps=12, every=100)
    assert all(p.isfinite().all() for p in module.parameters())


def test_nothing_that_is_not_finite_is_exported_and_no_text_is_made_of_it(tmp_path):
    (tmp_path / "exported").mkdir()
    with pytest.raises(UserError, match="the weights are not finite after step 4 .* nothing is exported"):
        fit(tmp_path, Poisons(4), ExportPretrained(tmp_path / "exported"), save=False, max_steps=4)
    assert not list((tmp_path / "exported").iterdir())
    module = FusedCausalLMModule(tiny_llama())
    weights = {name: torch.full_like(value, math.nan) for name, value in module.state_dict().items()}
    with pytest.raises(UserError, match="weights of the checkpoint are not finite, so nothing is exported"):
        module.save_pretrained(tmp_path / "best", weights=weights)
    module.load_state_dict(weights)
    ids = torch.arange(4)[None]
    for options in ({"do_sample": True}, {"do_sample": False}):
        with pytest.raises(UserError, match="the model's logits are not finite, so no token can be chosen"):
            module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, pad_token_id=0, **options)


class PoisonsOneRank(L.Callback):
    """Makes one gradient of rank 1 infinite in the third step."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: object) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            gradient = next(p.grad for p in pl_module.parameters() if p.grad is not None and local(p.grad).numel())
            local(gradient).view(-1)[0] = float("inf")


def poisoned(strategy: str, folder: Path) -> Any:
    """Return what each rank says of gradients that are infinite on one of them: watched, and then saved."""
    said: list[str] = []
    for watch, every in ((FiniteWatch(), 2), (FiniteWatch(patience=9), 1)):
        saver = RunCheckpoint(folder / f"{strategy}-{every}", every_n_train_steps=every)
        try:
            train(strategy, folder, 4, enable_checkpointing=True, callbacks=[PoisonsOneRank(), watch, saver])
        except UserError as error:
            said.append(str(error))
    return objects_of_ranks(said)


@pytest.mark.slow
def test_all_ranks_stop_together_at_what_one_of_them_has(tmp_path):
    for strategy, of_ranks in each(poisoned, 2, ["ddp", "fsdp2", "tp"], tmp_path).items():
        for watched, saved in of_ranks:
            assert watched.startswith("the gradients of step 3 were not finite; try")
            assert saved.startswith("the weights are not finite after step 3")
        for every in (1, 2):
            assert {path.name for path in (tmp_path / f"{strategy}-{every}").iterdir()} == {"last.ckpt"}


@pytest.mark.slow
def test_a_run_that_diverges_ends_with_one_sentence(tmp_path):
    diverging = [*SYNTHETIC, *TINY_MODEL, "optimizer.lr=1e4", "trainer.max_steps=20", "hydra.run.dir=out"]
    finished = run_training(tmp_path, *diverging, "callbacks.checkpoint.every_n_train_steps=1", status=1)
    assert "Traceback" not in finished.output
    assert re.search(r"not finite.*optimizer\.lr", finished.plain)
    assert "not finite" in (tmp_path / "out" / "error.txt").read_text()
    for path in (tmp_path / "out" / "checkpoints").iterdir():
        assert all(weight.isfinite().all() for weight in read_weights(path).values())
    assert not (tmp_path / "out" / "exported").exists()


def test_a_summary_is_valid_json_whatever_was_measured(tmp_path):
    write_summary(str(tmp_path), {"val/loss": math.nan, "train/loss": math.inf, "a": 1.0}, status="completed")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    written = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert written["metrics"] == {"val/loss": None, "train/loss": None, "a": 1.0}
    assert math.isnan(read_run(tmp_path).metrics["val/loss"])
