"""Run optimiser steps of given sizes with one model, and measure their memory and their speed.

Running out of memory is a result here, not a failure: everything that the failed step still refers to is released. Any
other error is raised.
"""

import gc
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, open_dict
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fused.app.commands.training import build_module
from lit_fused.app.config import check_precision
from lit_fused.callbacks import PeakMemoryMonitor
from lit_fused.errors import UserError
from lit_fused.losses import as_loss
from lit_fused.modules import FusedLMModule

_GIB = 2**30
_STEPS = 3
_MAX_SEQUENCE = 2**20


@dataclass(frozen=True)
class FitBatchOptions:
    """The options of ``mode=fit_batch``.

    Args:
        losses: names of files in ``conf/loss``; None: standard and the run's own.
        memory_gib: the limit of a step. None: all that is free on the GPU. Needed on a CPU, where it limits the whole
            process.
    """

    losses: list[str] | None = None
    memory_gib: float | None = None

    def __post_init__(self) -> None:
        if self.memory_gib is not None and self.memory_gib <= 0:
            raise UserError(f"fit_batch.memory_gib must be positive, got {self.memory_gib}")
        if self.losses is not None and not self.losses:
            raise UserError(
                "fit_batch.losses is empty; name files of conf/loss, or null for standard and the run's own"
            )


@dataclass(frozen=True)
class Trial:
    """The measurements of a size that fits."""

    batch_size: int
    sequence: int
    peak_gib: float
    tokens_per_sec: float

    @property
    def tokens(self) -> int:
        return self.batch_size * self.sequence


@dataclass
class Bench:
    """Run optimiser steps of given sizes with one model, whose loss can be exchanged."""

    cfg: DictConfig
    options: FitBatchOptions
    folder: str
    module: FusedLMModule = field(init=False)

    def __post_init__(self) -> None:
        trainer = self._trainer([])
        check_precision(self.cfg.precision, trainer)
        self.device = trainer.strategy.root_device
        self.limit_gib = self._limit()
        L.seed_everything(self.cfg.seed, workers=True, verbose=False)
        self.module = build_module(self.cfg, instantiate(self.cfg.loss))
        self.module.parity_check = False
        weights = sum(p.numel() * p.element_size() for p in self.module.parameters())
        trained = sum(p.numel() * p.element_size() for p in self.module.parameters() if p.requires_grad)
        before = process_gib() if self.device.type == "cpu" else 0.0
        self.fixed_gib = before + (weights + 3 * trained) / _GIB  # gradients and AdamW's state

    def choose(self, loss: Any) -> None:
        self.module.model.loss = as_loss(loss)

    @property
    def longest(self) -> int:
        """The longest sequence that the model supports."""
        model = self.module.model.transformers_model
        config = None if model is None else model.config.get_text_config()
        return getattr(config, "max_position_embeddings", None) or _MAX_SEQUENCE

    def run(self, batch_size: int, sequence: int) -> Trial | None:
        """Run some optimiser steps; return None if memory runs out."""
        monitor, clock = PeakMemoryMonitor(summary=False), _Clock()
        trainer = self._trainer([monitor, clock])
        try:
            trainer.fit(self.module, self._random_batches(batch_size, sequence, trainer))
        except Exception as error:  # several types of error mean that memory ran out
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # the frames refer to the tensors of the failed step
            return None
        finally:
            del trainer
            self._let_go()
        if not monitor.peaks:
            raise UserError("mode=fit_batch cannot measure memory here: it needs CUDA, or Linux")
        peak = max(monitor.peaks.values())
        if self.limit_gib is not None and peak > self.limit_gib and self.device.type == "cpu":
            return None
        return Trial(batch_size, sequence, peak, batch_size * sequence / clock.fastest)

    def _limit(self) -> float | None:
        wanted = self.options.memory_gib
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            if wanted is not None:
                if wanted * _GIB > total:
                    raise UserError(f"fit_batch.memory_gib={wanted}, but this GPU has {total / _GIB:.1f} GiB")
                torch.cuda.set_per_process_memory_fraction(wanted * _GIB / total, self.device)
            return free / _GIB if wanted is None else wanted
        if wanted is None:
            raise UserError(
                "mode=fit_batch on a CPU needs a limit, fit_batch.memory_gib=..., the GiB that the process may take: "
                "memory that runs out there takes the machine down"
            )
        available = _available_gib()
        if wanted > available:
            raise UserError(
                f"fit_batch.memory_gib={wanted} is more than the {available:.1f} GiB that are available here; give less"
            )
        return wanted

    def _trainer(self, callbacks: list[L.Callback]) -> L.Trainer:
        node = self.cfg.trainer.copy()
        with open_dict(node):
            node.callbacks, node.logger = None, False
            node.accumulate_grad_batches = min(node.accumulate_grad_batches, 2)
            node.max_steps, node.max_epochs, node.val_check_interval = _STEPS, -1, None
            node.limit_val_batches = node.num_sanity_val_steps = 0
            node.limit_train_batches = None
            node.enable_checkpointing = node.enable_model_summary = node.enable_progress_bar = False
            node.default_root_dir = self.folder
        build = instantiate(node, _partial_=True)
        return build(callbacks=callbacks)

    def _random_batches(self, batch_size: int, sequence: int, trainer: L.Trainer) -> DataLoader[Any]:
        vocabulary = self.module.model.vocabulary
        tokens: Tensor = torch.randint(vocabulary, (batch_size, sequence), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": tokens, "labels": tokens}
        return DataLoader([batch] * (_STEPS * trainer.accumulate_grad_batches), batch_size=None)  # type: ignore[arg-type]

    def _let_go(self) -> None:
        """Release what a step leaves behind, also one that failed in its middle."""
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
    """Measure the shortest time of a micro-batch with its share of the optimiser step, in seconds.

    The first step is left out.
    """

    def __init__(self) -> None:
        self.fastest = float("inf")
        self._start = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            _wait_for(trainer.strategy.root_device)
            self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > 1 and not trainer.fit_loop._should_accumulate():
            _wait_for(trainer.strategy.root_device)
            took = (time.perf_counter() - self._start) / trainer.accumulate_grad_batches
            self.fastest = min(self.fastest, took)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def process_gib() -> float:
    return _kib(Path("/proc/self/status"), "VmRSS") / 2**20


def _available_gib() -> float:
    """Return the GiB that this process has or could still get."""
    return _kib(Path("/proc/meminfo"), "MemAvailable") / 2**20 + process_gib()


def _kib(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(f"mode=fit_batch on a CPU needs Linux, which says what memory is free ({error})") from error
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out: the device's, or on a CPU the machine's.

    A kernel that wants more *shared* memory than a GPU has is no such error, though Triton calls it "out of resource".
    """
    found: BaseException | None = error
    while found is not None:  # a compiler raises its own error from the first one
        if isinstance(found, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(found, RuntimeError) and any(words in str(found) for words in _OUT_OF_MEMORY):
            return True
        found = found.__cause__
    return False


_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
