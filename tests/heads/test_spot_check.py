"""The spot check: a slice of a batch through the model's own forward and loss, and through the fused loss."""

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from head_cases import live_bytes
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_helpers import loader, quiet_trainer, ragged_batches
from logits_changes import changed
from ranks import call
from tiny_models import (
    MODELS,
    ScaledInTraining,
    TinyBackbone,
    sharpen,
    tiny_backbone,
    tiny_batch,
    tiny_llama,
    tiny_model,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from lit_fused import (
    CrossEntropyLoss,
    FusedCausalLMModule,
    LanguageModel,
    LinearCrossEntropyLoss,
    ModelInternalLoss,
    UserError,
    fuse,
)
from lit_fused.filtered import Filtered
from lit_fused.ops import linear_cross_entropy

CPU = torch.device("cpu")


def forgets_the_softcap(
    hidden_states: Tensor, weight: Tensor, targets: Tensor, *, softcap: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """A backend that is wrong in a way that leaves its loss finite."""
    return linear_cross_entropy(hidden_states, weight, targets, bias=bias, reduction="sum")[0]


def half_the_loss(hidden_states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * linear_cross_entropy(hidden_states, weight, targets, reduction="sum")[0]


def prepared(backbone: nn.Module, loss: Any = None) -> LanguageModel:
    model = LanguageModel(backbone, loss or LinearCrossEntropyLoss())
    model.prepare(CPU)
    return model


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_loss_passes_in_every_precision(name, dtype):
    model = prepared(sharpen(tiny_model(name, dtype)))
    model.spot_check(tiny_batch())


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"impl": "torch_native"}, {"impl": Filtered(0.1)}]
)
def test_a_right_loss_with_options_or_another_backend_passes(options):
    prepared(sharpen(tiny_model("llama")), LinearCrossEntropyLoss(**options)).spot_check(tiny_batch())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_model_that_does_something_else_in_training_stops_the_run(precision, tmp_path):
    module = FusedCausalLMModule(sharpen(tiny_llama(ScaledInTraining)))
    trainer = quiet_trainer(tmp_path, max_steps=2, precision=precision)
    with pytest.raises(UserError, match="does something to its logits .*losses differ by"):
        trainer.fit(module, loader(ragged_batches(2, length=40)))
    assert trainer.global_step == 0


def test_the_check_can_be_turned_off(tmp_path):
    halves = LinearCrossEntropyLoss(lambda h, w, t: 0.5 * linear_cross_entropy(h, w, t, reduction="sum")[0])
    module = FusedCausalLMModule(sharpen(tiny_llama()), halves, check_every_n_steps=0)
    trainer = quiet_trainer(tmp_path, max_steps=2)
    trainer.fit(module, loader(ragged_batches(2)))
    assert trainer.global_step == 2


def test_the_check_makes_nothing_larger_than_the_weights_gradient():
    backbone = tiny_llama()
    backbone.resize_token_embeddings(2**17, mean_resizing=False)
    model = prepared(backbone)
    with live_bytes() as allocated:
        model.spot_check({name: value[:1, :8] for name, value in tiny_batch().items()})
    assert allocated.largest <= backbone.lm_head.weight.nbytes


def test_a_wrong_backend_is_found():
    model = prepared(sharpen(tiny_model("gemma2")), LinearCrossEntropyLoss(forgets_the_softcap))
    with pytest.raises(UserError, match="the fused loss is .*the backend is wrong"):
        model.spot_check(tiny_batch())


def test_a_plain_module_is_checked_against_the_formula_of_its_own_layer():
    prepared(tiny_backbone()).spot_check(tiny_batch())
    halves = LinearCrossEntropyLoss(lambda h, w, t, *, bias=None: 0.5 * linear_cross_entropy(h, w, t, bias=bias)[0])
    with pytest.raises(UserError, match="but logits in float64 give"):
        prepared(tiny_backbone(), halves).spot_check(tiny_batch())


@pytest.mark.parametrize("loss", [ModelInternalLoss(), lambda hidden_states, labels: hidden_states.mean()])
def test_a_loss_that_has_nothing_to_be_compared_with_is_not_checked(loss):
    calls = []
    backbone = tiny_llama()
    backbone.register_forward_hook(lambda *_: calls.append(1))
    LanguageModel(backbone, loss).spot_check(tiny_batch())
    assert not calls


def test_a_batch_without_any_valid_target_is_passed_over():
    batch = tiny_batch()
    prepared(tiny_model("llama")).spot_check(batch | {"labels": torch.full_like(batch["labels"], -100)})


class DropsOut(TinyBackbone):
    def forward(self, input_ids: Tensor) -> Any:
        return nn.functional.dropout(super().forward(input_ids), 0.5, self.training)


