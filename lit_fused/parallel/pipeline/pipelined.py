"""The placement of a model whose layers are divided over the ranks of a pipeline."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from lit_fused.errors import UserError
from lit_fused.losses.loss import Batch, LossOutput
from lit_fused.models.language_model import LanguageModel
from lit_fused.parallel.copies import check_copies
from lit_fused.parallel.pipeline.division import complete, divide, divided_model, is_divided
from lit_fused.parallel.pipeline.runner import Pipeline
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
        strategy, divided = self.strategy, divided_model(model)
        sharded_over = self.mesh["data_parallel"] if strategy.fully_shard else None
        if divided is None:
            names = {id(module): name for name, module in strategy.lightning_module.named_modules()}
            rank = self.mesh["pipeline_parallel"].get_local_rank()
            prefix = f"{names[id(model.backbone)]}."
            divided = divide(model, prefix, strategy.layout, rank, strategy.root_device, sharded_over)
        shards = 1 if sharded_over is None else sharded_over.size()
        if not divided.layout.has_same_stages(strategy.layout) or divided.shards != shards:
            raise UserError(
                f"the model was divided for {divided.layout} before and cannot be divided for {strategy.layout}; build "
                "it anew, and load a checkpoint of it"
            )
        if divided.frozen and self._training:
            name = type(divided.decoder.model).__name__
            raise UserError(  # it has no gradients to send
                f"stage {divided.frozen[0]} of {strategy.layout.num_stages} of {name} has no parameter to be trained; "
                "choose strategy=ddp or fsdp2 for a model whose layers are frozen"
            )
        pipeline = Pipeline(
            model,
            divided,
            strategy.layout,
            strategy.microbatches,
            strategy.pipeline_group,
            strategy.root_device,
            lambda: strategy.precision_plugin.forward_context(),
        )
        strategy.run_with(divided, pipeline)

    def _compare_ranks(self, model: LanguageModel) -> None:
        strategy, divided = self.strategy, divided_model(model)
        assert divided is not None
        complete(model, divided, strategy.pipeline_group, strategy.pipeline.last_rank, strategy.root_device)
        if divided.tied_weight is not None and strategy.ends_group is not None:
            tied = {"the embedding, which the output layer is tied to,": divided.tied_weight}
            check_copies(tied, strategy.ends_group)
        if not strategy.fully_shard:
            check_copies(dict(model.named_parameters()), strategy.data_group)

    def train(
        self,
        model: LanguageModel,
        batch: Batch,
        compute_loss: Callable[[Batch], LossOutput],
        add: Callable[[LossOutput], Tensor],
        *,
        check_parity: bool,
    ) -> Tensor:
        return self.strategy.postpone(batch, add, check_parity=check_parity)

    def runner(self, model: LanguageModel) -> Pipeline:
        return self.strategy.pipeline

    @contextmanager
    def whole_weights(self, backbone: nn.Module) -> Iterator[Mapping[str, Tensor] | None]:
        yield self.strategy.whole_state_dict(backbone)

    def clip_by_norm(self, gradients: Iterable[Tensor], max_norm: float) -> None:
        self.strategy.clip_by_norm(list(gradients), max_norm)

    def name_of_rank(self, rank: int) -> str:
        stages = self.strategy.stages_of(rank)
        return f"rank {rank}: stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
