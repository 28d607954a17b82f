"""``PipelineStrategy`` and its placement: pipeline parallelism, alone or times data parallelism.

A schedule interleaves forward and backward, but Lightning's closure runs ``training_step``, ``zero_grad`` and
``backward`` one after the other. So ``training_step`` runs the schedule and keeps its gradients, and the backward of
the loss that it returns gives them to the parameters.

Ranks have coordinates (pipeline, data, tensor). Ranks that differ in the first share a batch; ranks that differ in the
second have the same stages.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lit_fused.errors import UserError, checked_options
from lit_fused.losses.loss import Batch, LossOutput
from lit_fused.models.compilation import check_compile
from lit_fused.models.language_model import LanguageModel
from lit_fused.parallel.checkpoint import FolderCheckpoints
from lit_fused.parallel.collectives import gradients_of, local, objects_of_ranks, total_norm
from lit_fused.parallel.placement import Placement, Run
from lit_fused.parallel.sharded import Sharded, check_never_compared
from lit_fused.pipeline.division import DividedModel, divide, divided_model
from lit_fused.pipeline.runner import Pipeline
from lit_fused.pipeline.stages import Layout


class PipelineStrategy(FolderCheckpoints):
    """Divides a decoder's layers over devices, between which micro-batches of each batch travel.

    It is for :class:`lit_fused.FusedCausalLMModule`, which adds exact sums, token-exact gradients and clipping.

    Args:
        pipeline_parallel_size: number of devices that the layers are divided over.
        data_parallel_size: number of such pipelines, each with batches of its own.
        schedule: a name of torch.distributed.pipelining: "1F1B", "GPipe", "Interleaved1F1B" or "LoopedBFS".
        microbatches: number of parts into which a batch's rows are divided; None is two for each stage.
        fully_shard: shard each stage's parameters over the ``data_parallel_size`` pipelines (FSDP2). Otherwise the
            pipelines have copies, whose gradients are averaged.
        process_group_backend, timeout: as of Lightning's ``ModelParallelStrategy``.

    Raises:
        UserError: a schedule that does not exist, or numbers that do not fit the number of devices.
    """

    placement_class: type[Placement]

    @checked_options(pipeline_parallel_size=1, data_parallel_size=1, microbatches=1)
    def __init__(
        self,
        pipeline_parallel_size: int,
        data_parallel_size: int = 1,
        schedule: str = "1F1B",
        microbatches: int | None = None,
        *,
        fully_shard: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        devices = pipeline_parallel_size * data_parallel_size
        super().__init__(devices, 1, True, process_group_backend, timeout)
        self.layout = Layout(schedule, pipeline_parallel_size)
        self.microbatches = 2 * self.layout.num_stages if microbatches is None else microbatches
        self.fully_shard = fully_shard
        self.pipeline: Pipeline | None = None  # runs batches; exists once the model has been divided
        self._replicas = data_parallel_size
        self.ends: dist.ProcessGroup | None = None  # this pipeline's first and last rank, which share a tied weight

    def setup_environment(self) -> None:
        super().setup_environment()  # It refuses another number of processes.
        self.mesh = init_device_mesh(
            self.root_device.type,
            (self.layout.ranks, self._replicas, 1),
            mesh_dim_names=("pipeline_parallel", "data_parallel", "tensor_parallel"),
        )
        ends = {0, self.layout.rank_of(self.layout.num_stages - 1)}
        mesh = self.mesh["pipeline_parallel", "data_parallel"].mesh
        for replica in range(self._replicas if len(ends) > 1 else 0):  # all ranks make all groups
            group = dist.new_group([int(mesh[rank, replica]) for rank in sorted(ends)])
            if isinstance(group, dist.ProcessGroup):  # ranks outside get a number
                self.ends = group

    def stages_of(self, rank: int) -> list[int]:
        return self.layout.stages_of(rank // self._replicas)

    @property
    def _divided(self) -> DividedModel:
        assert self.pipeline is not None
        return self.pipeline.divided

    def sum_gradients(self) -> None:
        """Sum a tied weight's gradients over the first and last stage; average copies' gradients over pipelines."""
        tied, gradients = self._divided.tied_weight, gradients_of(self.optimizers)
        own = None if tied is None or self.ends is None else tied.grad
        if own is not None and any(own is gradient for gradient in gradients):
            dist.all_reduce(local(own), group=self.ends)
        if self._replicas > 1 and not self.fully_shard:
            data_group = self.device_mesh.get_group("data_parallel")
            works: list[Any] = [dist.all_reduce(gradient, group=data_group, async_op=True) for gradient in gradients]
            for work in works:
                work.wait()
            torch._foreach_mul_(gradients, 1 / self._replicas)  # pyright: ignore[reportPrivateImportUsage]

    def whole_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the parameters and buffers of all stages, by their names in ``model``, in the CPU memory of rank 0;
        empty on other ranks, which all have to call it."""
        whole = gathered(model.state_dict(), self.device_mesh, self.root_device)
        if whole and self._divided.is_tied:
            decoder, names = self._divided.decoder, {id(module): name for name, module in model.named_modules()}
            head = f"{names[id(decoder.model)]}.{decoder.head}.weight".lstrip(".")
            whole[head] = whole[f"{names[id(decoder.base)]}.{decoder.embedding}.weight"]
        return whole