def test_the_check_runs_a_slice_and_leaves_gradients_and_random_numbers_as_they_were():
    backbone = tiny_model("llama")
    model = prepared(backbone)
    shapes: list[tuple[int, ...]] = []
    backbone.register_forward_hook(lambda _, __, output: shapes.append(tuple(output.logits.shape[:2])))
    model.spot_check(tiny_batch(40, 60))
    assert shapes[1] == (17, 60), "1024 tokens at most"
    model.spot_check(tiny_batch(2, 3000))
    assert shapes[2:] == [(1, 1), (2, 512)], "the fused pass has one row in place of logits"
    assert all(p.grad is None for p in model.parameters())

    model = prepared(tiny_backbone(DropsOut).train())
    before = torch.get_rng_state()
    model.spot_check(tiny_batch())
    assert torch.equal(torch.get_rng_state(), before)


class Changed(LlamaForCausalLM):
    """Changes its logits in training only."""

    change: Any = staticmethod(lambda logits: logits)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, **kwargs)
        if self.training:
            output.logits = self.change(output.logits)
        return output


CHANGES: dict[str, tuple[float, Any]] = {  # an offset that all logits of a row share, and the change
    "scale 1 / 1.1": (0, lambda x: x / 1.1),
    "scale 1 / 1.25": (0, lambda x: x / 1.25),
    "scale 1 / 1.5, offset 41": (41, lambda x: x / 1.5),
    "softcap 15": (0, lambda x: 15 * torch.tanh(x / 15)),
    "softcap 15, offset 142": (142, lambda x: 15 * torch.tanh(x / 15)),
    "rounded scale": (41, lambda x: (x.bfloat16() / 1.25).bfloat16()),
}


@pytest.fixture(scope="module")
def trained() -> LlamaForCausalLM:
    """A model that has learned a batch: its loss is far from that of a fresh one."""
    model, batch = tiny_llama(Changed), tiny_batch()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(14):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    assert 1 < model(**batch).loss.item() < 3
    return model


def with_offset(model: LlamaForCausalLM, offset: float) -> LlamaForCausalLM:
    model = copy.deepcopy(model)
    hidden: Any = model.model(tiny_batch()["input_ids"]).last_hidden_state
    mean = hidden.detach().flatten(0, 1).mean(0)
    with torch.no_grad():
        model.lm_head.weight += offset * mean / mean.square().sum()
    return model


@pytest.mark.parametrize("change", CHANGES)
def test_bfloat16_hides_no_change_of_a_trained_models_logits(trained, change):
    offset, function = CHANGES[change]
    model = prepared(with_offset(trained, offset))
    model.own_loss_differs = True  # It is that of the logits before the change.
    with torch.autocast("cpu", torch.bfloat16):
        model.spot_check(tiny_batch())
        model.backbone.change = function  # type: ignore[assignment]
        with pytest.raises(UserError, match="does something to its logits"):
            model.spot_check(tiny_batch())


@pytest.mark.parametrize("offset", [0, 41, 142])
def test_bfloat16_refuses_no_right_model(trained, offset):
    model = with_offset(trained, offset)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            weight.data += 0.03 * torch.randn(weight.shape, generator=generator) * weight.data.std(correction=0)
        batch = {name: ids.roll(seed, 1) for name, ids in tiny_batch().items()}
        with torch.autocast("cpu", torch.bfloat16):
            prepared(model).spot_check(batch)


def test_a_first_batch_without_labels_leaves_the_check_to_the_next(tmp_path):
    batches = ragged_batches(2, length=40)
    batches[0]["labels"] = torch.full_like(batches[0]["labels"], -100)
    trainer = quiet_trainer(tmp_path, max_steps=2)
    with pytest.raises(UserError, match="the backend is wrong"):
        trainer.fit(FusedCausalLMModule(tiny_llama(), LinearCrossEntropyLoss(half_the_loss)), loader(batches))
    assert trainer.global_step == 1


def test_the_first_batch_of_an_evaluation_is_checked(tmp_path):
    module = FusedCausalLMModule(tiny_llama(), LinearCrossEntropyLoss(half_the_loss))
    with pytest.raises(UserError, match="the backend is wrong"):
        quiet_trainer(tmp_path).validate(module, loader(ragged_batches(1)))


class HalfTheWeight(LlamaForCausalLM):
    """Calls its head with another weight, once it is told to."""

    on = True

    def forward(self, input_ids: Any = None, labels: Any = None, **_: Any) -> Any:  # type: ignore[override]
        hidden: Any = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        half = {"weight": self.lm_head.weight * 0.5}
        x = functional_call(self.lm_head, half, (hidden,)) if self.on and self.training else self.lm_head(hidden)
        loss = None if labels is None else self.loss_function(logits=x, labels=labels, vocab_size=97)
        return CausalLMOutputWithPast(loss=loss, logits=x)


