"""The filtered backward as a backend of the loss."""

import re
from functools import partial

import pytest
import torch
from errors_of import assert_close_gradients, gradients_after
from tiny_models import sharpen, tiny_batch, tiny_model

from lit_fused import LanguageModel, LinearCrossEntropyLoss, UserError
from lit_fused.filtered import Filtered, linear_cross_entropy

FILTER_STATISTICS = {"dropped_mass", "kept_columns", "exact_tokens"}


def filter_of(eps: float) -> partial:
    """Return the backend that filters every call."""
    return partial(linear_cross_entropy, filter_eps=eps)


@pytest.mark.parametrize("filter_eps", [-0.1, 1, 1.5, float("nan"), "2**-12"])
def test_a_filter_that_is_no_small_probability_is_refused_when_it_is_configured(filter_eps):
    with pytest.raises(UserError, match=rf"filter_eps must be a probability, .*, got '?{re.escape(str(filter_eps))}"):
        Filtered(filter_eps)


def test_label_smoothing_cannot_be_filtered():
    with pytest.raises(UserError, match="loss=filtered has no label_smoothing.*choose loss=chunked"):
        LinearCrossEntropyLoss(Filtered(), label_smoothing=0.1)


def test_a_dotted_path_names_the_filter_of_every_call():
    model = LanguageModel(
        sharpen(tiny_model("llama")), LinearCrossEntropyLoss("lit_fused.filtered.linear_cross_entropy")
    )
    assert model(tiny_batch()).stats.keys() > FILTER_STATISTICS


def test_a_filtered_loss_says_what_it_filters_where_it_trains_and_only_there():
    model = LanguageModel(sharpen(tiny_model("llama")), LinearCrossEntropyLoss(Filtered(0.05)))
    output = model(tiny_batch())
    assert output.stats.keys() == {"nll", "correct", "entropy", "lse_squared"} | FILTER_STATISTICS
    for name in FILTER_STATISTICS:
        assert output.stats[name].shape == ()
        assert not output.stats[name].requires_grad
        assert 0 <= output.stats[name] <= output.num_tokens
    with torch.no_grad():
        assert not model(tiny_batch()).stats.keys() & FILTER_STATISTICS
    model.requires_grad_(False)
    assert not model(tiny_batch()).stats.keys() & FILTER_STATISTICS, "nothing is trained"
    assert model.loss.backend.schedule.calls == 1, "nor is a call counted"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["llama_tied", "gemma2", "granite", "phi", "mixtral"])
def test_a_filter_of_nothing_gives_the_gradients_of_chunked_and_any_filter_its_loss(name):
    backbone = sharpen(tiny_model(name)).double()
    batch = tiny_batch()
    chunked = LanguageModel(backbone, LinearCrossEntropyLoss(z_loss=1e-3))
    whole = LanguageModel(backbone, LinearCrossEntropyLoss(filter_of(0.0), z_loss=1e-3))
    filtered = LanguageModel(backbone, LinearCrossEntropyLoss(filter_of(0.05), z_loss=1e-3))
    expected, found = chunked(batch), whole(batch)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(filtered(batch).loss, expected.loss, rtol=1e-6, atol=0.0)
    assert torch.equal(filtered.token_losses(batch), chunked.token_losses(batch))
    epsilon = torch.finfo(torch.float32).eps
    assert_close_gradients(gradients_after(found.loss, whole), gradients_after(expected.loss, chunked), 4 * epsilon)
    assert found.stats["dropped_mass"] == 0
    assert found.stats["kept_columns"] == found.num_tokens
