"""Save and restore what Lightning's checkpoints lack, so that a run goes on exactly where it was saved.

- **Position.** Gradients are in no checkpoint. One that is saved between the micro-batches of an optimiser step says
  that the step has not begun; a resumed run repeats them with the same weights and random numbers.
- **Random numbers** of each rank, which decide dropout, and the order of batches of a plain loader.
- **Validation** that was to follow the saved batch: Lightning leaves it out, and with it metrics, the best checkpoint,
  early stopping and plateaus. The saved loops say that it was interrupted, and Lightning repeats it.
- **Options.** Those of the resumed run count: see ``resumed_options.py``.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from lit_fused.parallel.checkpoint import in_groups, names_of_groups, with_names
from lit_fused.parallel.collectives import objects_of_ranks
from lit_fused.training.resumed_options import ResumedOptions

_RANDOM = "lit_fused_random_states"  # the key in a checkpoint: of each rank, by the kind of its device
_TO_VALIDATE = "lit_fused_to_validate"  # whether the resumed run begins with a validation


class ExactResume:
    """Completes the checkpoints of one fit, and restores what they have beside Lightning's own."""

    def __init__(self) -> None:
        self.begins_with_validation = False
        self.options = ResumedOptions()
        self._of_step: dict[str, Tensor] | None = None  # this rank's random states where an optimiser step began
        self._checkpoint: dict[str, Any] | None = None  # that was loaded, until training starts
        self._has_optimizers = False

    def begin_fit(self, module: L.LightningModule) -> None:
        """Remember the options of optimisers and schedules, which are made and have not loaded a checkpoint yet."""
        self._has_optimizers = True
        self.options.begin(module.trainer)
        if self._checkpoint is not None:  # Some strategies load it before, some after this.
            self._prepare(self._checkpoint, module)

    def begin_step(self, module: L.LightningModule) -> None:
        """Remember the random numbers with which an optimiser step of several micro-batches begins."""
        self._of_step = _random_states(module)

    # --- saving ---------------------------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any], module: L.LightningModule, batches: int, *, is_sharded: bool) -> None:
        """Complete Lightning's checkpoint in place. All ranks call it.

        ``batches`` micro-batches have run since the last optimiser step. A strategy that shards the model has given the
        states of optimisers names.
        """
        trainer, loops = module.trainer, checkpoint["loops"]["fit_loop"]
        progress = loops["epoch_loop.batch_progress"]
        at_batch_end = progress["current"]["completed"] < progress["current"]["processed"]
        _begin_epoch(loops)
        _reopen_epoch(loops, trainer.num_training_batches, stepped=not batches)
        if batches:
            _rewind(loops, batches)
        elif at_batch_end and _is_validation_due(trainer, progress):
            _interrupt_validation(loops)
            checkpoint[_TO_VALIDATE] = True
        own = (self._of_step if batches else None) or _random_states(module)
        checkpoint[_RANDOM] = objects_of_ranks(own) if dist.is_initialized() else [own]
        self.options.save(checkpoint)
        states = [] if is_sharded else checkpoint.get("optimizer_states", [])  # none if weights alone are saved
        for index, (state, optimizer) in enumerate(zip(states, trainer.optimizers, strict=False)):
            states[index] = with_names(state, names_of_groups(module, optimizer))

    # --- loading --------------------------------------------------------------------------------------------------

    def load(self, checkpoint: dict[str, Any], module: L.LightningModule) -> None:
        """Keep a checkpoint that Lightning has read, and is about to load, for :meth:`restore`."""
        self._checkpoint = checkpoint
        self.begins_with_validation = bool(checkpoint.get(_TO_VALIDATE))
        if self._has_optimizers:
            self._prepare(checkpoint, module)

    def _prepare(self, checkpoint: dict[str, Any], module: L.LightningModule) -> None:
        self.options.load(checkpoint)
        order_states(checkpoint, module)

    def restore(self, trainer: L.Trainer) -> None:
        """Restore this rank's random numbers, and what depends on them, when training starts.

        States of another number of ranks are ignored. A scheduler of accumulation is asked here, as Lightning asks it
        only where an epoch begins.
        """
        if (checkpoint := self._checkpoint) is None:
            return
        self._checkpoint = None
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(callback, GradientAccumulationScheduler):
                trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)
        self.options.restore(trainer)
        loop = trainer.fit_loop
        loaders = [] if trainer.train_dataloader is None else CombinedLoader(trainer.train_dataloader).flattened
        stateful = [loader for loader in loaders if hasattr(loader, "load_state_dict")]
        saved = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
        if any(saved):  # They may have been set up before their states were read.
            for loader, state in zip(stateful, saved, strict=False):
                loader.load_state_dict(state)
            _make_iterator(loop)
        done = loop.epoch_loop.batch_progress.current.ready
        begins_epoch = done % max(trainer.num_training_batches, 1) == 0 and not self.begins_with_validation
        # An iterator draws random numbers when it is made, which in an unbroken run was when its epoch began.
        _set_random_states(checkpoint.get(_RANDOM, []), trainer)
        if begins_epoch and not stateful:
            _make_iterator(loop)

    def end_epoch(self, trainer: L.Trainer) -> None:
        """Tell Lightning, at the end of an epoch, that the run is not restarting any more, if this process has the
        metrics by which schedules go: it would not step those that go by epochs, as metrics are in no checkpoint."""
        monitors = [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
        if all(monitor in trainer.callback_metrics for monitor in monitors):
            trainer.fit_loop.on_iteration_done()


def order_states(checkpoint: dict[str, Any], module: L.LightningModule) -> None:
    """Put the loaded states of optimisers, whose parameters have names, into the order of this run's optimisers."""
    states = checkpoint.get("optimizer_states", [])
    for index, (state, optimizer) in enumerate(zip(states, module.trainer.optimizers, strict=False)):
        states[index] = in_groups(state, names_of_groups(module, optimizer))


def keep_own_paths(states: dict[str, Any], callbacks: Iterable[L.Callback]) -> None:
    """Change loaded states of ``ModelCheckpoint`` callbacks in place: let them name files of their own folder alone.

    Lightning deletes what they name. Of each path the file's name counts, in the callback's present folder, as the run
    may have been moved. A file that is not there, or a link to elsewhere, is forgotten with its score.
    """
    for callback in callbacks:
        state = states.get(callback.state_key)
        if not isinstance(callback, ModelCheckpoint) or not state or "://" in str(callback.dirpath):
            continue
        folder = Path(callback.dirpath or ".")

        def own(path: str, folder: Path = folder) -> str:
            here = folder / Path(path).name
            return str(here) if path and here.resolve().parent == folder.resolve() and here.exists() else ""

        scores = {own(path): score for path, score in state["best_k_models"].items()}
        state["best_k_models"] = {path: score for path, score in scores.items() if path}
        state |= {name: own(state[name]) for name in ("best_model_path", "kth_best_model_path", "last_model_path")}
        state["dirpath"] = callback.dirpath
        if state["kth_best_model_path"] not in state["best_k_models"]:  # Lightning looks up its score.
            state |= {"kth_best_model_path": "", "best_k_models": {}}
        if not state["best_model_path"]:
            state["best_model_score"] = None


def _random_states(module: L.LightningModule) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if module.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(module.device)
    return state


def _set_random_states(states: list[dict[str, Tensor]], trainer: L.Trainer) -> None:
    if len(states) != trainer.world_size:
        return
    own = states[trainer.global_rank]
    torch.set_rng_state(own["cpu"].cpu())
    if "cuda" in own and trainer.strategy.root_device.type == "cuda":
        torch.cuda.set_rng_state(own["cuda"].cpu(), trainer.strategy.root_device)


def _make_iterator(loop: Any) -> None:
    """Make the iterator of the training batches anew. Lightning has no public way to it."""
    iter(loop._data_fetcher)


# --- the saved state of Lightning's loops, changed in place -----------------------------------------------------------


def _begin_epoch(loops: dict[str, Any]) -> None:
    """Forget the last epoch's batches if the next epoch is about to begin: Lightning would skip that one."""
    epochs = loops["epoch_progress"]["current"]
    if epochs["ready"] > epochs["started"]:
        progress = loops["epoch_loop.batch_progress"]
        progress["current"] = dict.fromkeys(progress["current"], 0)
        progress["is_last_batch"] = False


def _reopen_epoch(loops: dict[str, Any], length: float, *, stepped: bool) -> None:
    """Change the state where a fit has ended within an epoch of ``length`` batches.

    Lightning counts that epoch as ended, and a resumed run would go on with the next one. Afterwards the state is that
    after the epoch's last batch. ``stepped`` says that this batch ended an optimiser step.
    """
    epochs, progress = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    at_its_end = epochs["current"]["completed"] < epochs["current"]["processed"] == epochs["current"]["started"]
    if at_its_end and not progress["is_last_batch"] and progress["current"]["ready"] < length:
        for kind in ("total", "current"):
            epochs[kind]["processed"] -= 1
            progress[kind]["completed"] -= 1
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= stepped


def _rewind(loops: dict[str, Any], batches: int) -> None:
    """Set the state ``batches`` micro-batches back."""
    progress = loops["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        for name in counts:
            counts[name] -= batches
    progress["is_last_batch"] = False
    if progress["current"]["completed"] < progress["current"]["processed"]:  # at a batch's end Lightning will add one
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def _is_validation_due(trainer: L.Trainer, progress: dict[str, Any]) -> bool:
    """Return whether Lightning validates after the batch that ends now."""
    every = trainer.check_val_every_n_epoch
    if not trainer.enable_validation or (every is not None and (trainer.current_epoch + 1) % every):
        return False
    is_last = progress["is_last_batch"]
    interval = trainer.val_check_batch  # pyright: ignore[reportAttributeAccessIssue]
    if interval is None or interval == float("inf"):
        return is_last
    return progress["total" if every is None else "current"]["ready"] % interval == 0


def _interrupt_validation(loops: dict[str, Any]) -> None:
    """Let the state be that of a batch that has ended, and of a validation that was interrupted in its first batch."""
    for counts in (loops["epoch_loop.batch_progress"][kind] for kind in ("total", "current")):
        counts["completed"] += 1
    validation = loops["epoch_loop.val_loop.batch_progress"]
    for counts, started in ((validation["total"], True), (validation["current"], False)):
        counts |= {"ready": int(started), "started": int(started), "processed": 0, "completed": 0}