def gathered(tensors: dict[str, Any], mesh: DeviceMesh, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of all ranks of a pipeline, whole, in the CPU memory of global rank 0; empty elsewhere. They
    are sent one after the other, so that a device needs memory for one more than its own."""
    group, mine = mesh["pipeline_parallel"].get_group(), mesh["pipeline_parallel"].get_local_rank()
    is_sender = mesh["data_parallel"].get_local_rank() == 0  # Other pipelines have copies or shards of its tensors.
    everyone = objects_of_ranks({name: (value.shape, value.dtype) for name, value in tensors.items()}, group)
    result: dict[str, Tensor] = {}
    for rank, theirs in enumerate(everyone):
        for name, (shape, dtype) in theirs.items():
            if rank == mine:
                value = tensors[name]
                value = value.full_tensor() if isinstance(value, DTensor) else value
                if mine == 0 and is_sender:
                    result[name] = value.detach().cpu()
                elif is_sender:
                    dist.send(value.detach().to(device).contiguous(), group=group, group_dst=0)
            elif mine == 0 and is_sender:
                buffer = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(buffer, group=group, group_src=rank)
                result[name] = buffer.cpu()
    return result


class Pipelined(Sharded):
    """A pipeline, alone or times data parallelism; its strategy is a ``PipelineStrategy``."""

    def check(self, model: LanguageModel, *, training: bool, compile: str) -> None:
        check_never_compared(compile)
        check_compile(model, compile, self.strategy.root_device)
        module = type(self.strategy.lightning_module)
        for method in ("compute_loss", "backward"):  # The schedule has run backward when Lightning's begins.
            owner = next((base for base in module.__mro__ if method in vars(base)), type(self))
            if not owner.__module__.startswith(("lit_fused.", "lightning.")):
                raise UserError(
                    f"{module.__name__} overrides {method}, which strategy=pp would not call; give the loss as an "
                    "object (lit_fused/losses/loss.py), or choose strategy=ddp or fsdp2"
                )
        if getattr(getattr(model.loss, "objective", None), "single", False):
            raise UserError(
                f"objective={getattr(model.loss, 'name', None)} runs the model a second time, on answers to other "
                "prompts, which strategy=pp does not; choose strategy=ddp or fsdp2, or an objective of pairs"
            )

    def check_frozen(self, model: LanguageModel, what: str, instead: str, *, compile: str) -> None:
        raise UserError(f"strategy=pp divides one model, and a {what} cannot run beside it; {instead}")

    @property
    def _sharers(self) -> tuple[dist.ProcessGroup, str] | None:
        return self.strategy.pipeline.group, "the ranks of a pipeline"

    def prepare(self, model: LanguageModel) -> None:
        if divided_model(model) is None:
            super().prepare(model)
            model.prepare_hidden_states()

    def _divide(self, model: LanguageModel) -> None:
        strategy, layout, divided = self.strategy, self.strategy.layout, divided_model(model)
        sharded_over = self.mesh["data_parallel"] if strategy.fully_shard else None
        rank = self.mesh["pipeline_parallel"].get_local_rank()
        if divided is None:
            divided = divide(model, layout, rank, strategy.root_device, sharded_over)
        # Pipelines without FSDP2 average their gradients, which would mix different shards of an earlier FSDP2's.
        is_sharded = any(isinstance(stage, FSDPModule) for stage in divided.stages.values())
        found = divided.layout.num_stages, sorted(divided.stages), is_sharded
        if found != (layout.num_stages, sorted(layout.stages_of(rank)), strategy.fully_shard):
            raise UserError(
                "the model was divided for another schedule, or sharded otherwise, before; build it anew, and load a "
                "checkpoint of it"
            )
        strategy.pipeline = Pipeline(model, divided, strategy)

    def _complete(self, model: LanguageModel) -> None:
        for stage in self.strategy.pipeline.divided.stages.values():
            stage.to(self.strategy.root_device)  # FSDP2 looks for its shards again.

    def finish_gradients(self) -> None:
        self.strategy.sum_gradients()

    def spot_check(self, model: LanguageModel, batch: Batch) -> None:
        self.strategy.pipeline.spot_check(batch)

    def run(self, model: LanguageModel, batch: Batch, compute_loss: Run, scale: float) -> LossOutput:
        factor = torch.full((), scale, device=self.strategy.root_device)
        scaler = getattr(self.strategy.precision_plugin, "scaler", None)
        return self.strategy.pipeline.train(batch, factor if scaler is None else scaler.scale(factor))

    def evaluate(self, model: LanguageModel, batch: Batch) -> LossOutput:
        return self.strategy.pipeline(batch)

    def token_losses(self, model: LanguageModel, batch: Batch) -> Tensor:
        return self.strategy.pipeline.token_losses(batch)

    def generating(self, device: torch.device) -> Any:
        otherwise = "export it (save_pretrained), and let one device generate"
        raise UserError(f"a model that is divided over a pipeline does not generate text; {otherwise}")

    @contextmanager
    def whole_weights(self, backbone: nn.Module) -> Iterator[Mapping[str, Tensor] | None]:
        yield self.strategy.whole_state_dict(backbone)

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        divided = self.strategy.pipeline.divided
        copy = divided.tied_weight if 0 not in divided.stages else None  # The first stage counts it.
        counted = [g for g in gradients if copy is None or g is not copy.grad]
        return total_norm([torch.zeros(1, device=self.strategy.root_device), *counted], self.strategy.pipeline.group)

    def name_of_rank(self, rank: int) -> str:
        stages = self.strategy.stages_of(rank)
        return f"rank {rank}: stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


PipelineStrategy.placement_class = Pipelined
