"""``Placement``: how a model lies on devices, and everything that depends on it.

Each strategy of Lightning has one, which :func:`~lit_fused.parallel.placement_of` finds. Modules and callbacks ask it
and never look at the strategy. The base class is right for a whole model; a subclass overrides what differs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lit_fused.errors import UserError
from lit_fused.losses.loss import Batch, Forward, LossOutput
from lit_fused.models.compilation import check_compile, in_one_piece
from lit_fused.models.language_model import LanguageModel
from lit_fused.models.load import is_deferred, materialize, ordinary_defaults
from lit_fused.models.precision import prepare_precision
from lit_fused.parallel.checkpoint import prepare_checkpoints
from lit_fused.parallel.collectives import (
    send_weights,
    total_norm,
)
from lit_fused.parallel.replicas import ReplicatedStrategy

Run = Callable[[Batch], LossOutput]


def has_towers(model: LanguageModel) -> bool:
    """Return whether a part of the model runs for images or sounds alone, which a batch may be without."""
    config = getattr(model.transformers_model, "config", None)
    return config is not None and config.get_text_config() is not config


class Placement:
    """Says how a model lies on devices, and runs it there."""

    is_sharded = False  # no rank has the whole model: every rank has to call ``generate`` and ``save_pretrained``

    def __init__(self, strategy: Strategy | None) -> None:
        self.strategy: Any = strategy  # None for a model without a trainer, which does not train

    @property
    def is_global_zero(self) -> bool:
        """True on the rank that writes files and prints."""
        return self.strategy is None or self.strategy.is_global_zero

    @property
    def data_parallel_size(self) -> int:
        """Number of different micro-batches that are trained on at the same time."""
        return getattr(self.strategy, "world_size", 1)

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that train on different data; None for all ranks."""
        return None

    @property
    def averaged_ranks(self) -> int:
        """Number of ranks whose gradients the strategy averages; each of them has different tokens."""
        return self.data_parallel_size

    def set_up(self, model: LanguageModel, *, training: bool, compile: str) -> None:
        """Refuse what cannot work, by a UserError, then give the strategy our plugins for precision and checkpoints.

        ``training`` says that a fit begins; the others are those of :class:`lit_fused.training.FusedLMModule`.
        """
        self.check(model, training=training, compile=compile)
        if self.strategy.root_device.type == "mps":
            raise UserError("MPS has no float64, which exact token counts need; choose trainer.accelerator=cpu")
        prepare_precision(self.strategy, model.backbone, training=training, for_loss=model.loss.inputs)
        prepare_checkpoints(self.strategy.lightning_module.trainer)

    def compiled_by_default(self, model: LanguageModel, *, training: bool) -> str:
        """Return what ``compile="auto"`` is: "where possible", of :func:`compile_backbone`, where a GPU trains and
        nothing refuses "regional", else "none"."""
        if not training or self.strategy.root_device.type != "cuda":
            return "none"
        try:
            self.check(model, training=training, compile="where possible")
        except UserError:  # Whatever is wrong without compilation as well is refused later.
            return "none"
        rank_zero_info("The model's layers are compiled with the first steps; compile=none takes this back.")
        return "where possible"

    def check(self, model: LanguageModel, *, training: bool, compile: str) -> None:
        """Raise a UserError, which says what to choose instead, for what cannot work under this placement."""
        check_compile(model, compile, self.strategy.root_device)

    def prepare(self, model: LanguageModel) -> None:
        """Run what finds out about a whole model: its output head, and what its loss needs."""
        model.prepare(self.strategy.root_device)

    def place(self, model: LanguageModel) -> None:
        """Divide and shard the model in place, and give it its weights if they come late."""
        deferred = is_deferred(model)
        if deferred:  # it has no numbers to be rounded: they are made in the dtype that the run wants
            self.strategy.precision_plugin.convert_module(model)
        self._divide(model)
        if deferred:
            materialize(model, self.strategy.root_device, divided=self.is_sharded)
            with ordinary_defaults():
                self._complete(model)
            reshard(model)

    def _complete(self, model: LanguageModel) -> None:
        """Find out, of a divided model whose weights have come, what :meth:`prepare` finds out of a whole one."""
        self.prepare(model)

    def check_frozen(self, model: LanguageModel, what: str, instead: str, *, compile: str) -> None:
        """Raise a UserError if a model that is not trained cannot be beside the one that is; ``what`` it is, and what
        to choose ``instead``, are for messages."""
        try:
            self.check(model, training=False, compile=compile)
        except UserError as error:
            raise UserError(f"the {what}: {error}") from error

    def place_frozen(self, model: LanguageModel) -> None:
        """Put a model that is not trained on this rank's device, divided as the trained one is, with the precision and
        the numbers that all ranks have."""
        self.strategy.precision_plugin.convert_module(model)
        self.place(model)
        model.to(self.strategy.root_device)
        if self.data_parallel_size > 1 and not any(isinstance(p, DTensor) for p in model.parameters()):
            send_weights(model, self.strategy.root_device)

    def _divide(self, model: LanguageModel) -> None:
        """Divide and shard the model in place; one without weights stays without them where that is possible."""

    def check_batch(self, model: LanguageModel, batch: Batch, index: int) -> None:
        """Refuse the first batch (``index`` 0) if it makes the loss wrong under this strategy."""

    def finish_gradients(self) -> None:
        """Make this rank's gradients those of all ranks, if the backward of a step has not; raise a UserError if that
        is too late."""

    def spot_check(self, model: LanguageModel, batch: Batch) -> None:
        """Compare a slice of a batch with the model's own loss and logits; UserError if they differ."""
        model.spot_check(batch)

    def run(self, model: LanguageModel, batch: Batch, compute_loss: Run, scale: float) -> LossOutput:
        """Return the sums of a training batch. Backward begins at ``loss_sum``, times ``scale``.

        A placement may run forward and backward at once, and return a ``loss_sum`` whose backward gives the gradients.
        """
        return compute_loss(batch)

    def forward_pass(self, model: LanguageModel) -> Forward:
        """Return what a loss asks for numbers of a batch, within the model's forward."""
        return model

    def evaluate(self, model: LanguageModel, batch: Batch) -> LossOutput:
        """Return the sums of a batch, of training unless :meth:`run` does it itself, and of evaluation."""
        return model(batch)

    def token_losses(self, model: LanguageModel, batch: Batch) -> Tensor:
        """Return the negative log-likelihood of each position's target, (B, T) float32, 0 where ignored."""
        return model.token_losses(batch)

    def generating(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context in which the backbone's ``generate`` works; UserError where it cannot."""
        return nullcontext()

    @contextmanager
    def whole_weights(self, backbone: nn.Module) -> Iterator[Mapping[str, Tensor] | None]:
        """Give the backbone's parameters and buffers by name, whole, in the CPU memory of rank 0, inside of a block
        that every rank enters; None if the backbone itself has them."""
        # Parameters that a forward left gathered under FSDP2 are plain until their state is asked for.
        if not self.is_sharded and not any(isinstance(p, DTensor) for p in backbone.parameters()):
            yield None
            return
        weights: Any = get_model_state_dict(backbone, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        names: dict[int, str] = {}
        for name, p in backbone.named_parameters(remove_duplicate=False):  # a shared parameter was gathered twice
            first = names.setdefault(id(p), name)
            if first in weights:
                weights[name] = weights[first]
        yield weights

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of this rank's and all other ranks' gradients, each parameter's once, as a () tensor on the
        device, which nothing waits for."""
        return total_norm(gradients)

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks that train on different data, the same on all of them."""
        if self.averaged_ranks > 1:  # Lightning's own collectives wait for every rank, this one runs on the GPU
            tensor = tensor.clone()
            dist.all_reduce(tensor, group=self.data_parallel_group)
        return tensor

    def from_all_ranks(self, tensor: Tensor) -> Tensor:
        ranks = getattr(self.strategy, "world_size", 1)
        if ranks == 1:
            return tensor[None]
        gathered = [torch.empty_like(tensor) for _ in range(ranks)]
        dist.all_gather(gathered, tensor)
        return torch.stack(gathered)

    def name_of_rank(self, rank: int) -> str:
        return f"rank {rank}"


class OneDevice(Placement):
    """A model on one device, or without a trainer."""


class Replicated(Placement):
    """A copy of the model on every rank: our :class:`ReplicatedStrategy`, or Lightning's ``DDPStrategy``."""

    def check(self, model: LanguageModel, *, training: bool, compile: str) -> None:
        if not isinstance(self.strategy, DDPStrategy):
            raise UserError(
                f"{type(self.strategy).__name__} is not supported: the loss and its token counts are exact on a single "
                "device, under DDP, FSDP2, tensor parallelism; choose strategy=auto, ddp, fsdp2 "
                "(lit_fused.parallel.FSDP2Strategy()), tp, or fsdp2_tp"
            )
        super().check(model, training=training, compile=compile)

    def run(self, model: LanguageModel, batch: Batch, compute_loss: Run, scale: float) -> LossOutput:
        with nullcontext() if model.is_compiled_whole else in_one_piece():
            return compute_loss(batch)

    def finish_gradients(self) -> None:
        if isinstance(self.strategy, ReplicatedStrategy):
            self.strategy.finish_exchange()


def reshard(model: nn.Module) -> None:
    """Free the root's parameters, which FSDP2 leaves gathered after a forward pass outside of training."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
