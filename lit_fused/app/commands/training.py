"""``mode=fit``, ``validate``, ``test``: instantiate, fit or evaluate, and report."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from omegaconf import DictConfig, OmegaConf
from torch import nn

from lit_fused.app.defaults import kind_of_weights
from lit_fused.app.overrides import run_of
from lit_fused.app.ranks import is_first_rank
from lit_fused.app.reporting.finish import report
from lit_fused.app.run_folder import metric_rows, read_run_file
from lit_fused.callbacks import ExportPretrained
from lit_fused.callbacks.training_progress import total_steps
from lit_fused.errors import UserError
from lit_fused.models.generation import positions
from lit_fused.ops.user_error import printable
from lit_fused.training import FusedLMModule


def fit(cfg: DictConfig) -> float | None:
    """Fit, validate or test, as ``cfg.mode`` says, and return the metric of a search."""
    fits = cfg.mode == "fit"
    if not fits and cfg.ckpt_path is None and kind_of_weights(cfg) == "new":
        raise UserError(f"mode={cfg.mode} needs trained weights: ckpt_path=RUN, or model=pretrained model.path=...")
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    if is_first_rank() and cfg.ckpt_path is not None:
        _warn_of_other_data(config["data"], cfg.ckpt_path)
    L.seed_everything(cfg.seed, workers=True)
    trainer: L.Trainer = instantiate(cfg.trainer)
    loss, data = instantiate(cfg.loss), instantiate(cfg.data)
    module = build_module(cfg, loss)
    if fits:
        warn_of_positions(module, cfg.data.get("block_size"))
    if type(data).test_dataloader is L.LightningDataModule.test_dataloader:  # Data without a third part are tested on
        data.test_dataloader = data.val_dataloader  # the one that no weight was trained on.
        if cfg.mode == "test" or cfg.test:
            rank_zero_info("The data have no test part: the validation part is used.")
    steps = _Steps(Path(cfg.output_dir))
    trainer.callbacks.insert(0, steps)  # type: ignore[attr-defined]  (It prints before a bar does.)
    with _recording(trainer.loggers, config):
        quiet = {} if fits else {"verbose": False}  # the report prints the results
        getattr(trainer, cfg.mode)(module, data, ckpt_path=cfg.ckpt_path, **quiet)
        if fits and not steps.begun:  # The run was killed after its last checkpoint, or was over.
            rank_zero_info(f"Nothing is left to train: the checkpoint is at step {trainer.global_step}.")
            rank_zero_info("What is left to do is to validate and to export.")
            _finish(trainer, module, data, cfg.ckpt_path)
        if fits and cfg.test:
            measured = dict(trainer.callback_metrics)  # The test begins with none.
            savers: list[Any] = [saver for saver in trainer.checkpoint_callbacks if getattr(saver, "monitor", None)]
            best = next((saver.best_model_path for saver in savers if saver.best_model_path), None)
            trainer.test(module, data, ckpt_path=trainer.strategy.broadcast(best), verbose=False)
            trainer.callback_metrics.update(measured)
        value = report(trainer, module, cfg).get(cfg.metric, math.nan)
    return value if math.isfinite(value) else None  # A sweeper that searches says that this is no number.


validate = test = fit


@contextmanager
def _recording(loggers: Sequence[Logger], config: Mapping[str, Any]) -> Iterator[None]:
    """Log the configuration of a run, and finish its Weights & Biases run after the block: the next job of a sweep in
    this process would go on with it."""
    exit_code = 1
    for logger in loggers:
        if not isinstance(logger, CSVLogger):  # run.json, beside its file, has it
            logger.log_hyperparams(dict(config))
    try:
        yield
        exit_code = 0
    finally:
        if any(isinstance(logger, WandbLogger) for logger in loggers):
            import wandb

            wandb.finish(exit_code)  # does nothing on the other ranks, which have no run


def _finish(trainer: L.Trainer, module: FusedLMModule, data: Any, ckpt_path: str | None) -> None:
    """Validate a trained model, and export it while the strategy has it. What was logged before is reported as well."""
    logged = metric_rows(Path(trainer.default_root_dir))
    before = {name: torch.tensor(float(value)) for row in logged for name, value in row.items() if value}
    trainer.callbacks.append(_Exporting())  # type: ignore[attr-defined]
    trainer.validate(module, data, ckpt_path=ckpt_path, verbose=False)
    trainer.callback_metrics.update({**before, **trainer.callback_metrics})


class _Exporting(L.Callback):
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ExportPretrained):
                callback.on_train_end(trainer, pl_module)


def build_module(cfg: DictConfig, loss: Any, model: nn.Module | None = None) -> FusedLMModule:
    build, model = instantiate(cfg.module), instantiate(cfg.model) if model is None else model
    model = instantiate(cfg.memory)(model)
    # Some optimisers keep their options as they are given, and a checkpoint has plain lists only.
    optimizer, scheduler = (instantiate(node, _convert_="all") for node in (cfg.optimizer, cfg.scheduler))
    module = build(model, loss=loss, optimizer=optimizer, scheduler=scheduler)
    return module.train()  # a pretrained model comes in evaluation mode, in which Lightning would leave it


def warn_of_positions(module: FusedLMModule, block_size: int | None) -> None:
    """Warn if a decoder's rows are longer than its configuration says: rotary embeddings go on without an error."""
    inner = module.model.transformers_model
    if inner is None or inner.config.is_encoder_decoder or (block_size or 0) <= positions(inner):
        return
    rank_zero_warn(
        f"rows of data.block_size={block_size} tokens are longer than the {positions(inner)} positions that the "
        f"configuration of {type(inner).__name__} names, and that its export will name; with random weights, set "
        f"model.config.max_position_embeddings={block_size}; pretrained weights know no later positions"
    )


