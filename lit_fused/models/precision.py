"""Train in half precision without rounding rotary frequencies.

A rotary frequency with bfloat16's eight bits, times position 8192, is wrong by whole turns. transformers keeps these
buffers in float32 whatever the model's dtype, under names that end in ``inv_freq``; so do the plugins in this file,
which also leave complex buffers (``freqs_cis``) alone, whose imaginary part Lightning's cast would drop. Every other
buffer is rounded once, like a parameter: some models need it in their own dtype.
"""

from collections.abc import Collection
from typing import Any

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lit_fused.errors import UserError


class _KeepsFrequencies(Precision):
    """Cast a module and its batches as the plugin beside it does, except for rotary frequencies and for what a batch
    has ``for_loss``: a stored log-probability of -301.3 would be -302 in bfloat16."""

    for_loss: Collection[str] = ()

    def convert_input(self, data: Any) -> Any:
        converted = super().convert_input(data)
        return {**converted, **{n: data[n] for n in self.for_loss if n in data}} if type(data) is dict else converted

    def convert_module(self, module: nn.Module) -> nn.Module:
        whole = [(owner, name, getattr(owner, name)) for owner, name in _frequencies(module)]
        module = super().convert_module(module)
        for owner, name, buffer in whole:
            setattr(owner, name, buffer)
        return module


class RotaryHalfPrecision(_KeepsFrequencies, HalfPrecision):
    """Lightning's bf16-true and 16-true, with float32 frequencies."""


def prepare_precision(strategy: Strategy, model: nn.Module, *, training: bool, for_loss: Collection[str] = ()) -> None:
    """Replace Lightning's precision plugin by one of this file, before the strategy casts the model, and check its
    dtypes: UserError for rounded rotary frequencies, or float16 trained without a cast; bfloat16 gives a warning."""
    plugin = strategy.precision_plugin
    casts = isinstance(plugin, HalfPrecision | DoublePrecision) and "true" in str(plugin.precision)
    trained = [(name, p.dtype) for name, p in model.named_parameters() if training and not casts and p.requires_grad]
    first = {dtype: name for name, dtype in reversed(trained)}
    if torch.float16 in first:  # float16 loses small updates and most of Adam's second moments.
        raise UserError(
            f"{first[torch.float16]} is float16 (model.half(), or loaded from a float16 checkpoint) and is to be "
            f"trained with precision={plugin.precision}: its updates would vanish or overflow. Load the model with "
            "dtype=torch.float32 and choose precision=16-mixed, or choose precision=bf16-true"
        )
    for owner, name in _frequencies(model):
        dtype = getattr(owner, name).dtype
        if dtype.itemsize < torch.float32.itemsize:
            raise UserError(
                f"the rotary frequencies of {type(model).__name__} ({type(owner).__name__}.{name}) were rounded to "
                f"{dtype}, probably by model.to({dtype}): positions would be wrong by whole turns. Load the model with "
                "from_pretrained(..., dtype=...) or from_config(..., dtype=...), which keep them whole, or leave it in "
                "float32 and choose precision=bf16-true"
            )
    if torch.bfloat16 in first:  # from_pretrained uses the checkpoint's dtype by default.
        rank_zero_warn(
            f"{first[torch.bfloat16]} is bfloat16 and stays so with precision={plugin.precision}: updates smaller "
            "than a 256th of a parameter are lost. Load the model with dtype=torch.float32, or choose "
            "precision=bf16-true, which says so"
        )
    if type(plugin) is HalfPrecision:
        strategy.precision_plugin = RotaryHalfPrecision(plugin.precision)
    if isinstance(strategy.precision_plugin, _KeepsFrequencies):
        strategy.precision_plugin.for_loss = for_loss


def _frequencies(module: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (owner, name)
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name.endswith("inv_freq") or buffer.is_complex()
    ]
