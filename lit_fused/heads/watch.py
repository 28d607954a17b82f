"""Watch what a model does to its logits, in every forward pass, without building them.

In place of the output layer's output (..., V) the model gets one known number for each position, in the shape of the
whole output (:class:`UniformLogits`), a leaf of a graph of its own. What it makes of them has to be what the formula of
its head makes of them: in shape, which shows what acts on some of the vocabulary's entries; in value, which shows a
temperature or cap that has changed, a factor for some positions or rows, and positions in another order; and in
gradient, which shows hooks, clamps and detached parts. The numbers are no column of the logits, which would need a
product with the weight, and which a sharded, divided or adapted layer would have to gather: noise of every size sees
more, for O(B T).

The result is a few bits on the device. They are added up, and read when metrics are.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lit_fused.errors import UserError
from lit_fused.heads.spec import OutputHead
from lit_fused.heads.uniform_logits import UniformLogits, column_of

if TYPE_CHECKING:
    from lit_fused.heads.capture import InputCapture

TOLERANCE = 1e-4  # relative, of float32 numbers after a few operations; identification allows the same
_SHAPE, _GRAPH, _VALUE, _GRADIENT = 1, 2, 4, 8
_FAULTS = {
    _SHAPE: "they depend on the vocabulary entry by more than the output layer, or have another shape",
    _GRAPH: "their gradient is cut off, passes a backward hook of the output layer, or trains another parameter",
    _VALUE: "a temperature, cap, mask or hook has changed, or positions or rows have a factor or an order of their own",
    _GRADIENT: "their gradient is another one, as by a hook or a clamp",
}


def known_numbers(shape: torch.Size, phase: Tensor, device: torch.device) -> Tensor:
    """Return float32 noise of both signs and every size up to 200: the same for a ``phase`` (), without a generator."""
    index = torch.arange(shape.numel(), device=device, dtype=torch.float32).view(shape)
    hashed = torch.sin(index * 12.9898 + phase) * 43758.5453
    return torch.sinh(6 - 12 * (hashed - hashed.floor()))


def gradients_on() -> bool:
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


class HeadWatch:
    """Compares models with their formula, and keeps what it found until it is read."""

    def __init__(self) -> None:
        self.is_read_by_owner = False  # else the model reads it after each pass
        self._known = 0  # bits of faults that are found without a look at numbers
        self._found: Tensor | None = None  # () int64, those of the others, on the device
        self._earlier: Tensor | None = None  # found before the last pass

    def compare(self, head: OutputHead, call: "InputCapture", logits: Any) -> None:
        """Compare the ``logits`` that the model made of the call's known numbers with the head's formula."""
        if isinstance(logits, FakeTensor) or len(call.numbers) != 1:
            return
        numbers = call.numbers[0]
        with torch.autocast(numbers.device.type, enabled=False), torch.set_grad_enabled(numbers.requires_grad):
            expected = head.transform(numbers)
        is_uniform = type(logits) is type(numbers) and getattr(logits, "is_uniform", True)
        if not is_uniform or logits.shape != expected.shape:
            self.add_fault()
            return
        hooks = head.layer._backward_hooks or head.layer._backward_pre_hooks
        trained = any(leaf is not numbers for leaf in leaves(logits.grad_fn))
        if gradients_on() and (hooks or trained or call.had_gradient == [False]):
            self._known |= _GRAPH
            return
        with torch.autocast(numbers.device.type, enabled=False):
            found = _faults(head, numbers, logits, expected)
        self._found = found if self._found is None else self._found | found

    def add_fault(self) -> None:
        """Add that the model cannot make logits of one number for each position."""
        self._known |= _SHAPE

    def bits(self, device: torch.device) -> Tensor:
        """Return what was found, () int64 on ``device``, and forget it."""
        bits = torch.full((), self._known, dtype=torch.int64, device=device)
        bits = bits if self._found is None else bits | self._found.to(device)
        self._known, self._found, self._earlier = 0, None, None
        return bits

    def read_in_passing(self, name: str, head: OutputHead | None) -> None:
        """Refuse what was found on a CPU, and on a GPU what was found before the last pass, which is not waited for."""
        if self.is_read_by_owner:
            return
        on_cpu = self._found is None or self._found.device.type == "cpu"
        bits = self._found if on_cpu else self._earlier
        self._earlier = self._found
        refuse(self._known | (0 if bits is None else int(bits)), name, head)


class Basis:
    """Remembers what a head was identified with. Once it has changed, the head is to be identified again."""

    def __init__(self, head: OutputHead) -> None:
        self._head, self._forward = head, head.layer.forward
        self._tensors = [self._state(getattr(module, name)) for module, name in head.behind]

    def has_changed(self) -> bool:
        """Return whether the layer's forward or a tensor behind it changed; only a new version is compared."""
        for index, (module, name) in enumerate(self._head.behind):
            tensor, (before, version, numbers) = getattr(module, name), self._tensors[index]
            if tensor is not before or _version(tensor) != version:
                if tensor.shape != numbers.shape or not torch.equal(tensor, numbers):
                    return True
                self._tensors[index] = self._state(tensor)
        return self._head.layer.forward != self._forward

    @staticmethod
    def _state(tensor: Tensor) -> tuple[Tensor, int, Tensor]:
        return tensor, _version(tensor), tensor.detach().clone()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def faults_of(bits: int) -> str:
    """Return what the bits say; nothing for none."""
    return "; ".join(text for bit, text in _FAULTS.items() if bits & bit)


def refuse(bits: int, name: str, head: OutputHead | None) -> None:
    """Raise UserError if there are faults in ``bits`` of the model that ``name`` names."""
    if bits:
        raise UserError(
            f"{name} does something to its logits that is not the formula which its loss uses ({head}): "
            f"{faults_of(bits)}. Leave its logits as they were when training began, or choose loss=standard, which "
            "uses the model's own logits"
        )


def _faults(head: OutputHead, numbers: Tensor, logits: Tensor, expected: Tensor) -> Tensor:
    with torch.set_grad_enabled(numbers.requires_grad):
        difference = logits - expected
    with torch.no_grad():
        known = column_of(numbers)
        limit = TOLERANCE * (abs(head.scale) * known.abs() + column_of(expected).abs())
        faults = _VALUE * (~(column_of(difference).abs() <= limit)).any()
        if not numbers.requires_grad:
            return faults
        # Factors of every size, so that a clamp of gradients has some beyond it.
        factors = known.roll(1, 0) ** 3
        shaped = UniformLogits.of(factors, logits.shape[-1]) if isinstance(logits, UniformLogits) else factors
        try:
            (gradient,) = torch.autograd.grad(difference, numbers, shaped)
        except RuntimeError as error:  # A hook gave a gradient of another shape.
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return faults | _GRADIENT
        is_close = column_of(gradient).abs() <= TOLERANCE * abs(head.scale) * factors.abs()
        return faults | _GRADIENT * (~is_close).any()


def leaves(node: Any) -> Iterator[Tensor]:
    """Return the leaves of the graph that ends with ``node``."""
    seen, nodes = set(), [node]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [following for following, _ in node.next_functions]
