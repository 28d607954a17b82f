"""Evaluation and prediction: losses and metrics over all tokens of an epoch, from sums and counts."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lit_fused.errors import UserError
from lit_fused.losses import LossOutput
from lit_fused.losses.loss import Batch
from lit_fused.metrics import TokenMetrics
from lit_fused.ops.label_checks import IGNORE_INDEX
from lit_fused.parallel import may_end_anywhere, warn_of_repeated_rows
from lit_fused.training.average import TokenExactModule

NO_LABEL = (
    "no label was counted, as all of them are ignored (-100) or weigh nothing; look at the labels of the data, whose "
    "answers may be cut off"
)


class EvaluatedModule(TokenExactModule):
    """Runs batches of validation, test and prediction, and logs the metrics of each epoch."""

    metrics: nn.ModuleDict  # the sums of each stage, and of each of several loaders
    check_every_n_steps: int
    in_progress: tuple[str, ...] = ("loss", "perplexity")  # metrics that a progress bar shows

    def __init__(self) -> None:
        super().__init__()
        self._may_end_anywhere = False  # loaders that are streams are being evaluated
        self._first_due = set[str]()  # stages whose first batch with labels is to come
        self._next_check = 0  # a number of optimiser steps

    def compute_loss(self, batch: Batch) -> LossOutput:
        return self.placement.runner(self.model)(batch)

    def spot_check(self, stage: str, batch: Batch) -> None:
        """Run the spot check where it is due, with a batch that has labels: in the first of "training", in the first of
        each "evaluation", and after every n optimiser steps. Ranks that train or run a model together stop together."""
        is_training = stage == "training"
        is_first, together = stage in self._first_due, is_training or self.is_sharded
        is_due = is_first or (is_training and not self.average.batches and self.trainer.global_step >= self._next_check)
        if not self.check_every_n_steps or not is_due:
            return
        labelled = (self.model.targets(batch) != IGNORE_INDEX).any().int()
        if not (self.placement.from_all_ranks(labelled) if together else labelled).any():
            return
        self._first_due.discard(stage)
        if is_training:
            self._next_check = self.trainer.global_step + self.check_every_n_steps
        fault = None
        try:
            self.placement.runner(self.model).spot_check(batch, thorough=is_first)
        except UserError as error:
            fault = error
        if together:
            found = self.placement.from_all_ranks(torch.tensor(int(fault is not None), device=self.device))
            if fault is None and found.any():
                rank = self.placement.name_of_rank(int(found.int().argmax()))
                raise UserError(f"the spot check of {rank} has found what it says there")
        if fault is not None:
            raise fault

    @property
    def _stage(self) -> str:
        """Return "val", "test" or "predict", as the trainer names what it evaluates."""
        stage = self.trainer.state.stage
        return "" if stage is None else str(stage.dataloader_prefix)

    def on_validation_start(self) -> None:
        """Refuse loaders that do not fit, and forget the sums of an evaluation that was stopped before its end."""
        stage = self._stage
        for name in [name for name in self.metrics if name.partition("/")[0] == stage]:
            self._metrics_of(name).reset()
            if name != stage:
                del self.metrics[name]
        self.placement.check_lengths(getattr(self.trainer, f"num_{stage}_batches"), stage)
        self._first_due.add("evaluation")
        self._may_end_anywhere = may_end_anywhere(getattr(self.trainer, f"{stage}_dataloaders"))

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._check_place((dataloader_idx, batch_idx))

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def _check_place(self, place: tuple[int, int] | None) -> None:
        """Refuse an end on some ranks alone, before a step, in which ranks that share layers would wait for these."""
        if self._may_end_anywhere:
            self.placement.check_place(place, self._stage)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int | None = None) -> None:
        if not batch_idx and self.trainer.state.fn == TrainerFn.FITTING:
            warn_of_repeated_rows(self.trainer.val_dataloaders, "validation")
        self.placement.check_batch(self.model, batch, batch_idx)
        self.spot_check("evaluation", batch)
        output = self.compute_loss(batch)
        stage = self._stage
        for name in (stage, *([] if dataloader_idx is None else [f"{stage}/dataloader_idx_{dataloader_idx}"])):
            self._metrics_of(name).update(output)

    test_step = validation_step

    def _metrics_of(self, name: str) -> Any:
        if name not in self.metrics:
            self.metrics[name] = TokenMetrics(self.model.statistics).to(self.device)
        return self.metrics[name]

    def on_predict_epoch_end(self) -> None:
        self._check_place(None)

    def on_validation_epoch_end(self) -> None:
        self._check_place(None)
        stage = self._stage
        loaders = getattr(self.trainer, f"{stage}_dataloaders")
        names = [*loaders] if isinstance(loaders, Mapping) else []
        count, empty = len(getattr(self.trainer, f"num_{stage}_batches")), list[str]()
        # All ranks reduce the sums of the same loaders in the same order, also of those that had no batch here.
        for key in (stage, *(f"{stage}/dataloader_idx_{index}" for index in range(count) if count > 1)):
            metrics = self._metrics_of(key)
            values = metrics.compute()  # Reduced over the ranks, so that all of them log the same numbers.
            metrics.reset()
            suffix = key.removeprefix(stage)
            if suffix and names:
                suffix = f"/{names[int(suffix.rpartition('_')[2])]}"
            if metrics.is_empty:
                empty.append(f"{stage}{suffix}")
            options: Any = {"sync_dist": True, "add_dataloader_idx": not suffix}
            for name, value in values.items():
                shown = not suffix and name in self.in_progress
                self.log(f"{stage}/{name}{suffix}", value, prog_bar=shown, **options)
            if suffix:
                del self.metrics[key]
        if empty and not self.trainer.sanity_checking:
            rank_zero_warn(f"the metrics of {stage if stage in empty else ', '.join(empty)} are NaN: {NO_LABEL}")

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Score each sequence: "log_likelihood" (B,) float32, in nats, of its "num_tokens" (B,) int64 valid targets."""
        self.placement.check_batch(self.model, batch, batch_idx)
        return {
            "log_likelihood": -self.placement.runner(self.model).token_losses(batch).sum(-1),
            "num_tokens": (self.model.targets(batch) != IGNORE_INDEX).sum(-1),
        }
