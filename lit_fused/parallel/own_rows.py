"""FSDP2 that gathers no output layer (``gather_head=False``): ranks keep their rows of it, and tokens travel instead.

The loss computes the columns of a rank's rows for the tokens of all ranks (ops/tokens_of_ranks.py). Whoever calls the
layer itself, as generation does, gets the whole logits of its own tokens. An embedding that has the same weight looks
up the rows of all ranks' tokens. Their gradient is the mean over ranks, as FSDP2's of other parameters.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lit_fused.errors import UserError
from lit_fused.heads import output_layer
from lit_fused.heads.adapters import full_name
from lit_fused.heads.spec import keep_own_rows, local_rows
from lit_fused.models.language_model import LanguageModel
from lit_fused.ops.tokens_of_ranks import padded_rows, rows_of_ranks, sizes_of_ranks
from lit_fused.ops.vocabulary_parallel import VocabularyShard
from lit_fused.parallel.tensor import check_divided_loss, divide_parameter

_OTHERWISE = "choose gather_head=true"


def check_own_rows(model: LanguageModel) -> None:
    """Raise UserError unless ranks can keep their rows of the output layer, and of an embedding that is tied to it."""
    layer = output_layer(model.backbone)
    ties = _tied_to(layer, model)
    if type(layer) is not nn.Linear or any(not isinstance(m, nn.Embedding) or m.max_norm is not None for m in ties):
        kinds = " and ".join(full_name(m) for m in (layer, *ties))
        raise UserError(
            f"gather_head=false divides an nn.Linear and an nn.Embedding tied to it, got {kinds}; {_OTHERWISE}"
        )
    check_divided_loss(model, _OTHERWISE)


def divide_head(model: LanguageModel, mesh: DeviceMesh, embedded: torch.dtype | None) -> set[nn.Parameter]:
    """Divide the output layer, and an embedding that is tied to it, over a mesh in place; return their parameters,
    which FSDP2 has to leave alone. ``embedded`` is the dtype of embeddings; None: that of the weight."""
    layer: Any = output_layer(model.backbone)
    ties = _tied_to(layer, model)
    for name, _ in list(layer.named_parameters(recurse=False)):
        divide_parameter(layer, name, mesh)
    keep_own_rows(layer)

    def logits(hidden_states: Tensor) -> Tensor:
        rows, count = _padded(hidden_states.flatten(0, -2), mesh)
        of_all = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False).redistribute(placements=[Replicate()])
        hidden_ND = of_all.to_local(grad_placements=[Partial()])
        weight = local_rows(layer.weight, averaged=True).to(rows.dtype)
        bias = None if layer.bias is None else local_rows(layer.bias, averaged=True).to(rows.dtype)
        columns = F.linear(hidden_ND, weight, bias)
        shape = torch.Size((len(columns), layer.weight.shape[0]))
        divided = DTensor.from_local(columns, mesh, [Shard(1)], run_check=False, shape=shape, stride=(shape[1], 1))
        own = divided.redistribute(placements=[Shard(0)]).to_local()
        return own[:count].unflatten(0, hidden_states.shape[:-1])

    layer.forward = logits
    for embedding in ties:
        _look_up_in_rows(embedding, layer.weight, mesh, embedded)
    return {*layer.parameters()}


def _look_up_in_rows(embedding: Any, weight: nn.Parameter, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    own_forward = embedding.forward

    def forward(input_ids: Tensor) -> Tensor:
        ids, count = _padded(input_ids.flatten(), mesh)
        shard = VocabularyShard.of(embedding.weight, tokens_differ=True)
        of_all = rows_of_ranks(ids, [len(ids)] * mesh.size(), shard.group)
        found = shard.look_up(embedding, own_forward, local_rows(embedding.weight, averaged=True), of_all)
        found = found if dtype is None else found.to(dtype)
        own = DTensor.from_local(found, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(0)])
        return own.to_local()[:count].unflatten(0, input_ids.shape)

    embedding.weight = weight
    embedding.forward = forward


def _padded(rows: Tensor, mesh: DeviceMesh) -> tuple[Tensor, int]:
    """Return as many rows (n, ...) as the rank with the most has, and how many of them are this one's."""
    most = max(sizes_of_ranks(len(rows), rows.device, mesh.get_group()))
    return padded_rows(rows, most), len(rows)


def _tied_to(layer: nn.Module, model: nn.Module) -> list[nn.Module]:
    own = {id(p) for p in layer.parameters(recurse=False)}
    return [m for m in model.modules() if m is not layer and any(id(p) in own for p in m.parameters(recurse=False))]
