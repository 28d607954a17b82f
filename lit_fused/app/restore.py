"""Build a run's model from one of its checkpoints and its overrides, for export, to generate text and to score."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerBase

from lit_fused.app.overrides import checkpoint_of, configuration_of, run_of
from lit_fused.app.run_folder import RUN_FILE
from lit_fused.atomic import checkpoints_in, whole_checkpoint
from lit_fused.data.tokenizer import load_tokenizer
from lit_fused.errors import UserError
from lit_fused.models.hub import auto_class
from lit_fused.models.load import from_pretrained, materialize
from lit_fused.parallel.checkpoint import check_same_model, read_rest, read_weights, shapes_of
from lit_fused.training import FusedCausalLMModule, FusedLMModule, FusedMaskedLMModule, FusedSeq2SeqLMModule


def run_with(checkpoint: Path) -> Path:
    """Return the folder of the run that wrote a checkpoint. Raises UserError if another program wrote it."""
    run = run_of(checkpoint)
    if run is None:
        read_weights(checkpoint)  # raises UserError if it is no checkpoint
        raise UserError(
            f"no folder above {checkpoint} is that of a run (RUN/{RUN_FILE} for RUN/checkpoints/NAME), which says what "
            "model it is of; export it in a program of your own: "
            "module.load_state_dict(lit_fused.parallel.read_weights(PATH)), module.save_pretrained(FOLDER)"
        )
    return run


def load(path: str | Path, overrides: Sequence[str] = (), *, config_dir: str | None = None) -> FusedLMModule:
    """Return the module of a run, on the CPU, in evaluation mode, with the run's weights or their average.

    ``path`` is a checkpoint, file or folder, in its run's folder; a run's folder, of which the newest checkpoint
    is taken; or a folder that transformers can load, such as the run's ``exported``. ``overrides`` come after the
    run's own; ``config_dir`` is a folder of your own that the run was started with. Raises UserError if there is no
    such thing, it is damaged, or an override of the run could run code.
    """
    path = Path(path).expanduser().absolute()
    if (path / RUN_FILE).is_file():
        path = checkpoint_of(str(path)) if checkpoints_in(path / "checkpoints") else path / "exported"
    if (path / "config.json").is_file():
        model = from_pretrained(path)
        is_masked = auto_class(model.config) is AutoModelForMaskedLM
        kind = FusedMaskedLMModule if is_masked else FusedCausalLMModule
        module = (FusedSeq2SeqLMModule if model.config.is_encoder_decoder else kind)(model)
        materialize(module.model)
        return module.eval()
    whole_checkpoint(path)
    with configuration_of(run_with(path), overrides, config_dir) as cfg:
        return restored(cfg, path)


def restored(cfg: DictConfig, checkpoint: Path) -> FusedLMModule:
    """Build the module of a run on the CPU, in evaluation mode, with a checkpoint's weights in their own dtype, or
    their average if the run kept one. Raises UserError for weights of another model."""
    module: FusedLMModule = instantiate(cfg.module)(instantiate(cfg.model))
    weights = read_weights(checkpoint)
    module.make_room(weights)
    entries = module.state_dict(keep_vars=True)
    check_same_model(shapes_of(weights), shapes_of(entries))
    for name, value in entries.items():
        value.data = weights[name]  # layers that share a weight get the same tensor
    return module.eval()


def item_map_of(run: Path, checkpoint: Path) -> Any:
    """Return the :class:`~lit_fused.data.interactions.ItemMap` of a recommender's run, None if its data numbered no
    items. Raises UserError if it is not there, or is not that of the checkpoint."""
    from lit_fused.data.interactions import ItemMap, read_item_map  # needs pyarrow, which no other export does

    numbers = read_rest(checkpoint).get("InteractionDataModule", {}).get("items")
    if numbers is None:
        return None
    if (file := item_file_of(run)) is None:
        raise UserError(f"{run} has no items.parquet, which says what items the model's rows are of; restore it")
    items = ItemMap(read_item_map(file)[: numbers["count"]])
    if items.item_numbers != numbers:
        raise UserError(f"{file} numbers the items otherwise than {checkpoint}; restore the map of its run")
    return items


def item_file_of(run: Path) -> Path | None:
    """Return the file with the map of a recommender's items in a run's folder; None if there is none."""
    return next(filter(Path.is_file, (folder / "items.parquet" for folder in (run, run / "exported"))), None)


def tokenizer_of(run: Path, cfg: DictConfig) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that a run exported, or that of its data (prepared if need be); None for token arrays."""
    folder = run / "exported"
    if (folder / "tokenizer_config.json").is_file():
        return load_tokenizer(folder)
    data: Any = instantiate(cfg.data)
    data.prepare_data()
    data.setup("fit")
    return getattr(data, "tokenizer", None)
