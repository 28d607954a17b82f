"""The stages of a decoder: which layers belong to which stage, and each stage as a module of its own.

A stage runs the model's *own* forward, with its masks, positions and rotary embeddings, over a view of the decoder in
which all other layers pass their input on. The first layer's slot in a later stage returns the received hidden states,
whatever the model does to its embeddings. The last stage returns hidden states; the loss decides about logits.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from lit_fused.errors import UserError, check_choice
from lit_fused.heads import OutputHead, evaluation_mode, peft_model
from lit_fused.heads.capture import UnsupportedHeadError, replaced_forward
from lit_fused.heads.slices import slice_of
from lit_fused.losses import ModelInternalLoss
from lit_fused.models.checked_slice import compare
from lit_fused.models.documents_apart import may_be_packed, varlen_arguments
from lit_fused.models.language_model import LanguageModel

PROBE_LENGTH = 8
_SINGLE = ("1F1B", "GPipe")  # one stage on each rank
SCHEDULES = (*_SINGLE, "Interleaved1F1B", "LoopedBFS")  # the latter: two, 0 1 0 1


@dataclass(frozen=True)
class Layout:
    """The stages that a pipeline has under a schedule, and the rank of each."""

    schedule: str  # one of :data:`SCHEDULES`, the names of torch.distributed.pipelining
    ranks: int

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)

    @property
    def num_stages(self) -> int:
        return self.ranks * (1 if self.schedule in _SINGLE else 2)

    def stages_of(self, rank: int) -> list[int]:
        return list(range(rank, self.num_stages, self.ranks))

    def rank_of(self, stage: int) -> int:
        return stage % self.ranks


class _Slot(nn.Module):
    """Placeholder for another stage's layer, or for the last norm; returns what it has received, else its input."""

    received: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        received, self.received = self.received, None
        return hidden_states if received is None else received


class Elsewhere(nn.Module):
    """Placeholder for a module that another rank has; refuses to run. In a divided model it knows the division."""

    def __init__(self, divided: Any = None) -> None:
        super().__init__()
        self.divided = divided

    def forward(self, *_: Any, **__: Any) -> Tensor:
        raise UserError(
            "this rank has a part of the model; only the trainer's fit, validate, test and predict run a pipeline"
        )


@dataclass(frozen=True)
class Decoder:
    """Names and modules of the parts of a causal language model that a pipeline divides."""

    model: PreTrainedModel
    base: nn.Module
    embedding: str  # names in ``base``
    layers: str
    norm: str | None
    head: str  # name in ``model``

    @property
    def num_layers(self) -> int:
        return len(getattr(self.base, self.layers))

    @property
    def is_tied(self) -> bool:
        return getattr(self.model, self.head).weight is getattr(self.base, self.embedding).weight


class Stage(nn.Module):
    """Maps (B, T) token ids, or the (B, T, D) hidden states of the stage before, to (B, T, D) hidden states, by some
    ``layers`` of a ``decoder`` that is whole or pruned to those of this rank."""

    def __init__(self, decoder: Decoder, layers: range) -> None:
        super().__init__()
        own = getattr(decoder.base, decoder.layers)
        self.is_first, self.is_last = layers.start == 0, layers.stop == len(own)
        slots = [own[i] if i in layers else _Slot() for i in range(len(own))]
        view = copy.copy(decoder.base)
        view.__dict__["_modules"] = dict(decoder.base._modules)
        setattr(view, decoder.layers, nn.ModuleList(slots))
        if not self.is_first:
            setattr(view, decoder.embedding, Elsewhere())
        if decoder.norm is not None and not self.is_last:
            setattr(view, decoder.norm, _Slot())
        self.decoder = view
        if self.is_last:
            self.head = getattr(decoder.model, decoder.head)
            if decoder.is_tied:  # The parameter keeps the name that it has in the model.
                self.embedding = getattr(decoder.base, decoder.embedding)
        self._first_slot = slots[0]
        self._base = (decoder.base,)  # A tuple keeps it out of the module tree.
        self.context: Callable[[], AbstractContextManager[Any]] = nullcontext  # the precision's

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states between stages: the parameters', in which autocast leaves them."""
        return next(self.parameters()).dtype

    def forward(self, inputs: Tensor, **options: Any) -> Tensor:
        self.decoder.training = self._base[0].training
        if may_be_packed(options):
            options |= varlen_arguments(self.decoder, options["position_ids"])
        if not self.is_first:
            self._first_slot.received = inputs
        name = "input_ids" if self.is_first else "inputs_embeds"
        with self.context():
            hidden_states = self.decoder(**{name: inputs}, use_cache=False, **options).last_hidden_state
        if hidden_states.dtype != self.dtype and not self.is_last:
            raise UserError(
                f"the layers of {type(self.decoder).__name__} give {hidden_states.dtype} where its parameters are "
                f"{self.dtype}, and the next stage expects that; choose another precision, or strategy=fsdp2"
            )
        return hidden_states


