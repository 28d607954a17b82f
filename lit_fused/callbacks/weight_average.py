"""An exponential moving average of the weights, under every strategy."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lit_fused.checkpoints.reading import final_weights
from lit_fused.checkpoints.resuming import AVERAGE, averaging, end_averaging
from lit_fused.errors import UserError, check_number
from lit_fused.modules.placed_lm import PlacedLMModule
from lit_fused.parallel import local, reshard


class WeightAverage(L.Callback):
    """Updates, after every optimiser step, ``average = decay * average + (1 - decay) * weight``.

    The average is an entry of the optimiser's state, beside Adam's moments: a strategy shards, saves and restores it
    with that state. It starts as the weights after the first step. Validation, samples of text and the exported model
    use it, and the module has it once the fit has ended. A checkpoint has both. ``decay`` is in (0, 1). UserError at
    the start of a fit, if weights are in half precision or the checkpoint has none.
    """

    def __init__(self, decay: float = 0.999) -> None:
        check_number("the decay of an average of the weights", decay, "lie in (0, 1)", lambda x: 0 < x < 1)
        self.decay = decay
        self._step = 0  # the trainer's global_step at the last update
        self._hooks: list[RemovableHandle] = []
        self._validates = False  # The module has its averaged weights.

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            half = {str(p.dtype) for p in _parameters(optimizer) if p.dtype.itemsize < 4}
            if half:
                raise UserError(
                    f"an average of weights in {half.pop()} would lose most of its updates to rounding; choose "
                    "precision=bf16-mixed, which keeps the weights in float32, or leave the average out"
                )
            end_averaging(optimizer)  # that of an earlier fit, where a project has given its optimiser
            averaging.add(optimizer)
            # A strategy that restores a sharded state asks the optimiser for one first, to learn its entries.
            self._hooks.append(optimizer.register_state_dict_pre_hook(_complete))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        if self._step and not any(_averages(optimizer) for optimizer in trainer.optimizers):
            raise UserError(
                "this checkpoint has no average of the weights: it is of a run without one, or of an optimizer that "
                "keeps no state; resume without the average"
            )

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        for optimizer in trainer.optimizers:
            averages = _averages(optimizer)
            if averages:
                weights, parts = [local(p.detach()) for p in averages], [local(a) for a in averages.values()]
                torch._foreach_lerp_(parts, weights, 1 - self.decay)  # pyright: ignore[reportPrivateImportUsage]
            for p in _parameters(optimizer):
                if p.grad is not None and p not in averages:
                    optimizer.state[p][AVERAGE] = p.detach().clone()

    @contextmanager
    def applied(self, trainer: L.Trainer) -> Iterator[None]:
        """Give the module its averaged weights inside of the block."""
        self._exchange(trainer)
        try:
            yield
        finally:
            self._exchange(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._exchange(trainer)
            self._validates = True
        elif trainer.ckpt_path:
            assert isinstance(pl_module, PlacedLMModule)
            whole = final_weights(Path(str(trainer.ckpt_path)), pl_module.model.transformers_model)
            own = {name: whole[name] for name in get_model_state_dict(pl_module)}
            set_model_state_dict(pl_module, own, options=StateDictOptions(full_state_dict=True))

    on_test_start = on_validation_start

    def on_validation_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if self._validates:
            self._exchange(trainer)
        self._validates = False

    on_exception = on_validation_end  # type: ignore[assignment]

    @torch.no_grad()
    def _exchange(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        reshard(trainer.lightning_module)  # FSDP2 would use again the root's weights that a forward left gathered
        for optimizer in trainer.optimizers:
            for p, average in _averages(optimizer).items():
                weight, average = local(p.detach()), local(average)
                before = weight.clone()
                weight.copy_(average)
                average.copy_(before)

    on_fit_end = _exchange

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for optimizer in trainer.optimizers if stage == "fit" else ():
            end_averaging(optimizer)


def averaged_weights(trainer: L.Trainer) -> AbstractContextManager[None]:
    """Return a context in which the module has its averaged weights, if a callback of the trainer has them."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((c.applied(trainer) for c in callbacks if isinstance(c, WeightAverage)), nullcontext())


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _averages(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    return {p: optimizer.state[p][AVERAGE] for p in _parameters(optimizer) if AVERAGE in optimizer.state.get(p, {})}


def _complete(optimizer: Optimizer) -> None:
    for p, state in optimizer.state.items() if optimizer in averaging else ():
        if state and AVERAGE not in state:
            state[AVERAGE] = p.detach().clone()
