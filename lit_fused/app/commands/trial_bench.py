"""Run optimiser steps of given sizes with one model, and measure their memory and their speed.

Running out of memory is a result here, not a failure: the failed step's tensors are released. Other errors are raised.
"""

import gc
import re
import time
import traceback
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, open_dict
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fused.app.commands.training import build_module
from lit_fused.app.config import check_precision
from lit_fused.callbacks import PeakMemoryMonitor
from lit_fused.callbacks.peak_memory import linux_memory
from lit_fused.errors import UserError

_GIB = 2**30
_STEPS = 3
_MAX_SEQUENCE = 2**20


@dataclass(frozen=True)
class FitBatchOptions:
    """The options of ``mode=fit_batch``.

    Args:
        losses: names of files in ``conf/loss``; None: standard and the run's own.
        memory_gib: the limit of a step; None: all that is free on the GPU. A CPU needs it, for the whole process.
    """

    losses: list[str] | None = None
    memory_gib: float | None = None

    def __post_init__(self) -> None:
        if self.losses is not None and not self.losses:
            raise UserError("fit_batch.losses is empty; name files of conf/loss, or null: standard and the run's own")


class Trial(NamedTuple):
    peak_gib: float
    tokens_per_sec: float


class Bench:
    """Runs optimiser steps of given sizes with one model, whose loss can be exchanged."""

    def __init__(self, cfg: DictConfig, options: FitBatchOptions, folder: str) -> None:
        self.cfg, self.options, self.folder = cfg, options, folder
        trainer = self._trainer([])
        check_precision(cfg.precision, trainer)
        self.device = trainer.strategy.root_device
        self.limit_gib = self._limit()
        L.seed_everything(cfg.seed, workers=True, verbose=False)
        self.module = build_module(cfg, instantiate(cfg.loss))
        self.module.parity_check = False
        model = self.module.model.transformers_model
        config = None if model is None else model.config.get_text_config()
        self.longest: int = getattr(config, "max_position_embeddings", None) or _MAX_SEQUENCE
        parameters = [(p.numel() * p.element_size(), p.requires_grad) for p in self.module.parameters()]
        weights, trained = sum(size for size, _ in parameters), sum(size for size, grad in parameters if grad)
        before = process_gib() if self.device.type == "cpu" else 0.0
        self.fixed_gib = before + (weights + 3 * trained) / _GIB  # gradients and AdamW's state

    def run(self, batch_size: int, sequence: int) -> Trial | None:
        monitor, clock = PeakMemoryMonitor(summary=False), _Clock()
        trainer = self._trainer([monitor, clock])
        tokens: Tensor = torch.randint(
            self.module.model.vocabulary, (batch_size, sequence), generator=torch.Generator().manual_seed(0)
        )
        micro_batches = trainer.accumulate_grad_batches
        batches: Any = [{"input_ids": tokens, "labels": tokens.flip(-1)}] * (_STEPS * micro_batches)
        try:
            trainer.fit(self.module, DataLoader(batches, batch_size=None))
        except Exception as error:  # several types of error mean that memory ran out
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # the frames refer to the tensors of the failed step
            return None
        finally:
            del trainer
            self._release()
        if not monitor.peaks:
            raise UserError("mode=fit_batch cannot measure memory here: it needs CUDA, or Linux")
        peak = max(monitor.peaks.values())
        if self.limit_gib is not None and peak > self.limit_gib and self.device.type == "cpu":
            return None
        return Trial(peak, batch_size * sequence * micro_batches / clock.fastest)

    def _limit(self) -> float | None:
        wanted = self.options.memory_gib
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            if wanted is not None and wanted * _GIB > total:
                raise UserError(f"fit_batch.memory_gib={wanted}, but this GPU has {total / _GIB:.1f} GiB")
            if wanted is not None:
                torch.cuda.set_per_process_memory_fraction(wanted * _GIB / total, self.device)
            return free / _GIB if wanted is None else wanted
        if wanted is None:
            raise UserError(
                "mode=fit_batch on a CPU needs a limit, fit_batch.memory_gib=..., the GiB that the process may take: "
                "memory that runs out there takes the machine down"
            )
        try:
            available = linux_memory("/proc/meminfo", "MemAvailable") / _GIB + process_gib()
        except OSError as error:
            raise UserError(f"mode=fit_batch on a CPU needs Linux, which says what memory is free ({error})") from error
        if wanted > available:
            raise UserError(
                f"fit_batch.memory_gib={wanted} is more than the {available:.1f} GiB that are available here; give less"
            )
        return wanted

    def _trainer(self, callbacks: list[L.Callback]) -> L.Trainer:
        node = self.cfg.trainer.copy()
        with open_dict(node):
            node.callbacks, node.logger, node.devices = None, False, 1
            node.accumulate_grad_batches = min(node.accumulate_grad_batches, 2)
            node.max_steps, node.max_epochs, node.val_check_interval = _STEPS, -1, None
            node.limit_val_batches = node.num_sanity_val_steps = 0
            node.limit_train_batches = None
            node.enable_checkpointing = node.enable_model_summary = node.enable_progress_bar = False
            node.default_root_dir = self.folder
        return instantiate(node, _partial_=True)(callbacks=callbacks)

    def _release(self) -> None:
        module = self.module
        module.zero_grad(set_to_none=True)
        module.average.reset()
        if module.model.head is not None:
            module.model.replace_head(module.model.head)  # this releases the hidden states that the head captured
        module.trainer = None
        gc.collect()
        if self.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


class _Clock(L.Callback):
    _end, fastest = float("-inf"), float("inf")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            if trainer.strategy.root_device.type == "cuda":
                torch.cuda.synchronize(trainer.strategy.root_device)
            before, self._end = self._end, time.perf_counter()
            self.fastest = min(self.fastest, self._end - before)


def process_gib() -> float:
    return linux_memory("/proc/self/status", "VmRSS") / _GIB


_OUT_OF_MEMORY = re.compile(
    "CUDA (error: )?out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED|DefaultCPUAllocator: (can't allocate|not enough) mem"
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error says that memory ran out: the device's, or on a CPU the machine's. A kernel that wants
    more *shared* memory than a GPU has is no such error, though Triton calls it "out of resource"."""
    if error is None:
        return False
    said = isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    # A compiler raises its own error from the first one.
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError) or is_out_of_memory(error.__cause__)