def find_decoder(model: LanguageModel) -> Decoder:
    """Return the parts of a model that a pipeline divides; UserError for a shape, loss or inputs it cannot carry."""
    inner, head = model.transformers_model, model.head
    if inner is None or peft_model(model.backbone) is not None or model.is_compiled:
        raise _other_shape(model.name, "it is no transformers model, has PEFT's adapters, or is compiled")
    if isinstance(model.loss, ModelInternalLoss):
        raise UserError(
            "loss=model needs the whole model in one process, and strategy=pp has only a part of it in each; choose "
            "loss=standard or loss=chunked"
        )
    base, embedding = inner.base_model, inner.get_input_embeddings()
    children = dict(base.named_children())
    layers = [name for name, child in children.items() if isinstance(child, nn.ModuleList) and _are_layers(child)]
    embeddings = [name for name, child in children.items() if child is embedding]
    heads = [name for name, child in inner.named_children() if head is not None and child is head.layer]
    if base is inner or not len(layers) == len(embeddings) == len(heads) == 1:
        raise _other_shape(model.name, "it is not an embedding, one list of layers and an output layer")
    rest = [name for name, child in children.items() if name not in (*layers, *embeddings) and _has_parameters(child)]
    norm = rest[0] if rest else "norm" if isinstance(children.get("norm"), nn.Module) else None
    parts = [children[name] for name in (*embeddings, *layers, *([] if norm is None else [norm]))]
    divided = {id(p) for part in (*parts, inner.get_submodule(heads[0])) for p in part.parameters()}
    others = [name for name, p in inner.named_parameters() if id(p) not in divided]
    if others:  # Each stage would have a copy, and a part of its gradient.
        raise _other_shape(model.name, f"it has other parameters besides these: {', '.join(others[:3])}")
    return Decoder(inner, base, embeddings[0], layers[0], norm, heads[0])


def _are_layers(modules: nn.ModuleList) -> bool:
    return len(modules) > 0 and all(isinstance(layer, GradientCheckpointingLayer) for layer in modules)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _other_shape(name: str, reason: str) -> UserError:
    return UserError(
        f"strategy=pp cannot divide {name}: {reason}; it divides transformers decoders of an embedding, a list of "
        "layers, a norm and an output layer (Llama, Qwen3, Gemma2, Mistral ...). Choose strategy=fsdp2 or ddp"
    )


def layers_of_stages(num_layers: int, num_stages: int, head: float = 0.0) -> list[range]:
    """Return the layers of each stage, in order: one at least, and so many that all stages take about as long. The last
    stage also has the head, which takes as long as ``head`` layers."""
    if num_stages > num_layers:
        raise UserError(
            f"{num_stages} pipeline stages need at least as many layers, and the model has {num_layers}; choose fewer "
            "devices in the pipeline, or a schedule with one stage on each (1F1B, GPipe)"
        )
    of_a_stage = (num_layers + head) / num_stages
    starts = [min(math.ceil(i * of_a_stage - 0.5), num_layers - num_stages + i) for i in range(num_stages)]
    return [range(start, stop) for start, stop in pairwise([*starts, num_layers])]


