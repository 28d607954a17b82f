"""An exponential moving average of the weights: Lightning's, on the device that trains."""

import warnings

import lightning as L
from lightning.pytorch.callbacks import WeightAveraging
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lit_fused.errors import UserError, check_number
from lit_fused.training.trained_model import TrainedModel


class WeightAverage(WeightAveraging):
    """Updates, after every optimiser step, ``average = decay * average + (1 - decay) * weight``.

    It starts as the weights after the first step. Validation uses it, a checkpoint's "state_dict" is the average, and
    the module has it once training has ended: callbacks that come later in the trainer's list sample and export it.
    Lightning's own ``EMAWeightAveraging`` averages on the CPU, where the model still is when it copies it, and rounds
    integer buffers. ``decay`` is in (0, 1). UserError under a strategy that shards the model, or for weights in half
    precision.
    """

    def __init__(self, decay: float = 0.999) -> None:
        check_number("the decay of an average of the weights", decay, "lie in (0, 1)", lambda x: 0 < x < 1)
        super().__init__(use_buffers=False, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.decay = decay

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if str(trainer.precision).endswith("16-true"):
            raise UserError(
                f"an average of weights in {trainer.precision} would lose most of its updates to rounding; choose "
                "precision=bf16-mixed, which keeps the weights in float32, or leave the average out"
            )
        # The copy is of a model with its weights and final vocabulary, on its device: Lightning comes to that later.
        pl_module.setup(stage)
        if isinstance(pl_module, TrainedModel) and pl_module.is_sharded:
            raise UserError("an average of the weights needs all of them in each process; choose strategy=auto or ddp")
        pl_module.configure_model()
        pl_module.to(trainer.strategy.root_device)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*with a model that overrides the configure_model")
            super().setup(trainer, pl_module, stage)
