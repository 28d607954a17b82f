"""Masked language models: unshifted labels, a head that sees masked positions only, and what is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors_of import relative_error
from lightning_helpers import loader, quiet_trainer
from tiny_models import VOCABULARY, sharpen, tiny_model
from torch import Tensor

from lit_fused import (
    CrossEntropyLoss,
    FusedMaskedLMModule,
    LinearCrossEntropyLoss,
    MaskedLanguageModel,
    ModelInternalLoss,
    UserError,
    linear_cross_entropy,
)

MASK = 3


def masked_batch(rows: int = 4, length: int = 12, share: float = 0.3, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, VOCABULARY, (rows, length), generator=generator)
    chosen = torch.rand(ids.shape, generator=generator) < share
    return {"input_ids": ids.masked_fill(chosen, MASK), "labels": ids.masked_fill(~chosen, -100)}


def truth(batch: dict[str, Tensor], name: str = "masked_modernbert") -> dict[str, Tensor]:
    """The loss and its gradients, of the model's own logits in float64."""
    model = sharpen(tiny_model(name)).double()
    logits = model(input_ids=batch["input_ids"]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None} | {"loss": loss.detach()}


def counting(rows: list[int]) -> Any:
    """A backend that notes how many rows it got."""

    def backend(hidden_states: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None) -> Any:
        rows.append(len(hidden_states))
        return linear_cross_entropy(hidden_states, weight, targets, bias=bias, reduction="sum")[0]

    return backend


@pytest.mark.parametrize("loss", ["chunked", "torch_native", "standard", "model", "own backend"])
@pytest.mark.parametrize("name", ["masked_modernbert", "masked_eurobert_tied"])
def test_loss_and_gradients_of_every_loss_are_those_of_the_models_own_logits_in_float64(loss, name):
    batch, model = masked_batch(), sharpen(tiny_model(name))
    losses: dict[str, Any] = {"standard": CrossEntropyLoss(), "model": ModelInternalLoss()}
    made = losses.get(loss) or LinearCrossEntropyLoss(counting([]) if loss == "own backend" else loss)
    wrapped = MaskedLanguageModel(model, made)
    wrapped.prepare(torch.device("cpu"))
    output = wrapped(batch)
    output.loss.backward()
    assert output.num_tokens == (batch["labels"] != -100).sum()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None} | {"loss": output.loss.detach()}
    expected = truth(batch, name)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert relative_error({key: found[key]}, {key: value}) <= 1e-5, key


def test_only_masked_positions_reach_the_products_of_the_output_layer():
    rows: list[int] = []
    model = MaskedLanguageModel(tiny_model("masked_modernbert"), LinearCrossEntropyLoss(counting(rows)))
    for seed in range(3):
        batch = masked_batch(seed=seed)
        model(batch)
        assert rows[-1] == (batch["labels"] != -100).sum() < batch["labels"].numel()


def test_a_batch_without_masked_tokens_has_no_loss_and_gradients_of_zero():
    model = MaskedLanguageModel(tiny_model("masked_modernbert"), LinearCrossEntropyLoss())
    model.prepare(torch.device("cpu"))
    batch = masked_batch()
    output = model({**batch, "labels": torch.full_like(batch["labels"], -100)})
    assert (output.loss_sum, output.num_tokens, output.loss) == (0, 0, 0)
    output.loss_sum.backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None and not g.any() for g in gradients)


@pytest.mark.parametrize("added", [{}, {"label_smoothing": 0.2, "z_loss": 1e-2}], ids=str)
def test_validation_logs_loss_perplexity_and_accuracy_of_masked_tokens_and_prediction_scores_them(added, tmp_path):
    batch, model = masked_batch(rows=6), sharpen(tiny_model("masked_modernbert"))
    module, trainer = FusedMaskedLMModule(model, LinearCrossEntropyLoss(**added)), quiet_trainer(tmp_path)
    [found] = trainer.validate(module, loader([batch]), verbose=False)
    chosen = batch["labels"] != -100
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"]).logits.double()
    nll = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    assert found["val/loss"] == pytest.approx(nll[chosen].mean().item(), rel=1e-5)
    assert found["val/perplexity"] == pytest.approx(nll[chosen].mean().exp().item(), rel=1e-5)
    hits = (logits.argmax(-1) == batch["labels"])[chosen].double().mean().item()
    assert found["val/accuracy"] == pytest.approx(hits)
    predicted: Any = trainer.predict(module, loader([batch]))
    scores = predicted[0]
    torch.testing.assert_close(scores["log_likelihood"].double(), -nll.sum(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(scores["num_tokens"], chosen.sum(-1))


def copied() -> dict[str, Tensor]:
    batch = masked_batch()
    return {"input_ids": batch["labels"].clamp(min=5), "labels": batch["labels"]}


@pytest.mark.parametrize(
    ("name", "batch", "sentence"),
    [
        ("llama", masked_batch(), "own loss of LlamaForCausalLM pairs positions and labels in another way"),
        ("bert", masked_batch(), "own loss of BertLMHeadModel pairs positions and labels in another way"),
        ("masked_modernbert", copied(), "every label of this batch is the token that the model sees"),
        (
            "masked_modernbert",
            masked_batch() | {"entity_labels": torch.zeros(4, 2)},
            "a batch has entity_labels, for another loss than that of masked tokens",
        ),
        (
            "masked_modernbert",
            {"input_ids": masked_batch()["input_ids"], "shift_labels": masked_batch()["labels"]},
            "ModernBertForMaskedLM has labels that are never shifted",
        ),
    ],
)
def test_a_model_or_a_batch_with_which_something_else_would_be_learned_is_refused(name, batch, sentence):
    model = MaskedLanguageModel(tiny_model(name), LinearCrossEntropyLoss())

    def learn() -> None:
        model.prepare(torch.device("cpu"))
        model.spot_check(batch)

    with pytest.raises(UserError, match=sentence):
        learn()
