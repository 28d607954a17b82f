"""docs/troubleshooting.md quotes what is really said: each case here is a section there."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from test_parity import ScaledInTraining
from tiny_models import sharpen
from tiny_models import tiny_llama as llama_of
from torch import nn

from lit_fused import CrossEntropyLoss, FusedCausalLMModule, LinearCrossEntropyLoss, UserError

PAGE = (Path(__file__).parent.parent / "docs" / "troubleshooting.md").read_text()
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
QUOTES = {
    section.partition("\n")[0]: quote[1]
    for section in SECTIONS
    if (quote := re.search("```text\n(.*?)\n```", section, re.S))
}


def fit(backbone: nn.Module, changes: dict[str, Any] | None = None, loss: Any = None, **trainer: Any) -> None:
    batches = [{**batch, **(changes or {})} for batch in ragged_batches(1)]
    quiet_trainer(Path(), max_steps=1, **trainer).fit(FusedCausalLMModule(backbone, loss), loader(batches))


def loss_of(hidden: torch.Tensor, weight_dtype: torch.dtype = torch.float32) -> None:
    layer = nn.Linear(16, 61, bias=False, dtype=weight_dtype)
    LinearCrossEntropyLoss(output_embeddings=layer)(hidden, torch.zeros(2, 12, dtype=torch.int64))


CASES: dict[str, Callable[[], None]] = {
    "Tensors on two devices": lambda: loss_of(torch.zeros(2, 12, 16, device="meta")),
    "Hidden states and weight of two dtypes": lambda: loss_of(torch.zeros(2, 12, 16), torch.bfloat16),
    "`model.half()` before training": lambda: fit(tiny_llama().half()),
    "`model.to(torch.bfloat16)` before training": lambda: fit(tiny_llama().to(torch.bfloat16)),
    "Inputs in float64": lambda: fit(
        tiny_llama(), {"input_ids": None, "inputs_embeds": torch.zeros(2, 12, 16, dtype=torch.float64)}
    ),
    "Labels that are floats": lambda: fit(tiny_llama(), {"labels": torch.zeros(2, 12)}),
    "Labels of another shape": lambda: fit(tiny_llama(), {"labels": torch.zeros(2, 11, dtype=torch.int64)}),
    "Labels of another shape, with the standard loss": lambda: fit(
        tiny_llama(), {"labels": torch.zeros(2, 11, dtype=torch.int64)}, CrossEntropyLoss()
    ),
    "Labels outside the vocabulary": lambda: fit(tiny_llama(), {"labels": torch.full((2, 12), 61)}),
    "Token ids outside the vocabulary": lambda: fit(tiny_llama(), {"input_ids": torch.full((2, 12), 61)}),
    "A batch without labels": lambda: fit(tiny_llama(), {"labels": None}),
    "The first batch is refused": lambda: fit(sharpen(llama_of(ScaledInTraining))),
}


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("section", CASES)
def test_a_symptom_is_quoted_as_it_appears(section, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        CASES[section]()
    message = str(error.value).replace("meta", "cuda:0")
    figures = re.compile(r"\d+\.\d+(e-\d+)?")
    assert figures.sub("#", words(message)) == figures.sub("#", words(QUOTES[section]))


def test_every_section_that_quotes_a_sentence_has_its_case():
    assert QUOTES.keys() == CASES.keys()
