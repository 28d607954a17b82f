"""A wrong batch, or a model that is called wrongly, is refused in a sentence before anything is trained."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from torch import Tensor, nn

from lit_fused import (
    CrossEntropyLoss,
    FusedCausalLMModule,
    LinearCrossEntropyLoss,
    ModelInternalLoss,
    UserError,
)

LOSSES = [LinearCrossEntropyLoss, CrossEntropyLoss, ModelInternalLoss]
IDS: Tensor = ragged_batches(1)[0]["input_ids"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fit(batch: Any, loss: Any = None) -> None:
    quiet_trainer(Path(), max_steps=1).fit(FusedCausalLMModule(tiny_llama(), loss), loader([batch]))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": torch.tensor(3)}, "labels must be a tensor with one integer per position, got a single number"),
        ({"labels": IDS > 3}, "labels must be integer class indices .*got torch.bool"),
    ],
)
def test_what_no_model_takes_stops_the_first_batch_whatever_the_loss(changes: Any, message: str, loss: Any) -> None:
    with pytest.raises(UserError, match=message):
        fit(ragged_batches(1)[0] | changes, loss())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "labels", [IDS.flatten(), IDS.T, IDS[:, :-1], IDS.repeat(1, 2), IDS[:1]], ids=lambda t: t.shape
)
def test_labels_of_any_other_shape_stop_the_first_batch_whatever_the_loss(labels: Tensor, loss: Any) -> None:
    """As many labels in another order would pass for cross entropy of the flattened logits."""
    message = rf"labels of shape {re.escape(str(tuple(labels.shape)))} do not fit .*expected one label per position"
    with pytest.raises(UserError, match=message):
        fit(ragged_batches(1)[0] | {"labels": labels}, loss())


@pytest.mark.parametrize("length", [7, 200])
def test_a_mask_of_another_length_than_its_rows_stops_the_first_batch(length: int) -> None:
    batch = ragged_batches(1)[0]
    mask = torch.ones(len(batch["input_ids"]), length)
    with pytest.raises(UserError, match="attention_mask of shape .* does not fit input_ids"):
        fit(batch | {"attention_mask": mask})


def test_a_batch_without_labels_is_told_what_it_needs() -> None:
    with pytest.raises(UserError, match="a batch needs 'labels', integers"):
        fit(ragged_batches(1)[0] | {"labels": None})


def test_a_batch_that_is_a_list_is_told_what_it_should_be() -> None:
    with pytest.raises(UserError, match="a batch must be a dict with 'input_ids' and 'labels', got a list"):
        fit(list(ragged_batches(1)[0].values()))


@pytest.mark.parametrize("labels", [[[1, 2]], torch.tensor(3)])
def test_the_loss_by_itself_refuses_labels_that_are_no_tensor_of_positions(labels: Any) -> None:
    with pytest.raises(UserError, match="labels must be a tensor with one integer per position, got a"):
        LinearCrossEntropyLoss(output_embeddings=nn.Linear(16, 61))(torch.zeros(2, 12, 16), labels)
