"""The repeated blocks of a model: the units that are compiled, sharded or planned one by one."""

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return transformers' layers, or the entries of another model's outermost ``nn.ModuleList``s."""
    found: list[nn.Module] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for child in () if found else model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else blocks(child)
    return found
