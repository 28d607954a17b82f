"""docs/troubleshooting.md quotes what is really said: each case here is a section there."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from tiny_models import tiny_model
from torch import Tensor, nn

from lit_fused import (
    CrossEntropyLoss,
    FusedCausalLMModule,
    FusedDistillationModule,
    LanguageModel,
    LinearCrossEntropyLoss,
    ModelInternalLoss,
    PolicyLoss,
    UserError,
    fuse,
)
from lit_fused.ops import linear_cross_entropy

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
QUOTES = {
    section.partition("\n")[0]: quote[1]
    for section in SECTIONS
    if (quote := re.search("```text\n(.*?)\n```", section, re.S))
}


def fit(backbone: nn.Module, changes: dict[str, Any] | None = None, loss: Any = None, **trainer: Any) -> None:
    fit_batch(backbone, {**ragged_batches(1)[0], **(changes or {})}, loss, **trainer)


def fit_batch(backbone: nn.Module, batch: Any, loss: Any = None, **trainer: Any) -> None:
    quiet_trainer(Path(), max_steps=1, **trainer).fit(FusedCausalLMModule(backbone, loss), loader([batch]))


def loss_of(hidden: torch.Tensor, weight_dtype: torch.dtype = torch.float32) -> None:
    layer = nn.Linear(16, 61, bias=False, dtype=weight_dtype)
    LinearCrossEntropyLoss(output_embeddings=layer)(hidden, torch.zeros(2, 12, dtype=torch.int64))


def half_the_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, targets, reduction="sum")[0] / 2


def hooked_after_a_batch(backbone: Any) -> None:
    model = LanguageModel(backbone, LinearCrossEntropyLoss())
    model(ragged_batches(1)[0])
    backbone.lm_head.register_forward_hook(lambda _, __, logits: logits / 2)
    model.spot_check(ragged_batches(1)[0])


def fused_by(change: Callable[[Any], Any], **batch: Any) -> None:
    model = fuse(tiny_llama())
    change(model)
    with torch.no_grad():
        model(ragged_batches(1)[0]["input_ids"], **batch)


def twice_the_loss(model: Any) -> None:
    own = model.loss_function
    model.loss_function = lambda *logits, **others: 2 * own(*logits, **others)


class OwnRotary(nn.Module):
    """Attention with rotary embeddings that are not cast back."""

    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.register_buffer("inv_freq", 1e4 ** -torch.linspace(0, 1, 16), persistent=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor) -> Tensor:
        value = self.embedding(input_ids)
        turned = value * torch.outer(torch.arange(input_ids.shape[1]), self.inv_freq).cos()
        return nn.functional.scaled_dot_product_attention(turned, turned, value)


CASES: dict[str, Callable[[], Any]] = {
    "Tensors on two devices": lambda: loss_of(torch.zeros(2, 12, 16, device="meta")),
    "Hidden states and weight of two dtypes": lambda: loss_of(torch.zeros(2, 12, 16), torch.bfloat16),
    "`model.half()` before training": lambda: fit(tiny_llama().half()),
    "A model that was loaded in bfloat16": lambda: fit(
        type(tiny_llama())._from_config(tiny_llama().config, dtype=torch.bfloat16), precision="bf16-mixed"
    ),
    "`model.to(torch.bfloat16)` before training": lambda: fit(nn.Module.to(tiny_llama(), torch.bfloat16)),
    "Rotary embeddings of one's own under `precision=bf16-true`": lambda: fit(OwnRotary(), precision="bf16-true"),
    "Labels that are floats": lambda: fit(tiny_llama(), {"labels": torch.zeros(2, 12)}),
    "Labels that are no tensor": lambda: fit(tiny_llama(), {"labels": ragged_batches(1)[0]["labels"].tolist()}),
    "Labels of another shape": lambda: fit(tiny_llama(), {"labels": torch.zeros(2, 11, dtype=torch.int64)}),
    "Labels of another shape, with the standard loss or the model's own": lambda: fit(
        tiny_llama(), {"labels": torch.zeros(2, 11, dtype=torch.int64)}, CrossEntropyLoss()
    ),
    "Labels outside the vocabulary": lambda: fit(tiny_llama(), {"labels": torch.full((2, 12), 61)}),
    "Token ids outside the vocabulary": lambda: fit(tiny_llama(), {"input_ids": torch.full((2, 12), 61)}),
    "An attention mask of another shape": lambda: fit(tiny_llama(), {"attention_mask": torch.ones(2, 7)}),
    "A batch that is no dict": lambda: fit_batch(tiny_llama(), list(ragged_batches(1)[0].values())),
    "A batch without labels": lambda: fit(tiny_llama(), {"labels": None}),
    "A batch of another objective": lambda: fit(tiny_llama(), {"desirable": torch.tensor([1, 0])}),
    "A teacher with another vocabulary": lambda: quiet_trainer(Path(), max_steps=1).fit(
        FusedDistillationModule(tiny_llama(), teacher=tiny_model("qwen3", vocab_size=67)), loader(ragged_batches(1))
    ),
    "Rollouts of another model": lambda: LanguageModel(tiny_llama(), PolicyLoss()).spot_check(
        ragged_batches(1)[0] | {"sampler_log_probs": torch.full((2, 12), -6.0)}
    ),
    "What a model does to its logits has changed": lambda: hooked_after_a_batch(tiny_llama()),
    "The first batch is refused": lambda: fit(tiny_llama(), loss=LinearCrossEntropyLoss(half_the_loss)),
    "`fuse` takes another model": lambda: fuse(nn.Linear(2, 2)),
    "`fuse` and a loss that builds logits": lambda: fuse(tiny_llama(), loss=CrossEntropyLoss()),
    "A fused model in `nn.DataParallel`": lambda: fused_by(lambda model: model._replicate_for_data_parallel()),
    "A fused model whose own loss is another": lambda: fused_by(twice_the_loss, labels=IDS),
}


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.filterwarnings("error:.*is bfloat16 and stays so", "error:the rollouts")
@pytest.mark.parametrize("section", CASES)
def test_a_symptom_is_quoted_as_it_appears(section, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, UserWarning, RuntimeError)) as error:
        CASES[section]()
    message = str(error.value).replace("meta", "cuda:0")
    figures = re.compile(r"\d+\.\d+(e-\d+)?")
    assert figures.sub("#", words(message)) == figures.sub("#", words(QUOTES[section]))


def test_every_section_that_quotes_a_sentence_has_its_case():
    assert QUOTES.keys() == CASES.keys()


IDS = ragged_batches(1)[0]["input_ids"]
LOSSES = [LinearCrossEntropyLoss, CrossEntropyLoss, ModelInternalLoss]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "labels", [IDS.flatten(), IDS.T, IDS[:, :-1], IDS.repeat(1, 2), IDS[:1]], ids=lambda t: t.shape
)
def test_labels_of_any_other_shape_stop_the_first_batch_whatever_the_loss(labels, loss, tmp_path, monkeypatch):
    """As many labels in another order would pass for cross entropy of the flattened logits."""
    monkeypatch.chdir(tmp_path)
    shape = re.escape(str(tuple(labels.shape)))
    with pytest.raises(
        UserError, match=rf"labels of shape {shape} do not fit .*expected one label per position, \(2, 12"
    ):
        fit(tiny_llama(), {"labels": labels}, loss())
    model = LanguageModel(tiny_llama(), loss())
    with pytest.raises(UserError, match=rf"labels of shape {shape} do not fit"):
        model.token_losses({"input_ids": IDS, "labels": labels})


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": torch.tensor(3)}, "labels must be a tensor with one integer per position, got a single number"),
        ({"labels": IDS > 3}, "labels must be integer class indices .*got torch.bool"),
    ],
)
def test_what_no_model_takes_stops_the_first_batch_whatever_the_loss(changes, message, loss, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        fit(tiny_llama(), changes, loss())


@pytest.mark.parametrize("labels", [[[1, 2]], torch.tensor(3)])
def test_the_loss_by_itself_refuses_labels_that_are_no_tensor_of_positions(labels):
    with pytest.raises(UserError, match="labels must be a tensor with one integer per position, got a"):
        LinearCrossEntropyLoss(output_embeddings=nn.Linear(16, 61))(torch.zeros(2, 12, 16), labels)
