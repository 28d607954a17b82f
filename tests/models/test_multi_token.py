"""Tokens further ahead, learned beside the next one, against the definition in whole logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors_of import relative_error
from large_batch import ROUNDING
from lightning_helpers import loader, quiet_trainer
from strategy_cases import TRAINED, assert_as_in_one_process
from tiny_models import VOCABULARY, tiny_batch, tiny_llama
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from lit_fused import FusedCausalLMModule, FusedMultiTokenModule, LinearCrossEntropyLoss, UserError
from lit_fused.losses import CrossEntropyLoss, Loss, ModelInternalLoss
from lit_fused.models.multi_token_language_model import MultiTokenLanguageModel
from lit_fused.parallel.pipeline.stages import find_decoder
from lit_fused.parallel.tensor import check_plan

BATCH = tiny_batch()
WEIGHT = 0.7


def model_with(heads: Any, loss: Loss | None = None, dtype: torch.dtype = torch.float64) -> MultiTokenLanguageModel:
    """A tiny Llama whose heads are not zero."""
    backbone: Any = tiny_llama()
    backbone.to(dtype)
    model = MultiTokenLanguageModel(backbone, loss or LinearCrossEntropyLoss(), heads=heads, weight=WEIGHT)
    generator = torch.Generator().manual_seed(1)
    for p in model.ahead.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype) / 10
    return model.train()


def by_definition(model: MultiTokenLanguageModel, batch: dict[str, Tensor], weights: Tensor | None = None) -> Tensor:
    """S_1 and the weighted mean of the others, over the count of next tokens, of whole logits."""
    backbone: Any = model.backbone
    states, labels = backbone.model(batch["input_ids"])[0], batch["labels"]
    weights = torch.ones_like(labels, dtype=states.dtype) if weights is None else weights
    heads: Any = model.ahead.layers
    total = torch.zeros((), dtype=states.dtype)
    for place in range(len(heads) + 1):
        own = states if place == 0 else states + F.silu(heads[place - 1](states))
        logits = backbone.lm_head(own)[:, : -1 - place]
        losses = F.cross_entropy(logits.transpose(1, 2), labels[:, 1 + place :], reduction="none")
        total = total + (losses * weights[:, 1 + place :]).sum() * (1 if place == 0 else WEIGHT / len(heads))
    return total / (weights * (labels != -100))[:, 1:].sum()


def gradients_of(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return dict(zip(parameters, torch.autograd.grad(loss, [*parameters.values()]), strict=True))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("loss", [LinearCrossEntropyLoss(), LinearCrossEntropyLoss(recompute=True), CrossEntropyLoss()])
def test_loss_and_gradients_are_those_of_the_logits_of_each_head(loss, heads):
    model = model_with(heads, loss)
    expected = by_definition(model, BATCH)
    found = model(BATCH)
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert relative_error(gradients_of(found.loss, model), gradients_of(expected, model)) < 1e-12


def test_in_float32_the_error_is_below_1e_6():
    model, exact = model_with(2, dtype=torch.float32), model_with(2)
    exact.load_state_dict(model.state_dict())
    expected = by_definition(exact, BATCH)
    found = model(BATCH)
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert relative_error(gradients_of(found.loss, model), gradients_of(expected, exact)) < 1e-6


def test_weights_of_tokens_and_shifted_labels_count_for_each_head():
    model = model_with(2)
    weights = torch.rand(BATCH["labels"].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    expected = by_definition(model, BATCH, weights).item()
    assert model(BATCH | {"token_weights": weights}).loss.item() == pytest.approx(expected, rel=1e-12)
    shifted = {"input_ids": BATCH["input_ids"], "shift_labels": F.pad(BATCH["labels"][:, 1:], (0, 1), value=-100)}
    shifted["token_weights"] = F.pad(weights[:, 1:], (0, 1))
    assert model(shifted).loss.item() == pytest.approx(expected, rel=1e-12)


def test_documents_that_share_a_row_have_no_target_in_another():
    model, ids = model_with(3), BATCH["input_ids"][:1, :9]
    labels = ids.clone()
    labels[0, 4] = -100  # the first token of the second document
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    together = model({"input_ids": ids, "labels": labels, "position_ids": positions})
    alone = [model({"input_ids": part, "labels": part}) for part in (ids[:, :4], ids[:, 4:])]
    assert together.loss_sum.item() == pytest.approx(sum(part.loss_sum.item() for part in alone), rel=1e-12)
    for place, count in ((2, 2 + 3), (3, 1 + 2), (4, 0 + 1)):
        assert together.stats[f"tokens_{place}"] == count
        own = sum(part.stats[f"loss_of_token_{place}/tokens_{place}"].item() for part in alone)
        assert together.stats[f"loss_of_token_{place}/tokens_{place}"].item() == pytest.approx(own, rel=1e-12)


def of_own_layers() -> tuple[Any, MtpModel]:
    settings: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32}
    settings |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    settings |= {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    settings |= {"first_k_dense_replace": 2, "num_nextn_predict_layers": 2, "attn_implementation": "eager"}
    settings["experts_implementation"] = "eager"  # it has float64
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **settings)).double()
    own = MtpModel(model, 2).double()
    for p in (*model.parameters(), *own.parameters()):
        p.data.normal_(std=0.1)
    return model, own


def test_an_architectures_own_layers_get_the_next_tokens_embedding_and_are_trained():
    backbone, own = of_own_layers()
    model = MultiTokenLanguageModel(backbone, LinearCrossEntropyLoss(), heads=own, weight=WEIGHT).train()
    ids, labels = BATCH["input_ids"], BATCH["labels"]
    states, expected = backbone.model(ids)[0], torch.zeros((), dtype=torch.float64)
    rotary = backbone.model.rotary_emb
    for place in range(3):
        if place:  # equations 21 to 24 of arXiv:2412.19437, for the positions that have all their tokens
            layer: Any = own.layers[place - 1]
            embedded, length = backbone.model.embed_tokens(ids[:, place:]), ids.shape[1] - place
            joined = layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(states[:, :length])], -1))
            mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
            positions = torch.arange(place, place + length)[None]
            states = layer.mtp_block(joined, attention_mask=mask, position_embeddings=rotary(joined, positions))
            states = layer.post_norm(states)
        logits = backbone.lm_head(states)[:, : ids.shape[1] - 1 - place]
        losses = F.cross_entropy(logits.transpose(1, 2), labels[:, 1 + place :], reduction="sum")
        expected = expected + losses * (1 if place == 0 else WEIGHT / 2)
    expected = expected / (labels[:, 1:] != -100).sum()
    found = model(BATCH).loss
    assert found.item() == pytest.approx(expected.item(), rel=1e-10)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert any("mtp_block" in name for name in trained)
    ours, theirs = (torch.autograd.grad(loss, [*trained.values()], allow_unused=True) for loss in (found, expected))
    for name, mine, exact in zip(trained, ours, theirs, strict=True):
        assert (mine is None) == (exact is None), name
        if mine is not None and exact is not None:
            assert (mine - exact).norm() <= 1e-9 * exact.norm() + 1e-12, name


def test_own_layers_of_another_model_and_packed_rows_for_them_are_refused():
    backbone, own = of_own_layers()
    with pytest.raises(UserError, match="MtpModel is around another model"):
        MultiTokenLanguageModel(tiny_llama(), LinearCrossEntropyLoss(), heads=own)
    model = MultiTokenLanguageModel(backbone, LinearCrossEntropyLoss(), heads=own)
    positions = torch.arange(BATCH["input_ids"].shape[1]).expand_as(BATCH["input_ids"])
    with pytest.raises(UserError, match="do not keep documents of one row apart"):
        model(BATCH | {"position_ids": positions})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": 0}, "heads must be a number of further tokens"),
        ({"heads": True}, "heads must be a number of further tokens"),
        ({"weight": 0.0}, "weight must be a positive number"),
        ({"loss": ModelInternalLoss()}, "choose loss=chunked or loss=standard"),
        ({"loss": LinearCrossEntropyLoss(filter_eps=1e-4)}, "choose loss=chunked or loss=standard"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(options, words):
    with pytest.raises(UserError, match=words):
        FusedMultiTokenModule(tiny_llama(), **options)


def fit(tmp_path, batches: list[Any], training: bool = True, **options: Any) -> FusedMultiTokenModule:
    module = FusedMultiTokenModule(tiny_llama(), None, *TRAINED, heads=2, weight=WEIGHT).train(training)
    quiet_trainer(tmp_path, precision="64-true", **options).fit(module, loader(batches), loader(batches))
    return module


def test_accumulated_ragged_batches_are_the_one_large_batch(tmp_path):
    parts = [{name: value[i : i + 1] for name, value in BATCH.items()} for i in range(len(BATCH["labels"]))]
    whole = fit(tmp_path, [BATCH], max_epochs=2)
    split = fit(tmp_path, parts, max_epochs=2, accumulate_grad_batches=len(parts))
    for (name, p), q in zip(whole.model.named_parameters(), split.model.parameters(), strict=True):
        assert (p - q).norm() <= ROUNDING * p.norm() + 1e-12, name


def test_heads_of_a_module_in_evaluation_mode_are_trained(tmp_path):
    usual, loaded = (fit(tmp_path, [BATCH], training, max_epochs=2) for training in (True, False))
    for (name, p), q in zip(usual.model.named_parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert not loaded.backbone.training


def test_validation_is_that_of_the_next_token_and_an_export_has_the_backbone_alone(tmp_path):
    module = fit(tmp_path, [BATCH], max_epochs=1)
    trainer = quiet_trainer(tmp_path, precision="64-true")
    (of_heads,) = trainer.validate(module, loader([BATCH]), verbose=False)
    (plain,) = trainer.validate(FusedCausalLMModule(module.backbone), loader([BATCH]), verbose=False)
    assert {name: of_heads[name] for name in plain} == pytest.approx(plain, rel=1e-12)
    assert of_heads.keys() - plain.keys() == {"val/loss_of_token_2", "val/loss_of_token_3"}
    module.save_pretrained(tmp_path / "exported")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float64)
    assert loaded.state_dict().keys() == module.backbone.state_dict().keys()
    again = FusedCausalLMModule(loaded)
    assert trainer.validate(again, loader([BATCH]), verbose=False) == [pytest.approx(plain, rel=1e-12)]


def test_a_resumed_run_has_the_heads_of_an_uninterrupted_one(tmp_path):
    batches = [BATCH, {name: value.flip(0) for name, value in BATCH.items()}]
    whole = fit(tmp_path / "whole", batches, max_epochs=2)
    fit(tmp_path / "first", batches, max_epochs=1, enable_checkpointing=True)
    (checkpoint,) = (tmp_path / "first").rglob("*.ckpt")
    module = FusedMultiTokenModule(tiny_llama(), None, *TRAINED, heads=2, weight=WEIGHT)
    trainer = quiet_trainer(tmp_path, precision="64-true", max_epochs=2)
    trainer.fit(module, loader(batches), loader(batches), ckpt_path=checkpoint)
    for (name, p), q in zip(whole.model.named_parameters(), module.model.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.slow
def test_a_head_learns_the_token_after_the_next(tmp_path):
    """In these rows a token follows from the one before, and so does the one after it."""
    ids = (torch.arange(4)[:, None] * 5 + torch.arange(12) * 3) % 17 + 3
    module = FusedMultiTokenModule(tiny_llama(), heads=2, optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.02))
    trainer = quiet_trainer(tmp_path, max_epochs=60)
    trainer.fit(module, loader([{"input_ids": ids, "labels": ids}]))
    (found,) = trainer.validate(module, loader([{"input_ids": ids, "labels": ids}]), verbose=False)
    assert max(found[f"val/{name}"] for name in ("loss", "loss_of_token_2", "loss_of_token_3")) < 0.1


def test_an_architectures_own_layers_are_refused_where_they_were_never_compared():
    backbone, own = of_own_layers()
    model = MultiTokenLanguageModel(backbone, LinearCrossEntropyLoss(), heads=own)
    with pytest.raises(UserError, match="own layers for further tokens were never tested under tensor parallelism"):
        check_plan(model, 2, training=True)
    with pytest.raises(UserError, match="it has layers of its own for further tokens"):
        find_decoder(model)


def test_an_older_transformers_whose_layers_do_not_run_alone_is_refused(monkeypatch):
    backbone, own = of_own_layers()
    monkeypatch.delattr(MtpModel, "forward_layer")
    with pytest.raises(UserError, match=r"MtpModel of transformers .* cannot run one of its layers alone"):
        MultiTokenLanguageModel(backbone, LinearCrossEntropyLoss(), heads=own)


@pytest.mark.slow
def test_two_processes_train_the_heads_as_one_does(tmp_path):
    early, late = ("ddp", "fsdp2", "tp", "pp"), ("fsdp2", "tp", "pp")
    cases = {"multi_token": dict.fromkeys(early, ""), "multi_token_late": dict.fromkeys(late, "")}
    assert_as_in_one_process(tmp_path, cases)