class Anneals(L.Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.at:
            pl_module.backbone.on = True


def test_a_change_in_training_is_found_at_the_next_of_the_steps_that_are_checked(tmp_path):
    module = FusedCausalLMModule(sharpen(tiny_llama(HalfTheWeight)).train(), check_every_n_steps=3)
    module.backbone.on = False  # type: ignore[assignment]
    trainer = quiet_trainer(tmp_path, max_steps=9, callbacks=[Anneals(4)], accumulate_grad_batches=2)
    with pytest.raises(UserError, match="HalfTheWeight does something to its logits"):
        trainer.fit(module, DataLoader([tiny_batch()] * 18, batch_size=None))  # type: ignore[arg-type]
    assert trainer.global_step == 5  # in the sixth


def test_fuse_checks_the_first_call_of_training_every_nth_and_the_first_of_each_evaluation():
    model: Any = fuse(sharpen(tiny_llama(HalfTheWeight)).train(), check_every_n_steps=3)
    model.on = False
    batch = tiny_batch()
    model(**batch)
    model.on = True
    model(**batch)
    model.eval()
    with torch.no_grad():
        model(**batch)
    model.train()
    model(**batch)
    with pytest.raises(UserError, match=r"its logits .*train this model unfused"):
        model(**batch)
    never: Any = fuse(sharpen(tiny_llama(HalfTheWeight)).train(), check_every_n_steps=0)
    never(**batch)


LOADED = {
    "a bias": (lambda m, x, _: x + m.state, torch.zeros(97), torch.linspace(-3, 3, 97)),
    "a frozen bias": (lambda m, x, _: x + m.state, nn.Parameter(torch.zeros(97), False), torch.linspace(-3, 3, 97)),
}


@pytest.mark.parametrize("name", LOADED)
def test_a_checkpoint_is_evaluated_with_its_own_numbers_behind_the_head(name, tmp_path):
    f, fresh, saved = LOADED[name]
    values, batches = [], loader(ragged_batches(3))
    for loss in (LinearCrossEntropyLoss(), CrossEntropyLoss()):
        module, trainer = FusedCausalLMModule(changed(f, state=fresh), loss), quiet_trainer(tmp_path)
        weights = module.state_dict() | {"model.backbone.state": saved}
        weights["model.backbone.lm_head.weight"] = 3 * weights["model.backbone.lm_head.weight"]
        torch.save({"state_dict": weights, "pytorch-lightning_version": L.__version__}, tmp_path / "x.ckpt")
        [first] = trainer.validate(module, batches, ckpt_path=tmp_path / "x.ckpt", verbose=False)
        predicted = trainer.predict(module, batches, ckpt_path=tmp_path / "x.ckpt")
        assert predicted is not None
        values.append([first["val/loss"], *(p["log_likelihood"].sum().item() for p in predicted)])  # type: ignore[index]
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def test_what_is_done_to_the_logits_in_evaluation_alone_is_refused_with_its_first_batch(tmp_path):
    module = FusedCausalLMModule(changed(lambda m, x, _: x if m.training else x * (1 + (x.shape[1] > 8))))
    trainer = quiet_trainer(tmp_path)
    for evaluate in (trainer.validate, trainer.test):
        with pytest.raises(UserError, match="Changed does something to its logits"):
            evaluate(module, loader(ragged_batches(1)))


def refused_on_both_ranks(rank: int, folder: Path, strategy: str) -> None:
    backbone: Any = sharpen(tiny_llama(HalfTheWeight)).train()
    backbone.on = False
    module = FusedCausalLMModule(backbone, check_every_n_steps=2)
    # Ranks that compute each token together have the same model.
    changes = [Anneals(1)] if rank == 1 or strategy == "tp" else []
    sizes = {"fsdp2": (2, 1), "tp": (1, 2)}.get(strategy)
    placed = ModelParallelStrategy(*sizes) if sizes else strategy
    trainer = quiet_trainer(folder, devices=2, strategy=placed, max_steps=5, callbacks=changes)
    with pytest.raises(UserError, match="HalfTheWeight does something to its logits|has found a difference on rank 1"):
        trainer.fit(module, DataLoader([tiny_batch(2)] * 12, batch_size=None))  # type: ignore[arg-type]
    assert trainer.global_step == 1  # in the second


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "tp"])
def test_a_fault_of_one_rank_stops_all_ranks(strategy, tmp_path):
    call(refused_on_both_ranks, 2, tmp_path, strategy, timeout=120)


@pytest.mark.gpu
def test_the_host_waits_for_a_gpu_in_no_step_that_is_not_checked():
    model = prepared(nn.Module.to(tiny_model("llama"), "cuda"))
    batch = {name: value.to("cuda") for name, value in tiny_batch().items()}
    model(batch).loss.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(batch).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
