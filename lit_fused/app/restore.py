"""A run's model from one of its checkpoints, without its trainer: for export, and to generate text.

What a run was is written beside its checkpoints, ``.hydra/config.yaml``.
"""

import os
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any, cast

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lit_fused.checkpoints.reading import check_same_model, final_weights, shapes_of
from lit_fused.data.old_runs import translate
from lit_fused.errors import UserError
from lit_fused.modules.fused_lm import FusedLMModule
from lit_fused.weights import grow_vocabulary, is_deferred, materialize, origin_of

_CONFIG = Path(".hydra", "config.yaml")
# Names in configurations of runs of earlier versions, and what they are called now. Names ending in a dot are modules.
_RENAMED = {
    "lit_fused.commands.command_line.": "lit_fused.app.command_line.",
    "lit_fused.commands.fitting.": "lit_fused.app.",
    "lit_fused.commands.planning.": "lit_fused.app.",
    "lit_fused.generation.": "lit_fused.app.",
    "lit_fused.launching.": "lit_fused.app.",
    "lit_fused.loggers.": "lit_fused.app.",
    "lit_fused.reporting.hydra_callback.": "lit_fused.app.",
}


def run_of(checkpoint: Path) -> Path | None:
    """Return the folder of the run that wrote a checkpoint; None if another program wrote it."""
    return next((folder for folder in checkpoint.absolute().parents if (folder / _CONFIG).is_file()), None)


@contextmanager
def configuration_of(run: Path) -> Iterator[DictConfig]:
    """Yield a run's configuration while the working directory is the one that the run was started in."""
    cfg = OmegaConf.create(_renamed(OmegaConf.to_container(OmegaConf.load(run / _CONFIG))))
    assert isinstance(cfg, DictConfig)
    hydra = run / ".hydra" / "hydra.yaml"
    started_in = OmegaConf.select(OmegaConf.load(hydra), "hydra.runtime.cwd") if hydra.is_file() else None
    with chdir(started_in if started_in and os.path.isdir(started_in) else os.getcwd()):
        yield cfg


def _renamed(node: Any) -> Any:
    """Return a configuration with the present names of an earlier version's targets."""
    if isinstance(node, list):
        return [_renamed(child) for child in node]
    if not isinstance(node, dict):
        return node
    node = {key: _renamed(value) for key, value in node.items()}
    for old, new in _RENAMED.items():
        if str(node.get("_target_")).startswith(old):
            node["_target_"] = new + node["_target_"].removeprefix(old)
    return node


def restored(cfg: DictConfig, checkpoint: Path) -> FusedLMModule:
    """Build the module of a run on the CPU, in evaluation mode, with a checkpoint's weights in their own dtype.

    If the run kept an average of the weights, the module gets the average.

    Raises:
        UserError: they are of another model.
    """
    module = instantiate(cfg.module)(instantiate(cfg.model))
    if not isinstance(module, FusedLMModule):
        raise UserError(f"{type(module).__name__} is no FusedLMModule and cannot be restored")
    weights = final_weights(checkpoint, module.model.transformers_model)
    _grow_to(module, weights)
    if is_deferred(module.model):
        materialize(module.model)
    entries = module.state_dict(keep_vars=True)
    check_same_model(shapes_of(weights), shapes_of(entries))
    for name, value in entries.items():
        value.data = weights[name]  # in its own dtype, and once where layers share it
    return module.eval()


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
    """Return the tokenizer of a run's data, which are prepared unless the cache has them; None for token arrays."""
    data: Any = instantiate(translate(cast(dict[str, Any], OmegaConf.to_container(cfg.data, resolve=True))))
    data.prepare_data()
    data.setup("fit")
    return getattr(data, "tokenizer", None)


def exported_tokenizer(run: Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that a run exported with its model; None if there is none."""
    folder = run / "exported"
    if not (folder / "tokenizer_config.json").is_file():
        return None
    return AutoTokenizer.from_pretrained(folder)
