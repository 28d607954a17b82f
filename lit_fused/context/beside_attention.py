"""Tell a model what it needs of whole rows beside attention: the longest position, and the logits of its routers.

``dynamic`` and ``longrope`` positions are scaled by the longest position that they are given. A rank gives them one
more, the longest of the whole rows, and drops what they return for it. A router's loss is a product of means over all
tokens. The model computes it, on each rank, of the router logits of all of them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_fused.context.exchange import Ranks
from lit_fused.losses.loss import Batch, labels_of


@contextmanager
def told_of_whole_rows(model: PreTrainedModel, ranks: Ranks, batch: Batch) -> Iterator[None]:
    """Let forward passes of this rank's part of a ``batch`` (B, T) know its longest position and its router logits."""
    rows, length = labels_of(batch).shape
    positions = batch.get("position_ids")
    longest = length - 1 if positions is None else positions.max()

    def add_longest(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        named = dict(zip(("x", "position_ids", "layer_type"), arguments, strict=False)) | named
        part = named["position_ids"]
        return (), named | {"position_ids": torch.cat([part, torch.zeros_like(part[:, :1]) + longest], 1)}

    def drop_longest(_: nn.Module, __: Any, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return tuple(each[:, :-1] for each in embeddings)

    def gather_routers(_: nn.Module, __: Any, output: Any) -> None:
        logits = getattr(output, "router_logits", None)
        if logits is not None and getattr(model.config, "output_router_logits", False):
            parts = (each.unflatten(0, (rows, -1)) for each in logits)
            output.router_logits = tuple(ranks.whole(part, length).flatten(0, 1) for part in parts)

    with ExitStack() as hooks:
        for module in model.modules():
            if any(kind in str(getattr(module, "rope_type", "")) for kind in ("dynamic", "longrope")):
                hooks.callback(module.register_forward_pre_hook(add_longest, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(drop_longest).remove)
        hooks.callback(model.base_model.register_forward_hook(gather_routers).remove)
        yield
