"""An exponential moving average of the weights, which lies as they do under any strategy."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lit_fused.errors import UserError, check_number
from lit_fused.parallel.checkpoint import WEIGHTS_BESIDE_AVERAGE, check_place_for_average
from lit_fused.parallel.collectives import local
from lit_fused.parallel.placement import reshard


class WeightAverage(L.Callback):
    """Updates, after every optimiser step, ``average = decay * average + (1 - decay) * weight``.

    It starts as the weights after the first step. Validation uses it, a checkpoint's "state_dict" is the average, and
    the module has it once training has ended: callbacks that come later in the trainer's list sample and export it.
    Each rank averages its own part of the weights that optimisers train. ``decay`` is in (0, 1). UserError for weights
    in half precision, and under Lightning's own ``ModelParallelStrategy``.
    """

    def __init__(self, decay: float = 0.999) -> None:
        check_number("the decay of an average of the weights", decay, "lie in (0, 1)", lambda x: 0 < x < 1)
        self.decay, self._update = decay, get_ema_multi_avg_fn(decay)
        self._others: dict[Tensor, Tensor] = {}  # by parameter: its average, or its weight while it has the average
        self._is_exchanged = False  # The parameters have the average.

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        check_place_for_average(trainer.strategy)
        if str(trainer.precision).endswith("16-true"):
            raise UserError(
                f"an average of weights in {trainer.precision} would lose most of its updates to rounding; choose "
                "precision=bf16-mixed, which keeps the weights in float32, or leave the average out"
            )
        self._others, self._is_exchanged = {}, False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        self._others = {p: other.to(p.device) for p, other in self._others.items()}  # Some are loaded before p moves.

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self._step:  # More micro-batches of the same step follow.
            return
        self._step = trainer.global_step
        trained = [p for o in trainer.optimizers for group in o.param_groups for p in group["params"]]
        self._others |= {p: p.detach().clone() for p in trained if p not in self._others}
        self._update([local(other) for other in self._others.values()], [local(p) for p in self._others], self._step)

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._exchange(pl_module)

    on_validation_epoch_end = on_validation_epoch_start

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._exchange(pl_module)

    @torch.no_grad()
    def _exchange(self, module: L.LightningModule) -> None:
        """Exchange the numbers of the parameters and those beside them, in place."""
        reshard(module)  # FSDP2 may have left weights gathered; the next forward gathers the new numbers.
        for p, other in self._others.items():
            numbers = local(p).clone()
            local(p).copy_(local(other))
            local(other).copy_(numbers)
        self._is_exchanged = not self._is_exchanged

    def state_dict(self) -> dict[str, Any]:
        return {"decay": self.decay}  # With it, Lightning warns of a resumed run that leaves the average out.

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        state, named = checkpoint["state_dict"], pl_module.named_parameters(remove_duplicate=False)
        others = {name: self._others[p] for name, p in named if p in self._others}
        own = {name: state[name] for name in others}
        average, weights = (own, others) if self._is_exchanged else (others, own)
        checkpoint |= {"state_dict": state | average, WEIGHTS_BESIDE_AVERAGE: weights}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            weights = checkpoint.get(WEIGHTS_BESIDE_AVERAGE, {})
            self._others = {p: weights[name].clone() for name, p in pl_module.named_parameters() if name in weights}
            self._is_exchanged = True  # The module has loaded the average.
            self._exchange(pl_module)