_INCIDENTAL = {"weights", "batch_size", "num_workers", "prepare_workers", "cache_dir", "seed"}


def _warn_of_other_data(data: dict[str, Any], checkpoint: str) -> None:
    """Print how data differ from those of a checkpoint's run, if they do: also the loss of another tokenizer's tokens
    looks like a loss."""
    run = run_of(checkpoint)
    saved = read_run_file(run) if run else {}
    theirs, start = (saved.get("config") or {}).get("data") or data, f"{saved.get('cwd')}/"
    pairs = {key: (data.get(key), theirs.get(key)) for key in {**theirs, **data} if key not in _INCIDENTAL}
    keys = [key for key, values in pairs.items() if len({str(value).replace(start, "") for value in values}) > 1]
    if keys:
        anew = pairs.get("tokenizer") == (None, None)
        own = f"; a tokenizer is trained anew on them: data.tokenizer={run}/exported is the run's" * anew
        print(printable(f"These are not the data of {run}, by data.{', data.'.join(keys[:4])}{own}"))


class _Steps(L.Callback):
    """Says how long a fit is, and makes ``max_steps`` end it as ``should_stop`` does, which validates wherever in an
    epoch that is. Where validations come after shares of an epoch, so does the run's last step."""

    def __init__(self, folder: Path) -> None:
        self.begun, self._folder = False, folder

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            for name in ("summary.json", "report.html"):  # of a run that goes on in its folder
                (self._folder / name).unlink(missing_ok=True)
            rank_zero_info(_length(trainer))
        self.begun = True

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        interval = getattr(trainer, "val_check_interval", None)  # Without one, validations come after some time.
        end = total_steps(trainer) if isinstance(interval, float) and interval < 1 else trainer.max_steps
        trainer.should_stop |= 0 <= end <= trainer.global_step


def _length(trainer: L.Trainer) -> str:
    """Return how long a fit trains: "3 epochs are 117 steps"."""
    end = total_steps(trainer)
    batches = trainer.num_training_batches / trainer.accumulate_grad_batches
    epochs = f"{end / math.ceil(batches):.2g} epochs are " if 0 < batches < math.inf else ""
    length = f"{epochs}{int(end):,} steps" if math.isfinite(end) else "no end"
    return f"training: {length}".replace(": 1 epochs are", ": 1 epoch is")
