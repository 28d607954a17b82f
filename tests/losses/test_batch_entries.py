"""Entries of a batch beside tokens and labels change the loss as they say, or are refused."""

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors_of import relative_error
from lightning_helpers import loader, quiet_trainer
from preference_cases import batches_of
from strategy_cases import TRAINED, rollouts, stored_scores
from tiny_models import tiny_batch, tiny_llama, tiny_model
from torch import Tensor, nn

from lit_fused import FusedCausalLMModule, LanguageModel, LinearCrossEntropyLoss, UserError
from lit_fused.losses import CrossEntropyLoss, Loss, ModelInternalLoss
from lit_fused.models.masked_language_model import MaskedLanguageModel

BATCH = tiny_batch()
WEIGHTS = torch.rand(BATCH["labels"].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def weighted_mean(backbone: Any, batch: dict[str, Tensor], weights: Tensor, smoothing: float = 0.0) -> Tensor:
    """The definition: each label's loss times its weight, divided by the weights of the labels that count."""
    logits, labels = backbone(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", label_smoothing=smoothing)
    return (losses * weights[:, 1:]).sum() / (weights[:, 1:] * (labels != -100)).sum()


def gradients_of(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return dict(zip(parameters, torch.autograd.grad(loss, [*parameters.values()]), strict=True))


@pytest.mark.parametrize("kind", [LinearCrossEntropyLoss, CrossEntropyLoss])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weights_are_factors_of_the_labels_losses_and_the_mean_is_over_their_sum(kind, smoothing):
    backbone = tiny_llama().double()
    expected = weighted_mean(backbone, BATCH, WEIGHTS, smoothing)
    truth = gradients_of(expected, backbone)
    model = LanguageModel(backbone, kind(label_smoothing=smoothing))
    loss = model(BATCH | {"token_weights": WEIGHTS}).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert relative_error(gradients_of(loss, backbone), truth) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int16, torch.bool])
@pytest.mark.parametrize("kind", [LinearCrossEntropyLoss, CrossEntropyLoss])
def test_weights_of_any_dtype_are_summed_as_they_are(kind, dtype):
    """A sum in bfloat16 has eight binary digits."""
    weights = (100 * WEIGHTS).to(dtype)
    expected = weighted_mean(tiny_llama().double(), BATCH, weights.double())
    loss = LanguageModel(tiny_llama().double(), kind())(BATCH | {"token_weights": weights}).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_weights_of_shifted_labels_and_of_masked_tokens_are_not_shifted():
    ids, targets = BATCH["input_ids"], F.pad(BATCH["labels"][:, 1:], (0, 1), value=-100)
    shifted = {"input_ids": ids, "shift_labels": targets, "token_weights": F.pad(WEIGHTS[:, 1:], (0, 1))}
    loss = LanguageModel(tiny_llama().double(), LinearCrossEntropyLoss())(shifted).loss
    assert loss.item() == pytest.approx(weighted_mean(tiny_llama().double(), BATCH, WEIGHTS).item(), rel=1e-12)

    bert = tiny_model("bert").double()
    labels = ids.where(WEIGHTS > 0.5, -100)
    masked = {"input_ids": ids.where(labels == -100, 3), "labels": labels, "token_weights": WEIGHTS}
    losses = F.cross_entropy(bert(input_ids=masked["input_ids"]).logits.transpose(1, 2), labels, reduction="none")
    expected = (losses * WEIGHTS).sum() / WEIGHTS[labels != -100].sum()
    loss = MaskedLanguageModel(bert, LinearCrossEntropyLoss())(masked).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (WEIGHTS.where(WEIGHTS > 0.5, torch.nan), "token_weights must be finite and not negative"),
        (-WEIGHTS, "token_weights must be finite and not negative"),
        (WEIGHTS[:, 1:], "token_weights"),
    ],
)
def test_weights_that_are_none_are_refused(weights, words):
    with pytest.raises(UserError, match=words):
        LanguageModel(tiny_llama().double(), LinearCrossEntropyLoss())(BATCH | {"token_weights": weights})


OF_OTHER_LOSSES = {
    "desirable": lambda: batches_of("dpo", "model")[0],
    "reward": lambda: rollouts()[0],
    "teacher_entries": lambda: BATCH | stored_scores(tiny_model("qwen3"), BATCH, 5),
    "teacher_hidden_states": lambda: BATCH | {"teacher_hidden_states": torch.zeros(*BATCH["labels"].shape, 8)},
}


@pytest.mark.parametrize("loss", [LinearCrossEntropyLoss(), CrossEntropyLoss()])
@pytest.mark.parametrize("entry", OF_OTHER_LOSSES)
def test_a_batch_of_another_objective_is_refused(entry, loss):
    with pytest.raises(
        UserError, match=rf"a batch has {entry}.*{type(loss).__name__} does not read.*choose the module"
    ):
        LanguageModel(tiny_model("qwen3"), loss)(OF_OTHER_LOSSES[entry]())


@pytest.mark.parametrize("loss", [ModelInternalLoss(), lambda hidden_states, labels: hidden_states.sum()])
def test_weights_that_a_loss_does_not_read_are_refused(loss: Loss):
    with pytest.raises(UserError, match="a batch has token_weights, which"):
        LanguageModel(tiny_llama(), loss)(BATCH | {"token_weights": WEIGHTS.float()})


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"attn_mask": torch.ones_like(BATCH["input_ids"])}, r"attn_mask.*did you mean attention_mask\?"),
        ({"token_weight": WEIGHTS}, r"token_weight, which.*did you mean token_weights\?"),
        ({"loss_mask": WEIGHTS}, r"loss_mask.*did you mean token_weights\?"),
        ({"token_weights": 0 * WEIGHTS}, "token_weights.*all zero"),
    ],
)
def test_an_entry_that_nothing_reads_or_that_weighs_nothing_has_one_warning(entries, words, tmp_path):
    module = FusedCausalLMModule(tiny_llama(), None, *TRAINED)
    trainer = quiet_trainer(tmp_path, max_steps=2, precision="64-true", limit_val_batches=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        trainer.fit(module, loader([BATCH | entries] * 2), loader([BATCH | entries]))
    assert len([w for w in caught if re.search(words, str(w.message))]) == 1


def test_entries_with_names_of_their_own_and_weights_that_are_partly_zero_have_no_warning():
    entries = {"row": torch.arange(3), "attention_mask": torch.ones_like(BATCH["input_ids"]), "attn_mask": None}
    model = LanguageModel(tiny_llama().double(), LinearCrossEntropyLoss())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.look_at(BATCH | entries | {"token_weights": (WEIGHTS > 0.5).double()})
