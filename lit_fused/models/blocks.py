"""The repeated blocks of a model: the units that are compiled, sharded or planned one by one."""

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return transformers' layers, or the entries of another model's outermost ``nn.ModuleList``s."""
    layers: list[nn.Module] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return layers or _in_module_lists(model)


def _in_module_lists(model: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else _in_module_lists(child)
    return found
