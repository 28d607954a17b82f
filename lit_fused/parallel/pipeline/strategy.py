"""``PipelineStrategy``: pipeline parallelism, alone or times data parallelism, under automatic optimisation.

A schedule interleaves forward and backward, and Lightning wants them one after the other: its closure runs
``training_step``, ``zero_grad`` and ``backward``. So ``training_step`` only puts the batch aside and returns a
placeholder, and ``backward`` runs the schedule. What arrives there in the placeholder's place has been divided by the
number of accumulated batches: it is the factor that the schedule's loss takes.

Ranks lie in a mesh (pipeline, data, tensor): those that differ in the first coordinate share a batch, those that
differ in the second have the same stages.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer

from lit_fused.checkpoints import checkpoint_fault, shapes_of
from lit_fused.errors import UserError
from lit_fused.heads import OutputHead, output_layer
from lit_fused.losses.base import Batch
from lit_fused.model import LanguageModel
from lit_fused.parallel.clipping import clip_by_norm, local
from lit_fused.parallel.groups import check_copies
from lit_fused.parallel.pipeline import checkpoints
from lit_fused.parallel.pipeline.layout import SPLIT_BACKWARD, Layout
from lit_fused.parallel.pipeline.runner import Pipeline
from lit_fused.parallel.pipeline.stages import (
    Decoder,
    Stage,
    StageForwardPass,
    check_division,
    find_decoder,
    head_of_last_stage,
    layers_of_stages,
    prune,
)
from lit_fused.parallel.strategies import MovableCheckpoints
from lit_fused.precision import ordinary_defaults
from lit_fused.weights import is_deferred, materialize
from lit_fused.weights.twin import no_twin, twin_of


@dataclass
class Division:
    """A model that has been divided: what is left of it on this rank, and what the whole was.

    Attributes:
        decoder: the model's parts; those of other ranks are gone.
        layout: the stages of all ranks.
        stages: this rank's, by their index.
        shapes: of all entries of the whole model's state_dict.
        names: of all its parameters, in order, as the optimiser of one process has them.
        is_tied: whether embedding and output layer are one parameter.
        embedding_rows, hidden_size: of the whole model's embedding.
        shards: into which FSDP2 divides each of its parameters.
        frozen: the stages, of all ranks, without any parameter to be trained.
    """

    decoder: Decoder
    layout: Layout
    stages: dict[int, Stage]
    shapes: dict[str, tuple[int, ...]]
    names: list[str]
    is_tied: bool
    embedding_rows: int
    hidden_size: int
    shards: int
    frozen: list[int]


class PipelineStrategy(MovableCheckpoints, ModelParallelStrategy):
    """Divides a decoder's layers over devices, between which micro-batches of each batch travel.

    For :class:`lit_fused.FusedCausalLMModule`, which does the rest: exact sums, token-exact gradients, clipping.

    Args:
        pipeline_parallel_size: number of devices that the layers are divided over.
        data_parallel_size: number of such pipelines, each with batches of its own.
        schedule: a name of torch.distributed.pipelining: "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS",
            "InterleavedZeroBubble", "ZBVZeroBubble" or "DualPipeV".
        microbatches: into how many a batch's rows are divided; None is two for each stage.
        stages_per_rank: of an interleaved schedule; None is two.
        fully_shard: with ``data_parallel_size``, FSDP2 over the pipelines: each has a part of the parameters of its
            stage only. Else they are copies, whose gradients are averaged.
        save_distributed_checkpoint: a folder with a file of every rank, else one file, assembled on rank 0.
        process_group_backend, timeout: as of Lightning's ``ModelParallelStrategy``.

    Raises:
        UserError: a schedule that does not exist, or numbers that do not fit each other or the number of devices.
    """

    def __init__(
        self,
        pipeline_parallel_size: int,
        data_parallel_size: int = 1,
        schedule: str = "1F1B",
        microbatches: int | None = None,
        *,
        stages_per_rank: int | None = None,
        fully_shard: bool = False,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(data_parallel_size, 1, save_distributed_checkpoint, process_group_backend, timeout)
        self.layout = Layout.of(schedule, pipeline_parallel_size, stages_per_rank)
        self.microbatches = 2 * self.layout.num_stages if microbatches is None else microbatches
        if data_parallel_size < 1 or self.microbatches < 1:
            raise UserError(
                f"data_parallel_size and microbatches must be positive, got {data_parallel_size} and {microbatches}"
            )
        if schedule in ("1F1B", "DualPipeV") and self.microbatches < self.layout.num_stages:
            raise UserError(
                f"schedule={schedule} needs as many microbatches as stages, {self.layout.num_stages}, or more, got "
                f"{self.microbatches}"
            )
        if (
            fully_shard and schedule in SPLIT_BACKWARD
        ):  # torch's FSDP2 loses gradients of weights that come on their own
            raise UserError(
                f"schedule={schedule} computes the gradients of inputs and weights apart, and FSDP2 would lose the "
                "latter; choose 1F1B, GPipe, Interleaved1F1B or LoopedBFS with fully_shard=True"
            )
        rounds = max(1, self.microbatches // pipeline_parallel_size)
        if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and self.microbatches % rounds:
            raise UserError(
                f"schedule={schedule} needs a number of microbatches that is a multiple of pipeline_parallel_size, "
                f"{pipeline_parallel_size}, got {self.microbatches}"
            )
        self._replicas = data_parallel_size
        self._fully_shard = fully_shard
        self._pipeline: Pipeline | None = None
        self._division: Division | None = None
        self._postponed: tuple[Batch, bool] | None = None  # the batch that backward runs, whether to check parity
        self._ends: dist.ProcessGroup | None = None  # first and last rank of this pipeline, which share a tied weight

    # Environment.

    def _configure_launcher(self) -> None:
        self._check_world(self.num_nodes * self.num_processes)  # before any process is started
        super()._configure_launcher()

    def setup_environment(self) -> None:
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        self._check_world(self.world_size)
        self._device_mesh = init_device_mesh(
            self.root_device.type,
            (self.layout.ranks, self._replicas, 1),
            mesh_dim_names=("pipeline_parallel", "data_parallel", "tensor_parallel"),
        )
        ends = [0, self.layout.rank_of(self.layout.num_stages - 1)]
        mesh = self._device_mesh["pipeline_parallel", "data_parallel"].mesh
        for replica in range(self._replicas):  # all ranks make all groups
            members = [int(mesh[rank, replica]) for rank in ends]
            group = dist.new_group(sorted(set(members))) if len(set(members)) > 1 else None
            if self.global_rank in members:
                assert not isinstance(group, int)  # what new_group gives to ranks outside
                self._ends = group
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def _check_world(self, processes: int) -> None:
        wanted = self.layout.ranks * self._replicas
        if processes != wanted:
            raise UserError(
                f"pipeline_parallel_size={self.layout.ranks} times data_parallel_size={self._replicas} needs {wanted} "
                f"devices, got {processes}; set trainer.devices (times trainer.num_nodes) to {wanted}"
            )

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a process, by its number among all of them."""
        return self.layout.stages_of(rank // self._replicas)

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """The ranks of this pipeline, which train on the same batches."""
        return self.device_mesh["pipeline_parallel"].get_group()

    @property
    def _rank(self) -> int:
        """Of this process in its pipeline."""
        return self.device_mesh["pipeline_parallel"].get_local_rank()

    @property
    def _shards(self) -> int:
        """Into which FSDP2 divides a parameter."""
        return self._replicas if self._fully_shard else 1

    @property
    def _data_group(self) -> dist.ProcessGroup:
        return self.device_mesh["data_parallel"].get_group()

    # The model.

    @property
    def pipeline(self) -> Pipeline:
        """What runs batches; exists once the model has been divided."""
        assert self._pipeline is not None
        return self._pipeline

    @property
    def division(self) -> Division:
        assert self._division is not None
        return self._division

    def divide(self, model: LanguageModel, prefix: str) -> None:
        """Take what is not this rank's out of ``model``, in place. All ranks begin with the same whole model.

        Args:
            model: its head is identified, or its weights come late; then they are still not there, but for a model
                without a twin, and :meth:`complete` is called once they are.
            prefix: of the names of its backbone's parameters in the LightningModule.

        Raises:
            UserError: a model that a pipeline cannot divide exactly.
        """
        division = model.division
        if division is None:
            division = self._first_division(model, prefix)
            model.division = division
        elif not division.layout.has_same_stages(self.layout) or division.shards != self._shards:
            raise UserError(
                f"the model was divided for {division.layout} before and cannot be divided for {self.layout}; build it "
                "anew, and load a checkpoint of it"
            )
        if division.frozen and self._module.trainer.state.fn == TrainerFn.FITTING:  # it has no gradients to send
            name = type(division.decoder.model).__name__
            raise UserError(
                f"stage {division.frozen[0]} of {self.layout.num_stages} of {name} has no parameter to be trained; "
                "choose strategy=ddp or fsdp2 for a model whose layers are frozen"
            )
        self._division = division
        self._pipeline = Pipeline(
            model,
            division.stages,
            self.layout,
            self.microbatches,
            self.pipeline_group,
            self.root_device,
            lambda: self.precision_plugin.forward_context(),
            division.embedding_rows,
            division.hidden_size,
        )

    def _first_division(self, model: LanguageModel, prefix: str) -> Division:
        if is_deferred(model):
            model.replace_head(OutputHead(output_layer(model.backbone)))  # its numbers: see complete
        decoder = find_decoder(model)
        ranges = layers_of_stages(decoder.num_layers, self.layout.num_stages)
        whole = [Stage(decoder, layers) for layers in ranges]
        if not is_deferred(model) or not self._twin_is_exact(model):
            materialize(model)
            check_division(model, decoder, whole)
        mine = self.layout.stages_of(self._rank)
        shapes = {prefix + name: shape for name, shape in shapes_of(model.backbone.state_dict()).items()}
        names = [prefix + name for name, _ in model.backbone.named_parameters()]
        rows, size = getattr(decoder.base, decoder.embedding).weight.shape
        is_tied = decoder.is_tied
        frozen = [i for i, stage in enumerate(whole) if not any(p.requires_grad for p in stage.parameters())]
        stages = {index: whole[index] for index in mine}
        prune(model, decoder, [ranges[index] for index in mine])
        division = Division(decoder, self.layout, stages, shapes, names, is_tied, rows, size, self._shards, frozen)
        if self._fully_shard:
            mesh = self.device_mesh["data_parallel"]
            for index, stage in stages.items():
                for layer in ranges[index]:
                    fully_shard(getattr(decoder.base, decoder.layers)[layer], mesh=mesh)
                fully_shard(stage, mesh=mesh)
        return division

    def _twin_is_exact(self, model: LanguageModel) -> bool:
        """Divide a small model like this one and compare it; False, with a warning, if there is none."""
        backbone = model.transformers_model
        assert backbone is not None
        backbone = twin_of(backbone, self.layout.num_stages, self.root_device)
        if backbone is None:
            return False
        twin = type(model)(backbone, model.loss)
        try:
            with ordinary_defaults():
                twin.prepare(self.root_device)
                twin.prepare_hidden_states()
                decoder = find_decoder(twin)
                ranges = layers_of_stages(decoder.num_layers, self.layout.num_stages)
                check_division(twin, decoder, [Stage(decoder, layers) for layers in ranges])
        except UserError:
            raise
        except Exception as error:  # its own, about the other sizes; the whole model will tell
            no_twin(backbone, error)
            return False
        return True

    def complete(self, model: LanguageModel) -> None:
        """Once the weights have come: identify the output head, where it is, and compare what ranks share.

        Raises:
            UserError: on all ranks: the head cannot be identified, or ranks began with different numbers.
        """
        division = self.division
        found: list[Any] = [None]  # a refusal, or what all ranks have to know of the head
        for index, stage in division.stages.items():
            if isinstance(stage, FSDPModule):
                stage._apply(lambda tensor: tensor)  # as in materialize: it looks for its shards again
                stage.unshard()
            if index == self.layout.num_stages - 1:
                found = [self._head_of_last_stage(model)]
            if isinstance(stage, FSDPModule):
                stage.reshard()
        dist.broadcast_object_list(found, self.pipeline.last_rank, group=self.pipeline_group)
        if isinstance(found[0], str):
            raise UserError(found[0])
        if self._rank != self.layout.rank_of(self.layout.num_stages - 1):
            scale, softcap, vocabulary = found[0]
            assert model.head is not None
            model.replace_head(replace(model.head, scale=scale, softcap=softcap, n_out=vocabulary))
        if self._tied_weight is not None and self._ends is not None:
            check_copies({"the embedding, which the output layer is tied to,": self._tied_weight}, self._ends)
        if not self._fully_shard:
            check_copies(dict(model.named_parameters()), self._data_group)

    def _head_of_last_stage(self, model: LanguageModel) -> str | tuple[float, float | None, int]:
        try:
            head = head_of_last_stage(self.division.decoder)
            model.replace_head(head)
            model.loss.prepare(StageForwardPass(model), self.root_device)
        except UserError as error:
            return str(error)
        return head.scale, head.softcap, head.vocabulary

    def teardown(self) -> None:
        self._pipeline = None
        super().teardown()

    # The step.

    def postpone(self, batch: Batch, check_parity: bool, loss_divisor: float) -> Tensor:
        """Put a batch aside for :meth:`backward`, which takes the placeholder that is returned in the loss's place."""
        self._postponed = batch, check_parity
        return torch.ones((), device=self.root_device) / loss_divisor

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self._module
        self.pre_backward(closure_loss)
        scale = self.precision_plugin.pre_backward(closure_loss, module)  # on_before_backward
        if self._postponed is not None:
            batch, check_parity = self._postponed
            self._postponed = None
            module.add_to_window(self.pipeline.train(batch, scale.detach(), check_parity))
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)  # on_after_backward
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: L.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        def with_all_gradients() -> Any:
            result = closure()
            self._sum_gradients()
            return result

        return super().optimizer_step(optimizer, with_all_gradients, model, **kwargs)

    def _sum_gradients(self) -> None:
        """Once per optimiser step: a tied weight's over first and last stage, and copies' over the pipelines."""
        tied = self._tied_weight
        if tied is not None and tied.grad is not None and self._ends is not None:
            dist.all_reduce(local(tied.grad), group=self._ends)
        if self._replicas > 1 and not self._fully_shard:
            gradients = [p.grad for p in self._module.parameters() if p.grad is not None]
            works = [dist.all_reduce(g, group=self._data_group, async_op=True) for g in gradients]
            for work in works:
                assert work is not None
                work.wait()
            torch._foreach_div_(gradients, float(self._replicas))  # pyright: ignore[reportPrivateImportUsage]

    @property
    def _tied_weight(self) -> nn.Parameter | None:
        """The tied weight, on the ranks of the first and the last stage."""
        division = self.division
        ends = {0, self.layout.num_stages - 1}
        if not division.is_tied or not ends & division.stages.keys():
            return None
        return getattr(division.decoder.base, division.decoder.embedding).weight

    def clip_by_norm(self, gradients: list[Tensor], max_norm: float) -> Tensor:
        """As :func:`lit_fused.parallel.clip_by_norm`, over all stages; a tied weight counts once."""
        copy = self._tied_weight if 0 not in self.division.stages else None
        counted = [g for g in gradients if copy is None or g is not copy.grad]
        return clip_by_norm(gradients, max_norm, counted=counted, group=self.pipeline_group)

    # Checkpoints.

    def whole_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The parameters and buffers of all stages in the CPU memory of rank 0, by their names in ``model``; empty
        elsewhere. Every rank has to call it."""
        state = checkpoints.gathered(model.state_dict(), self.device_mesh, self.root_device)
        division = self.division
        if state and division.is_tied:
            embedding, head = self._tied_names(model)
            state[head] = state[embedding]
        return state

    def _tied_names(self, model: nn.Module) -> tuple[str, str]:
        names = {id(module): name for name, module in model.named_modules()}
        decoder = self.division.decoder
        return (
            f"{names[id(decoder.base)]}.{decoder.embedding}.weight",
            f"{names[id(decoder.model)]}.{decoder.head}.weight".lstrip("."),
        )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        if self._save_distributed_checkpoint:
            return checkpoints.own_state(self.model)
        return self.whole_state_dict(self.model)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.model is not None
        optimizer = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self._save_distributed_checkpoint:
            return checkpoints.own_optimizer_state(self.model, optimizer)
        return checkpoints.whole_optimizer_state(
            self.model, optimizer, self.division.names, self.device_mesh, self.root_device
        )

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.model is not None
        path = Path(self.broadcast(checkpoint_path))
        fault = checkpoint_fault(path)
        if fault:
            raise UserError(fault)
        division, optimizers = self.division, self._fitted_optimizers
        if path.is_dir():
            return checkpoints.load_folder(path, self.model, optimizers, division.shapes, weights_only)
        return checkpoints.load_file(
            path, self.model, optimizers, division.shapes, division.names, self.pipeline_group, weights_only
        )

    @property
    def _module(self) -> Any:
        """The LightningModule, a ``FusedLMModule``."""
        assert self.lightning_module is not None
        return self.lightning_module
