"""The placement of a model whose layers are divided over the ranks of a pipeline."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lit_fused.errors import UserError
from lit_fused.losses.loss import Batch
from lit_fused.models.language_model import LanguageModel
from lit_fused.parallel.collectives import check_copies, clip_by_norm
from lit_fused.parallel.pipeline.division import complete, divide, divided_model, is_divided
from lit_fused.parallel.pipeline.runner import Pipeline
from lit_fused.parallel.placement import Add, Run
from lit_fused.parallel.sharded import Sharded, check_never_compared


class Pipelined(Sharded):
    """A pipeline, alone or times data parallelism; its strategy is a ``PipelineStrategy``."""

    forward_in_backward = True
    _training = False

    def check(self, model: LanguageModel, *, training: bool, compile: str, kernels: str) -> None:
        check_never_compared(compile, kernels)
        self._training = training

    def prepare(self, model: LanguageModel) -> None:
        if not is_divided(model):
            super().prepare(model)
            model.prepare_hidden_states()

    def _divide(self, model: LanguageModel) -> None:
        strategy, layout, divided = self.strategy, self.strategy.layout, divided_model(model)
        sharded_over = self.mesh["data_parallel"] if strategy.fully_shard else None
        if divided is None:
            names = {id(module): name for name, module in strategy.lightning_module.named_modules()}
            rank = self.mesh["pipeline_parallel"].get_local_rank()
            divided = divide(model, f"{names[id(model.backbone)]}.", layout, rank, strategy.root_device, sharded_over)
        shards = 1 if sharded_over is None else sharded_over.size()
        if not divided.layout.has_same_stages(layout) or divided.shards != shards:
            raise UserError(
                f"the model was divided for {divided.layout} before and cannot be divided for {layout}; build it anew, "
                "and load a checkpoint of it"
            )
        if divided.frozen and self._training:
            name = type(divided.decoder.model).__name__
            raise UserError(  # it has no gradients to send
                f"stage {divided.frozen[0]} of {layout.num_stages} of {name} has no parameter to be trained; choose "
                "strategy=ddp or fsdp2 for a model whose layers are frozen"
            )
        strategy.pipeline = Pipeline(model, divided, strategy)

    def _compare_ranks(self, model: LanguageModel) -> None:
        strategy, pipeline = self.strategy, self.strategy.pipeline
        complete(model, pipeline.divided, pipeline.group, pipeline.last_rank, strategy.root_device)
        tied = pipeline.divided.tied_weight
        if tied is not None and strategy.ends is not None:
            check_copies({"the embedding, which the output layer is tied to,": tied}, strategy.ends)
        if not strategy.fully_shard:
            check_copies(dict(model.named_parameters()), self.data_parallel_group)

    def train(self, model: LanguageModel, batch: Batch, compute_loss: Run, add: Add, *, check_parity: bool) -> Tensor:
        self.strategy.postponed = batch, check_parity, add
        return torch.ones((), device=self.strategy.root_device)

    def runner(self, model: LanguageModel) -> Pipeline:
        return self.strategy.pipeline

    @contextmanager
    def whole_weights(self, backbone: nn.Module) -> Iterator[Mapping[str, Tensor] | None]:
        yield self.strategy.whole_state_dict(backbone)

    def clip_by_norm(self, gradients: Iterable[Tensor], max_norm: float) -> None:
        divided, gradients = self.strategy.pipeline.divided, list(gradients)
        copy = divided.tied_weight if 0 not in divided.stages else None  # The first stage counts it.
        counted = [g for g in gradients if copy is None or g is not copy.grad]
        clip_by_norm(gradients, max_norm, counted=counted, group=self.strategy.pipeline.group)

    def name_of_rank(self, rank: int) -> str:
        stages = self.strategy.stages_of(rank)
        return f"rank {rank}: stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