@torch.no_grad()
def check_stages(model: LanguageModel, decoder: Decoder, stages: Sequence[Stage]) -> None:
    """Raise UserError for a model that is more than its stages one after the other, before anything is pruned.

    Two rows of eight tokens, the second with padding, run in evaluation mode.
    """
    name, device = type(decoder.model).__name__, decoder.model.device
    vocabulary, hidden_size = getattr(decoder.base, decoder.embedding).weight.shape
    ids = (torch.arange(2 * PROBE_LENGTH, device=device) * 7 + 3).view(2, PROBE_LENGTH) % vocabulary
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    positions = torch.arange(PROBE_LENGTH, device=device).expand(2, -1) + 1
    options = {"attention_mask": mask, "position_ids": positions}
    with evaluation_mode(model):
        try:
            whole, _, aux_loss = model.hidden_states({"input_ids": ids, **options})
            hidden_states, between = ids, set[torch.Size]()
            for stage in stages if aux_loss is None else ():
                hidden_states = stage(hidden_states, **options)
                between |= set() if stage.is_last else {hidden_states.shape}
        except Exception as error:  # The model raised it, of whatever class: its shape does not fit stages.
            reason = f"its stages do not run with attention_mask and position_ids ({type(error).__name__}: {error})"
            raise _other_shape(name, reason) from error
    if aux_loss is not None:
        raise UserError(
            f"{name} has a router's auxiliary loss, made by all layers together, which strategy=pp does not carry; "
            "switch it off (output_router_logits=False in the model's configuration) or choose strategy=fsdp2"
        )
    for shape in between - {torch.Size((*ids.shape, hidden_size))}:
        raise _other_shape(
            name, f"its layers give {tuple(shape)} for {tuple(ids.shape)} tokens of {hidden_size} numbers"
        )
    error, size = (hidden_states - whole).abs().max().item(), whole.abs().max().item()
    if not error <= 16 * torch.finfo(whole.dtype).eps * size:
        reason = f"its hidden states are not those of its stages one after the other (they differ by {error:.2g})"
        raise _other_shape(name, reason)


class _Body(BaseModelOutputWithPast):
    """Stands for what the body of a model returns: the last hidden state, and None for all else that models ask for."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


@contextmanager
def body_returning(part: nn.Module, hidden_states: Any) -> Iterator[None]:
    """Let a part of a model return these hidden states, a tensor, in a block, whatever it is called with."""
    answer: Any = _Body(last_hidden_state=hidden_states)  # transformers' annotation allows a FloatTensor alone
    with replaced_forward(part, lambda *_, **__: answer):
        yield


class StageForwardPass:
    """A :class:`~lit_fused.losses.loss.Forward` over batches that contain the last stage's "hidden_states".

    The spot check runs the model's own forward behind its body, the ``decoder``.
    """

    def __init__(self, model: LanguageModel, decoder: Decoder) -> None:
        self.model = model
        self.decoder = decoder
        self.few_targets = model.few_targets

    def targets(self, batch: Any) -> Tensor:
        return self.model.targets(batch)

    def token_weights(self, batch: Any) -> Tensor | None:
        return self.model.token_weights(batch)

    def prepare_hidden_states(self) -> OutputHead:
        assert self.model.head is not None  # No weight but the layer's own is behind the decoder (find_decoder).
        return self.model.head

    def hidden_states(self, batch: Any) -> tuple[Tensor, OutputHead, None]:
        return batch["hidden_states"], self.prepare_hidden_states(), None

    def whole_rows(self, numbers: Tensor, batch: Any) -> Tensor:
        return numbers

    def own_positions(self, numbers: Tensor) -> Tensor:
        return numbers

    def spot_check(self, batch: Any) -> None:
        """Raise UserError for what the model does to its logits, or for its own loss, behind its body."""
        model, decoder = self.model, self.decoder
        with torch.no_grad():
            model.loss.check(self, batch)
        if not hasattr(model.loss, "cross_entropy"):
            return
        head = self.prepare_hidden_states()
        part = slice_of(batch, self.targets(batch), head.vocabulary)
        try:
            with body_returning(decoder.base, part.pop("hidden_states").detach()):
                compare(model, part, head)
        except Exception as error:  # The model raised it, of whatever class: it asks its body for more.
            if isinstance(error, UserError) and not isinstance(error, UnsupportedHeadError):
                raise
            rank_zero_warn(
                f"the spot check is left out: the forward of {model.name} does not run behind the last stage "
                f"({type(error).__name__}: {error}); train a batch on one device to have it checked"
            )

    def logits(self, batch: Any) -> tuple[Tensor, None]:
        return self.prepare_hidden_states().logits(batch["hidden_states"]), None
