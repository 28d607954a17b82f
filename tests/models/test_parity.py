"""The first batch's check: the loss that trains against logits in float64, in the precision of the run."""

import copy
from typing import Any

import pytest
import torch
from lightning_helpers import loader, quiet_trainer, ragged_batches
from tiny_models import (
    MODELS,
    WIDTH,
    ScaledInTraining,
    TinyBackbone,
    sharpen,
    tiny_backbone,
    tiny_batch,
    tiny_llama,
    tiny_model,
)
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from lit_fused import CrossEntropyLoss, FusedCausalLMModule, LanguageModel, LinearCrossEntropyLoss, UserError
from lit_fused.heads import OutputHead
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
    "options", [{"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"impl": "torch_native"}, {"filter_eps": 0.1}]
)
def test_a_right_loss_with_options_or_another_backend_passes(options):
    prepared(sharpen(tiny_model("llama")), LinearCrossEntropyLoss(**options)).spot_check(tiny_batch())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_model_that_does_something_else_in_training_stops_the_run(precision, tmp_path):
    module = FusedCausalLMModule(sharpen(tiny_llama(ScaledInTraining)))
    trainer = quiet_trainer(tmp_path, max_steps=2, precision=precision)
    with pytest.raises(UserError, match="does something to its logits .*a temperature, cap, mask or hook has changed"):
        trainer.fit(module, loader(ragged_batches(2, length=40)))
    assert trainer.global_step == 0


def test_the_check_can_be_turned_off(tmp_path):
    halves = LinearCrossEntropyLoss(lambda h, w, t: 0.5 * linear_cross_entropy(h, w, t, reduction="sum")[0])
    module = FusedCausalLMModule(sharpen(tiny_llama()), halves, check_every_n_steps=0)
    trainer = quiet_trainer(tmp_path, max_steps=2)
    trainer.fit(module, loader(ragged_batches(2)))
    assert trainer.global_step == 2


def test_a_wrong_backend_is_found():
    model = prepared(sharpen(tiny_model("gemma2")), LinearCrossEntropyLoss(forgets_the_softcap))
    with pytest.raises(UserError, match="loss=forgets_the_softcap is .*the backend is wrong"):
        model.spot_check(tiny_batch())


def test_a_plain_module_is_checked_against_the_formula_of_its_own_layer():
    prepared(tiny_backbone()).spot_check(tiny_batch())
    halves = LinearCrossEntropyLoss(lambda h, w, t, *, bias=None: 0.5 * linear_cross_entropy(h, w, t, bias=bias)[0])
    with pytest.raises(UserError, match="the logits in float64 give"):
        prepared(tiny_backbone(), halves).spot_check(tiny_batch())


@pytest.mark.parametrize("loss", [CrossEntropyLoss(), lambda hidden_states, labels: hidden_states.mean()])
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


def test_the_check_is_one_forward_pass_that_builds_few_logits_and_uses_up_no_random_number():
    backbone = tiny_model("llama")
    model = prepared(backbone)
    strides: list[int] = []
    backbone.register_forward_hook(lambda _, __, output: strides.append(output.logits.same.stride(-1)))
    model.spot_check(tiny_batch(10, 60))
    assert strides == [0], "the memory of one column"
    assert all(p.grad is None for p in model.parameters())

    model = prepared(tiny_backbone(DropsOut).train())
    assert model.backbone.get_submodule("head").in_features == WIDTH
    before = torch.get_rng_state()
    model.spot_check(tiny_batch())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_with_the_check_is_bit_for_bit_the_run_without(tmp_path):
    weights = []
    for every in (1, 0):
        module = FusedCausalLMModule(tiny_model("llama"), check_every_n_steps=every)
        quiet_trainer(tmp_path, max_steps=3).fit(module, loader(ragged_batches(3)))
        weights.append(nn.utils.parameters_to_vector(module.parameters()))
    assert torch.equal(*weights)


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
