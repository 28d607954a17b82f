"""The largest tensor that operations in a block make."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Records, in a ``with`` block, the most numbers that a new tensor of floating point has, and its shape."""

    numbers, bytes, shape = 0, 0, ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(found):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            if tensor.untyped_storage().data_ptr() not in known and tensor.numel() > self.numbers:
                self.numbers, self.shape = tensor.numel(), tuple(tensor.shape)
                self.bytes = tensor.numel() * tensor.itemsize
        return found
