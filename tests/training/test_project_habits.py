"""Habits of other Lightning projects: each works as in any LightningModule, or a sentence says what to do."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, DistributedSampler

from lit_fused import FusedCausalLMModule, UserError
from lit_fused.parallel import warn_of_repeated_rows

BATCHES = [b for b in ragged_batches(5) if (b["labels"][:, 1:] != -100).any()]


class Rates(L.Callback):
    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.seen.append([group["lr"] for group in optimizer.param_groups])


def fit(
    module: L.LightningModule, folder: Path, epochs: int = 1, **options: Any
) -> tuple[L.Trainer, list[list[float]]]:
    rates = Rates()
    trainer = quiet_trainer(folder, max_epochs=epochs, callbacks=[rates, *options.pop("callbacks", [])], **options)
    trainer.fit(module, loader(BATCHES), loader(BATCHES[:2]))
    return trainer, rates.seen


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader(BATCHES)

    def val_dataloader(self) -> Any:
        return [loader(BATCHES[:1]), loader(BATCHES[1:3])]

    test_dataloader = predict_dataloader = val_dataloader


def test_each_of_several_validation_loaders_has_its_figures_and_all_together_have_theirs(tmp_path):
    trainer = quiet_trainer(tmp_path, max_epochs=1)
    module = FusedCausalLMModule(tiny_llama())
    trainer.fit(module, datamodule=Data())
    fitted = dict(trainer.callback_metrics)
    together = quiet_trainer(tmp_path).validate(module, loader(BATCHES[:3]), verbose=False)[0]
    second = quiet_trainer(tmp_path).validate(module, loader(BATCHES[1:3]), verbose=False)[0]
    assert fitted["val/loss"].item() == pytest.approx(together["val/loss"], rel=1e-6)
    assert fitted["val/accuracy/dataloader_idx_1"].item() == pytest.approx(second["val/accuracy"], rel=1e-6)
    assert fitted["val/loss/dataloader_idx_1"].item() == pytest.approx(second["val/loss"], rel=1e-6)
    assert fitted["val/loss/dataloader_idx_0"] != fitted["val/loss/dataloader_idx_1"]
    trainer.test(module, datamodule=Data(), verbose=False)
    assert trainer.callback_metrics["test/loss/dataloader_idx_1"].item() == pytest.approx(second["val/loss"], rel=1e-6)
    assert len(trainer.predict(module, datamodule=Data()) or []) == 2


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_the_figures_of_an_evaluation_that_was_stopped_are_not_in_the_next_one(stage, tmp_path):
    """A notebook's cell is stopped, and run again."""

    class Stops(FusedCausalLMModule):
        stops = True

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int | None = None) -> None:
            super().validation_step(batch, batch_idx, dataloader_idx)
            if self.stops and dataloader_idx == 1:
                raise ValueError("stopped")

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int | None = None) -> None:
            super().test_step(batch, batch_idx, dataloader_idx)
            if self.stops and dataloader_idx == 1:
                raise ValueError("stopped")

    module, data = Stops(tiny_llama()), [loader(BATCHES[:2]), loader(BATCHES[2:])]
    trainer, expected = quiet_trainer(tmp_path), quiet_trainer(tmp_path)
    with pytest.raises(ValueError, match="stopped"):
        getattr(trainer, stage)(module, data, verbose=False)
    module.stops = False
    found = getattr(trainer, stage)(module, data, verbose=False)
    assert found == getattr(expected, stage)(FusedCausalLMModule(tiny_llama()), data, verbose=False)


def test_a_module_is_called_as_its_backbone_is():
    model, ids = tiny_llama(), BATCHES[0]["input_ids"]
    module = FusedCausalLMModule(model)
    assert torch.equal(module(input_ids=ids).logits, model(input_ids=ids).logits)
    assert torch.equal(module(ids).logits, model(ids).logits)


