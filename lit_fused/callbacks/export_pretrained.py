"""Export the trained model as a Hugging Face folder when training ends."""

from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lit_fused.callbacks.model_card import model_card
from lit_fused.callbacks.weight_average import averaged_weights
from lit_fused.checkpoints.own_folder import check_own
from lit_fused.checkpoints.reading import final_weights
from lit_fused.errors import UserError
from lit_fused.modules import FusedLMModule


class ExportPretrained(L.Callback):
    """Writes weights, configuration, generation settings, tokenizer and a model card (``README.md``) into a folder that
    transformers' ``from_pretrained`` loads.

    Args:
        folder: where to write. A folder that an export wrote is replaced; one with other files is refused.
        which: "last" for the weights at the end of training (their average, if there is one); "best" for those of the
            best checkpoint of a ``ModelCheckpoint`` with a monitored metric.
    """

    def __init__(self, folder: str | Path, which: str = "last") -> None:
        if which not in ("last", "best"):
            raise UserError(f"which must be last or best, got {which!r}")
        self.folder, self.which = Path(folder), which

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        check_own(self.folder)
        if self.which == "best" and not _monitors(trainer):
            raise UserError(
                "the best weights are those of a ModelCheckpoint with a monitored metric, and there is none; choose "
                "callbacks=best, set callbacks.checkpoint.monitor, or callbacks.export.which=last"
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, FusedLMModule)
        if not trainer.is_global_zero and not pl_module.is_sharded:
            return
        tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
        pl_module.model_card = model_card(trainer, pl_module)
        if self.which == "best":
            monitor = _monitors(trainer)[0]
            path = trainer.strategy.broadcast(monitor.best_model_path)
            if path:
                model = pl_module.model.transformers_model
                weights = final_weights(Path(path), model) if trainer.is_global_zero else {}
                pl_module.save_pretrained(self.folder, tokenizer, weights)
                return
            rank_zero_warn(f"no checkpoint was compared by {monitor.monitor}; the last weights are exported")
        with averaged_weights(trainer):
            pl_module.save_pretrained(self.folder, tokenizer)


def _monitors(trainer: L.Trainer) -> list[ModelCheckpoint]:
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.monitor is not None]
