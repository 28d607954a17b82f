"""Build a run's model from one of its checkpoints and its ``.hydra/config.yaml``, for export and to generate text."""

import os
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any, cast

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lit_fused.app.config import targets
from lit_fused.checkpoints.reading import check_same_model, final_weights, read_weights, shapes_of
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


def run_of(checkpoint: Path) -> Path:
    """Return the folder of the run that wrote a checkpoint. Raises UserError if another program wrote it."""
    run = next((folder for folder in checkpoint.absolute().parents if (folder / _CONFIG).is_file()), None)
    if run is None:
        read_weights(checkpoint)  # raises UserError if it is no checkpoint
        raise UserError(
            f"no folder above {checkpoint} has the configuration of a run (.hydra/config.yaml), which says what model "
            "it is of; export it in a program of your own: "
            "module.load_state_dict(lit_fused.checkpoints.read_weights(PATH)), module.save_pretrained(FOLDER)"
        )
    return run


@contextmanager
def configuration_of(run: Path) -> Iterator[DictConfig]:
    """Yield a run's configuration while the working directory is the one that the run was started in."""
    content: Any = OmegaConf.to_container(OmegaConf.load(run / _CONFIG))
    for _, node in targets(content):
        for old, new in _RENAMED.items():
            if str(node["_target_"]).startswith(old):
                node["_target_"] = new + node["_target_"].removeprefix(old)
    hydra = run / ".hydra" / "hydra.yaml"
    started_in = OmegaConf.select(OmegaConf.load(hydra), "hydra.runtime.cwd") if hydra.is_file() else None
    with chdir(started_in if started_in and os.path.isdir(started_in) else os.getcwd()):
        yield DictConfig(content)


def restored(cfg: DictConfig, checkpoint: Path) -> FusedLMModule:
    """Build the module of a run on the CPU, in evaluation mode, with a checkpoint's weights in their own dtype.

    If the run kept an average of the weights, the module gets that. Raises UserError for weights of another model.
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
        value.data = weights[name]  # layers that share a weight get the same tensor
    return module.eval()


def _grow_to(module: FusedLMModule, weights: dict[str, Tensor]) -> None:
    """Grow a pretrained model's vocabulary to that of the run, which depends on the run's tokenizer."""
    model = module.model.transformers_model
    if model is None or origin_of(model) is None:
        return
    table = getattr(model.get_input_embeddings(), "weight", None)
    name = next((name for name, p in module.named_parameters(remove_duplicate=False) if p is table), None)
    if table is not None and name in weights and len(weights[name]) > len(table):
        grow_vocabulary(model, len(weights[name]))


def tokenizer_of(run: Path, cfg: DictConfig) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that a run exported, or that of its data (prepared if need be); None for token arrays."""
    folder = run / "exported"
    if (folder / "tokenizer_config.json").is_file():
        return AutoTokenizer.from_pretrained(folder)
    data: Any = instantiate(translate(cast(dict[str, Any], OmegaConf.to_container(cfg.data, resolve=True))))
    data.prepare_data()
    data.setup("fit")
    return getattr(data, "tokenizer", None)
