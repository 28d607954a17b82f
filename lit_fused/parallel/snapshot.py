"""Copies in CPU memory of what a checkpoint saves, which a GPU makes beside the next forward and backward pass."""

import threading
from collections.abc import Hashable, Iterable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.tensor import DTensor


class MetricsLostError(Exception):
    """A fit ended with an error after a state was copied and before the loggers had the metrics of its step."""


class Snapshots(Callback):
    """Copies a checkpoint's tensors to CPU memory, on a GPU by a stream of their own.

    The device waits for copies of trained weights and of optimisers' states before it changes them: before the next
    step of an optimiser, and before a validation and the end, for which an average may take their place. It waits at
    once for everything else, since a forward pass or a hook may change that: buffers, frozen weights; and all of a
    module that steps its optimisers by itself, perhaps without Lightning's hook.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._copied: Any = None  # the event after the newest copies
        self.are_logged = threading.Event()  # The loggers have the metrics of the step whose state was copied.
        self._are_lost = False  # They will never have them.

    def take(self, checkpoint: dict[str, Any], trainer: L.Trainer, *, shared: bool = True) -> dict[str, Any]:
        """Return the checkpoint with copies in CPU memory, which are complete after :meth:`wait`. With ``shared``, a
        tensor that stands at several places, as a tied weight does, has one copy at all of them."""
        self.are_logged.clear()
        self._are_lost = False
        trained = _changed_by_steps(trainer)
        found = dict[Hashable, Tensor]()
        keys = list[Hashable]()

        def note(tensor: Tensor) -> Tensor:
            keys.append((_place(tensor), tensor.shape, tensor.stride(), tensor.dtype) if shared else len(keys))
            found.setdefault(keys[-1], tensor.detach())
            return tensor

        apply_to_collection(checkpoint, Tensor, note)
        late = {key for key, tensor in found.items() if _place(tensor) in trained}
        if trainer.strategy.root_device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
        copies = self._copies({key: found[key] for key in found if key not in late})
        self._device_waits()
        copies |= self._copies({key: found[key] for key in late})
        order = iter(keys)
        return apply_to_collection(checkpoint, Tensor, lambda _: copies[next(order)])

    def _copies(self, tensors: dict[Hashable, Tensor]) -> dict[Hashable, Tensor]:
        with torch.cuda.stream(self._stream):  # of None: no other stream
            # A copy that does not block goes into pinned memory, which torch keeps for the next save.
            copies = {
                key: t.to("cpu", non_blocking=True) if t.is_cuda else t.cpu().clone() for key, t in tensors.items()
            }
        if self._stream is not None:
            self._copied = self._stream.record_event()
        return copies

    def wait(self) -> None:
        """Wait until the newest copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def wait_for_loggers(self) -> None:
        """Wait, in a thread, until the loggers have the metrics of the copied step; MetricsLostError if the fit has
        ended without. One that ended otherwise than by Lightning says nothing; the limit lets its process end."""
        self.are_logged.wait(timeout=60)
        if self._are_lost:
            raise MetricsLostError

    def end_wait(self, *, failed: bool) -> None:
        """Let the thread go on: nothing more is logged, as the fit ends or has ``failed``."""
        self._are_lost |= failed and not self.are_logged.is_set()
        self.are_logged.set()

    def _device_waits(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def on_before_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._device_waits()

    on_train_end = on_before_optimizer_step

    def on_validation_start(self, *_: Any, **__: Any) -> None:
        self._device_waits()
        self.are_logged.set()

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self.are_logged.set()


def _place(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()


def _changed_by_steps(trainer: L.Trainer) -> set[int]:
    """Return where trained weights and the states of their optimisers lie, which nothing but a step changes."""
    if trainer.state.fn != TrainerFn.FITTING or not trainer.lightning_module.automatic_optimization:
        return set()
    parameters = (p for o in trainer.optimizers for group in o.param_groups for p in group["params"])
    states = (value for o in trainer.optimizers for state in o.state.values() for value in state.values())
    tensors: Iterable[Tensor] = (t for t in (*parameters, *states) if isinstance(t, Tensor))
    return {_place(tensor) for tensor in tensors}
