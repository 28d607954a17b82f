"""Divide a decoder over the ranks of a pipeline, and tell what is left of it on each.

Placeholders stand where modules of other ranks were. Each of them knows the :class:`DividedModel`, so that a model
stays divided however many trainers it goes through.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lit_fused.errors import UserError
from lit_fused.heads import OutputHead, output_layer
from lit_fused.models.language_model import LanguageModel
from lit_fused.models.load import is_deferred, ordinary_defaults
from lit_fused.parallel.twin import small_twin
from lit_fused.pipeline import stages
from lit_fused.pipeline.stages import Decoder, Elsewhere, Layout, Stage


@dataclass
class DividedModel:
    """A model that has been divided: what is left of it on this rank, and what the whole was."""

    decoder: Decoder  # the model's parts; those of other ranks are gone
    layout: Layout
    stages: dict[int, Stage]  # this rank's, by their index
    is_tied: bool  # embedding and output layer are one parameter
    embedding_rows: int  # of the whole model
    hidden_size: int
    shards: int  # number of parts into which FSDP2 divides each of its parameters; 1 without it
    frozen: list[int]  # the stages, of all ranks, without any parameter to be trained

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """The tied weight, on the ranks of the first and the last stage; None elsewhere, and if none is tied."""
        is_here = self.is_tied and {0, self.layout.num_stages - 1} & self.stages.keys()
        return getattr(self.decoder.base, self.decoder.embedding).weight if is_here else None


def divided_model(model: nn.Module) -> DividedModel | None:
    """Return what is left of a model that a pipeline has divided; None for any other."""
    return next((m.divided for m in model.modules() if isinstance(m, Elsewhere) and m.divided is not None), None)


def divide(
    model: LanguageModel, layout: Layout, rank: int, device: torch.device, mesh: DeviceMesh | None
) -> DividedModel:
    """Take what is not this rank's out of a whole model, in place. All ranks begin with the same model.

    Args:
        model: its head is identified, or its weights come late. In that case they are still missing afterwards, and
            :func:`complete` has to be called once they are there.
        layout: the stages of all ranks; UserError if they cannot give exactly what the model gives.
        rank, mesh: of this process in its pipeline; ranks over which FSDP2 shards the stages, or None.
    """
    if is_deferred(model):
        model.replace_head(OutputHead(output_layer(model.backbone)))  # complete() identifies the head
    decoder = stages.find_decoder(model)
    ranges = stages.layers_of_stages(decoder.num_layers, layout.num_stages, _head_in_layers(decoder))
    whole = [Stage(decoder, layers) for layers in ranges]
    if is_deferred(model):
        _check_twin(model, layout, device)
    else:
        stages.check_stages(model, decoder, whole)
    rows, size = getattr(decoder.base, decoder.embedding).weight.shape
    divided = DividedModel(
        decoder,
        layout,
        stages={index: whole[index] for index in layout.stages_of(rank)},
        is_tied=decoder.is_tied,
        embedding_rows=rows,
        hidden_size=size,
        shards=1 if mesh is None else mesh.size(),
        frozen=[i for i, stage in enumerate(whole) if not any(p.requires_grad for p in stage.parameters())],
    )
    del whole
    prune(model, decoder, [ranges[index] for index in divided.stages], divided)
    if mesh is not None:
        for index, stage in divided.stages.items():
            for layer in ranges[index]:
                fully_shard(getattr(decoder.base, decoder.layers)[layer], mesh=mesh)
            fully_shard(stage, mesh=mesh)
    return divided


def _head_in_layers(decoder: Decoder) -> float:
    """Return how many layers take about as long as the output head.

    A parameter of either costs as many operations, but the head's products are larger, and layers have attention beside
    them: the head of a 0.6B and of a 1.7B model took 0.51 and 0.59 of the time of layers with as many parameters
    (docs/parallelism_measured.md).
    """
    layers = sum(p.numel() for p in getattr(decoder.base, decoder.layers).parameters())
    return 0.55 * getattr(decoder.model, decoder.head).weight.numel() * decoder.num_layers / layers


def _check_twin(model: LanguageModel, layout: Layout, device: torch.device) -> None:
    """Raise UserError unless a small model like this one, which has no weights yet, is exactly its stages."""
    assert model.transformers_model is not None
    # Layers of it: the first, the last, and one between them, which all others are like.
    twin = type(model)(small_twin(model.transformers_model, min(layout.num_stages, 3), device), model.loss)
    twin.own_positions = model.own_positions  # What is found out about the twin's holds for the model's.
    with ordinary_defaults():
        twin.prepare(device)
        twin.prepare_hidden_states()
        decoder = stages.find_decoder(twin)
        ranges = stages.layers_of_stages(decoder.num_layers, min(layout.num_stages, decoder.num_layers))
        stages.check_stages(twin, decoder, [Stage(decoder, layers) for layers in ranges])


def prune(model: LanguageModel, decoder: Decoder, layers: Sequence[range], divided: DividedModel | None = None) -> None:
    """Replace, in place, every module that belongs to other ranks than the one with these ranges of layers.

    A tied embedding stays on the first stage and, with the output layer, on the last.
    """
    own = getattr(decoder.base, decoder.layers)
    is_first = any(part.start == 0 for part in layers)
    is_last = any(part.stop == len(own) for part in layers)
    is_tied, head = decoder.is_tied, model.head
    for index in range(len(own)):
        if not any(index in part for part in layers):
            own[index] = Elsewhere(divided)
    if not is_first and not (is_tied and is_last):
        setattr(decoder.base, decoder.embedding, Elsewhere(divided))
    if not is_last:
        if decoder.norm is not None:
            setattr(decoder.base, decoder.norm, Elsewhere(divided))
        assert head is not None
        model.replace_head(replace(head, layer=Elsewhere(divided), n_out=head.vocabulary, offset=None))
        setattr(decoder.model, decoder.head, Elsewhere(divided))
    gc.collect()  # what captured the output layer's input refers to itself, and to that layer


def complete(
    model: LanguageModel, divided: DividedModel, group: dist.ProcessGroup, last_rank: int, device: torch.device
) -> None:
    """Identify the output head of a divided model whose weights have come, on the last stage, and tell the others.

    ``group`` has the ranks of the pipeline, of which ``last_rank`` (its global number) has the last stage. UserError on
    all of them if the head cannot be identified.
    """
    found: list[Any] = [None]  # a refusal, or what all ranks have to know of the head
    last = divided.layout.num_stages - 1
    for index, stage in divided.stages.items():
        if isinstance(stage, FSDPModule):
            stage.to(device)  # as in materialize: it looks for its shards again
            stage.unshard()
        if index == last:
            try:
                head = stages.identify_last_head(divided.decoder)
                model.replace_head(head)
                model.loss.prepare(stages.StageForwardPass(model), device)
                found = [(head.scale, head.softcap, head.vocabulary)]
            except UserError as error:
                found = [str(error)]
        if isinstance(stage, FSDPModule):
            stage.reshard()
    dist.broadcast_object_list(found, last_rank, group=group)
    if isinstance(found[0], str):
        raise UserError(found[0])
    if last not in divided.stages:
        scale, softcap, vocabulary = found[0]
        assert model.head is not None
        model.replace_head(replace(model.head, scale=scale, softcap=softcap, n_out=vocabulary))
