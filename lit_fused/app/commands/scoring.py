"""``mode=score``: write a model's scores of the data, on one device: its most probable entries for every position, or
the input of its output layer, or the log-probability of each answer of preferences."""

from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.progress import track

from lit_fused.app.one_device import chosen_module, on_device, one_device_trainer
from lit_fused.data import PreferenceEncoding, TokenDataModule
from lit_fused.data.stored_scores import ScoreHeader, ScoreWriter, write_output_layer
from lit_fused.errors import check_switches
from lit_fused.objectives.distillation import scores_to_store, teacher_head
from lit_fused.objectives.preference_loss import answers_to_store
from lit_fused.ops.frozen_columns import whole_weight
from lit_fused.ops.label_checks import IGNORE_INDEX
from lit_fused.training import FusedLMModule, FusedSeq2SeqLMModule


@dataclass(frozen=True)
class ScoreOptions:
    """The options of ``mode=score``.

    Args:
        path: of the file, a Parquet; None: ``scores.parquet`` in the run's folder.
        top_k: most probable entries that are stored for each position, beside the target's.
        temperature: T that divides the logits; a student has to be trained with the same one.
        hidden: store the input of the output layer for each position instead, and the layer once: divergences over the
            whole vocabulary, at any temperature.
    """

    path: str | None = None
    top_k: int = 64
    temperature: float = 1.0
    hidden: bool = False

    def __post_init__(self) -> None:
        check_switches({"score.hidden": bool}, {"score.hidden": self.hidden})


def score(cfg: DictConfig) -> None:
    """Write the file, and print what is in it."""
    options: ScoreOptions = instantiate(cfg.score)
    trainer = one_device_trainer(cfg)
    data = instantiate(cfg.data, scores=None) if "scores" in cfg.data else instantiate(cfg.data)
    data.prepare_data()
    data.setup("fit")
    if "reference" in cfg.module:
        cfg.module.reference = "stored"  # without a copy of the model
    module = on_device(chosen_module(cfg), trainer)
    own = getattr(module.backbone, "name_or_path", None) or f"{type(module.backbone).__name__} with random weights"
    name = own if cfg.ckpt_path is None else str(Path(cfg.ckpt_path).absolute())
    path = Path(options.path or Path(cfg.output_dir, "scores.parquet"))
    header, tokens = write_scores(path, options, data, module, name, trainer)
    how = "module=preference module.reference=stored" if header.k is None else "module=distillation"
    print(f"{path}: {tokens:,} tokens, by {name}")
    print(f"Train on them: python train.py {how} data.scores={path} ... (with the same data)")


def write_scores(
    path: Path, options: ScoreOptions, data: TokenDataModule, module: FusedLMModule, name: str, trainer: L.Trainer
) -> tuple[ScoreHeader, int]:
    """Write the scores of all rows of set-up data. Return the file's header, and the number of tokens."""
    model, sets, tokens = module.model, data.rows_in_order(), 0
    of_answers = isinstance(data.encoding, PreferenceEncoding)
    stores_hidden, layer = options.hidden and not of_answers, None
    model.prepare(module.device)
    with torch.inference_mode(), trainer.precision_plugin.forward_context():
        if stores_hidden:
            first_batch = next(iter(data.batches_in_order(next(iter(sets.values())))))
            layer = teacher_head(model, trainer.strategy.batch_to_device(first_batch))
            layer = layer._replace(weight=whole_weight(layer.weight))
    header = ScoreHeader(
        k=None if of_answers else 0 if stores_hidden else min(int(options.top_k), model.vocabulary),
        temperature=1.0 if of_answers or stores_hidden else float(options.temperature),
        vocabulary=model.vocabulary,
        model=name,
        shifted=not isinstance(module, FusedSeq2SeqLMModule),
        rows={name: len(rows) for name, rows in sets.items()},
        width=None if layer is None else layer.hidden_states.shape[-1],
        dtype="float32" if layer is None else str(layer.hidden_states.dtype).removeprefix("torch."),
    )
    with ScoreWriter.open(path, header) as file, torch.inference_mode(), trainer.precision_plugin.forward_context():
        for part, rows in sets.items():
            first = 0
            for batch in track(data.batches_in_order(rows), f"scoring {part}", transient=True):
                batch = trainer.strategy.batch_to_device(batch)
                if header.k is None:
                    found = answers_to_store(model, batch)
                elif header.width is not None:
                    found = [teacher_head(model, batch).hidden_states]
                else:
                    found = scores_to_store(model, batch, header.k, header.temperature)
                for scores in zip(*found, strict=True):
                    file.add(rows[first], scores)
                    first += 1
                tokens += int((model.targets(batch) != IGNORE_INDEX).sum())
        if layer is not None:  # The two files appear together, or one after a failure would be of another model.
            write_output_layer(path, {n: value for n, value in layer._asdict().items() if n != "hidden_states"})
    return header, tokens
