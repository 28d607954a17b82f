"""A run's model from one of its checkpoints, without its trainer: for export, and to generate text.

What a run was is written beside its checkpoints, ``.hydra/config.yaml``.
"""

import os
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lit_fused.checkpoints import check_same_model, read_averages, read_weights, shapes_of
from lit_fused.errors import UserError
from lit_fused.modules.base import FusedLMModule
from lit_fused.weights import grow_vocabulary, is_deferred, materialize, origin_of

_CONFIG = Path(".hydra", "config.yaml")


def run_of(checkpoint: Path) -> Path | None:
    """The folder of the run that a checkpoint lies in; None if it is another program's."""
    return next((folder for folder in checkpoint.absolute().parents if (folder / _CONFIG).is_file()), None)


@contextmanager
def configuration_of(run: Path) -> Iterator[DictConfig]:
    """A run's configuration, while the working directory is the one that it was started in."""
    cfg = OmegaConf.load(run / _CONFIG)
    assert isinstance(cfg, DictConfig)
    hydra = run / ".hydra" / "hydra.yaml"
    started_in = OmegaConf.select(OmegaConf.load(hydra), "hydra.runtime.cwd") if hydra.is_file() else None
    with chdir(started_in if started_in and os.path.isdir(started_in) else os.getcwd()):
        yield cfg


def restored(cfg: DictConfig, checkpoint: Path) -> FusedLMModule:
    """The module of a run on the CPU, in evaluation mode, with the weights of a file or a folder, in their own dtype;
    with their average if the run kept one.

    Raises:
        UserError: they are of another model.
    """
    module = instantiate(cfg.module)(instantiate(cfg.model))
    if not isinstance(module, FusedLMModule):
        raise UserError(f"{type(module).__name__} is no FusedLMModule and cannot be restored")
    weights = weights_of(checkpoint, module)
    _grow_to(module, weights)
    if is_deferred(module.model):
        materialize(module.model)
    entries = module.state_dict(keep_vars=True)
    check_same_model(shapes_of(weights), shapes_of(entries))
    for name, value in entries.items():
        value.data = weights[name]  # in its own dtype, and once where layers share it
    return module.eval()


def weights_of(checkpoint: Path, module: FusedLMModule) -> dict[str, Tensor]:
    """A checkpoint's weights by name, whole and on the CPU; averaged ones in the place of those that have an average.

    Raises:
        UserError: it is no checkpoint of a run.
    """
    weights, averages = read_weights(checkpoint), read_averages(checkpoint)
    model = module.model.transformers_model
    for target, source in ({} if model is None else model.all_tied_weights_keys).items():
        for name in [name for name in averages if name.endswith((f".{target}", f".{source}"))]:
            prefix = name.removesuffix(target).removesuffix(source)
            averages |= {other: averages[name] for other in (prefix + target, prefix + source) if other in weights}
    return {**weights, **averages}


def _grow_to(module: FusedLMModule, weights: dict[str, Tensor]) -> None:
    """Let a pretrained model's vocabulary grow to that of the run, which the run's tokenizer decided."""
    model = module.model.transformers_model
    if model is None or origin_of(model) is None:
        return
    table = getattr(model.get_input_embeddings(), "weight", None)
    name = next((name for name, p in module.named_parameters(remove_duplicate=False) if p is table), None)
    if table is not None and name in weights and len(weights[name]) > len(table):
        grow_vocabulary(model, len(weights[name]))


def tokenizer_of(cfg: DictConfig) -> PreTrainedTokenizerBase | None:
    """Of a run's data, which are prepared unless the cache has them; None if they are tokens already."""
    data: Any = instantiate(cfg.data)
    data.prepare_data()
    data.setup("fit")
    return getattr(data, "tokenizer", None)


def exported_tokenizer(run: Path) -> PreTrainedTokenizerBase | None:
    """The one that a run has exported with its model; None if it has not."""
    folder = run / "exported"
    if not (folder / "tokenizer_config.json").is_file():
        return None
    return AutoTokenizer.from_pretrained(folder)
