"""``mode=fit``, ``validate``, ``test``: instantiate, fit or evaluate, and report."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning as L
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.utilities import rank_zero_info
from omegaconf import DictConfig, OmegaConf
from torch import nn

from lit_fused.app.continued import different_data
from lit_fused.app.loggers import RunCSVLogger, recording
from lit_fused.app.reporting.finish import report
from lit_fused.app.run_config import read_config
from lit_fused.app.run_folder import adopt_configuration
from lit_fused.callbacks import ResumeHint, RunCheckpoint
from lit_fused.callbacks.training_progress import total_steps
from lit_fused.data.loader import BatchLoader, counted
from lit_fused.errors import UserError
from lit_fused.training import FusedLMModule


def fit(cfg: DictConfig) -> float | None:
    """Fit, validate or test, as ``cfg.mode`` says, and return the metric of a search."""
    L.seed_everything(cfg.seed, workers=True)
    trainer: L.Trainer = instantiate(cfg.trainer)
    loss = instantiate(cfg.loss)
    data = instantiate(cfg.data)
    module = build_module(cfg, loss)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    ckpt_path = cfg.ckpt_path if trainer.is_global_zero else None
    if ckpt_path is not None and (different := different_data(config["data"], ckpt_path)):
        print(f"mode={cfg.mode}: {different}")
    hints = _hints(trainer, Path(cfg.output_dir).absolute())
    if type(data).test_dataloader is L.LightningDataModule.test_dataloader:  # Data without a third part are tested on
        data.test_dataloader = data.val_dataloader  # the one that no weight was trained on.
    run = GoingOn(trainer, Path(cfg.output_dir))
    if cfg.mode != "fit":
        run.start_at(0)
    with recording(trainer.loggers, config), run.steps_noted():
        quiet = {} if cfg.mode == "fit" else {"verbose": False}  # the report prints the results
        getattr(trainer, cfg.mode)(module, data, ckpt_path=cfg.ckpt_path, **quiet)
        if cfg.mode == "fit" and cfg.test:
            measured = dict(trainer.callback_metrics)  # The test begins with none.
            savers: list[Any] = trainer.checkpoint_callbacks
            best = next((saver.best_model_path for saver in savers if saver.monitor and saver.best_model_path), None)
            trainer.test(module, data, ckpt_path=trainer.strategy.broadcast(best), verbose=False)
            trainer.callback_metrics.update(measured)
        try:
            overrides = HydraConfig.get().overrides.task
            metrics = report(trainer, module, cfg.output_dir, overrides, cfg.tags)
        except Exception as error:  # whatever it is, the run is trained: resuming makes up for what is missing
            for hint in hints:
                hint.on_exception(trainer, module, error)
            raise
    return _metric(cfg.metric, metrics)


validate = test = fit


def _hints(trainer: L.Trainer, run: Path) -> list[ResumeHint]:
    """Return the callbacks that say how to resume, for which a path is enough if a trusted configuration is saved."""
    hints = [c for c in trainer.callbacks if isinstance(c, ResumeHint)]  # type: ignore[attr-defined]
    with suppress(UserError):
        read_config(run)
        for hint in hints:
            hint.enough_in = run / "checkpoints"
    return hints


def _metric(name: str | None, metrics: Mapping[str, float]) -> float | None:
    """Return the finite metric ``name``. Without one, raise UserError for a sweeper that searches, else return None."""
    value = metrics.get(name or "", math.nan)
    if math.isfinite(value):
        return value
    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN and not hydra.sweeper._target_.endswith(".BasicSweeper"):
        was = f"was {value}" if name in metrics else f"was not measured; it measured {', '.join(sorted(metrics))}"
        raise UserError(f"the sweep goes by metric={name}, which in this run {was}")
    return None


def build_module(cfg: DictConfig, loss: Any, model: nn.Module | None = None) -> FusedLMModule:
    build, model = instantiate(cfg.module), instantiate(cfg.model) if model is None else model
    # Some optimisers keep their options as they are given, and a checkpoint has plain lists only.
    optimizer, scheduler = (instantiate(node, _convert_="all") for node in (cfg.optimizer, cfg.scheduler))
    module = build(model, loss=loss, optimizer=optimizer, scheduler=scheduler)
    return module.train()  # a pretrained model comes in evaluation mode, in which Lightning would leave it


class GoingOn:
    """Takes the place of the ``run`` of a trainer's fit loop, which is called when a checkpoint has been loaded. The
    metrics of a run that is resumed continue, and a run that has been trained to its end is finished: it may have been
    killed after its last checkpoint, and Lightning trains nothing then, and calls no hook that exports."""

    def __init__(self, trainer: L.Trainer, folder: Path) -> None:
        self.first_step = float("inf")  # the step that training begins at, once it is known
        self._trainer, self._folder, self._train = trainer, folder, trainer.fit_loop.run
        trainer.fit_loop.run = self._run  # type: ignore[method-assign]
        trainer.callbacks.append(_LastStep())  # type: ignore[attr-defined]

    @contextmanager
    def steps_noted(self) -> Iterator[None]:
        """Note on an exception how far the training was, if a step has ended: it is then about the training itself."""
        try:
            yield
        except Exception as error:  # any may come from a configured object; it is raised again
            if self._trainer.global_step > self.first_step:
                error.add_note(f"raised after {self._trainer.global_step} steps")
            raise

    def start_at(self, step: int, *, is_over: bool = False, validates: bool = False) -> None:
        """Remove from the run's files what comes after a step, and its validation if this process ``validates`` it
        again. Rank zero only."""
        savers = [c for c in self._trainer.checkpoint_callbacks if isinstance(c, RunCheckpoint)]
        last = next((row for row in (saver.unwritten for saver in savers) if row and row["step"] < step), None)
        for logger in self._trainer.loggers:
            if isinstance(logger, RunCSVLogger):
                # Lightning counts steps from 0 here.
                logger.keep(lambda row: int(row["step"]) < step - (validates and bool(row.get("val/loss"))), last)
        if self._trainer.is_global_zero:
            adopt_configuration(self._folder)
            if not is_over:
                for name in ("summary.json", "report.html"):
                    (self._folder / name).unlink(missing_ok=True)

    def _run(self) -> None:
        trainer, loop = self._trainer, self._trainer.fit_loop
        loop.setup_data()
        step, end = trainer.global_step, total_steps(trainer)
        is_over = 0 < end <= step
        module = trainer.lightning_module
        validates = is_over or (isinstance(module, FusedLMModule) and module.begins_with_validation())
        self.start_at(step, is_over=is_over, validates=validates)
        if not is_over:
            self.first_step = step
            rank_zero_info(length_in_words(trainer))
            self._train()
            return
        rank_zero_info(f"Nothing is left to train: the checkpoint is at step {step}, and training ends at step {end}.")
        rank_zero_info("What is left to do is to validate and to export.")
        loop.reset()
        loop.on_run_start()
        trainer.validating = True
        loop.epoch_loop.val_loop.restarting = False
        loop.epoch_loop.val_loop.run()
        trainer.training = True
        loop.on_run_end()


def length_in_words(trainer: L.Trainer) -> str:
    """Return what a fit trains on and for how long, as far as it is known once the trainer has its data: "1,204
    documents in 310 rows of 512 tokens: 3 epochs are 117 steps of 8 rows"."""
    loader, accumulated, of_rows = trainer.train_dataloader, trainer.accumulate_grad_batches, ""
    batches: Any = trainer.num_training_batches  # infinite where it is not known
    is_known = isinstance(batches, int) and batches > 0
    contents = f"batches in an epoch: {batches:,}" if isinstance(batches, int) else "data of unknown length"
    if isinstance(loader, BatchLoader):
        limit = f", of which {batches:,} of {len(loader):,} batches in an epoch" * (batches < len(loader))
        contents = loader.contents + limit
        of_rows = f" of {_rows_of_a_step(loader, batches, accumulated)}" if is_known else ""
    end, epochs = total_steps(trainer), trainer.max_epochs or -1
    if not math.isfinite(end):
        return f"{contents}: training has no end"
    steps = counted(int(end), "step") + of_rows
    passes = end / math.ceil(batches / accumulated) if is_known else None
    if passes == epochs:
        return f"{contents}: {counted(epochs, 'epoch')} {'is' if epochs == 1 else 'are'} {steps}"
    if passes is None:
        return f"{contents}: {steps}"
    return f"{contents}: {steps} {'is' if end == 1 else 'are'} {passes:{',.0f' if passes >= 10 else '.2g'}} epochs"


def _rows_of_a_step(loader: BatchLoader, batches: int, accumulated: int) -> str:
    """Return how many rows a step has. An epoch's last step has those of the batches that are left."""
    order = loader.batch_sampler
    most = counted(min(min(accumulated, batches) * order.rows_of_all_ranks, order.num_samples), "row")
    return most if batches <= accumulated or batches % accumulated == 0 else f"at most {most}"


class _LastStep(L.Callback):
    """Makes ``max_steps`` end a run as ``should_stop`` does, which validates wherever in an epoch that is. Where
    validations come after shares of an epoch, so does the run's last step."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        interval = getattr(trainer, "val_check_interval", None)  # Without one, validations come after some time.
        end = total_steps(trainer) if isinstance(interval, float) and interval < 1 else trainer.max_steps
        trainer.should_stop |= 0 <= end <= trainer.global_step
