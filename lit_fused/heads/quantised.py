"""Output layers whose weight is quantised: rows of it are dequantised tile by tile, and it is frozen.

bitsandbytes' layers of 4 bits (NF4 and FP4), transformers' ``FP8Linear``, and weights of torchao. None of these
packages is imported here: who has such a layer has imported its class.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_fused.ops.frozen_columns import FrozenColumns, with_frozen_columns

_4_BITS = "bitsandbytes.nn.Linear4bit"
_FLOAT8 = "transformers.integrations.finegrained_fp8.FP8Linear"
_TORCHAO = "torchao.utils.TorchAOBaseTensor"


def is_instance(thing: Any, *names: str) -> bool:
    """Return whether a thing is of one of these classes, by full name. None is, before their modules are imported."""
    return isinstance(thing, loaded_classes(*names))


def loaded_classes(*names: str) -> tuple[Any, ...]:
    """Return those of some classes, by full name, whose modules have been imported."""
    parts = [name.rpartition(".") for name in names]
    found = [getattr(sys.modules.get(module), kind, None) for module, _, kind in parts]
    return tuple(kind for kind in found if kind is not None)


def is_quantised(layer: Any) -> bool:
    """Return whether a linear layer's weight is one that :func:`weight_of` dequantises."""
    return _rows_of(layer) is not None


def why_not_dequantised(layer: Any) -> str | None:
    """Return why the weight of a quantised layer cannot be read now, to follow "its output layer"; None if it can."""
    if is_instance(layer, _4_BITS):
        state = layer.weight.quant_state
        if state is None:
            return "has a weight that is to be quantised: move the model to its device first"
        if getattr(state, "packing_format_for_cpu", False):
            return "has a weight that bitsandbytes has repacked, in an evaluation on a CPU: load the model anew"
        if layer.in_features % state.blocksize:
            return f"has a weight whose blocks of {state.blocksize} numbers are in rows of {layer.in_features}"
    return None


def settle(layer: Any) -> None:
    """Make a layer of 4 bits stay as it is: it would repack its weight in evaluation on a CPU, and choose what it
    computes in, if nobody has, in its first call."""
    if is_instance(layer, _4_BITS):
        layer.support_avx512bf16_for_cpu, layer.compute_type_is_set = False, True


def rounds_activations(layer: Any) -> bool:
    """Return whether a layer is an ``FP8Linear``: its own product rounds hidden states to 8 bits as well."""
    is_float8 = getattr(getattr(layer, "weight", None), "dtype", None) == torch.float8_e4m3fn
    return is_float8 and any(type(layer).forward is kind.forward for kind in loaded_classes(_FLOAT8))


def weight_of(layer: Any, dtype: torch.dtype) -> Tensor:
    """Return the weight (V, D) of a linear layer. That of a quantised one is all frozen columns
    (:mod:`lit_fused.ops.frozen_columns`), in the dtype in which the layer multiplies hidden states of ``dtype``."""
    rows_of = _rows_of(layer)
    if rows_of is None:
        return layer.weight
    own = getattr(layer, "compute_dtype", None) or dtype
    dtype = max(own, dtype, key=lambda each: torch.finfo(each).eps)
    columns = torch.empty(layer.out_features, 0, dtype=dtype, device=layer.weight.device)
    return with_frozen_columns(columns, FrozenColumns(rows_of(layer, dtype), layer.in_features))


def dequantised_weight(layer: Any) -> Tensor | None:
    """Return a quantised layer's weight (V, D) as a whole, in float32; None if it is not quantised."""
    rows_of = _rows_of(layer)
    return None if rows_of is None else rows_of(layer, torch.float32)(slice(0, layer.out_features))


def _rows_of(layer: Any) -> Callable[[Any, torch.dtype], Callable[[slice], Tensor]] | None:
    """Return what makes the function of a layer's rows; None unless its weight is quantised."""
    if is_instance(layer, _4_BITS):
        return _rows_of_4_bits
    if rounds_activations(layer):
        return _rows_of_float8
    return _rows_of_torchao if is_instance(getattr(layer, "weight", None), _TORCHAO) else None


def _rows_of_4_bits(layer: Any, dtype: torch.dtype) -> Callable[[slice], Tensor]:
    from bitsandbytes import functional

    packed, state = layer.weight.data.view(torch.uint8).flatten(), layer.weight.quant_state
    width, block, absmax = layer.in_features, state.blocksize, state.absmax
    if state.nested:  # one scale for each block, in 8 bits
        absmax = functional.dequantize_blockwise(absmax, state.state2) + state.offset

    def rows(of: slice) -> Tensor:
        start, stop = of.start * width, of.stop * width
        kind = {"code": state.code, "blocksize": block, "quant_type": state.quant_type, "dtype": dtype}
        shape = torch.Size((of.stop - of.start, width))
        part = functional.QuantState(absmax[start // block : stop // block], shape, **kind)
        return functional.dequantize_4bit(packed[start // 2 : stop // 2, None], part)

    return rows


def _rows_of_float8(layer: Any, dtype: torch.dtype) -> Callable[[slice], Tensor]:
    weight, scale, block = layer.weight.detach(), layer.weight_scale_inv.detach().float(), layer.block_size

    def rows(of: slice) -> Tensor:
        part = weight[of].to(dtype)  # Numbers of 8 bits are exact in more: with their scale they are rounded once.
        if block is None:  # One scale is of all numbers, else of a block of rows and columns.
            return part.mul_(scale)
        factor = scale[torch.arange(of.start, of.stop, device=scale.device) // block[0]]
        if part.shape[1] % block[1]:  # A row's last block is smaller. Else no scale is copied for each number.
            return part.mul_(factor.repeat_interleave(block[1], 1)[:, : part.shape[1]])
        part.unflatten(1, (-1, block[1])).mul_(factor.unsqueeze(-1))
        return part

    return rows


def _rows_of_torchao(layer: Any, dtype: torch.dtype) -> Callable[[slice], Tensor]:
    return lambda rows: layer.weight[rows].dequantize().to(dtype)