def test_optimizer_and_scheduler_may_be_instances_with_groups_of_ones_own(tmp_path):
    def groups(model: Any) -> list[dict[str, Any]]:
        head = [model.lm_head.weight]
        return [{"params": head, "lr": 0.1}, {"params": [p for p in model.parameters() if p is not head[0]]}]

    model, truth = tiny_llama().double(), tiny_llama().double()
    optimizer = torch.optim.SGD(groups(model), lr=0.3)
    module = FusedCausalLMModule(model, optimizer=optimizer, scheduler=StepLR(optimizer, 2, gamma=0.5))
    _, rates = fit(module, tmp_path, precision="64-true")
    assert rates == [[0.1, 0.3]] * 2 + [[0.05, 0.15]] * 2
    plain = torch.optim.SGD(groups(truth), lr=0.3)
    schedule = StepLR(plain, 2, gamma=0.5)
    for batch in BATCHES:
        logits = truth(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        plain.zero_grad()
        F.cross_entropy(logits, batch["labels"][:, 1:].flatten()).backward()
        plain.step()
        schedule.step()
    for (name, p), q in zip(model.named_parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("form", ["partial", "instance"])
def test_a_schedule_may_wait_for_a_plateau(form, tmp_path):
    model = tiny_llama()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3)
    plateau = partial(ReduceLROnPlateau, patience=0, threshold=0.99)  # Only the first loss is an improvement.
    if form == "partial":
        module = FusedCausalLMModule(model, optimizer=partial(torch.optim.SGD, lr=0.3), scheduler=plateau)  # type: ignore[arg-type]
    else:
        module = FusedCausalLMModule(model, optimizer=optimizer, scheduler=plateau(optimizer))
    trainer, rates = fit(module, tmp_path, epochs=3)
    assert [rate[0] for rate in rates[:: len(BATCHES)]] == pytest.approx([0.3, 0.3, 0.03])
    assert trainer.lr_scheduler_configs[0].monitor == "val/loss"


def test_an_optimizer_or_scheduler_of_other_parameters_is_refused(tmp_path):
    other = torch.optim.SGD(tiny_llama().parameters(), lr=0.3)
    with pytest.raises(UserError, match=r"SGD that was given has parameters that are not the module's.*partial"):
        fit(FusedCausalLMModule(tiny_llama(), optimizer=other), tmp_path)
    with pytest.raises(UserError, match="StepLR that was given is of another optimizer"):
        fit(FusedCausalLMModule(tiny_llama(), scheduler=StepLR(other, 1)), tmp_path)


@pytest.mark.parametrize("method", ["setup", "on_train_start"])
def test_a_hook_that_forgets_the_one_it_overrides_is_refused(method, tmp_path):
    forgetful = type("Forgetful", (FusedCausalLMModule,), {method: lambda self, *_, **__: None})
    with pytest.raises(UserError, match=rf"Forgetful.{method} must call super\(\).{method}\(...\)"):
        fit(forgetful(tiny_llama()), tmp_path)


ROWS: Any = [{name: value[0] for name, value in batch.items()} for batch in ragged_batches(8)]


def test_a_fit_announces_rows_that_ranks_repeat(tmp_path):
    repeating = DataLoader(ROWS[:5], sampler=DistributedSampler(ROWS[:5], 2, 0))
    module, trainer = FusedCausalLMModule(tiny_llama()), quiet_trainer(tmp_path, max_epochs=1)
    with pytest.warns(UserWarning, match="1 of 5 validation rows count twice in val/loss"):
        trainer.fit(module, loader(BATCHES), [loader(BATCHES), repeating])
    with pytest.warns(UserWarning, match="1 of 5 training rows count twice in every epoch"):
        quiet_trainer(tmp_path, max_epochs=1).fit(module, repeating)


@pytest.mark.filterwarnings("error:.*count twice")
def test_rows_that_ranks_share_equally_are_not_announced():
    equal = DataLoader(ROWS[:6], 2, sampler=DistributedSampler(ROWS[:6], 2, 0))
    warn_of_repeated_rows({"a": equal, "b": loader(BATCHES)}, "validation")
    warn_of_repeated_rows({"a": equal, "b": loader(BATCHES)}, "training")


class Noisy(nn.Module):
    """A backbone with dropout in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.dropout, self.head = nn.Embedding(61, 8), nn.Dropout(0.5), nn.Linear(8, 61)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.dropout(self.embedding(input_ids))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_sparse_gradients_of_an_embedding_train_as_dense_ones(accumulate, tmp_path):
    def trained(sparse: bool) -> nn.Module:
        backbone = Noisy().eval()
        backbone.embedding.sparse = sparse
        module = FusedCausalLMModule(backbone, optimizer=torch.optim.SGD(backbone.parameters(), 0.5))
        fit(module, tmp_path, accumulate_grad_batches=accumulate)
        return backbone

    for dense, sparse in zip(trained(False).parameters(), trained(True).parameters(), strict=True):
        torch.testing.assert_close(sparse, dense)


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_resumed_between_epochs_has_the_order_and_dropout_of_an_uninterrupted_one(workers, validates, tmp_path):
    def run(epochs: int, folder: str, seed: int, **options: Any) -> tuple[nn.Module, str]:
        L.seed_everything(seed, verbose=False)
        module = FusedCausalLMModule(Noisy(), optimizer=partial(torch.optim.SGD, lr=0.5))
        saver = ModelCheckpoint(tmp_path / folder, save_last=True)
        trainer = quiet_trainer(tmp_path, max_epochs=epochs, enable_checkpointing=True, callbacks=[saver])
        torch.manual_seed(seed)
        data = DataLoader(ROWS, 2, shuffle=True, num_workers=workers)
        trainer.fit(module, data, DataLoader(ROWS, 4) if validates else None, **options)
        return module.backbone, saver.last_model_path

    whole, _ = run(3, "whole", 1)
    _, checkpoint = run(2, "first", 1)
    resumed, _ = run(3, "second", 2, ckpt_path=checkpoint)
    for (name, p), q in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q), name
