"""Quantised output layers: the numbers of the dequantised layer, which no step makes as a whole."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from largest_tensor import LargestTensor
from lightning_helpers import loader, quiet_trainer
from peft import LoraConfig, get_peft_model
from tiny_models import sharpen, tiny_batch, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations import finegrained_fp8

import lit_fused
from lit_fused import CrossEntropyLoss, FusedCausalLMModule, LanguageModel, LinearCrossEntropyLoss
from lit_fused.losses import Loss
from lit_fused.ops import frozen_columns

CPU = torch.device("cpu")
VOCABULARY, WIDTH = 992, 64  # rows and blocks of a partial tile at the end
bitsandbytes = pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.filterwarnings("ignore:.*bitsandbytes:UserWarning")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(frozen_columns, "_TILE_BYTES", 1)  # 64 rows


def four_bits(layer: Any, quant_type: str = "nf4", nested: bool = True, compute_dtype: Any = None) -> nn.Module:
    sizes, options = (layer.in_features, layer.out_features), {"quant_type": quant_type, "compute_dtype": compute_dtype}
    found = bitsandbytes.nn.Linear4bit(
        *sizes, bias=layer.bias is not None, compress_statistics=nested, **options
    )  # one packs what it is given
    found.load_state_dict(layer.state_dict())
    return found.to("cpu")


def dequantised(layer: Any) -> nn.Linear:
    """A plain layer of the same numbers, in float64."""
    plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, dtype=torch.float64)
    if hasattr(layer.weight, "quant_state"):
        state = copy.copy(layer.weight.quant_state)
        state.dtype = torch.float32
        plain.weight.data = bitsandbytes.functional.dequantize_4bit(layer.weight.data, state).double()
    elif hasattr(layer, "weight_scale_inv"):
        scale, (rows, columns) = layer.weight_scale_inv.double(), layer.block_size
        scale = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        plain.weight.data = layer.weight.double() * scale[:VOCABULARY, :WIDTH]
    else:
        plain.weight.data = layer.weight.dequantize().double()
    plain.weight.requires_grad_(False)
    if layer.bias is not None:
        plain.bias.data = layer.bias.data.double()
    return plain


def with_head(
    name: str = "llama",
    dtype: torch.dtype = torch.float32,
    lora: bool = False,
    quantise: Callable[..., nn.Module] = four_bits,
    **options: Any,
) -> Any:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "tie_word_embeddings": False}
    model: Any = sharpen(tiny_model(name, dtype, **sizes), 5.0)
    model.set_output_embeddings(quantise(model.get_output_embeddings(), **options))
    if not lora:
        return model
    model.is_loaded_in_4bit = quantise is four_bits  # PEFT has a class of its own for such layers then
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head", "q_proj"], init_lora_weights=False))


def exact(model: Any) -> Any:
    """The model in float64 with its head dequantised."""
    found = copy.deepcopy(model)
    inner = found.get_base_model() if hasattr(found, "get_base_model") else found
    head = inner.get_output_embeddings()
    if hasattr(head, "base_layer"):
        inner.set_output_embeddings(nn.Identity())
        plain = head.base_layer = dequantised(head.base_layer)
        found.double()
        head.double()
        inner.set_output_embeddings(head)
        assert head.base_layer is plain
        return found
    inner.set_output_embeddings(dequantised(head))
    return found.double()


def loss_and_gradients(backbone: nn.Module, loss: Loss) -> dict[str, Tensor]:
    model, device = LanguageModel(backbone, loss), next(backbone.parameters()).device
    model.prepare(device)
    backbone.zero_grad()
    value = model({name: values.to(device) for name, values in tiny_batch().items()}).loss
    value.backward()
    gradients = {name: p.grad.double() for name, p in backbone.named_parameters() if p.grad is not None}
    return {"loss": value.detach().double(), **gradients}


def assert_exact(model: Any, rounding: float = 4 * torch.finfo(torch.float32).eps) -> None:
    truth = loss_and_gradients(exact(model), CrossEntropyLoss())
    own = loss_and_gradients(model, CrossEntropyLoss())
    found = loss_and_gradients(model, LinearCrossEntropyLoss())
    assert found.keys() == own.keys() == truth.keys()
    whole = torch.stack([value.norm() for name, value in truth.items() if name != "loss"]).norm()
    for name, value in truth.items():
        scale = value.abs() if name == "loss" else whole
        assert (found[name] - value).norm() <= 2 * (own[name] - value).norm() + rounding * scale, name


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_a_layer_of_4_bits_has_the_loss_and_gradients_of_the_layer_dequantised(quant_type, nested, lora):
    assert_exact(with_head(lora=lora, quant_type=quant_type, nested=nested))


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_on_a_gpu_it_errs_no_more_than_the_layers_own_product(quant_type, lora):
    model = with_head(dtype=torch.bfloat16, lora=lora, quant_type=quant_type).cuda()
    assert_exact(model, torch.finfo(torch.bfloat16).eps / 16)


@pytest.mark.parametrize("name", ["phi", "gemma2", "granite"])
def test_its_bias_softcap_and_scale_are_the_models(name):
    assert_exact(with_head(name, lora=name == "gemma2"))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    ("dtype", "compute_dtype"),
    [(torch.bfloat16, None), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_half_precision_errs_no_more_than_the_layers_own_product(dtype, compute_dtype, lora):
    is_cast = dtype == torch.float32  # and so are LoRA's products, which PEFT leaves in float32
    rounding = torch.finfo(torch.bfloat16).eps / (2 if is_cast and lora else 16)
    assert_exact(with_head(dtype=dtype, lora=lora, compute_dtype=compute_dtype), rounding)


@pytest.mark.parametrize("lora", [False, True])
def test_a_step_and_the_scores_of_tokens_make_no_tensor_of_the_weights_size(lora):
    model = LanguageModel(with_head(lora=lora), LinearCrossEntropyLoss())
    model.prepare(CPU)
    model.backbone.get_input_embeddings().requires_grad_(False)  # type: ignore[operator]  # Its gradient is as large.
    batch = {name: value[:1, :8] for name, value in tiny_batch().items()}
    with LargestTensor() as largest:
        model(batch).loss.backward()
        with torch.no_grad():
            model.eval().token_losses(batch)
    assert largest.numbers < VOCABULARY * WIDTH / 2, largest.shape


@pytest.mark.parametrize("lora", [False, True])
def test_a_fused_model_trains_evaluates_and_trains_on_as_the_model_itself_does(lora):
    own, fused = with_head(lora=lora), lit_fused.fuse(with_head(lora=lora))
    for module in own.modules():
        module.support_avx512bf16_for_cpu = False  # or its weight is repacked in evaluation
    for _ in range(2):
        found, expected = fused(**tiny_batch()).loss, own(**tiny_batch()).loss
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        of_found, of_expected = (
            torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
            for loss, model in ((found, fused), (expected, own))
        )
        torch.testing.assert_close(of_found, of_expected, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            logits = [model.eval()(input_ids=tiny_batch()["input_ids"]).logits for model in (fused, own)]
        torch.testing.assert_close(*logits)
        fused.train()
        own.train()


def test_the_module_trains_lora_on_it_as_transformers_loads_it_and_scores_it(tmp_path):
    tiny_model("llama", vocab_size=VOCABULARY, hidden_size=WIDTH).save_pretrained(tmp_path)
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=[])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=options, dtype=torch.float32)
    assert "Linear4bit (992, 64)" in str(lit_fused.identify_head(model))
    module = FusedCausalLMModule(get_peft_model(model, LoraConfig(target_modules=["lm_head"])), check_every_n_steps=1)
    batches = loader([tiny_batch() for _ in range(3)])
    trainer = quiet_trainer(tmp_path, max_epochs=1)
    trainer.fit(module, batches, batches)
    assert trainer.callback_metrics["val/loss"].isfinite()
    losses = LanguageModel(module.model.backbone, CrossEntropyLoss()).token_losses(tiny_batch())
    torch.testing.assert_close(module.model.token_losses(tiny_batch()), losses, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lora", [False, True])
def test_its_certificate_is_in_float64_of_the_dequantised_layer(lora):
    certificate = lit_fused.certify(with_head(lora=lora))
    assert "(992, 64)" in certificate["layer"]
    for name in ("loss", "hidden_states", *(["weights"] if lora else [])):
        assert certificate[f"fused/{name}"] <= 2 * certificate[f"own/{name}"] + 1e-6
        assert certificate[f"own/{name}"] < 1e-5


def test_a_weight_that_cannot_be_read_row_by_row_is_refused_by_name():
    model = with_head()
    with torch.no_grad():
        model.eval()(**tiny_batch())
    if getattr(model.lm_head.weight.quant_state, "packing_format_for_cpu", False):
        with pytest.raises(lit_fused.UserError, match="repacked, in an evaluation on a CPU: load the model anew"):
            lit_fused.fuse(model)
    model.lm_head = bitsandbytes.nn.Linear4bit(WIDTH, VOCABULARY, bias=False)
    with pytest.raises(lit_fused.UserError, match="to be quantised: move the model to its device"):
        lit_fused.fuse(model)
    narrow: Any = tiny_model("llama", hidden_size=32)
    narrow.lm_head = four_bits(narrow.lm_head)
    with pytest.raises(lit_fused.UserError, match="blocks of 64 numbers are in rows of 32"):
        lit_fused.fuse(narrow)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("bits", ["Float8", "Int8"])
def test_weights_of_torchao_are_exact_and_rounded_activations_are_refused(bits, lora):
    quantization = pytest.importorskip("torchao.quantization")

    def quantise(layer: nn.Module, kind: str) -> nn.Module:
        quantization.quantize_(layer, getattr(quantization, kind)())
        return layer

    assert_exact(with_head(lora=lora, quantise=quantise, kind=f"{bits}WeightOnlyConfig"))
    if bits == "Int8":
        with pytest.raises(lit_fused.UserError, match=r"does not compute h W\^T \+ b"):
            lit_fused.fuse(with_head(lora=lora, quantise=quantise, kind="Int8DynamicActivationInt8WeightConfig"))


def float8(layer: Any, columns: int = 24) -> nn.Module:
    """Weights in float8 with a scale for each block of 48 rows and some columns: the last ones may be smaller."""
    found = finegrained_fp8.FP8Linear(WIDTH, VOCABULARY, block_size=(48, columns))
    found.weight.data = (layer.weight.data * 20).to(torch.float8_e4m3fn)
    size = found.weight_scale_inv.shape
    found.weight_scale_inv.data = torch.rand(size, generator=torch.Generator().manual_seed(0)) / 20 + 0.02
    return found.requires_grad_(False)


@pytest.mark.parametrize(("lora", "columns"), [(False, 24), (True, 24), (False, 32)])
def test_a_layer_of_float8_has_the_numbers_of_the_layer_dequantised_also_beside_its_own_rounded_product(
    lora, columns, monkeypatch
):
    def matmul(x: Tensor, weight: Tensor, scale: Tensor, block: Any, dtype: torch.dtype, **_: Any) -> Tensor:
        plain = finegrained_fp8.FP8Linear(WIDTH, VOCABULARY, block_size=block)
        plain.weight, plain.weight_scale_inv = nn.Parameter(weight, False), nn.Parameter(scale, False)
        size = x.abs().amax(-1, keepdim=True) / 448
        rounded = (x / size).to(torch.float8_e4m3fn).to(dtype) * size
        return rounded @ dequantised(plain).weight.to(dtype).T

    kernels = SimpleNamespace(matmul=matmul)  # transformers loads those of a GPU from the Hub
    monkeypatch.setattr(finegrained_fp8, "load_finegrained_fp8_kernel", lambda: kernels)
    model = with_head(lora=lora, quantise=float8, columns=columns)
    truth = loss_and_gradients(exact(model), CrossEntropyLoss())
    plain = loss_and_gradients(exact(model).float(), CrossEntropyLoss())
    rounded = loss_and_gradients(model, CrossEntropyLoss())
    found = loss_and_gradients(model, LinearCrossEntropyLoss())
    assert found.keys() == truth.keys()
    assert (rounded["loss"] - truth["loss"]).abs() > 1e-4
    for name, value in truth.items():
        scale = value.norm() + 1e-2
        assert (found[name] - value).norm() <= 2 * (plain[name] - value).norm() + 1e-6 * scale, name
    fused = lit_fused.fuse(with_head(lora=lora, quantise=float8, columns=columns))
    torch.testing.assert_close(fused(**tiny_batch()).loss.double(), truth["loss"], rtol=1e-6, atol=0)
    assert lit_fused.certify(with_head(lora=lora, quantise=float8, columns=columns))["fused/hidden_states"] < 1e-5
