"""The LightningModule of sequential recommenders: a catalogue of items in place of a vocabulary."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_fused.atomic import written_whole
from lit_fused.errors import UserError, checked_options
from lit_fused.export.own_folder import check_own, finish_own
from lit_fused.losses import Loss
from lit_fused.losses.loss import Batch
from lit_fused.models import item_encoders
from lit_fused.models.recommender import Recommendations, RecommenderModel, padded_histories
from lit_fused.training.module import FusedLMModule
from lit_fused.training.optimizers import NO_DECAY

_SETTINGS, _WEIGHTS = "recommender.json", "model.safetensors"


class FusedRecommenderModule(FusedLMModule):
    """A sequential recommender trained on the full softmax over its catalogue, without its logits.

        module = FusedRecommenderModule(SASRec(num_items=1_000_000))
        Trainer().fit(module, loader)    # {"input_ids": (B, T), "labels": (B, T)}, items from 1 on, 0 for padding
        module.recommend(histories, k=10)

    Validation and test log, beside the loss, ``ndcg_at_10``, ``recall_at_10``, ``mrr`` and ``coverage_at_10`` (the
    share of the catalogue that was among the 10 best of anyone) over the full catalogue, all ranks together. A data
    module with ``num_items`` lets the table grow to it, and its ``popularity`` (V,), interactions of each item, is
    what ``popularity_correction`` takes. The other arguments are those of
    :class:`~lit_fused.models.recommender.RecommenderModel` and :class:`FusedLMModule`.
    """

    @checked_options()
    def __init__(
        self,
        backbone: nn.Module,
        loss: Loss | Callable[[Tensor, Tensor], Tensor] | None = None,
        optimizer: Optimizer | Callable[..., Optimizer] | None = None,
        scheduler: LRScheduler | Callable[..., LRScheduler] | None = None,
        *,
        popularity_correction: float = 0.0,
        mask_fraction: float = 0.2,
        top_k: int = 10,
        check_every_n_steps: int = 100,
        no_decay: Sequence[str] = NO_DECAY,
        compile: str = "none",
    ) -> None:
        self._of_model = {
            "popularity_correction": popularity_correction,
            "mask_fraction": mask_fraction,
            "top_k": top_k,
        }
        make: Any = partial(RecommenderModel, **self._of_model)
        self.language_model = make
        self.in_progress = ("loss", f"ndcg_at_{top_k}")
        options: dict[str, Any] = {"check_every_n_steps": check_every_n_steps, "compile": compile}
        super().__init__(backbone, loss, optimizer, scheduler, no_decay=no_decay, **options)

    item_map: Any = None  # of the run that the weights are of, where no data module has it

    @property
    def _recommender(self) -> RecommenderModel:
        assert isinstance(self.model, RecommenderModel)
        return self.model

    def setup(self, stage: str) -> None:
        model, items = self._recommender, self._of_data("num_items")
        exported, check = getattr(self.backbone, "item_numbers", None), self._of_data("check_item_numbers")
        if exported and check:
            check(exported)
        if items is not None:
            model.grow(items)
        elif not model.num_items:
            raise UserError("the model has no items, and the data name none; choose data=interactions, or num_items")
        if (counts := self._of_data("popularity")) is not None:
            model.correct_popularity(counts)
        elif stage == "fit" and model.popularity_correction and model.log_popularity is None:
            raise UserError(
                "popularity_correction needs the interactions of each item: a data module with popularity (V,), as "
                "data=interactions has, or module.model.correct_popularity(counts)"
            )
        super().setup(stage)

    def make_room(self, weights: Mapping[str, Tensor]) -> None:
        table = self._recommender.table.weight
        names = [name for name, p in self.named_parameters() if p is table]
        for name in names:
            if name in weights:
                self._recommender.grow(len(weights[name]) - 1)

    def on_validation_epoch_start(self) -> None:
        self._recommender.shown = torch.zeros(self._recommender.num_items, dtype=torch.bool, device=self.device)

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        shown, self._recommender.shown = self._recommender.shown, None
        if shown is not None:
            share = (self.placement.sum_over_data(shown.float()) > 0).float().mean()
            share = share.where(share > 0, torch.nan)  # Nothing was recommended to anyone.
            self.log(f"{self._stage}/coverage_at_{self._recommender.top_k}", share, sync_dist=True)

    on_test_epoch_end = on_validation_epoch_end

    def recommend(self, input_ids: Any, k: int = 10, seen: Any = None) -> Recommendations:
        """Return the k best next items of histories, a tensor (B, T) or lists, in evaluation mode, as
        :meth:`~lit_fused.models.recommender.RecommenderModel.recommend` says."""
        was_training, batch = self.training, {"input_ids": padded_histories(input_ids).to(self.device)}

        def run(model: Any, batch: Batch) -> Recommendations:
            return model.recommend(batch["input_ids"], k, seen)

        try:
            with self.placement.generating(self.device):
                return self.eval()._recommender.run_with(run, batch)
        finally:
            self.train(was_training)

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Return the best "items" and their "scores", (B, top_k), after "input_ids" (B, T), without its "seen"."""
        return self.recommend(batch["input_ids"], self._recommender.top_k, batch.get("seen"))._asdict()

    def save_pretrained(
        self, folder: str | Path, tokenizer: Any = None, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write a folder that :meth:`from_folder` loads, whole or not at all: weights, settings, and the item map of
        the run's data, if it has one. The arguments are those of :meth:`TrainedModel.save_pretrained`."""
        if weights is None:
            self.check_finite("nothing is exported", together=self.is_sharded)
        folder = Path(folder)
        with self.placement.whole_weights(self.model) as whole:
            if not self.placement.is_global_zero:
                return
            own = {f"model.{name}": value for name, value in (whole or self.model.state_dict()).items()}
            given, items = own if weights is None else weights, self._of_data("item_map") or self.item_map
            check_own(folder)
            with written_whole(folder) as partial_folder:
                partial_folder.mkdir(parents=True, exist_ok=True)
                tensors = {name: given[name].detach().cpu().contiguous().clone() for name in own}
                save_file(tensors, partial_folder / _WEIGHTS)
                settings = {
                    "backbone": type(self.backbone).__name__,
                    "settings": getattr(self.backbone, "settings", {}),
                    "num_items": self._recommender.num_items,
                    "module": self._of_model,
                    "item_numbers": items and items.item_numbers,
                }
                (partial_folder / _SETTINGS).write_text(json.dumps(settings, indent=1), encoding="utf-8")
                if items is not None:
                    items.write_items(partial_folder / "items.parquet")
                finish_own(partial_folder)

    @classmethod
    def from_folder(cls, folder: str | Path, backbone: nn.Module | None = None, **options: Any) -> Self:
        """Return the module that :meth:`save_pretrained` wrote, in evaluation mode. ``backbone`` is needed if it is
        none of lit_fused's own; ``options`` are those of the class."""
        folder = Path(folder)
        saved = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
        weights = load_file(folder / _WEIGHTS)
        if backbone is None:
            if saved["backbone"] not in ("SASRec", "BidirectionalItems"):
                raise UserError(f"{folder} has a {saved['backbone']}, a backbone of your own: pass backbone=")
            backbone = getattr(item_encoders, saved["backbone"])(saved["num_items"], **saved["settings"])
        assert backbone is not None
        module = cls(backbone, **(saved["module"] | options))
        module.make_room(weights)
        module.load_state_dict(weights)
        module.backbone.item_numbers = saved.get("item_numbers")
        return module.eval()


def pretrained_items(path: str | Path) -> nn.Module:
    """Return the backbone in an exported folder, to train it on: its table grows to the items of the data."""
    return FusedRecommenderModule.from_folder(path).backbone.train()
