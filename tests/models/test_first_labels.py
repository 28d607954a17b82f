"""Labels that are shifted, labels that are not, and who says which."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning_helpers import loader, quiet_trainer
from tiny_models import MODELS, VOCABULARY, WIDTH, tiny_batch, tiny_llama
from tiny_seq2seq import tiny_seq2seq
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel, XLNetConfig, XLNetLMHeadModel

from lit_fused import (
    CrossEntropyLoss,
    FusedCausalLMModule,
    LanguageModel,
    LinearCrossEntropyLoss,
    ModelInternalLoss,
    Seq2SeqLanguageModel,
    UserError,
)

BATCH = tiny_batch()
SUCCESSORS = F.pad(BATCH["labels"][:, 1:], (0, 1), value=-100)
IDS = BATCH["input_ids"]


def masked_model(model_type: str, **changes: Any) -> PreTrainedModel:
    settings = MODELS["llama"][1] | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} | changes
    config = AutoConfig.for_model(model_type, **(settings | {"vocab_size": VOCABULARY}))
    return AutoModelForMaskedLM.from_config(config).train()


MASKED = ["bert", "modernbert", "roberta", "distilbert", "electra", "albert"]


@pytest.mark.parametrize("loss", [LinearCrossEntropyLoss(), CrossEntropyLoss()])
@pytest.mark.parametrize("model_type", MASKED)
def test_a_masked_language_model_is_refused_with_what_serves_it_and_that_serves_it(model_type, loss):
    backbone = masked_model(model_type, dim=WIDTH, n_layers=2, n_heads=4, hidden_dim=48, embedding_size=WIDTH)
    model = LanguageModel(backbone.eval(), loss)
    model.prepare(torch.device("cpu"))
    masked = IDS.masked_fill(BATCH["labels"] != -100, 3)
    batch = {"input_ids": masked, "labels": BATCH["labels"]}
    with pytest.raises(UserError, match=f"loss of {type(backbone).__name__} pairs positions and .*as 'shift_labels'"):
        model.spot_check(batch)
    model.spot_check({"input_ids": masked, "shift_labels": BATCH["labels"]})
    found = model({"input_ids": masked, "shift_labels": BATCH["labels"]})
    torch.testing.assert_close(found.loss, backbone(**batch).loss)
    assert found.num_tokens == (BATCH["labels"] != -100).sum()


def test_what_auto_model_for_causal_lm_builds_trains_with_a_warning():
    backbone = XLNetLMHeadModel(XLNetConfig(vocab_size=VOCABULARY, d_model=WIDTH, n_layer=1, n_head=4, d_inner=48))
    with pytest.warns(UserWarning, match="XLNetLMHeadModel does not shift"):
        LanguageModel(backbone, LinearCrossEntropyLoss()).spot_check(BATCH)


@pytest.mark.parametrize("loss", [LinearCrossEntropyLoss(), CrossEntropyLoss()])
def test_a_batch_with_shifted_labels_and_a_count_gives_the_models_own_loss_of_them(loss):
    backbone = tiny_llama().eval()
    for batch in (
        {"input_ids": IDS, "shift_labels": SUCCESSORS},
        BATCH | {"num_items_in_batch": 70},
        BATCH | {"shift_labels": SUCCESSORS, "num_items_in_batch": torch.tensor(70)},
    ):
        own = backbone(**({"labels": BATCH["labels"]} | batch)).loss
        torch.testing.assert_close(LanguageModel(backbone, loss)(batch).loss, own)


def gradient_of_a_step(batches: list[dict[str, Any]], tmp_path: Any) -> list[Tensor]:
    gradients: list[Tensor] = []

    class Module(FusedCausalLMModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradients.append(nn.utils.parameters_to_vector(p.grad for p in self.parameters()))  # type: ignore[misc]

    trainer = quiet_trainer(tmp_path, max_steps=1, accumulate_grad_batches=len(batches))
    trainer.fit(Module(tiny_llama().double()), loader(batches))
    return gradients


def test_a_module_divides_a_steps_gradient_by_the_count_that_its_batches_state(tmp_path):
    count = int((BATCH["labels"][:, 1:] != -100).sum())
    halves = [{name: value[rows] for name, value in BATCH.items()} for rows in (slice(0, 2), slice(2, 3))]
    [expected] = gradient_of_a_step(halves, tmp_path)
    shifted = [
        {"input_ids": half["input_ids"], "shift_labels": F.pad(half["labels"][:, 1:], (0, 1), value=-100)}
        for half in halves
    ]
    [found] = gradient_of_a_step([half | {"num_items_in_batch": 2 * count} for half in shifted], tmp_path)
    torch.testing.assert_close(found, expected / 2)


@pytest.mark.parametrize("training", [True, False])
def test_labels_that_are_the_next_tokens_are_refused_once_there_are_enough_to_tell(training):
    model = LanguageModel(tiny_llama(), LinearCrossEntropyLoss()).train(training)
    few = {"input_ids": IDS[:, :-1], "labels": IDS[:, 1:].clone()}
    few["labels"][:, 2:] = -100
    model.spot_check(few)
    with pytest.raises(UserError, match="label t equals token t \\+ 1, .* name these 'shift_labels'"):
        model.spot_check({"input_ids": IDS[:, :-1], "labels": IDS[:, 1:]})
    model.spot_check({"input_ids": torch.full((2, 9), 5), "labels": torch.full((2, 9), 5)})
    model.spot_check(BATCH)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: LanguageModel(tiny_llama(), ModelInternalLoss()), "shift_labels, and loss=model leaves the labels to"),
        (
            lambda: Seq2SeqLanguageModel(tiny_seq2seq("t5"), LinearCrossEntropyLoss()),
            "labels that are never shifted; name",
        ),
    ],
)
def test_who_cannot_take_shifted_labels_says_so(model, message):
    with pytest.raises(UserError, match=message):
        model()({"input_ids": IDS, "labels": IDS, "shift_labels": SUCCESSORS})


def test_a_function_of_ones_own_gets_shifted_labels_by_their_name():
    with pytest.raises(TypeError, match="unexpected keyword argument 'shift_labels'"):
        LanguageModel(tiny_llama(), lambda h, labels: h.mean())({"input_ids": IDS, "shift_labels": SUCCESSORS})

    def mean(hidden_states: Tensor, labels: Tensor, shift_labels: Any = None) -> Tensor:
        return F.cross_entropy(backbone.lm_head(hidden_states).flatten(0, 1), shift_labels.flatten())

    backbone = tiny_llama()
    output = LanguageModel(backbone, mean)({"input_ids": IDS, "shift_labels": SUCCESSORS})
    torch.testing.assert_close(output.loss, backbone(**BATCH).loss)
