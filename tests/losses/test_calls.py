"""Calls of the fused loss with hidden states and labels, as a foreign trainer makes them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_batch, tiny_llama
from torch import Tensor

from lit_fused import LinearCrossEntropyLoss

Loss: Any = LinearCrossEntropyLoss  # as a caller sees it whose mistakes no type checker finds
BATCH = tiny_batch()
LABELS = BATCH["labels"]
WEIGHTS = torch.rand(LABELS.shape, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def model() -> Any:
    return tiny_llama().double()


@pytest.fixture
def hidden(model: Any) -> Tensor:
    return model.model(BATCH["input_ids"]).last_hidden_state.detach()


@pytest.fixture
def losses(model: Any, hidden: Tensor) -> Tensor:
    """The definition: position t predicts label t + 1, and the last position nothing."""
    found = F.cross_entropy(model.lm_head(hidden)[:, :-1].transpose(1, 2), LABELS[:, 1:], reduction="none")
    return F.pad(found, (0, 1))


def test_a_layer_and_its_weight_are_output_layers(model, hidden, losses):
    layer = model.get_output_embeddings()
    expected = losses.sum() / (LABELS[:, 1:] != -100).sum()
    made = [
        Loss(output_embeddings=layer),
        Loss("auto", layer),
        Loss("pytorch", layer, chunk_size=4096),
        Loss(output_embeddings=layer, impl="torch_native"),
        Loss(output_embeddings=layer.weight),
    ]
    for loss in made:
        torch.testing.assert_close(loss(hidden, LABELS), expected)
    grad = torch.autograd.grad(made[-1](hidden, LABELS), layer.weight)[0]
    torch.testing.assert_close(grad, torch.autograd.grad(made[0](hidden, LABELS), layer.weight)[0])


def test_flat_labels_and_shifted_labels_are_not_shifted(model, hidden, losses):
    layer, mean = model.lm_head, losses.sum() / (LABELS[:, 1:] != -100).sum()
    flat, successors = hidden.flatten(0, 1), F.pad(LABELS[:, 1:], (0, 1), value=-100)
    loss = Loss(output_embeddings=layer)
    torch.testing.assert_close(loss(flat, successors.flatten()), mean)
    torch.testing.assert_close(loss(hidden, shift_labels=successors), mean)
    torch.testing.assert_close(loss(hidden, LABELS, shift_labels=successors), mean)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8, torch.bool])
def test_a_mask_of_any_dtype_is_counted_exactly(dtype):
    """Float16 ends at 65504, and a loss over an infinite count is zero."""
    hidden, labels = torch.randn(70000, 4, generator=torch.Generator().manual_seed(0)), torch.arange(70000) % 11
    weight, mask = torch.linspace(-1, 1, 44).view(11, 4), (torch.arange(70000) % 100 != 0).to(dtype)
    head = Loss(output_embeddings=weight)
    loss = head(hidden, labels, token_weights=mask)
    torch.testing.assert_close(loss, head(hidden[mask != 0], labels[mask != 0]), rtol=1e-5, atol=0)


def test_weights_of_tokens_and_a_count_of_ones_own(model, hidden, losses):
    layer, valid = model.lm_head, LABELS[:, 1:] != -100
    loss = Loss(output_embeddings=layer)
    torch.testing.assert_close(loss(hidden, LABELS, num_items_in_batch=7), losses.sum() / 7)
    weights, weighted = WEIGHTS[:, 1:], (losses[:, :-1] * WEIGHTS[:, 1:]).sum()
    torch.testing.assert_close(loss(hidden, LABELS, token_weights=WEIGHTS), weighted / weights[valid].sum())
    assert loss(hidden, LABELS, token_weights=torch.zeros(LABELS.shape)) == 0
    leaf = hidden.clone().requires_grad_()
    loss(leaf, LABELS, token_weights=WEIGHTS).backward()
    reference = hidden.clone().requires_grad_()
    each = F.cross_entropy(layer(reference)[:, :-1].transpose(1, 2), LABELS[:, 1:], reduction="none")
    ((each * weights).sum() / weights[valid].sum()).backward()
    torch.testing.assert_close(leaf.grad, reference.grad)
