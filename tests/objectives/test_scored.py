"""The base of the objectives: scores of tokens become sums and counts, in modules, accumulation and evaluation."""

import pytest
import torch
import torch.nn.functional as F
from errors_of import assert_same_gradients
from lightning_helpers import loader, quiet_trainer
from tiny_models import VOCABULARY, tiny_model
from torch import Tensor

from lit_fused import FusedCausalLMModule, LanguageModel
from lit_fused.errors import UserError
from lit_fused.heads import OutputHead
from lit_fused.losses import LossOutput
from lit_fused.objectives import PolicyLoss, ScoredLoss
from lit_fused.ops import token_scores


def preferred(scores: Tensor, targets: Tensor, weights: Tensor) -> LossOutput:
    """The logistic loss of the weighted difference between the log-likelihoods of the two rows of each pair."""
    rows = scores.sum(-1)
    margins = weights[::2] * (rows[::2] - rows[1::2])
    tokens = (targets != -100).sum(-1)
    counted = (tokens[::2] + tokens[1::2] > 0).double()
    stats = {"margin": (margins * counted).sum(), "length/rows": tokens.sum(), "rows": (tokens > 0).sum()}
    stats = {name: value.detach() for name, value in stats.items()}
    return LossOutput(-(F.logsigmoid(margins) * counted).sum(), counted.sum().long(), stats=stats)


class PairLoss(ScoredLoss):
    statistics = ("margin", "length/rows", "rows")
    inputs = ("pair_weight",)
    rows_together = 2

    def of_scores(self, scores, targets, batch):
        return preferred(scores.log_prob, targets, batch["pair_weight"])


def pairs(count: int, seed: int = 0, length: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (2 * count, length), generator=generator)
    shown = torch.randint(4, length + 1, (2 * count, 1), generator=generator)
    labels = ids.masked_fill((torch.arange(length) < 3) | (torch.arange(length) >= shown), -100)
    return {"input_ids": ids, "labels": labels, "pair_weight": torch.rand(2 * count, generator=generator) + 0.5}


def of_logits(model: LanguageModel, batch: dict[str, Tensor]) -> LossOutput:
    logits = model.backbone(input_ids=batch["input_ids"]).logits
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    picked = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return preferred(picked.where(targets != -100, 0), targets, batch["pair_weight"])


@pytest.mark.parametrize("name", ["llama_tied", "granite", "gemma2", "cohere"])
def test_loss_and_gradients_are_those_of_the_logits(name):
    model = LanguageModel(tiny_model(name).double(), PairLoss())
    batch = pairs(3)
    expected = of_logits(model, batch)
    found = model(batch)
    assert found.num_tokens == 3
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)  # Scales are float32 numbers.
    assert_same_gradients(found.loss, expected.loss, [p for p in model.parameters() if p.requires_grad])


def test_accumulated_and_evaluated_batches_of_pairs_equal_one_large_batch(tmp_path):
    parts = [pairs(1, 1), pairs(3, 2), pairs(2, 3)]
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    found = []
    for batches, accumulated in (([whole], 1), (parts, 3)):
        module = FusedCausalLMModule(
            tiny_model("llama").double(), PairLoss(), optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1)
        )
        trainer = quiet_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=accumulated)
        trainer.fit(module, loader(batches), loader(batches))
        found.append((dict(trainer.callback_metrics), [p.detach().clone() for p in module.parameters()]))
    (one, weights), (accumulated, others) = found
    lengths = (whole["labels"][:, 1:] != -100).sum(-1)
    for name in ("train/loss", "train/margin", "train/length", "val/loss", "val/margin", "val/length"):
        torch.testing.assert_close(one[name], accumulated[name], rtol=1e-6, atol=1e-9)
    assert one["train/length"].item() == pytest.approx(lengths.double().mean().item())
    assert "train/rows" not in one  # It is what lengths are divided by, and says nothing else.
    for weight, other in zip(weights, others, strict=True):
        assert (weight - other).norm() <= 1e-7 * other.norm()  # Llama's norms are float32.


def test_the_check_of_the_first_batch_compares_the_scores_that_are_trained_on(tmp_path):
    class Wrong(PairLoss):
        def scores(self, hidden_states, targets, head, selected=None, temperature=None):
            scores = super().scores(hidden_states, targets, head, selected, temperature)
            return scores._replace(log_prob=1.1 * scores.log_prob)

    module = FusedCausalLMModule(tiny_model("llama"), Wrong())
    with pytest.raises(UserError, match="but logits in float64 give"):
        quiet_trainer(tmp_path, max_steps=1).fit(module, loader([pairs(2)]))


def test_invariant_scores_have_the_bits_of_a_sampler_that_scores_each_row_alone():
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 301, bias=False)
    hidden, targets = torch.randn(3, 9, 64), torch.randint(301, (3, 9))
    targets[1, 4:] = -100
    loss = PolicyLoss(invariant=True, temperature=0.7)
    found = loss.scores(hidden, targets, OutputHead(layer)).log_prob
    for row in range(3):
        alone = token_scores(hidden[row], layer.weight, targets[row], scale=1 / 0.7, invariant=True).log_prob
        assert torch.equal(found[row], alone)
