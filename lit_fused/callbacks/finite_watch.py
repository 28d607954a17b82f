"""Stop a fit whose loss or gradients are not finite."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lit_fused.errors import UserError, check_number
from lit_fused.parallel import HostCopy, are_finite, local

_SKIPPED = 20  # steps in a row: float16's loss scale begins at 2 ** 16 and is halved after each


class FiniteWatch(L.Callback):
    """Raises a UserError, on every rank, when the loss or the gradients of optimiser steps are not finite.

    The numbers are looked at on the device, and read one step later, so the device waits for nothing.

    Args:
        patience: how many such steps in a row are tolerated. None means 0, or 20 for a float16 run with a loss
            scale, which skips such a step and halves the scale.
    """

    def __init__(self, patience: int | None = None) -> None:
        if patience is not None:
            words = "be a number of steps, 0 or more, or null"
            check_number("patience", patience, words, lambda x: x >= 0, whole=True)
        self.patience = patience

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._bad = torch.zeros(2, dtype=torch.int32, device=pl_module.device)  # loss, gradients of the present step
        self._unread: tuple[int, HostCopy] | None = None
        self._step, self._in_a_row = trainer.global_step, 0

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        if hasattr(pl_module, "gradient_norms"):  # The module has computed them from all gradients, once.
            return
        gradients = [local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if gradients:
            self._bad[1] |= ~are_finite(gradients).all()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self._bad[0] |= ~loss.detach().isfinite().all()
        if trainer.global_step == self._step:  # The step's other micro-batches are to come.
            return
        self._step = trainer.global_step
        for norm in getattr(pl_module, "gradient_norms", ()):
            self._bad[1] |= ~norm.isfinite()
        self._read(trainer)
        self._unread = self._step, HostCopy(self._bad)
        self._bad = torch.zeros_like(self._bad)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._read(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._read(trainer)

    def _read(self, trainer: L.Trainer) -> None:
        """Look at the last step's numbers, which have come meanwhile, and raise a UserError if it was one too many."""
        if self._unread is None:
            return
        (step, bad), self._unread = self._unread, None
        of_loss, of_gradients = bad.read()
        self._in_a_row = self._in_a_row + 1 if of_loss or of_gradients else 0
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        patience = self.patience if self.patience is not None else _SKIPPED * (scaler is not None)
        if self._in_a_row <= patience:
            return
        what = " and ".join(["the loss"] * of_loss + ["the gradients"] * of_gradients)
        before = f", and in the {self._in_a_row - 1} before it" if self._in_a_row > 1 else ""
        scale = "" if scaler is None else f" (float16's loss scale is {scaler.get_scale():g})"
        otherwise = "" if scaler is None else ", or precision=bf16-mixed"
        raise UserError(
            f"{what} of step {step} {'were' if of_gradients else 'was'} not finite{before}{scale}; try a smaller "
            f"optimizer.lr, a larger scheduler.warmup_fraction, trainer.gradient_clip_val=1.0{otherwise}; "
            "callbacks.finite.patience=N tolerates N such steps in a row"
        )
