"""The shapes of everything that operations return in a block, as a check that no logits are made."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Shapes(TorchDispatchMode):
    """Remembers the shape of everything that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen |= {tuple(x.shape) for x in tree_leaves(result) if isinstance(x, Tensor)}
        return result


@contextmanager
def shapes() -> Iterator[set[tuple[int, ...]]]:
    with Shapes() as mode:
        yield mode.seen
