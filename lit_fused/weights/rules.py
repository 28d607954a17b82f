"""Draw a model's initial weights one tensor at a time, by transformers' own rules and (seed, name of the tensor).

transformers calls ``_init_weights`` on each module, children first. A rule may write several tensors, also those of its
children, and several rules may write one (GPT-2 draws its ``c_proj`` twice). Here the rules run on a *skeleton*, a copy
of the model on the meta device. One tensor gets memory, the generator is seeded by its name, and the rules of its
module and of all modules around it run in order; they do nothing to the other tensors. So peak memory is one tensor,
and its numbers do not depend on the order or the rank.

The memory is first filled with a value that no rule writes, so a tensor that no rule sets, even in part, is detected.
A rule that computes one tensor from another is detected too, because the other has no numbers.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_utils import local_torch_dtype

from lit_fused.errors import UserError

Index = tuple[slice | Tensor, ...]
SOURCE = "_lit_fused_weights"  # the attribute of a model without memory that holds the source of its weights


class FromRules:
    """Gives the tensors of a transformers model by name, drawn by the model's own rules.

    Args:
        skeleton: the whole model on the meta device, its tied weights not tied.
        tied: the names of tied weights -> the name of the one that they are tied to.
        seed: any integer.
    """

    def __init__(self, skeleton: PreTrainedModel, tied: Mapping[str, str], seed: int) -> None:
        self.name = type(skeleton).__name__
        self.tied = dict(tied)
        self._skeleton = skeleton
        self._seed = seed
        self._tensors = dict(named_tensors(skeleton))
        self._names = {tensor: name for name, tensor in reversed(self._tensors.items())}  # the first of a shared module
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._dtype = skeleton.dtype
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def read(self, name: str, index: Index) -> Tensor:
        """Return a part of a tensor, on the CPU, to be copied at once. Tied weights give the same numbers."""
        return self._read(self.tied.get(name, name), index)

    def close(self) -> None:
        """Free memory. Reading may continue later."""
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _read(self, name: str, index: Index) -> Tensor:
        """Draw a tensor, in the skeleton's dtype. All tensors use the same memory, so that the heap gets no holes."""
        meta = self._tensors[name]
        if meta.dtype == torch.bool:  # there is no third value: a part that was not set keeps the fill
            drawn = self._draw(name, False).clone()
            complete = torch.equal(drawn, self._draw(name, True))
        elif meta.is_floating_point() or meta.is_complex():
            drawn = self._draw(name, float("nan"))
            complete = not bool(drawn.sum().isnan()) or not bool(drawn.isnan().any())  # the sum allocates nothing
        else:
            unset = torch.iinfo(meta.dtype).min or torch.iinfo(meta.dtype).max
            drawn = self._draw(name, unset)
            complete = not bool((drawn == unset).any())
        if not complete:
            raise self._refusal(f"leave {name}, or a part of it, without a value")
        return drawn[index]

    def _draw(self, name: str, fill: Any) -> Tensor:
        meta = self._tensors[name]
        size = meta.numel() * meta.itemsize
        if len(self._memory) < size:
            self._memory = torch.empty(0, device="cpu")  # It is freed before more is allocated.
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        real = self._memory[:size].view(meta.dtype).view(meta.shape).fill_(fill)
        if isinstance(meta, nn.Parameter):
            real = nn.Parameter(real, requires_grad=meta.requires_grad)
        name = self._names[meta]
        seed = int.from_bytes(hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:7], "little")
        with (
            _in_place_of(meta, real, self._skeleton),
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            ordinary_defaults(self._dtype),
            _Alone(real),
        ):
            torch.default_generator.manual_seed(seed)
            try:
                for owner, module in self._around(name):
                    owner._init_weights(module)
            except Exception as error:  # any exception of the model's code, or that of _Alone
                raise self._refusal(f"cannot make {name} alone ({type(error).__name__}: {error})") from error
            return self._skeleton.get_parameter_or_buffer(name).detach()

    def _around(self, name: str) -> list[tuple[PreTrainedModel, nn.Module]]:
        """Return the module of a tensor and those around it, innermost first, each with the model whose rules apply."""
        owner, module = self._skeleton, self._skeleton
        found: list[tuple[PreTrainedModel, nn.Module]] = [(owner, module)]
        for part in name.split(".")[:-1]:
            module = getattr(module, part)
            owner = module if isinstance(module, PreTrainedModel) else owner
            found.append((owner, module))
        return found[::-1]

    def _refusal(self, reason: str) -> UserError:
        return UserError(
            f"{self.name} cannot be initialised one tensor at a time: its rules {reason}. Build it whole on every "
            "process: from_config(..., at_once=True), or at_once: true in the model's file"
        )


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer, by each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def places_of(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    """Yield each tensor's name, the dict of its module that has it, its name there, and itself."""
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for attribute, tensor in tensors.items():
                if tensor is not None:
                    yield f"{prefix}.{attribute}".lstrip("."), tensors, attribute, tensor


@contextmanager
def ordinary_defaults(dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Create tensors on the CPU and in ``dtype`` unless the code says otherwise: in ``configure_model``, Lightning sets
    the run's device and precision as defaults."""
    with torch.device("cpu"), local_torch_dtype(dtype):
        yield


@contextmanager
def _in_place_of(own: Tensor, other: Tensor, model: nn.Module) -> Iterator[None]:
    places = [(tensors, attribute) for _, tensors, attribute, tensor in places_of(model) if tensor is own]
    for tensors, attribute in places:
        tensors[attribute] = other
    try:
        yield
    finally:
        for tensors, attribute in places:
            tensors[attribute] = own


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
