"""Note what a forward pass changes in a model beside its gradients, compare it between two passes, and give it back.

A model may count its calls, average a number in a buffer, draw from a generator of its own, or replace one of its
parts. A pass beside the training has to leave all of this as it was. And two passes that are to do the same have to
change the same: a count that grows with labels alone would not grow in training.
"""

import math
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

_PLAIN = (bool, int, float, str)
_CONTAINERS = (list, dict, set, deque)
_DEPTH = 3  # of containers within containers
_OF_TORCH = vars(nn.Module()).keys() - {"training"}  # parameters, hooks and so on
NOT_THERE = object()
_CLOSE = 1e-3  # relative: two passes of the same numbers may round differently on a GPU


def same_numbers(found: Any, expected: Any) -> bool:
    """Return whether two values are the same: numbers but for rounding, other kinds of objects without a look."""
    if found is expected:
        return True
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        if found.shape != expected.shape:
            return False
        if torch.equal(found, expected) or not expected.numel():
            return True
        found, expected = (each.detach().to(torch.float64) for each in (found, expected))
        size = expected.nan_to_num(0, 0, 0).abs().amax().item()
        return torch.allclose(found, expected, rtol=_CLOSE, atol=_CLOSE * size, equal_nan=True)
    if isinstance(expected, dict) and isinstance(found, dict):
        return found.keys() == expected.keys() and all(same_numbers(found[name], expected[name]) for name in expected)
    if isinstance(expected, list | tuple | deque) and isinstance(found, list | tuple | deque):
        return len(found) == len(expected) and all(map(same_numbers, found, expected))
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(found, expected, rel_tol=_CLOSE) or (math.isnan(found) and math.isnan(expected))
    if any(isinstance(each, (*_PLAIN, set, Tensor, *_CONTAINERS)) for each in (found, expected)):
        return type(found) is type(expected) and found == expected
    return (found is None) == (expected is None) and (found is NOT_THERE) == (expected is NOT_THERE)


class _Noted:
    """A value as it was, and how to give it back in place."""

    def __init__(self, value: Any, depth: int = _DEPTH) -> None:
        self.value: Any = value
        self.copy: Any = value
        self.parts: list[_Noted] = []
        if type(value) in (Tensor, DTensor) and not value.is_meta:
            self.copy = value.detach().clone()
        elif isinstance(value, torch.Generator):
            self.copy = value.get_state()
        elif isinstance(value, _CONTAINERS) and depth:
            self.copy = value.copy()
            self.parts = [_Noted(part, depth - 1) for part in (value.values() if isinstance(value, dict) else value)]

    def give_back(self) -> Any:
        value = self.value
        if self.copy is value:
            return value
        if isinstance(value, Tensor):
            if not torch.equal(value, self.copy):  # A graph may have it, and would not run backward.
                value.detach().copy_(self.copy)
        elif isinstance(value, torch.Generator):
            value.set_state(self.copy)
        else:
            if value != self.copy:
                value.clear()
                (value.extend if isinstance(value, list | deque) else value.update)(self.copy)
            for part in self.parts:
                part.give_back()
        return value

    def as_it_was(self) -> Any:
        """Return a value to compare with."""
        if isinstance(self.copy, dict):
            return dict(zip(self.copy, (part.as_it_was() for part in self.parts), strict=True))
        return [part.as_it_was() for part in self.parts] if isinstance(self.copy, list | deque) else self.copy


class ModelState:
    """The buffers, parts and attributes of a model's modules, and their configurations' entries, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        configurations: dict[int, tuple[str, Any]] = {}
        # For each module or configuration: what was noted, which of it is registered, and what is passed over.
        self._of: list[tuple[str, Any, dict[str, _Noted], set[str], set[str]]] = []
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            registered = dict([*module.named_children(), *module.named_buffers(recurse=False)])
            self._note(prefix, module, registered)
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig):
                configurations.setdefault(id(config), (prefix, config))
        for prefix, config in configurations.values():
            self._note(f"{prefix}config.", config, {})

    def _note(self, prefix: str, owner: Any, registered: dict[str, Any]) -> None:
        attributes = vars(owner)
        passed_over = {*_OF_TORCH, *(name for name, value in attributes.items() if _is_view(value))}
        noted = {name: _Noted(value) for name, value in attributes.items() if name not in passed_over}
        noted |= {name: _Noted(value) for name, value in registered.items()}
        self._of.append((prefix, owner, noted, {*registered}, passed_over))

    def changes(self) -> dict[str, Any]:
        """Return what has changed since, as it is now, by name."""
        found: dict[str, Any] = {}
        for prefix, owner, noted, registered, passed_over in self._of:
            now = vars(owner) | {name: getattr(owner, name) for name in registered}
            for name in (noted.keys() | now.keys()) - passed_over:
                value = now.get(name, NOT_THERE)
                if not same_numbers(value, noted[name].as_it_was()) if name in noted else _is_number(value):
                    found[prefix + name] = _Noted(value).as_it_was()
        return found

    @torch.no_grad()
    def give_back(self) -> None:
        """Make everything what it was."""
        for _, owner, noted, registered, passed_over in self._of:
            now = {name: value for name, value in vars(owner).items() if name not in passed_over}
            for name in now.keys() - noted.keys():
                if _is_number(now[name]):  # Others mark what was done once, as hooks that were put on the model.
                    del vars(owner)[name]
            for name, value in noted.items():
                before = value.give_back()
                if name in registered:
                    if getattr(owner, name) is not before:
                        setattr(owner, name, before)
                elif isinstance(before, _PLAIN) or _is_number(before) or _is_number(now.get(name)):
                    vars(owner)[name] = before


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, a tensor, or a container of these."""
    if isinstance(value, _CONTAINERS):
        return all(map(_is_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor | int | float) and not isinstance(value, bool | nn.Parameter)


def _is_view(value: Any) -> bool:
    """Return whether a value is a tensor without memory of its own, as FSDP1's parameters, whose memory is freed."""
    if not isinstance(value, Tensor) or value.is_meta:
        return isinstance(value, Tensor)
    part = value.to_local() if isinstance(value, DTensor) else value
    return part.untyped_storage().nbytes() != part.nbytes


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, and afterwards each of its modules as it was."""
    modes = [(module, module.training) for module in model.modules()]  # the modes may differ, as in a frozen tower
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def without_trace(model: nn.Module) -> Iterator[ModelState]:
    """Run a model eagerly in a block, and give back what a forward pass changes: random numbers, the model's buffers
    and attributes, and its parts (BigBird replaces its attention for good when it gets few tokens)."""
    devices = list({p.device for p in model.parameters() if p.is_cuda})
    # NumPy's global generator is the one that models draw from, so that is the one to give back.
    state, of_python, of_numpy = ModelState(model), random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        try:
            yield state
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002
            state.give_back()


@contextmanager
def probing(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for forward passes beside its training, and afterwards all of it as it was."""
    # On some CPUs bitsandbytes' layers of 4 bits repack their weights in evaluation, and have no gradient then.
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            vars(module)["support_avx512bf16_for_cpu"] = False
    with without_trace(model), evaluation_mode(model):
        yield
