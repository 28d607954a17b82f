"""Draw a model's initial weights one tensor at a time, by transformers' own rules and (seed, name of the tensor).

transformers initialises a model by calling ``_init_weights`` on each of its modules, children first. A rule may write
several tensors, also those of its children, and several rules may write one (GPT-2 draws its ``c_proj`` twice). Here
the rules run on a *skeleton*, a copy of the model without memory (the meta device). One tensor gets memory, the
generator is seeded by its name, and the rules of its module and of all modules around it run in order; they do nothing
to the other tensors. So peak memory is one tensor, and its numbers depend only on the configuration, the seed and its
name, not on the order or the rank.

The memory is first filled with a value that no rule writes, so a tensor that no rule sets, even in part, is detected.
A rule that computes one tensor from another is detected too, because the other has no numbers.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.weights.tensor_defaults import ordinary_defaults


class InitialWeights:
    """Draws the tensors of a transformers model.

    Args:
        skeleton: the model on the meta device, its tied weights not tied.
        seed: any integer.
    """

    def __init__(self, skeleton: PreTrainedModel, seed: int) -> None:
        self.skeleton = skeleton
        self.seed = seed
        self._names = {tensor: name for name, tensor in reversed(list(named_tensors(skeleton)))}
        self._tensors = dict(named_tensors(skeleton))
        self._dtype = skeleton.dtype
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def draw(self, name: str) -> Tensor:
        """Return the whole tensor on the CPU, in the skeleton's dtype, valid until the next call.

        All tensors use the same memory, so that the heap gets no holes.

        Raises:
            UserError: the rules cannot run for this tensor alone, or leave a part of it without a value.
        """
        meta = self._tensors[name]
        if meta.dtype == torch.bool:  # there is no third value: a part that was not set keeps the fill
            drawn = self._draw(name, False).clone()
            complete = torch.equal(drawn, self._draw(name, True))
        else:
            drawn = self._draw(name, _unset(meta.dtype))
            if meta.is_floating_point() or meta.is_complex():
                complete = not bool(drawn.sum().isnan()) or not bool(drawn.isnan().any())  # the sum allocates nothing
            else:
                complete = not bool((drawn == _unset(meta.dtype)).any())
        if not complete:
            raise self._refusal(f"leave {name}, or a part of it, without a value")
        return drawn

    def close(self) -> None:
        """Free the memory."""
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _draw(self, name: str, fill: Any) -> Tensor:
        meta = self._tensors[name]
        size = meta.numel() * meta.itemsize
        if len(self._memory) < size:
            self.close()
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        real = self._memory[:size].view(meta.dtype).view(meta.shape).fill_(fill)
        if isinstance(meta, nn.Parameter):
            real = nn.Parameter(real, requires_grad=meta.requires_grad)
        name = self._names[meta]  # the first name of a shared module
        with (
            _in_place_of(meta, real, self.skeleton),
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            ordinary_defaults(self._dtype),
            _Alone(real),
        ):
            torch.default_generator.manual_seed(_number(self.seed, name))
            try:
                for owner, module in self._around(name):
                    owner._init_weights(module)
            except Exception as error:  # any exception of the model's code, or that of _Alone
                raise self._refusal(f"cannot make {name} alone ({type(error).__name__}: {error})") from error
            return self.skeleton.get_parameter_or_buffer(name).detach()

    def _around(self, name: str) -> list[tuple[PreTrainedModel, nn.Module]]:
        """Return the module of a tensor and those around it, innermost first, each with the model whose rules apply."""
        owner, module = self.skeleton, self.skeleton
        found: list[tuple[PreTrainedModel, nn.Module]] = [(owner, module)]
        for part in name.split(".")[:-1]:
            module = getattr(module, part)
            owner = module if isinstance(module, PreTrainedModel) else owner
            found.append((owner, module))
        return found[::-1]

    def _refusal(self, reason: str) -> UserError:
        return UserError(
            f"{type(self.skeleton).__name__} cannot be initialised one tensor at a time: its rules {reason}. Build it "
            "whole on every process: from_config(..., at_once=True), or at_once: true in the model's file"
        )


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer, by each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@contextmanager
def _in_place_of(own: Tensor, other: Tensor, model: nn.Module) -> Iterator[None]:
    places = [
        (tensors, attribute)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for attribute, tensor in tensors.items()
        if tensor is own
    ]
    for tensors, attribute in places:
        tensors[attribute] = other  # type: ignore[assignment]
    try:
        yield
    finally:
        for tensors, attribute in places:
            tensors[attribute] = own  # type: ignore[assignment]


class _Alone(TorchDispatchMode):
    """Refuses operations on ``tensor`` and one without numbers: some of them would silently do nothing."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._storage = tensor.untyped_storage()._cdata

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(t.is_meta for t in tensors) and any(t.untyped_storage()._cdata == self._storage for t in tensors):
            raise RuntimeError("it is made of another tensor")
        return func(*args, **(kwargs or {}))


def _unset(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return torch.iinfo(dtype).min or torch.iinfo(dtype).max


def _number(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "little")
