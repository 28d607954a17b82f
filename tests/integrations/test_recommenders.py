"""The base classes for RecTools and RePlay before stand-ins of the classes that these libraries let a user extend;
tools/recommender_libraries.py compares them with the libraries themselves."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from fused_recommenders import FusedRecTools, FusedRePlay

ITEMS, WIDTH = 11, 8


@pytest.mark.parametrize("labels", [5, 1])
def test_the_loss_of_rectools_is_its_softmax_of_all_items_with_its_weights(labels):
    class Theirs(nn.Module):
        item_model: Any
        torch_model: Any
        logits_t = 0.5

        def __init__(self) -> None:
            super().__init__()
            self.items = nn.Parameter(torch.randn(ITEMS, WIDTH, dtype=torch.float64))
            vars(self).update(torch_model=self, item_model=self)

        def get_all_embeddings(self) -> Tensor:
            return self.items

        def encode_sessions(self, batch: dict[str, Tensor], items: Tensor) -> Tensor:
            return items[batch["x"]].cumsum(1)

        def _calc_custom_loss(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            raise ValueError("loss fused is not supported")

    class Fused(FusedRecTools, Theirs): ...

    torch.manual_seed(0)
    module: Any = Fused()
    targets = torch.randint(1, ITEMS, (3, labels))
    targets[0, 0] = 0
    batch = {"x": torch.randint(ITEMS, (3, 5)), "y": targets, "yw": torch.rand(3, labels, dtype=torch.float64)}
    logits = module.encode_sessions(batch, module.items)[:, -labels:] @ module.items.T / 0.5
    each = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=0, reduction="none") * batch["yw"]
    truth = each.sum() / (targets > 0).sum()
    found = module._calc_custom_loss_outputs(batch, 0)["loss"]
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(loss, module.items)[0] for loss in (found, truth)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)


def test_the_loss_of_replay_is_its_cross_entropy_where_the_mask_has_a_target():
    class Theirs(nn.Module):
        logits_callback: Any = None

        def forward(self, *_: Any, **__: Any) -> Tensor:
            raise NotImplementedError

    class Fused(FusedRePlay, Theirs): ...  # pyright: ignore[reportIncompatibleMethodOverride]

    torch.manual_seed(0)
    items = torch.randn(ITEMS, WIDTH, dtype=torch.float64, requires_grad=True)

    class Model:
        body = SimpleNamespace(embedder=SimpleNamespace(get_item_weights=lambda: items))

        def get_logits(self) -> None: ...

    loss = Fused()
    loss.logits_callback = Model().get_logits
    hidden, targets = torch.randn(3, 5, WIDTH, dtype=torch.float64), torch.randint(ITEMS, (3, 5, 1))
    mask = torch.arange(15).view(3, 5, 1) % 3 > 0
    found = loss(model_embeddings=hidden, positive_labels=targets, target_padding_mask=mask, padding_mask=None)
    truth = F.cross_entropy((hidden @ items.T)[mask[..., 0]], targets[mask])
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(loss, items)[0] for loss in (found, truth)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)
