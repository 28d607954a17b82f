"""Half precision that leaves rotary frequencies whole.

``precision=bf16-true`` casts a module to bfloat16, and with it the frequencies that its rotary embeddings multiply
positions with. A frequency with eight bits, times 8192, is wrong by whole turns. transformers computes and keeps these
buffers in float32 whatever the model's dtype, under names that end in ``inv_freq``; so does the plugin here.
"""

from dataclasses import replace

import torch
from lightning.pytorch.plugins.precision import FSDPPrecision, HalfPrecision, Precision
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from lit_fused.errors import UserError


class _KeepsFrequencies(Precision):
    """Casts as the plugin that it is mixed into does, but for buffers named ``*inv_freq``, which stay as they are."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        whole = [(owner, name, getattr(owner, name)) for owner, name in _frequencies(module)]
        module = super().convert_module(module)
        for owner, name, buffer in whole:
            setattr(owner, name, buffer)
        return module


class RotaryHalfPrecision(_KeepsFrequencies, HalfPrecision):
    """Lightning's bf16-true and 16-true with whole frequencies."""


class RotaryFSDPPrecision(_KeepsFrequencies, FSDPPrecision):
    """Lightning's precision for FSDP1 with whole frequencies, and gradients that are summed over ranks in float32."""

    @property
    def mixed_precision_config(self) -> MixedPrecision:
        config = super().mixed_precision_config
        return replace(config, reduce_dtype=torch.float32, buffer_dtype=torch.float32)


def keep_frequencies(strategy: Strategy, model: nn.Module) -> None:
    """Put the plugin above in the place of Lightning's; called before the strategy casts the model.

    Raises:
        UserError: the model's frequencies have been rounded already.
    """
    for owner, name in _frequencies(model):
        dtype = getattr(owner, name).dtype
        if dtype.itemsize < torch.float32.itemsize:
            raise UserError(
                f"the rotary frequencies of {type(model).__name__} ({type(owner).__name__}.{name}) were rounded to "
                f"{dtype}, probably by model.to({dtype}): positions would be wrong by whole turns. Load the model with "
                "from_pretrained(..., dtype=...) or from_config(..., dtype=...), which keep them whole, or leave it in "
                "float32 and choose precision=bf16-true"
            )
    plugin = strategy.precision_plugin
    if type(plugin) is HalfPrecision:
        strategy.precision_plugin = RotaryHalfPrecision(plugin.precision)
    elif type(plugin) is FSDPPrecision:
        strategy.precision_plugin = RotaryFSDPPrecision(plugin.precision, plugin.scaler)  # type: ignore[arg-type]


def refuse_float16_parameters(model: nn.Module, precision: str) -> None:
    """An optimiser on float16 parameters loses small updates and divides by an epsilon that is zero in float16.

    Raises:
        UserError: some parameter to be trained is float16, and the precision is not 16-true.
    """
    halves = (name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16)
    found = next(halves, None)
    if found is not None and precision != "16-true":
        raise UserError(
            f"{found} is float16 (model.half()?) and is to be trained with precision={precision}: its updates would "
            "vanish or overflow. Leave the model in float32 and choose precision=16-mixed, or load it with "
            "dtype=torch.bfloat16"
        )


def _frequencies(module: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (owner, name)
        for owner in module.modules()
        for name, _ in owner.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    ]
