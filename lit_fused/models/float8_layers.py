"""Train with the products of a model's layers in float8, by torchao. No parameter and no name of one changes.

Input, weight and gradient of a product are scaled to float8 as whole tensors, anew in each step. The output layer, its
loss and everything in evaluation mode (validation, generation, export) compute as they do without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_fused.errors import UserError, needing
from lit_fused.heads import peft_model
from lit_fused.losses.loss import WEIGHTS
from lit_fused.models.compilation import blocks
from lit_fused.models.language_model import LanguageModel

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

LEAST_WIDTH = 2048  # of a model; narrower ones are slower than in bfloat16 (docs/measurements.md)
_LEAST_SIDE = 1024  # of a layer's weight: smaller ones, such as routers of experts, stay as they are
_LEAST_CAPABILITY = (8, 9)


def check_float8(model: LanguageModel, compile: str, strategy: "Strategy") -> None:
    """Raise a UserError where float8 would be slower or wrong, was never tested, or cannot run."""
    device, precision = strategy.root_device, strategy.precision_plugin.precision
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        raise UserError(
            f"kernels=float8 is for a CUDA GPU of compute capability 8.9 or more, and this is {_name(device)}; choose "
            "kernels=none"
        )
    with needing("kernels=float8", "float8"):
        import_module("torchao.float8")
    width = max((min(layer.weight.shape) for _, _, layer in _layers(model)), default=0)
    refusals = {
        f"this model's widest layers have {width} inputs or outputs, and below {LEAST_WIDTH} float8 is slower than "
        "bfloat16; choose kernels=none": width < LEAST_WIDTH,
        f"kernels=float8 has products in bfloat16 beside it, and precision is {precision}; choose "
        "precision=bf16-mixed or bf16-true": precision not in ("bf16-mixed", "bf16-true"),
        f"{type(model.loss).__name__} was never tested with float8, which only the trained model would have; "
        "choose kernels=none": {*model.loss.inputs} - {WEIGHTS},
        "PEFT's adapters were never tested with layers in float8; choose kernels=none": peft_model(model.backbone),
        "kernels=float8 was never tested on several devices; choose kernels=none, or trainer.devices=1": (
            getattr(strategy, "world_size", 1) > 1
        ),
        "layers in float8 are slower than in bfloat16 unless they are compiled; choose compile=regional": (
            compile == "none"
        ),
    }
    for reason, holds in refusals.items():
        if holds:
            raise UserError(reason)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _layers(model: LanguageModel) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Return the linear layers that are large enough, each with the module that has it, and its name there."""
    found = [
        (owner, name, layer)
        for block in blocks(model.backbone)
        for owner in block.modules()
        for name, layer in owner.named_children()
        if type(layer) is nn.Linear
    ]
    return [(owner, name, layer) for owner, name, layer in found if _is_large(*layer.weight.shape)]


def _is_large(*sides: int) -> bool:
    return min(sides) >= _LEAST_SIDE and all(side % 16 == 0 for side in sides)  # GPUs take sixteen at a time


def use_float8_layers(model: LanguageModel) -> None:
    """Compute the products of the large linear layers of a model's blocks in float8 while it trains."""
    float8 = import_module("torchao.float8")
    Float8Linear: Any = import_module("torchao.float8.float8_linear").Float8Linear

    class TrainedInFloat8(Float8Linear):
        def forward(self, input: Tensor) -> Any:
            return super().forward(input) if self.training else F.linear(input, self.weight, self.bias)

    config = float8.Float8LinearConfig(pad_inner_dim=True)  # for any number of tokens
    for owner, name, layer in _layers(model):
        setattr(owner, name, TrainedInFloat8.from_float(layer, config).train(layer.training))
