"""The LightningModule: token-exact steps, metrics from sums, checkpoints, generation, export, and what it refuses."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from errors_of import relative_error
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_helpers import VOCABULARY, loader, quiet_trainer, ragged_batches, tiny_llama
from tiny_models import tiny_model
from torch import Tensor, nn
from transformers import MambaConfig, MambaForCausalLM, get_constant_schedule

from lit_fused import (
    CrossEntropyLoss,
    FusedCausalLMModule,
    LinearCrossEntropyLoss,
    ModelInternalLoss,
    UserError,
    filtered,
)
from lit_fused.losses import Loss
from lit_fused.training.optimizers import weight_decay_groups


class Spy(FusedCausalLMModule):
    """Keeps the gradients and the gradient norm that each optimiser step would apply, and what was logged for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[dict[str, Tensor]] = []
        self.norms: list[float] = []
        self.logged: list[dict[str, float]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = {n: p.grad.clone() for n, p in self.model.backbone.named_parameters() if p.grad is not None}
        self.steps.append(gradients)
        self.norms.append(math.sqrt(sum(g.double().square().sum().item() for g in gradients.values())))

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        if not self.trainer.fit_loop._should_accumulate():
            self.logged.append({k: v.item() for k, v in self.trainer.callback_metrics.items()})


def fit(module: L.LightningModule, batches: list[dict[str, Tensor]], folder: Path, **options: Any) -> L.Trainer:
    trainer = quiet_trainer(folder, max_epochs=1, precision="64-true", **options)
    trainer.fit(module, loader(batches))
    return trainer


def test_a_subclass_may_change_the_loss_and_log_beside_it(tmp_path):
    class Doubled(Spy):
        def compute_loss(self, batch):
            output = super().compute_loss(batch)
            output.loss_sum = 2 * output.loss_sum
            return output

        def training_step(self, batch, batch_idx):
            self.log("own/length", float(batch["input_ids"].shape[1]))
            return super().training_step(batch, batch_idx)

    plain, doubled = Spy(tiny_llama()), Doubled(tiny_llama())
    for module in (plain, doubled):
        fit(module, ragged_batches(2), tmp_path, accumulate_grad_batches=2)
    twice = {name: 2 * gradient for name, gradient in plain.steps[0].items()}
    assert relative_error(doubled.steps[0], twice) < 1e-12
    assert doubled.logged[0]["own/length"] == 12


def test_validation_metrics_are_those_of_all_tokens_at_once(tmp_path):
    batches = ragged_batches(5)
    model = tiny_llama().double()
    ids, labels = (torch.cat([b[name] for b in batches]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    targets = labels[:, 1:].flatten()
    valid = targets != -100
    p = logits[valid].softmax(-1)
    expected = {
        "val/loss": F.cross_entropy(logits, targets).item(),
        "val/perplexity": F.cross_entropy(logits, targets).exp().item(),
        "val/accuracy": (logits.argmax(-1) == targets)[valid].double().mean().item(),
        "val/entropy": -(p * p.log()).sum(-1).mean().item(),
        "val/z": logits[valid].logsumexp(-1).square().mean().item(),
    }
    trainer = quiet_trainer(tmp_path, precision="64-true")
    found = trainer.validate(FusedCausalLMModule(model), loader(batches), verbose=False)[0]
    assert found == pytest.approx(expected, rel=1e-6)

    found = trainer.test(FusedCausalLMModule(model), loader(batches), verbose=False)[0]
    assert found == pytest.approx({k.replace("val", "test"): v for k, v in expected.items()}, rel=1e-6)


@pytest.mark.parametrize("loss", [LinearCrossEntropyLoss, CrossEntropyLoss])
def test_validation_compares_losses_by_the_cross_entropy_and_logs_what_is_added_by_names_of_its_own(loss, tmp_path):
    batches, options = ragged_batches(3), {"label_smoothing": 0.3, "z_loss": 1e-2}

    def measured(**added: float) -> tuple[float, Mapping[str, float]]:
        module, trainer = FusedCausalLMModule(tiny_llama(), loss(**added)), quiet_trainer(tmp_path)
        [found] = trainer.validate(module, loader(batches), verbose=False)
        with torch.no_grad():
            outputs = [module.model.loss.compute(module.model, batch) for batch in batches]
        return float(sum(o.loss_sum for o in outputs) / sum(o.num_tokens for o in outputs)), found

    _, plain = measured()
    trained, found = measured(**options)
    assert found["val/loss"] == pytest.approx(plain["val/loss"], rel=1e-6)
    assert found["val/perplexity"] == pytest.approx(math.exp(found["val/loss"]), rel=1e-5)
    assert found["val/smoothed_loss"] + found["val/z_loss"] == pytest.approx(trained, rel=1e-5)
    assert found["val/z_loss"] == pytest.approx(1e-2 * found["val/z"], rel=1e-5)


def unlabelled(count: int) -> list[dict[str, Tensor]]:
    return [batch | {"labels": torch.full_like(batch["labels"], -100)} for batch in ragged_batches(count)]


def warnings_of_no_label(caught: Any) -> list[str]:
    return [str(warning.message) for warning in caught if "no label was counted" in str(warning.message)]


@pytest.mark.parametrize("loss", [LinearCrossEntropyLoss, CrossEntropyLoss, ModelInternalLoss])
def test_a_validation_without_labels_has_no_number_and_one_warning(loss, tmp_path):
    module, trainer = FusedCausalLMModule(tiny_llama(), loss()), quiet_trainer(tmp_path)
    with pytest.warns(UserWarning, match="the metrics of val are NaN: no label was counted") as caught:
        [found] = trainer.validate(module, loader(unlabelled(2)), verbose=False)
    assert len(warnings_of_no_label(caught)) == 1
    assert found.keys() >= {"val/loss", "val/perplexity"}
    assert all(math.isnan(value) for value in found.values())


def test_a_set_without_labels_among_others_is_named(tmp_path):
    module, trainer = FusedCausalLMModule(tiny_llama()), quiet_trainer(tmp_path)
    loaders = {"web": loader(ragged_batches(2)), "code": loader(unlabelled(2))}
    with pytest.warns(UserWarning, match="the metrics of val/code are NaN"):
        found = {k: v for row in trainer.validate(module, loaders, verbose=False) for k, v in row.items()}
    assert math.isnan(found["val/loss/code"])
    assert found["val/loss"] == pytest.approx(found["val/loss/web"])


def test_the_best_checkpoint_is_never_that_of_a_validation_without_labels(tmp_path):
    class NoneAtFirst(FusedCausalLMModule):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int | None = 0) -> None:
            labels = batch["labels"] if self.current_epoch else torch.full_like(batch["labels"], -100)
            super().validation_step(batch | {"labels": labels}, batch_idx, dataloader_idx)

    best = ModelCheckpoint(tmp_path, monitor="val/loss", filename="{epoch}")
    trainer = quiet_trainer(tmp_path, max_epochs=2, enable_checkpointing=True, callbacks=[best])
    trainer.fit(NoneAtFirst(tiny_llama()), loader(ragged_batches(2)), loader(ragged_batches(2)))
    assert Path(best.best_model_path).name == "epoch=1.ckpt"
    assert best.best_model_score is not None
    assert best.best_model_score > 0


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_step_without_labels_logs_no_number_and_moves_no_weight(accumulated, tmp_path):
    module = Spy(tiny_llama(), None, partial(torch.optim.SGD, lr=1.0))
    before = {name: p.double() for name, p in module.named_parameters()}
    with pytest.warns(UserWarning, match="the fit has trained nothing: no label was counted") as caught:
        fit(module, unlabelled(4), tmp_path, accumulate_grad_batches=accumulated)
    assert len(warnings_of_no_label(caught)) == 1
    assert len(module.logged) == 4 // accumulated
    for logged in module.logged:
        assert math.isnan(logged["train/loss"])
        assert math.isnan(logged["train/perplexity"])
    assert module.norms == [0.0] * (4 // accumulated)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


@pytest.mark.filterwarnings("error:.*no label was counted")
def test_a_fit_with_a_label_somewhere_is_no_fit_without_labels(tmp_path):
    fit(FusedCausalLMModule(tiny_llama()), [*unlabelled(2), *ragged_batches(1)], tmp_path)


def masked_mean(logits: Tensor, targets: Tensor) -> Tensor:
    losses, valid = F.cross_entropy(logits, targets.clamp(min=0), reduction="none"), targets != -100
    return (losses * valid).sum() / valid.sum().clamp(min=1)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("mean", [masked_mean, F.cross_entropy])
def test_a_loss_functions_mean_over_no_labels_is_not_counted(mean, accumulated, tmp_path):
    def module() -> Spy:
        def own_loss(hidden: Tensor, labels: Tensor) -> Tensor:
            return mean(model.lm_head(hidden[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())

        model = tiny_llama()
        return Spy(model, own_loss, partial(torch.optim.SGD, lr=0.1))

    labelled, ours, theirs = ragged_batches(2), module(), module()
    batches = [b for batch in labelled for b in (batch, batch | {"labels": torch.full_like(batch["labels"], -100)})]
    fit(ours, batches, tmp_path, accumulate_grad_batches=accumulated)
    fit(theirs, labelled, tmp_path)
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))
    found = [quiet_trainer(tmp_path).validate(ours, loader(each), verbose=False)[0] for each in (batches, labelled)]
    assert found[0] == found[1]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-true"])
@pytest.mark.parametrize(
    "loss",
    [
        LinearCrossEntropyLoss,
        lambda: LinearCrossEntropyLoss(filtered.Filtered(0.02)),
        CrossEntropyLoss,
        ModelInternalLoss,
    ],
    ids=["chunked", "filtered", "standard", "model"],
)
def test_every_kind_of_loss_trains_in_lower_precision(loss, precision, tmp_path):
    batches = [b for b in ragged_batches(5) if (b["labels"][:, 1:] != -100).any()]
    module = Spy(tiny_llama(), loss(), partial(torch.optim.SGD, lr=0.3), get_constant_schedule)
    trainer = quiet_trainer(tmp_path, max_epochs=6, precision=precision)
    trainer.fit(module, loader(batches))
    losses = [logged["train/loss"] for logged in module.logged]
    assert all(math.isfinite(value) for value in losses)
    assert sum(losses[-4:]) < 0.95 * sum(losses[:4])


def undecayed(backbone: nn.Module, **options: Any) -> set[str]:
    """The names of the parameters without weight decay."""
    module = FusedCausalLMModule(backbone, **options)
    decaying, plain = weight_decay_groups(module.model, module.no_decay)
    names = {id(p): n.removeprefix("model.backbone.") for n, p in module.named_parameters()}
    assert len(plain["params"]) + len(decaying["params"]) == len(names)
    assert plain["weight_decay"] == 0.0
    return {names[id(p)] for p in plain["params"]}


def test_weights_decay_and_gains_and_biases_and_embeddings_do_not():
    model = tiny_llama(attention_bias=True)
    always = {name for name, _ in model.named_parameters() if "norm" in name or "bias" in name}
    assert undecayed(model) == always | {"model.embed_tokens.weight"}
    assert undecayed(model, no_decay=()) == always
    assert undecayed(model, no_decay=["lm_head"]) == always | {"lm_head.weight"}
    assert undecayed(model, no_decay=["layers.0.mlp"]) == always | {
        f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")
    }
    assert "transformer.wte.weight" in undecayed(tiny_model("gpt2"))  # by its class
    with pytest.raises(UserError, match="no_decay=lm_hed: no parameter has that in its name.*there are .*lm_head"):
        FusedCausalLMModule(model, no_decay=["embed", "lm_hed"])


def test_the_decay_rates_of_mamba_do_not_decay():
    config = MambaConfig(vocab_size=97, hidden_size=16, state_size=4, num_hidden_layers=2, tie_word_embeddings=False)
    model = MambaForCausalLM(config)
    found = undecayed(model)
    assert {name for name, p in model.named_parameters() if p.ndim > 1} & found == {
        "backbone.embeddings.weight",
        *(f"backbone.layers.{layer}.mixer.A_log" for layer in (0, 1)),
    }


def checkpointed(folder: Path, **options: Any) -> L.Trainer:
    callbacks = [ModelCheckpoint(folder, save_last=True, every_n_train_steps=2, save_top_k=0)]
    return quiet_trainer(folder, enable_checkpointing=True, callbacks=callbacks, **options)


def test_a_checkpoint_holds_hugging_face_names_under_one_prefix(tmp_path):
    checkpointed(tmp_path, max_steps=2).fit(FusedCausalLMModule(tiny_llama()), loader(ragged_batches(2)))
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert {name.removeprefix("model.backbone.") for name in state} == set(tiny_llama().state_dict())


def test_a_checkpoint_of_another_model_is_refused_and_kept(tmp_path):
    checkpointed(tmp_path, max_steps=2).fit(FusedCausalLMModule(tiny_llama()), loader(ragged_batches(2)))
    before = (tmp_path / "last.ckpt").read_bytes()
    other = FusedCausalLMModule(tiny_llama(hidden_size=32))
    with pytest.raises(UserError, match=r"checkpoint is of another model: \d+ weights differ .*16.* there, .*32"):
        checkpointed(tmp_path, max_steps=4).fit(other, loader(ragged_batches(2)), ckpt_path=tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt").read_bytes() == before


@pytest.mark.parametrize("loss", [LinearCrossEntropyLoss(), CrossEntropyLoss(), ModelInternalLoss()])
def test_predict_scores_each_sequence_whatever_the_loss(loss: Loss, tmp_path):
    model, batch = tiny_llama().eval(), ragged_batches(2)[1]
    with torch.no_grad():
        log_p = model(input_ids=batch["input_ids"]).logits[:, :-1].log_softmax(-1)
    targets = batch["labels"][:, 1:]
    expected = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0].where(targets != -100, 0).sum(-1)
    predicted: Any = quiet_trainer(tmp_path).predict(FusedCausalLMModule(model, loss), loader([batch]))
    [scores] = predicted
    torch.testing.assert_close(scores["log_likelihood"], expected)
    assert scores["num_tokens"].tolist() == (targets != -100).sum(-1).tolist()


class Plain(nn.Module):
    """A backbone that is no transformers model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids)


def test_a_plain_module_trains_and_says_what_only_transformers_models_can_do(tmp_path):
    module = Spy(Plain(), optimizer=partial(torch.optim.AdamW, lr=0.1), scheduler=get_constant_schedule)
    quiet_trainer(tmp_path, max_steps=10).fit(module, loader(ragged_batches(5)))
    assert module.logged[5]["train/loss"] < module.logged[0]["train/loss"]
    with pytest.raises(UserError, match="Plain is not a transformers model and cannot generate text"):
        module.generate(torch.tensor([[1]]))
    with pytest.raises(UserError, match="Plain is not a transformers model and cannot be saved"):
        module.save_pretrained(tmp_path / "x")


class Words(L.LightningDataModule):
    """A datamodule whose tokenizer has more entries than the tiny model."""

    tokenizer = range(VOCABULARY + 1)

    def train_dataloader(self):
        return loader(ragged_batches(1))


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_at_set_up(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer has 62 entries but the model's vocabulary only 61; .*vocab_size"):
        quiet_trainer(tmp_path, max_steps=1).fit(FusedCausalLMModule(tiny_llama()), datamodule=Words())


def test_a_strategy_that_is_not_exact_yet_is_refused_at_set_up(tmp_path, monkeypatch):
    trainer = quiet_trainer(tmp_path, max_steps=1)
    monkeypatch.setattr("lit_fused.parallel._CLASSES", ())
    with pytest.raises(UserError, match="SingleDeviceStrategy is not supported.*choose strategy=auto, ddp, fsdp2"):
        trainer.fit(FusedCausalLMModule(tiny_llama()), loader(ragged_batches(1)))
