"""Make a Hugging Face folder, or one file, of a checkpoint that lies on the disk: in one process, on the CPU.

    python -m lit_fused.export outputs/DATE/TIME/checkpoints/last.ckpt my_model
    python -m lit_fused.export --consolidate outputs/DATE/TIME/checkpoints/last.ckpt last_whole.ckpt

The model is built from the configuration that the run has left beside its checkpoints, and filled with their weights,
whichever strategy wrote them and on however many ranks.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import transformers
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lit_fused.checkpoints import check_same_model, consolidate, read_weights, shapes_of
from lit_fused.errors import UserError
from lit_fused.modules.base import FusedLMModule
from lit_fused.weights import is_deferred, materialize

_CONFIG = Path(".hydra", "config.yaml")


def export(checkpoint: str | Path, folder: str | Path, *, tokenizer: bool = True) -> None:
    """Write ``folder`` as :class:`~lit_fused.callbacks.ExportPretrained` does after a fit, whole or not at all.

    Args:
        checkpoint: a file or a folder, in a run's folder.
        folder: must not exist yet.
        tokenizer: whether to add the run's tokenizer, for which its text has to be there.

    Raises:
        UserError: there is no checkpoint, no configuration, or they are of two models; or the folder exists.
    """
    checkpoint, folder = Path(checkpoint).absolute(), Path(folder).absolute()
    if folder.exists():
        raise UserError(f"{folder} exists already; choose another folder")
    weights = read_weights(checkpoint)
    with _configuration(checkpoint) as cfg:
        module = instantiate(cfg.module)(instantiate(cfg.model))
        if not isinstance(module, FusedLMModule):
            raise UserError(f"{type(module).__name__} is no FusedLMModule and cannot be exported")
        if is_deferred(module.model):
            materialize(module.model)
        entries = module.state_dict(keep_vars=True)
        check_same_model(shapes_of(weights), shapes_of(entries))
        for name, value in entries.items():
            value.data = weights[name]  # in its own dtype, and once where layers share it
        module.save_pretrained(folder, _tokenizer_of(cfg) if tokenizer else None)


@contextmanager
def _configuration(checkpoint: Path) -> Iterator[DictConfig]:
    """Of the run that a checkpoint lies in, while the working directory is the one that it was started in."""
    run = next((folder for folder in checkpoint.parents if (folder / _CONFIG).is_file()), None)
    if run is None:
        raise UserError(
            f"no folder above {checkpoint} has the configuration of a run ({_CONFIG}); a checkpoint of a program of "
            "your own is exported there: module.load_state_dict(lit_fused.checkpoints.read_weights(PATH)), "
            "module.save_pretrained(FOLDER)"
        )
    cfg = OmegaConf.load(run / _CONFIG)
    assert isinstance(cfg, DictConfig)
    hydra = run / ".hydra" / "hydra.yaml"
    started_in = OmegaConf.select(OmegaConf.load(hydra), "hydra.runtime.cwd") if hydra.is_file() else None
    with chdir(started_in if started_in and os.path.isdir(started_in) else os.getcwd()):
        yield cfg


def _tokenizer_of(cfg: DictConfig) -> Any:
    data = instantiate(cfg.data)
    data.prepare_data()
    data.setup("fit")
    return getattr(data, "tokenizer", None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m lit_fused.export", description="Export a checkpoint.")
    parser.add_argument("checkpoint", help="a file or a folder in outputs/DATE/TIME/checkpoints")
    parser.add_argument("output", help="the folder, or with --consolidate the file, to write")
    parser.add_argument("--consolidate", action="store_true", help="write a folder's content as one checkpoint file")
    parser.add_argument("--no-tokenizer", action="store_true", help="export the model alone")
    options = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    try:
        if options.consolidate:
            consolidate(options.checkpoint, options.output)
        else:
            export(options.checkpoint, options.output, tokenizer=not options.no_tokenizer)
    except UserError as error:
        sys.exit(str(error))
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
