"""Count the floating-point operations that training on a token needs and those that devices can do: their ratio is MFU.

The convention is that of PaLM (appendix B) and nanoGPT: count what the *model* needs, not what the program executes.
An entry of a matrix costs 6 operations per token: 2 in forward, 2 for the gradient of the inputs, 2 for its own.
Attention costs ``12 * heads * head_dim * T`` per token and layer, over all T keys, whether or not a causal kernel
skips half of them. So a token costs ``6 N + 12 L H Q T``. Beyond that short formula:

- N counts the parameters that multiply. The embedding's table is looked up and does not count; the output layer counts,
  also where it is the same table. A mixture of experts counts the experts that one token uses.
- A layer of sliding attention has no more keys than its window; a linear-attention layer counts its matrices only.
- A frozen matrix (LoRA's base) has no gradient of its own: 4 operations.
- Recomputed activations count once (MFU, not HFU), and ignored or padded positions count like others.
- Parts of the output layer's backward that a loss skips (filtered, cce) count.

An encoder-decoder, or a model that transformers does not know, has no MFU rather than a wrong one.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lit_fused.heads import transformers_model

_ATTENTION = {"full_attention", "attention", "sliding_attention", "chunked_attention"}
_WITHOUT_ATTENTION = {"linear_attention", "mamba", "conv", "recurrent", "moe", "mlp"}
_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

# Each row is a pattern of device names and the TFLOP/s in dense matrix products: bfloat16 and float16 (accumulated in
# float32), TF32, float32. From NVIDIA's data sheets, halved where a sheet counts sparsity. The first match counts.
_PEAK_TFLOPS: list[tuple[str, float | None, float | None, float | None]] = [
    (r"\bB200\b", 2250, None, None),
    (r"\bH[12]00 NVL\b", 835.5, 417.5, 60),
    (r"\bH100 PCIe\b", 756, 378, 51.2),
    (r"\bG?H200\b|\bH100\b", 989.4, 494.7, 66.9),
    (r"\bA100\b", 312, 156, 19.5),
    (r"\bA40\b", 149.7, 74.8, 37.4),
    (r"\bRTX A6000\b", 154.8, 77.4, 38.7),
    (r"\bL40S\b", 362, 183, 91.6),
    (r"\bL40\b", 181, 90.5, 90.5),
    (r"\bL4\b", 121, 60, 30.3),
    (r"\bRTX 4090\b(?! (?:D|Laptop))", 165.2, 82.6, 82.6),
    (r"\bRTX 3090\b(?! Ti)", 71, 35.6, 35.6),
]


@dataclass(frozen=True)
class ModelFlops:
    """The operations of forward and backward.

    Attributes:
        matrices: operations per token in matrix products with parameters.
        attention: for each layer, the operations per token and key, and the most keys (None: the sequence's length).
    """

    matrices: int
    attention: tuple[tuple[int, int | None], ...]

    def of(self, rows: int, length: int) -> int:
        """Return the operations for ``rows`` sequences of ``length`` tokens."""
        keys = sum(cost * min(length, most or length) for cost, most in self.attention)
        return rows * length * (self.matrices + keys)


def model_flops(backbone: nn.Module) -> ModelFlops | None:
    """Return the operations of a transformers causal model, perhaps without weights; None if unknown."""
    model = transformers_model(backbone)
    if model is None or model.config.is_encoder_decoder:
        return None
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    if any(table is not None and not list(table.parameters()) for table in tables):  # Another rank has it.
        return None
    config = model.config.get_text_config()
    if config is not model.config:  # The model also takes images or sound.
        return None
    attention, matrices = _attention(config), 0
    for path, module in model.named_modules():
        if "original_module" in path.split("."):  # PEFT trains a copy of this module in its place.
            continue
        is_expert = "experts" in path.split(".") or type(module).__name__.endswith("Experts")
        share = _active_share(config) if is_expert else 1.0
        for name, parameter in module.named_parameters(recurse=False):
            size = _multiplying(name, module, parameter)
            is_known = is_expert or parameter.ndim == 2 or isinstance(module, nn.Conv1d)
            if size and (share is None or not is_known):
                return None
            matrices += round(size * (share or 0)) * (4 + 2 * parameter.requires_grad)
    return None if attention is None else ModelFlops(matrices, attention)


def _multiplying(name: str, module: nn.Module, parameter: nn.Parameter) -> int:
    """Return how many of a parameter's entries multiply a token."""
    if parameter.ndim < 2 or isinstance(module, nn.Embedding) or "bias" in name:
        return 0
    inputs, outputs = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if name == "weight" and isinstance(inputs, int) and isinstance(outputs, int):
        return inputs * outputs  # A quantised weight packs several entries into one.
    return parameter.numel()


def _active_share(config: Any) -> float | None:
    active, experts = (
        next((getattr(config, name) for name in names if getattr(config, name, None)), None)
        for names in (_ACTIVE_EXPERTS, _EXPERTS)
    )
    return active / experts if isinstance(active, int) and isinstance(experts, int) else None


def _attention(config: Any) -> tuple[tuple[int, int | None], ...] | None:
    heads, layers = getattr(config, "num_attention_heads", None), getattr(config, "num_hidden_layers", None)
    if not isinstance(heads, int) or not isinstance(layers, int):
        return None
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys, values = getattr(config, "qk_head_dim", None) or width, getattr(config, "v_head_dim", None) or width
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"] * layers
    if not set(types) <= _ATTENTION | _WITHOUT_ATTENTION:
        return None
    windows = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    most_keys = {kind: getattr(config, name, None) for kind, name in windows.items()}
    cost = 6 * heads * (keys + values)
    return tuple((cost, most_keys.get(kind)) for kind in types if kind not in _WITHOUT_ATTENTION)


def peak_flops(device: torch.device | str, precision: str) -> float | None:
    """Return the operations per second of a device in dense matrix products, or None for a device without figures.

    Args:
        device: a CUDA device, others have no figures; or the driver's name of one ("NVIDIA H200").
        precision: Lightning's name. The part before the hyphen decides: bf16-mixed multiplies in bfloat16. 32-true is
            TF32 where torch may use it (``torch.set_float32_matmul_precision``), else float32.
    """
    if isinstance(device, torch.device):
        device = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    figures = next((figures for pattern, *figures in _PEAK_TFLOPS if re.search(pattern, device)), None)
    half, tf32, single = figures or (None, None, None)
    allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
    figure = {"bf16": half, "16": half, "32": tf32 if allowed else single}.get(precision.split("-")[0])
    return None if figure is None else figure * 1e12
