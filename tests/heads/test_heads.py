"""Head identification by experiment, capture of the head's input, and the forms in which hidden states are found."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import VOCABULARY, WIDTH, sharpen, tiny_batch, tiny_llama, tiny_model
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm
from transformers import (
    BertConfig,
    BigBirdForMaskedLM,
    BigBirdPegasusForConditionalGeneration,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    LlamaForCausalLM,
    LlamaModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from lit_fused import LinearCrossEntropyLoss, Seq2SeqLanguageModel
from lit_fused.errors import UserError
from lit_fused.heads import OutputHead, identify_head, output_layer
from lit_fused.heads.capture import InputCapture, extract_hidden_states
from lit_fused.heads.probe import UnsupportedHeadError
from lit_fused.heads.with_labels import labels_are_shifted_by
from lit_fused.models.masked_language_model import MaskedLanguageModel

EXPECTED: dict[str, dict[str, Any]] = {  # name in MODELS -> what stands between its hidden states and its logits
    "llama": {},
    "llama_tied": {},
    "qwen3": {},
    "qwen3_tied": {},
    "phi": {"bias": True},
    "granite": {"scale": 0.25},
    "cohere": {"scale": 0.3},
    "falcon_h1": {"scale": 0.37},
    "gemma2": {"softcap": 4.0},
    "gemma2_default": {"softcap": 30.0},
    "bert": {"bias": True},
    "mpt": {},  # its configuration has a logit_scale that its logits ignore
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXPECTED)
def test_a_freshly_initialised_head_is_identified_whatever_its_dtype(name, dtype):
    expected = EXPECTED[name]
    model = tiny_model(name, dtype)
    head = identify_head(model)
    assert head.layer is model.get_output_embeddings()
    assert head.scale == pytest.approx(expected.get("scale", 1.0), rel=1e-6)
    assert head.softcap == (None if "softcap" not in expected else pytest.approx(expected["softcap"], rel=1e-6))
    assert head.has_bias == ("bias" in expected)
    assert head.n_out is None
    assert head.vocabulary == VOCABULARY


@pytest.mark.parametrize(
    ("build", "kind"),
    [(BigBirdForMaskedLM, MaskedLanguageModel), (BigBirdPegasusForConditionalGeneration, Seq2SeqLanguageModel)],
)
def test_a_model_that_replaces_its_attention_for_few_tokens_is_as_it_was_after_the_checks(build, kind):
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    sizes |= {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "block_size": 4}
    heads = {"num_attention_heads": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = build(build.config_class(vocab_size=VOCABULARY, max_position_embeddings=128, **sizes, **heads)).train()
    parts, drawn = [*model.modules()], torch.get_rng_state()
    kind(model, LinearCrossEntropyLoss()).prepare(torch.device("cpu"))
    after = [*model.modules()]
    assert len(after) == len(parts)
    assert all(now is before for now, before in zip(after, parts, strict=True))
    assert {m.attention_type for m in after if hasattr(m, "attention_type")} == {"block_sparse"}
    assert all(m.training for m in after)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_identified_head_rebuilds_the_models_own_logits(name):
    model = sharpen(tiny_model(name)).eval()
    head = identify_head(model)
    inputs = {"input_ids": tiny_batch()["input_ids"], "use_cache": False}
    with torch.no_grad():
        own = model(**inputs).logits
        with InputCapture(head, model) as captured:
            placeholder = model(**inputs).logits
    assert placeholder.isnan().all()
    assert placeholder.numel() < own.numel()
    assert own.std() > 0.1, "logits near zero would agree with anything"
    torch.testing.assert_close(head.logits(captured[0]), own, rtol=1e-5, atol=1e-5)


class Sliced(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, **kwargs)
        output.logits = 0.5 * output.logits[..., :90]
        return output


def test_logits_that_leave_out_the_last_entries_of_the_vocabulary_are_identified():
    head = identify_head(tiny_llama(Sliced))
    assert (head.n_out, head.vocabulary, head.scale) == (90, 90, 0.5)
    assert head.operands(torch.zeros(1, WIDTH))[1].shape == (90, WIDTH)
    assert str(head) == "Linear (97, 32), scale 0.5, first 90 entries"


class AddsBuffer(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("logits_bias", torch.zeros(1, config.vocab_size))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, **kwargs)
        output.logits = output.logits + self.logits_bias
        return output


def test_a_buffer_that_a_checkpoint_fills_later_is_part_of_the_formula_from_the_start():
    model: Any = tiny_llama(AddsBuffer).eval()
    head = identify_head(model)
    assert head.offset == (model, "logits_bias")
    assert not model.logits_bias.any(), "identification leaves it as it was"
    model.logits_bias.copy_(torch.randn(VOCABULARY))
    hidden, own = model.model(tiny_batch()["input_ids"]).last_hidden_state, model(tiny_batch()["input_ids"]).logits
    torch.testing.assert_close(head.logits(hidden), own)


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64])
def test_neither_the_default_dtype_nor_the_default_device_of_the_moment_matters(default):
    """Lightning's 16-true makes float16 the default dtype around each step, in which 1e6 is infinite. A head is
    identified there after a checkpoint was loaded."""
    models = [tiny_model("llama"), tiny_model("gemma2"), tiny_llama(Sliced), tiny_llama(AddsBuffer)]
    expected = [str(identify_head(model)) for model in models]
    torch.set_default_dtype(default)
    try:
        with torch.device("meta"):  # stands for torch.set_default_device("cuda")
            found = [str(identify_head(model)) for model in models]
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == expected


def test_the_heads_bias_is_scaled_with_the_products_and_cut_with_the_weight():
    layer = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    head = OutputHead(layer, scale=3.0, softcap=5.0, n_out=90)
    hidden = torch.randn(4, WIDTH, dtype=torch.float64)
    same, weight, bias = head.operands(hidden)
    assert same is hidden
    assert bias is not None
    by_formula = 5 * torch.tanh((3 * hidden @ weight.T + bias) / 5)
    torch.testing.assert_close(head.logits(hidden), by_formula, rtol=1e-12, atol=1e-12)


def test_identification_leaves_modes_weights_gradients_forwards_and_random_numbers_as_they_were():
    model = tiny_model("phi")
    model.model.layers[0].eval()  # a part that its user keeps in evaluation mode
    model.model.embed_tokens.weight.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    weights = copy.deepcopy(model.state_dict())
    wanted = [p.requires_grad for p in model.parameters()]
    random_numbers = torch.get_rng_state()

    identify_head(model)
    labels_are_shifted_by(model)

    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert all(p.grad is None for p in model.parameters())
    assert "forward" not in model.get_output_embeddings().__dict__
    assert torch.equal(torch.get_rng_state(), random_numbers)


class Unshifted(LlamaForCausalLM):
    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, **kwargs)
        if labels is not None:
            output.loss = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
        return output


def test_whether_a_models_own_loss_shifts_the_labels_is_found_by_asking_it():
    assert labels_are_shifted_by(tiny_llama())
    assert labels_are_shifted_by(tiny_model("mixtral"))
    assert not labels_are_shifted_by(tiny_llama(Unshifted))
    assert not labels_are_shifted_by(tiny_model("bart"))


# Heads that no formula covers, each a small change of a Llama.


class ChangedLogits(LlamaForCausalLM):
    change: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gain = nn.Parameter(torch.ones(()))
        self.gains = torch.linspace(0.5, 1.5, config.vocab_size)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, **kwargs)
        output.logits = self.change(output.logits)
        return output


class TrainableGain(ChangedLogits):
    def change(self, logits: Tensor) -> Tensor:
        return logits * self.gain


class Cubes(ChangedLogits):
    def change(self, logits: Tensor) -> Tensor:
        return logits**3


class HardCap(ChangedLogits):
    def change(self, logits: Tensor) -> Tensor:
        return logits.clamp(-5, 5)


class DropsPositions(ChangedLogits):
    def change(self, logits: Tensor) -> Tensor:
        return logits[:, -1:]


class NoLogits(ChangedLogits):
    def change(self, logits: Tensor) -> None:
        return None


class RunsTwice(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        super().forward(*args, **kwargs)
        return super().forward(*args, **kwargs)


class LinearWithOwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(F.normalize(input, dim=-1))


class LinearWithAdapter(nn.Linear):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.down = nn.Parameter(torch.zeros(2, WIDTH))


class Linear4bit(nn.Module):
    """Shaped like a quantised layer: packed integers and a scale, no floating-point weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(VOCABULARY * WIDTH // 2, 1, dtype=torch.uint8), requires_grad=False)
        self.absmax = torch.ones(VOCABULARY)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.new_zeros(*hidden_states.shape[:-1], VOCABULARY)


def with_head(head: nn.Module) -> LlamaForCausalLM:
    model: Any = tiny_llama()
    model.lm_head = head
    return model


def with_wrapped_forward() -> LlamaForCausalLM:
    model: Any = tiny_llama()
    own = model.lm_head.forward
    model.lm_head.forward = lambda hidden: own(hidden) + own(hidden.roll(1, dims=-1))
    return model


REFUSED: dict[str, tuple[Any, str]] = {
    "trainable gain": (lambda: tiny_llama(TrainableGain), "TrainableGain .*a trainable parameter acts on its logits"),
    "cubes": (lambda: tiny_llama(Cubes), "Cubes .*is not a scale, a softcap or a slice"),
    "hard cap": (lambda: tiny_llama(HardCap), "HardCap .*is not a scale, a softcap or a slice"),
    "drops positions": (lambda: tiny_llama(DropsPositions), r"DropsPositions .*gives \(2, 8, 97\).*are \(2, 1, 97\)"),
    "no logits": (lambda: tiny_llama(NoLogits), "NoLogits .*its output has no logits"),
    "head runs twice": (lambda: tiny_llama(RunsTwice), "RunsTwice .*its output layer ran 2 times in one forward pass"),
    "own forward": (
        lambda: with_head(LinearWithOwnForward(WIDTH, VOCABULARY, bias=False)),
        r"LlamaForCausalLM .*a test_heads.LinearWithOwnForward, not a plain linear layer",
    ),
    "adapter parameters": (
        lambda: with_head(LinearWithAdapter(WIDTH, VOCABULARY, bias=False)),
        "LlamaForCausalLM .*has parameters besides weight and bias",
    ),
    "spectral norm": (
        lambda: with_head(spectral_norm(nn.Linear(WIDTH, VOCABULARY, bias=False))),
        "LlamaForCausalLM .*computes its weight at every use",
    ),
    "quantised": (
        lambda: with_head(Linear4bit()),
        "LlamaForCausalLM .*test_heads.Linear4bit, not a plain linear layer",
    ),
    "embedding": (lambda: with_head(nn.Embedding(VOCABULARY, WIDTH)), "LlamaForCausalLM .*is an Embedding"),
    "no head": (lambda: LlamaModel(tiny_llama().config), "LlamaModel .*is None.*AutoModelForCausalLM"),
    "wrapped forward": (with_wrapped_forward, r"LlamaForCausalLM .*does not compute h W\^T \+ b"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", REFUSED)
def test_a_head_that_no_formula_covers_is_refused_with_class_reason_and_way_out(case, dtype):
    build, message = REFUSED[case]
    model = build()
    model = model if case == "quantised" else model.to(dtype)
    with pytest.raises(UnsupportedHeadError, match=message) as refusal:
        identify_head(model)
    assert "choose loss=standard" in str(refusal.value)
    assert model.training
    if case != "wrapped forward" and model.get_output_embeddings() is not None:
        assert "forward" not in model.get_output_embeddings().__dict__


def test_hooks_that_make_the_weight_or_see_gradients_are_refused_where_the_layer_does_not_run():
    layer = prune.l1_unstructured(nn.Linear(WIDTH, VOCABULARY), "weight", 0.3)
    plain: Any = nn.Sequential(layer)
    plain.get_output_embeddings = lambda: layer
    for build in (lambda layer: LinearCrossEntropyLoss(output_embeddings=layer), lambda layer: output_layer(plain)):
        with pytest.raises(UserError, match=r"a hook of the output layer makes its weight.*prune.remove"):
            build(layer)
    prune.remove(layer, "weight")
    assert output_layer(plain) is layer
    layer.register_full_backward_hook(lambda layer, inputs, outputs: (0 * inputs[0],))
    with pytest.raises(UserError, match=r"a hook of the output layer .*its gradients.*weight.register_hook"):
        output_layer(plain)


def test_forward_hooks_that_change_what_a_layer_returns_are_refused_where_it_does_not_run_and_others_are_not():
    layer = nn.Linear(WIDTH, VOCABULARY)
    plain: Any = nn.Sequential(layer)
    plain.get_output_embeddings = lambda: layer
    seen: list[Any] = []
    layer.register_forward_hook(lambda layer, inputs, output: seen.append(output.shape))
    assert output_layer(plain) is layer
    hooks: list[tuple[Any, Any]] = [
        (layer.register_forward_hook, lambda layer, inputs, output: 2 * output),
        (layer.register_forward_pre_hook, lambda layer, inputs: (inputs[0] + 1,)),
    ]
    for register, hook in hooks:
        handle = register(hook)
        for build in (lambda layer: LinearCrossEntropyLoss(output_embeddings=layer), lambda layer: output_layer(plain)):
            with pytest.raises(UserError, match="a hook of the output layer .*changes its input, its output"):
                build(layer)
        handle.remove()


# Capture


def test_capture_keeps_the_layers_input_and_gives_one_row_that_is_no_number():
    layer = nn.Linear(WIDTH, VOCABULARY)
    hidden = torch.randn(2, 3, WIDTH, dtype=torch.bfloat16)
    capture = InputCapture(OutputHead(layer), layer)
    with capture as inputs:
        placeholder = layer(hidden)
    assert len(inputs) == 1
    assert inputs[0] is hidden
    assert placeholder.shape == (1, 1, VOCABULARY)
    assert placeholder.isnan().all()
    with capture as inputs:
        layer(input=hidden)
    assert inputs[0] is hidden
    with InputCapture(OutputHead(layer, is_by_position=True), layer):
        assert layer(hidden).shape == (2, 3, 1)
    assert layer(hidden.float()).shape == (2, 3, VOCABULARY)


# Hidden states in the forms that backbones return them in


@dataclass
class OwnOutput:
    last_hidden_state: Tensor


HIDDEN, OTHER = torch.randn(2, 3, 4), torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    "output",
    [
        pytest.param(HIDDEN, id="tensor"),
        pytest.param((HIDDEN, OTHER), id="tuple"),
        pytest.param({"last_hidden_state": HIDDEN, "hidden_states": (OTHER,)}, id="dict"),
        pytest.param(BaseModelOutputWithPast(last_hidden_state=HIDDEN), id="transformers' output"),
        pytest.param(OwnOutput(HIDDEN), id="dataclass"),
    ],
)
def test_hidden_states_are_found_in_every_form_that_backbones_use(output):
    assert extract_hidden_states(output, "Backbone") is HIDDEN


def test_an_encoder_decoder_made_of_two_models_reads_the_labels_as_it_does_itself():
    """It masks padding in its decoder's input, which ignored labels become."""
    part: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48}
    part |= {"num_hidden_layers": 1, "num_attention_heads": 4}
    part |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**part), BertConfig(**part))
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = sharpen(EncoderDecoderModel(config))
    batch = tiny_batch(ignored=0.4)
    output = Seq2SeqLanguageModel(model, LinearCrossEntropyLoss())(batch)
    torch.testing.assert_close(output.loss, model(**batch).loss)
