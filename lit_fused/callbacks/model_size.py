"""Say in one line what is trained, in place of Lightning's table of submodules."""

import warnings

import lightning as L
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count

from lit_fused.errors import checked_options
from lit_fused.modules import FusedLMModule


class ModelSize(ModelSummary):
    """Prints the model's class, its parameters, and their size; nothing where ``shown`` is false."""

    @checked_options()
    def __init__(self, shown: bool = True) -> None:
        super().__init__(max_depth=-1)
        self.shown = shown

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.shown:
            with warnings.catch_warnings():
                # Lightning doubts a size of 32 bits in mixed precision, where the weights do have them.
                warnings.filterwarnings("ignore", message=".*is not supported by the model summary")
                summary = self._summary(trainer, pl_module)
            name = type(pl_module.backbone if isinstance(pl_module, FusedLMModule) else pl_module).__name__
            total, trained = (
                get_human_readable_count(count).strip()
                for count in (summary.total_parameters, summary.trainable_parameters)
            )
            which = "all trained" if total == trained else f"{trained} trained"
            rank_zero_info(f"{name}: {total} parameters, {which}, {summary.model_size:,.1f} MB")
