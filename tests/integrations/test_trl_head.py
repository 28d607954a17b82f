"""A model that is fused after TRL has given it a head: TRL's numbers, by our head, as near to float64 as TRL's own."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from trl.trainer.utils import add_fused_lm_head

import lit_fused
from lit_fused.integrations import fused_pass

SFT = ("log_probs", "entropy", "is_top1")
DPO = (*SFT, "mean_logits", "log_sum_sq_probs")
BATCH = tiny_batch()
STARTS = torch.arange(BATCH["input_ids"].shape[1]) % 7  # Documents of seven tokens share a row.
PACKED = {"input_ids": BATCH["input_ids"], "position_ids": STARTS.expand_as(BATCH["input_ids"])}
PACKED["labels"] = PACKED["input_ids"].masked_fill(PACKED["position_ids"] == 0, -100)
SHIFTED = {"input_ids": BATCH["input_ids"], "shift_labels": BATCH["labels"].roll(-1, 1), "num_items_in_batch": 9}


def numbers(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad()
    found = model(**batch, fused_lm_head=True)
    (found.loss + found.log_probs.exp().sum() + 0.1 * found.entropy.sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: value.detach().double() for name, value in (dict(found) | gradients).items()}


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of our head."""
    calls, own = [], fused_pass.scored

    def counted(*args: Any) -> Any:
        calls.append(args)
        return own(*args)

    monkeypatch.setattr(fused_pass, "scored", counted)
    return calls


@pytest.mark.parametrize(
    ("name", "outputs", "temperature", "batch", "is_ours"),
    [
        ("llama", DPO, 1.0, BATCH, True),
        ("llama", SFT, 1.0, PACKED, True),
        ("cohere", DPO, 0.7, SHIFTED, True),
        ("gemma2", SFT, 0.7, BATCH, True),
        ("gemma2", DPO, 0.7, BATCH, False),  # The mean of capped logits is no token score.
        ("gptj", SFT, 1.0, BATCH, True),  # a bias
        ("mixtral", SFT, 1.0, BATCH | {"output_router_logits": True}, True),
    ],
)
def test_trl_gets_its_numbers_and_their_gradients(name, outputs, temperature, batch, is_ours, scored):
    found = {}
    for kind in ("exact", "own", "fused"):
        model = tiny_model(name, dtype=torch.float64 if kind == "exact" else torch.float32)
        add_fused_lm_head(model, temperature, outputs=outputs)
        found[kind] = numbers(lit_fused.fuse(model) if kind == "fused" else model, batch)
    assert bool(scored) == is_ours
    assert found["fused"].keys() == found["own"].keys()
    for key, truth in found["exact"].items():
        error, usual = ((found[kind][key] - truth).norm() for kind in ("fused", "own"))
        assert error <= 2 * usual + 1e-6 * truth.norm(), key


def test_an_adapter_on_the_head_that_trl_would_not_see_is_trained(scored):
    model = tiny_model("llama")
    add_fused_lm_head(model, outputs=SFT)
    adapted = get_peft_model(model, LoraConfig(target_modules=["lm_head"], r=4, init_lora_weights=False))
    logits = adapted(input_ids=BATCH["input_ids"]).logits[:, :-1]
    targets = BATCH["labels"][:, 1:]
    expected = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0].where(targets != -100, 0)
    found = numbers(lit_fused.fuse(adapted), BATCH)
    torch.testing.assert_close(found["log_probs"].float(), expected)
    assert any("lora" in name for name in found)


def test_calls_that_ask_for_no_head_are_as_before(scored):
    model = tiny_model("llama")
    own = model(**BATCH).loss
    add_fused_lm_head(model)
    lit_fused.fuse(model)
    answer = model(**BATCH, fused_lm_head=False)
    assert not isinstance(answer.logits, Tensor)
    torch.testing.assert_close(answer.loss, own)
    assert model(input_ids=BATCH["input_ids"]).logits is not None
    assert model(**BATCH, fused_lm_head=True).log_probs is not None
    assert len(scored) == 1
    lit_fused.unfuse(model)
    assert model(**BATCH, fused_lm_head=True).log_probs is not None
    assert len(scored) == 1
