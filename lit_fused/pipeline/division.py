"""Divide a decoder over the ranks of a pipeline, and tell what is left of it on each.

Placeholders stand where modules of other ranks were. Each of them knows the :class:`DividedModel`, so that a model
stays divided however many trainers it goes through.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lit_fused.errors import UserError
from lit_fused.heads import output_layer
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
        model: its head is identified, or its weights come late, which are still missing afterwards.
        layout: the stages of all ranks; UserError if they cannot give exactly what the model gives.
        rank, mesh: of this process in its pipeline; ranks over which FSDP2 shards the stages, or None.
    """
    if is_deferred(model):
        _identify_by_twin(model, layout, device)
    decoder = stages.find_decoder(model)
    ranges = stages.layers_of_stages(decoder.num_layers, layout.num_stages, _head_in_layers(decoder))
    whole = [Stage(decoder, layers) for layers in ranges]
    if not is_deferred(model):
        stages.check_stages(model, decoder, whole)
    rows, size = getattr(decoder.base, decoder.embedding).weight.shape
    divided = DividedModel(
        decoder,
        layout,
        stages={index: whole[index] for index in layout.stages_of(rank)},
        is_tied=decoder.is_tied,
        embedding_rows=rows,
        hidden_size=size,
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
    them: the head of a 0.6B and of a 1.7B model took 0.51 and 0.59 of the time of layers with as many parameters.
    """
    layers = sum(p.numel() for p in getattr(decoder.base, decoder.layers).parameters())
    return 0.55 * getattr(decoder.model, decoder.head).weight.numel() * decoder.num_layers / layers


def _identify_by_twin(model: LanguageModel, layout: Layout, device: torch.device) -> None:
    """Check the division, and identify the output head, of a small model like this one, which has no weights yet."""
    assert model.transformers_model is not None
    # Layers of it: the first, the last, and one between them, which all others are like.
    twin = type(model)(small_twin(model.transformers_model, min(layout.num_stages, 3), device), model.loss)
    with ordinary_defaults():
        twin.prepare(device)
        head = twin.prepare_hidden_states()
        decoder = stages.find_decoder(twin)
        ranges = stages.layers_of_stages(decoder.num_layers, min(layout.num_stages, decoder.num_layers))
        stages.check_stages(twin, decoder, [Stage(decoder, layers) for layers in ranges])
    assert head is not None
    if head.n_out is not None or head.offset is not None:
        raise UserError(f"the twin's head of {model.name} is not the model's ({head}); build it with at_once=True")
    model.replace_head(replace(head, layer=output_layer(model.backbone)))


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
        setattr(decoder.model, decoder.head, Elsewhere(divided))  # first: replace_head remembers the model's layer
        model.replace_head(replace(head, layer=Elsewhere(divided), n_out=head.vocabulary, offset=None))
    gc.collect()  # what captured the output layer's input refers to itself, and to that layer
