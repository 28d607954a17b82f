"""Divide the tokens of a training step, too, where tensor parallelism divides the matrices.

Between a layer's divided matrices each rank has a part of the tokens alone: of the norms and sums of hidden states it
computes, and keeps for backward, that part (sequence parallelism: Korthikanti et al., 2022, arXiv:2205.05198). Tokens
are gathered before an attention or feed-forward layer, and divided again by the sum over ranks that ends it.

Hidden states that are divided say so by their type, ``DTensor``: what would take them for whole ones raises an error.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lit_fused.models.compilation import blocks

_WHOLE = Replicate()


class DividedTokens:
    """Divides the tokens between the first block's input and the last block's output of a model, until :meth:`remove`.

    In evaluation, and where the ranks do not divide the number of tokens, they stay whole.

    Args:
        backbone: a model whose matrices are divided.
        columns: the matrices, by name, that are divided by their outputs.
        rows: the matrices, by name, that are divided by their inputs, and whose outputs are summed; and how the layer
            before them leaves these inputs.
        mesh: the ranks.
    """

    def __init__(
        self, backbone: nn.Module, columns: list[str], rows: Mapping[str, Placement], mesh: DeviceMesh
    ) -> None:
        self._mesh = mesh
        self._undo: list[Callable[[], None]] = []
        layers = blocks(backbone)
        self._change_input(layers[0], self._divide)
        self._undo.append(layers[-1].register_forward_hook(_leave).remove)
        number = Counter(name.rpartition(".")[0] for name in columns)
        for name in (name for name, matrices in number.items() if matrices > 1):
            self._change_input(backbone.get_submodule(name), self._gather)
        for name, given in rows.items():
            self._change_forward(backbone.get_submodule(name), partial(self._sum, given))
        divided = {backbone.get_submodule(name) for name in (*columns, *rows)}
        for layer in {module for block in layers for module in block.modules()} - divided:
            if layer._parameters:
                self._change_forward(layer, self._with_copies)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _change_input(self, layer: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            given = args[0] if args else kwargs.get("hidden_states")
            if not torch.is_grad_enabled() or not isinstance(given, Tensor):
                return args, kwargs
            changed = change(given)
            return ((changed, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": changed})

        self._undo.append(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _change_forward(self, layer: Any, change: Callable[..., Callable[..., Any]]) -> None:
        own = layer.forward
        self._undo.append(partial(setattr, layer, "forward", own))
        layer.forward = change(layer, own)

    def _of_rank(self, hidden: Tensor) -> Shard | None:
        """Return how hidden states (rows, tokens, D) are divided: by rows, which takes no copy, or tokens."""
        if torch.is_grad_enabled() and hidden.dim() == 3:
            return next((Shard(dim) for dim in (0, 1) if hidden.shape[dim] % self._mesh.size() == 0), None)
        return None

    def _distributed(self, hidden: Tensor, placement: Placement) -> DTensor:
        if isinstance(hidden, DTensor):
            return hidden
        return DTensor.from_local(hidden, self._mesh, [placement], run_check=False)

    def _divide(self, hidden: Tensor) -> Tensor:
        of_rank = self._of_rank(hidden)
        return hidden if of_rank is None else self._distributed(hidden, _WHOLE).redistribute(placements=[of_rank])

    def _gather(self, hidden: Tensor) -> Tensor:
        # Also of whole tokens the gradient is summed over the ranks once here, and not once for each matrix; under
        # autocast in the dtype that the matrices take, which is half as much to send as float32.
        device = hidden.device.type
        if hidden.dtype == torch.float32 and torch.is_autocast_enabled(device):
            hidden = hidden.to(torch.get_autocast_dtype(device))
        return self._distributed(hidden, _WHOLE).redistribute(placements=[_WHOLE])

    def _sum(self, given: Placement, layer: nn.Module, own: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(part: Tensor) -> Tensor:
            of_rank = self._of_rank(part)
            if of_rank is None:
                return own(part)
            part = self._distributed(part, given).redistribute(placements=[Shard(-1)])
            return type(layer).forward(layer, part).redistribute(placements=[of_rank])

        return forward

    def _with_copies(self, layer: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
        """Let a layer that every rank has whole take divided tokens; the gradients of its copies are summed."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not args or not isinstance(args[0], DTensor) or args[0].placements == (_WHOLE,):
                return own(*args, **kwargs)
            copies: Mapping[str, Tensor | None] = dict(layer._parameters)
            for name, copy in copies.items():
                if copy is not None:
                    layer._parameters[name] = self._distributed(copy, _WHOLE)  # type: ignore[assignment]
            try:
                return own(*args, **kwargs)
            finally:
                layer._parameters.update(copies)  # type: ignore[arg-type]

        return forward


def _leave(block: nn.Module, args: Any, output: Any) -> Any:
    hidden, *others = output if isinstance(output, tuple) else (output,)
    if isinstance(hidden, DTensor):
        hidden = hidden.redistribute(placements=[_WHOLE]).to_local()
    return (hidden, *others) if isinstance(output, tuple) else hidden
