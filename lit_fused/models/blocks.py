"""The layers of a model: the blocks that it repeats."""

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks: transformers' layers, or the entries of a model's outermost ``nn.ModuleList``s, of
    lists in a list those of the inner ones. A layer of transformers may have others inside."""
    found: list[nn.Module] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for child in () if found else model.children():
        is_entry = isinstance(model, nn.ModuleList) and not isinstance(child, nn.ModuleList)
        found += [child] if is_entry else blocks(child)
    return found


def closed_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that share no weight and no part with weights with anything outside, but for those inside of
    another such block."""
    users: dict[int, set[int]] = {}
    for module in model.modules():
        for part in (*module.children(), *module.parameters(recurse=False)):
            users.setdefault(id(part), set()).add(id(module))
    closed: list[nn.Module] = []
    nested: set[int] = set()
    for block in blocks(model):  # Outer ones come before those inside of them.
        inside = {id(module) for module in block.modules()}
        parts = [part for part in block.modules() if part is not block and any(True for _ in part.parameters())]
        if id(block) not in nested and all(users[id(part)] <= inside for part in (*parts, *block.parameters())):
            closed.append(block)
            nested |= inside
    return closed


def part_to_compile(block: nn.Module) -> nn.Module:
    """Return what ``torch.compile`` is to take of a block: all of it, unless its forward was replaced by an object that
    names something ``inside``, as hooks of autograd stay out of a graph (memory/offloaded_layer.py)."""
    return getattr(vars(block).get("forward"), "inside", block)
