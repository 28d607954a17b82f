"""PEFT: adapters on the output layer are exact or refused by name, all others work as they are; export and resuming.

Deltas are never zero here: a loss that read only the frozen weight would be right at the first step, and wrong later.
"""

import copy
from functools import partial
from typing import Any

import peft
import pytest
import torch
from composed import composed
from errors_of import assert_as_near
from hydra.utils import instantiate
from largest_tensor import LargestTensor
from lightning_helpers import loader, quiet_trainer
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import VOCABULARY, sharpen, tiny_batch, tiny_llama, tiny_model
from tiny_seq2seq import pair_batch, tiny_seq2seq
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaForCausalLM

from lit_fused import (
    CrossEntropyLoss,
    FusedCausalLMModule,
    FusedSeq2SeqLMModule,
    LanguageModel,
    LinearCrossEntropyLoss,
    ModelInternalLoss,
    UserError,
    filtered,
)
from lit_fused.app.commands import MODES
from lit_fused.app.config import check_config
from lit_fused.heads.probe import UnsupportedHeadError
from lit_fused.losses import Loss

CPU = torch.device("cpu")
HEAD = ["q_proj", "v_proj", "lm_head"]

pytestmark = pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings=True`", "ignore:Setting `save_embedding_layers`", "ignore:Input and output"
)


def lora(targets: Any = HEAD, **options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_modules": targets} | options)


def adapted(config: Any = None, name: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny model with an adapter, every trained number of which is drawn anew."""
    base = sharpen(tiny_model(name, dtype, **changes), 5.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = get_peft_model(base, config or lora())
    return with_deltas(model).train()


def with_deltas(model: nn.Module, spread: float = 0.2) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=spread)
    return model


def loss_and_gradients(backbone: nn.Module, loss: Loss, seed: int = 0) -> dict[str, Tensor]:
    model = LanguageModel(backbone, loss)
    model.prepare(CPU)
    backbone.zero_grad()
    torch.manual_seed(seed)
    value = model(tiny_batch()).loss
    value.backward()
    gradients = {name: p.grad.clone() for name, p in backbone.named_parameters() if p.grad is not None}
    return {"loss": value.detach(), **gradients}


def assert_exact(backbone: nn.Module, fused: Loss | None = None, truth: nn.Module | None = None) -> dict[str, Tensor]:
    """The fused loss and its gradients are as close to float64 as those of PEFT's own forward and cross entropy."""
    exact = loss_and_gradients(truth or copy.deepcopy(backbone).double(), CrossEntropyLoss())
    standard = loss_and_gradients(backbone, CrossEntropyLoss())
    ours = loss_and_gradients(backbone, fused or LinearCrossEntropyLoss())
    dtype = next(backbone.parameters()).dtype
    rounding = 4 * torch.finfo(dtype).eps if dtype == torch.float32 else torch.finfo(dtype).eps / 16
    assert_as_near(ours, standard, exact, rounding)
    return ours


# Exact: adapters on the output layer


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "name",
    [
        "llama_tied",
        "gemma2",
        "phi",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "granite", "cohere", "mixtral")),
    ],
)
def test_lora_on_the_output_layer_is_exact_and_freezes_its_weight(name, dropout):
    config = lora(lora_dropout=dropout, target_modules=[*HEAD, "embed_tokens"] if name == "llama_tied" else HEAD)
    changes: dict[str, Any] = {"output_router_logits": False} if name == "mixtral" else {}
    model = adapted(config, name, **changes)
    gradients = assert_exact(model)
    trained = {key.rpartition("lm_head.")[2] for key in gradients if "lm_head" in key}
    assert trained == {"lora_A.default.weight", "lora_B.default.weight"}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_float32_adapters_on_a_bf16_model_are_as_exact_as_in_pefts_own_forward(dropout):
    model = adapted(lora(lora_dropout=dropout), dtype=torch.bfloat16)
    assert model.get_base_model().lm_head.lora_A["default"].weight.dtype == torch.float32
    assert_exact(model)


@pytest.mark.parametrize("loss", [LinearCrossEntropyLoss(), LinearCrossEntropyLoss(recompute=True)])
def test_a_step_with_lora_on_the_output_layer_makes_no_tensor_of_the_weights_size(loss):
    model = LanguageModel(adapted(vocab_size=4000), loss)
    model.prepare(CPU)
    batch = {name: value[:1, :8] for name, value in tiny_batch().items()}
    with LargestTensor() as largest:
        model(batch).loss.backward()
    assert largest.numbers < 4000 * 16, largest.shape  # The weight is (4000, 32).


def test_several_active_adapters_add_up_each_with_its_rank_scaling_and_dropout():
    model = adapted()
    model.add_adapter("second", lora(["lm_head"], r=3, lora_alpha=5, use_rslora=True, lora_dropout=0.2))
    model.add_adapter("elsewhere", lora(["q_proj"], r=2))
    model.add_adapter("inactive", lora(["lm_head"], r=2))
    model.base_model.set_adapter(["default", "second", "elsewhere"])
    gradients = assert_exact(with_deltas(model))
    names = {key.split(".")[-2] for key in gradients if "lm_head" in key}
    assert names == {"default", "second"}


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
@pytest.mark.parametrize("tying", [False, True])
@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_modules_to_save_train_the_copy_and_not_the_original(module, tying, name):
    model = adapted(lora(["q_proj"], modules_to_save=[module], ensure_weight_tying=tying), name)
    gradients = assert_exact(model)
    trained = {key for key in gradients if "embed" in key or "head" in key}
    assert trained
    assert all(".modules_to_save.default." in key for key in trained)


@pytest.mark.parametrize("tying", [False, True])
def test_lora_on_tied_embeddings_is_exact_in_pefts_own_two_ways(tying):
    config = lora(["q_proj", "embed_tokens"], ensure_weight_tying=tying)
    model, truth = adapted(config, "llama_tied"), adapted(config, "llama_tied").double()  # no deepcopy when tied
    gradients = assert_exact(model, truth=truth)
    assert any("lora_embedding_A" in key for key in gradients)
    assert any("lm_head.lora_A" in key for key in gradients) == tying


@pytest.mark.parametrize(
    "loss",
    [
        LinearCrossEntropyLoss("torch_native"),
        pytest.param(LinearCrossEntropyLoss("torch_compile"), marks=(pytest.mark.slow, pytest.mark.needs_compiler)),
        LinearCrossEntropyLoss(recompute=True),
        LinearCrossEntropyLoss(partial(filtered.linear_cross_entropy, filter_eps=0.0)),
        ModelInternalLoss(),
    ],
    ids=["torch_native", "torch_compile", "recompute", "filtered", "model"],
)
def test_every_backend_gives_the_same_numbers(loss):
    assert_exact(adapted(lora(lora_dropout=0.1), "granite"), loss)


def test_merged_or_disabled_adapters_are_followed_as_in_pefts_own_forward():
    model, batch = adapted(), tiny_batch()
    fused, standard = LanguageModel(model, LinearCrossEntropyLoss()), LanguageModel(model, CrossEntropyLoss())
    fused.prepare(CPU)
    with torch.no_grad():
        active = fused(batch).loss.item()
        with model.disable_adapter():
            disabled = fused(batch).loss.item()
            assert disabled == pytest.approx(standard(batch).loss.item(), rel=1e-6)
        assert abs(disabled - active) > 0.1
        model.merge_adapter()
        assert fused(batch).loss.item() == pytest.approx(active, rel=1e-5)
        with model.disable_adapter():
            assert fused(batch).loss.item() == pytest.approx(disabled, rel=1e-5), "PEFT takes them out again"
        assert fused(batch).loss.item() == pytest.approx(active, rel=1e-5)


def test_loras_dropout_is_no_difference_to_the_spot_check():
    model = LanguageModel(adapted(lora(lora_dropout=0.5)), LinearCrossEntropyLoss())
    model.prepare(CPU)
    model.spot_check(tiny_batch())
    assert all(module.training for module in model.backbone.modules())


def test_an_encoder_decoder_with_lora_on_its_output_layer_is_exact():
    config = AutoConfig.for_model(
        "t5", vocab_size=97, d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    base = sharpen(AutoModelForSeq2SeqLM.from_config(config), 5.0)
    model = with_deltas(get_peft_model(base, lora(["q", "lm_head"], task_type="SEQ_2_SEQ_LM"))).train()
    values = []
    for loss in (LinearCrossEntropyLoss(), CrossEntropyLoss()):
        module = FusedSeq2SeqLMModule(model, loss)
        module.model.prepare(CPU)
        values.append(module.model(tiny_batch()).loss.item())
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    assert module.generate(tiny_batch()["input_ids"], max_new_tokens=3).shape[0] == 3


# Refused: what is no product added to the weight

_KINDS: dict[str, Any] = {
    "IA3": partial(peft.IA3Config, feedforward_modules=[]),
    "LoHa": partial(peft.LoHaConfig, r=4),
    "LoKr": partial(peft.LoKrConfig, r=4),
    "AdaLoRA": partial(peft.AdaLoraConfig, total_step=10),
    "OFT": partial(peft.OFTConfig, oft_block_size=8, r=0),
    "VeRA": partial(peft.VeraConfig, r=4),
    "FourierFT": partial(peft.FourierFTConfig, n_frequency=10),
    "DoRA": partial(LoraConfig, r=4, use_dora=True),
    "LoRA with a bias": partial(LoraConfig, r=4, lora_bias=True),
}
_NAMED = {
    "IA3": "peft.tuners.ia3.layer.Linear",
    "LoHa": "peft.tuners.loha.layer.Linear",
    "LoKr": "peft.tuners.lokr.layer.Linear",
    "AdaLoRA": "peft.tuners.adalora.layer.SVDLinear",
    "OFT": "peft.tuners.oft.layer.Linear",
    "VeRA": "peft.tuners.vera.layer.Linear",
    "FourierFT": "peft.tuners.fourierft.layer.FourierFTLinear",
    "DoRA": "the LoRA variant Dora",
    "LoRA with a bias": r"LoRA with a bias of its own \(lora_bias=True\)",
}


@pytest.mark.parametrize("kind", _KINDS)
def test_every_other_adapter_is_refused_on_the_output_layer_and_exact_elsewhere(kind):
    def build(target: str) -> Any:
        return adapted(_KINDS[kind](target_modules=[target], task_type="CAUSAL_LM"))

    refused = build("lm_head")
    with pytest.raises(UnsupportedHeadError, match=f"LlamaForCausalLM .*{_NAMED[kind]}.*; choose loss=standard"):
        LanguageModel(refused, LinearCrossEntropyLoss()).prepare(CPU)
    with pytest.raises(UserError, match=_NAMED[kind]):
        LinearCrossEntropyLoss(output_embeddings=refused.get_base_model().get_output_embeddings())
    assert_exact(build("o_proj"))


def test_adapters_on_the_output_layers_parameter_are_refused():
    config = lora([], target_parameters=["lm_head.weight"])
    with pytest.raises(UnsupportedHeadError, match="peft.tuners.lora.layer.ParamWrapper"):
        LanguageModel(adapted(config, "llama_tied"), LinearCrossEntropyLoss()).prepare(CPU)


@pytest.mark.parametrize("name", ["llama_tied", "gemma2", "llama"])
def test_rows_that_are_trained_alone_are_exact_also_in_an_output_layer_tied_to_the_embedding(name):
    model = adapted(lora(["q_proj"], trainable_token_indices=[3, 5, 96]), name)
    gradients = assert_exact(model)
    (rows,) = [key for key in gradients if "trainable_tokens_delta" in key]
    assert gradients[rows].shape == (3, 32)
    head = LanguageModel(model, LinearCrossEntropyLoss())
    head.prepare(CPU)
    assert head.vocabulary == VOCABULARY


@torch.no_grad()
def test_trained_rows_that_are_merged_or_disabled_are_followed_as_in_pefts_own_forward():
    model = adapted(lora(["q_proj"], trainable_token_indices=[3, 5, 96]), "llama_tied")

    def loss(of: Loss) -> float:
        return LanguageModel(model, of)(tiny_batch()).loss.item()

    active = loss(CrossEntropyLoss())
    with model.disable_adapter():
        disabled = loss(LinearCrossEntropyLoss())
        assert disabled == pytest.approx(loss(CrossEntropyLoss()), rel=1e-6)
    assert abs(disabled - active) > 1e-4
    model.merge_adapter()
    assert loss(LinearCrossEntropyLoss()) == pytest.approx(active, rel=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
    ],
    ids=lambda config: config.peft_type.value,
)
@pytest.mark.parametrize("compiled", [False, True])
def test_virtual_tokens_before_the_input_are_refused_whatever_the_loss(config, compiled):
    model: Any = get_peft_model(tiny_model("llama"), config)
    model = torch.compile(model) if compiled else model
    for loss in (LinearCrossEntropyLoss(), CrossEntropyLoss()):
        with pytest.raises(UserError, match="prompt learning .* choose another adapter, LoRA for instance"):
            LanguageModel(model, loss)


def test_an_adapter_that_is_activated_after_preparation_is_refused_in_the_next_step():
    model = adapted()
    model.add_adapter("dora", lora(["lm_head"], use_dora=True))
    fused = LanguageModel(model, LinearCrossEntropyLoss())
    fused.prepare(CPU)
    fused(tiny_batch())
    model.set_adapter("dora")
    with pytest.raises(UserError, match="the LoRA variant Dora"):
        fused(tiny_batch())


class NamesItsEmbedding(LlamaForCausalLM):
    def get_output_embeddings(self) -> nn.Module:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.model.embed_tokens


def test_an_output_layer_found_by_its_shape_is_never_the_layer_inside_an_adapter():
    model = with_deltas(get_peft_model(tiny_llama(NamesItsEmbedding), lora())).train()
    assert any("lm_head.lora_A" in key for key in assert_exact(model))
    model = get_peft_model(tiny_llama(NamesItsEmbedding), peft.IA3Config(target_modules=HEAD, feedforward_modules=[]))
    with pytest.raises(UnsupportedHeadError, match="peft.tuners.ia3.layer.Linear"):
        LanguageModel(model, LinearCrossEntropyLoss()).prepare(CPU)


# Training, checkpoints, generation, export


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", ["gemma2", "llama_tied"])
def test_from_zero_deltas_the_gradients_are_exact_as_well(name, dropout):
    model = get_peft_model(sharpen(tiny_model(name), 5.0), lora(lora_dropout=dropout)).train()
    gradients = assert_exact(model)
    assert not gradients["base_model.model.lm_head.lora_A.default.weight"].any()
    assert gradients["base_model.model.lm_head.lora_B.default.weight"].any()


def test_only_the_adapters_are_optimised_and_a_model_without_any_to_train_is_refused(tmp_path):
    module = FusedCausalLMModule(adapted())
    quiet_trainer(tmp_path, max_steps=1).fit(module, loader([tiny_batch()]))
    optimised = {id(p) for group in module.optimizers().param_groups for p in group["params"]}  # type: ignore[union-attr]
    assert optimised == {id(p) for n, p in module.named_parameters() if ".lora_" in n}

    module.backbone.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = PeftModel.from_pretrained(tiny_model("llama"), tmp_path)
    with pytest.raises(UserError, match="no parameter of PeftModelForCausalLM is to be trained.*is_trainable=True"):
        quiet_trainer(tmp_path, max_steps=1).fit(FusedCausalLMModule(loaded), loader([tiny_batch()]))


_EXPORTED: dict[str, tuple[str, Any]] = {
    "everywhere but the output layer": ("llama_tied", lora("all-linear")),
    "output layer": ("llama", lora()),
    "output layer of tied embeddings": ("gemma2", lora()),
    "input layer of tied embeddings": ("llama_tied", lora(["q_proj", "embed_tokens"])),
    "both layers of tied embeddings": ("llama_tied", lora(["embed_tokens"], ensure_weight_tying=True)),
    "a trained copy of the output layer": ("llama_tied", lora(["q_proj"], modules_to_save=["lm_head"])),
    "a trained copy of tied embeddings": (
        "llama_tied",
        lora(["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    ),
    "DoRA": ("llama", lora(["q_proj", "lm_head"], use_dora=True)),
    "LoHa": ("llama", peft.LoHaConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")),
}


@pytest.mark.parametrize("case", _EXPORTED)
def test_an_export_is_a_plain_model_with_the_adapters_merged_and_beside_it_the_adapters(case, tmp_path):
    name, config = _EXPORTED[case]
    model = adapted(config, name).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    wanted = [(p.requires_grad, p.data_ptr()) for p in model.parameters()]
    tied = model.get_base_model().config.tie_word_embeddings

    FusedCausalLMModule(model).save_pretrained(tmp_path / "exported")

    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [(p.requires_grad, p.data_ptr()) for p in model.parameters()] == wanted
    assert model.get_base_model().config.tie_word_embeddings == tied
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    base = sharpen(tiny_model(name), 5.0)
    adapter = PeftModel.from_pretrained(base, tmp_path / "exported" / "adapter").eval()
    ids = tiny_batch()["input_ids"]
    own = model(ids).logits
    assert (own - sharpen(tiny_model(name), 5.0).eval()(ids).logits).abs().max() > 0.01
    torch.testing.assert_close(merged(ids).logits, own, rtol=1e-4, atol=1e-4)
    assert torch.equal(adapter(ids).logits, own)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(merged.generate(ids[:, :5], **options), model.generate(input_ids=ids[:, :5], **options))
    assert not [key for key in merged.state_dict() if "lora" in key]


@pytest.mark.parametrize(
    ("name", "targets", "whole"),
    [
        ("bart", ["q_proj", "lm_head"], None),
        ("marian", ["embed_tokens"], None),
        ("pegasus", ["q_proj"], ["lm_head"]),
        ("t5", ["shared"], None),
    ],
)
def test_an_export_of_an_encoder_decoder_has_all_tables_that_adapters_have_untied(name, targets, whole, tmp_path):
    model = get_peft_model(tiny_seq2seq(name), LoraConfig(r=4, target_modules=targets, modules_to_save=whole))
    FusedSeq2SeqLMModule(with_deltas(model).eval()).save_pretrained(tmp_path / "exported")
    merged = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "exported").eval()
    batch: Any = pair_batch()
    torch.testing.assert_close(merged(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-4)


def test_adapters_that_cannot_be_merged_are_exported_alone_with_a_warning(tmp_path):
    module = FusedCausalLMModule(adapted(lora(["q_proj"], lora_bias=True)))
    with pytest.warns(
        UserWarning, match=r"could not be merged into the weights \(RuntimeError: .*only the folder adapter"
    ):
        module.save_pretrained(tmp_path / "exported")
    assert {path.name for path in (tmp_path / "exported").iterdir()} == {"adapter", ".lit_fused.json"}


# The configuration


@pytest.mark.parametrize("overrides", [[], ["model@model.model=gemma2", "model.peft_config.target_modules=[lm_head]"]])
def test_the_configuration_builds_a_peft_model_around_the_chosen_one(overrides, tmp_path):
    cfg = composed("model=lora", "data=synthetic", "data.vocab_size=64", *overrides)
    check_config(cfg, MODES)
    model: Any = instantiate(cfg.model)
    assert model.get_base_model().config.model_type == ("gemma2" if overrides else "llama")
    assert isinstance(model, peft.PeftModelForCausalLM)
    adapted_layers = {name.split(".lora_")[0].split(".")[-1] for name in model.state_dict() if ".lora_" in name}
    assert adapted_layers == (
        {"lm_head"} if overrides else {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    )
    model.save_pretrained(tmp_path)  # its configuration is of plain lists, which JSON knows
