"""The first batch's check: the loss that trains against the model's own logits, in the precision of the run."""

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

from lit_fused import CrossEntropyLoss, FusedCausalLMModule, LanguageModel, LinearCrossEntropyLoss, UserError
from lit_fused.ops import linear_cross_entropy

CPU = torch.device("cpu")


def forgets_the_softcap(
    hidden_states: Tensor, weight: Tensor, targets: Tensor, *, softcap: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """A backend that is wrong in a way that leaves its loss finite."""
    return linear_cross_entropy(hidden_states, weight, targets, bias=bias, reduction="sum")[0]


def prepared(backbone: nn.Module, loss: Any = None) -> LanguageModel:
    model = LanguageModel(backbone, loss or LinearCrossEntropyLoss())
    model.prepare(CPU)
    return model


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_loss_passes_in_every_precision(name, dtype):
    model = prepared(sharpen(tiny_model(name, dtype)))
    model.check_parity(tiny_batch())


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"impl": "torch_native"}, {"filter_eps": 0.1}]
)
def test_a_right_loss_with_options_or_another_backend_passes(options):
    prepared(sharpen(tiny_model("llama")), LinearCrossEntropyLoss(**options)).check_parity(tiny_batch())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_model_that_does_something_else_in_training_stops_the_run_with_both_numbers(precision, tmp_path):
    module = FusedCausalLMModule(sharpen(tiny_llama(ScaledInTraining)))
    trainer = quiet_trainer(tmp_path, max_steps=2, precision=precision)
    with pytest.raises(UserError, match=r"loss=chunked is [\d.]+ for 64 tokens .*own logits give [\d.]+; .*differ by"):
        trainer.fit(module, loader(ragged_batches(2, length=40)))
    assert trainer.global_step == 0


def test_the_check_can_be_turned_off(tmp_path):
    halves = LinearCrossEntropyLoss(lambda h, w, t: 0.5 * linear_cross_entropy(h, w, t, reduction="sum")[0])
    module = FusedCausalLMModule(sharpen(tiny_llama()), halves, parity_check=False)
    trainer = quiet_trainer(tmp_path, max_steps=2)
    trainer.fit(module, loader(ragged_batches(2)))
    assert trainer.global_step == 2


def test_a_wrong_backend_is_found():
    model = prepared(sharpen(tiny_model("gemma2")), LinearCrossEntropyLoss(forgets_the_softcap))
    with pytest.raises(UserError, match="loss=forgets_the_softcap is .*the backend is wrong"):
        model.check_parity(tiny_batch())


def test_a_plain_module_is_checked_against_the_formula_of_its_own_layer():
    prepared(tiny_backbone()).check_parity(tiny_batch())
    halves = LinearCrossEntropyLoss(lambda h, w, t, *, bias=None: 0.5 * linear_cross_entropy(h, w, t, bias=bias)[0])
    with pytest.raises(UserError, match="the model's own logits give"):
        prepared(tiny_backbone(), halves).check_parity(tiny_batch())


@pytest.mark.parametrize("loss", [CrossEntropyLoss(), lambda hidden_states, labels: hidden_states.mean()])
def test_a_loss_that_has_nothing_to_be_compared_with_is_not_checked(loss):
    calls = []
    backbone = tiny_llama()
    backbone.register_forward_hook(lambda *_: calls.append(1))
    LanguageModel(backbone, loss).check_parity(tiny_batch())
    assert not calls


def test_a_batch_without_any_valid_target_is_passed_over():
    batch = tiny_batch()
    prepared(tiny_model("llama")).check_parity(batch | {"labels": torch.full_like(batch["labels"], -100)})


class DropsOut(TinyBackbone):
    def forward(self, input_ids: Tensor) -> Any:
        return nn.functional.dropout(super().forward(input_ids), 0.5, self.training)


def test_the_check_is_one_forward_pass_that_builds_few_logits_and_uses_up_no_random_number():
    backbone = tiny_model("llama")
    model = prepared(backbone)
    widths: list[torch.Size] = []
    backbone.register_forward_hook(lambda _, __, output: widths.append(output.logits.shape))
    model.check_parity(tiny_batch(10, 60))
    assert widths == [(1, 64, 97)]
    assert all(p.grad is None for p in model.parameters())

    model = prepared(tiny_backbone(DropsOut).train())
    assert model.backbone.get_submodule("head").in_features == WIDTH
    before = torch.get_rng_state()
    model.check_parity(tiny_batch())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_with_the_check_is_bit_for_bit_the_run_without(tmp_path):
    weights = []
    for parity_check in (True, False):
        module = FusedCausalLMModule(tiny_model("llama"), parity_check=parity_check)
        quiet_trainer(tmp_path, max_steps=3).fit(module, loader(ragged_batches(3)))
        weights.append(nn.utils.parameters_to_vector(module.parameters()))
    assert torch.equal(*weights)
