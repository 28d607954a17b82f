"""Distillation beside TRL's GKD on the same logits and labels."""

from typing import Any

import pytest
import torch
from distillation_cases import case
from trl.experimental.gkd import GKDTrainer

from lit_fused.ops import linear_distillation

KINDS = {0.0: {"divergence": "forward_kl"}, 1.0: {"divergence": "reverse_kl"}}


@pytest.mark.parametrize("temperature", [1.0, 0.9])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_loss_and_gradients_are_those_of_gkd(beta, temperature):
    (hidden, weight), targets, teacher, _ = case("plain", torch.float32)
    options: Any = KINDS.get(beta, {"divergence": "jsd", "beta": beta})
    ours, _ = linear_distillation(hidden, weight, targets, teacher, temperature=temperature, **options)
    logits = [(hidden @ weight.T)[None], (teacher.hidden_states @ teacher.weight.T)[None]]
    theirs = GKDTrainer.generalized_jsd_loss(logits[0], logits[1], targets[None], beta=beta, temperature=temperature)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    found, wanted = (torch.autograd.grad(loss, (hidden, weight)) for loss in (ours, theirs))
    for gradient, other in zip(found, wanted, strict=True):
        assert (gradient - other).norm() <= 1e-5 * other.norm()
