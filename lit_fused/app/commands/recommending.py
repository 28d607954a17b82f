"""``mode=recommend``: the best items for users, or for histories, with a run's checkpoint, on one device."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from lit_fused.app.one_device import on_device, one_device_trainer
from lit_fused.app.restore import item_file_of, restored, run_with
from lit_fused.data.interactions import histories_of, write_recommendations
from lit_fused.errors import UserError
from lit_fused.parallel.checkpoint import read_rest


@dataclass(frozen=True)
class RecommendOptions:
    """Says which users get how many items.

    Attributes:
        users: a .parquet or .csv file with a column of users whom the run's data have; or with their histories, as the
            run's data; None for all users of the run's data.
        output: the Parquet file that is written; None for recommendations.parquet in the run's folder.
        k: items for each user.
        exclude_seen: leave out what a user had before.
        batch_size: users at a time.
    """

    users: str | None = None
    output: str | None = None
    k: int = 10
    exclude_seen: bool = True
    batch_size: int = 1024


def recommend(cfg: DictConfig) -> None:
    options: RecommendOptions = instantiate(cfg.recommend)
    if cfg.ckpt_path is None:
        raise UserError("mode=recommend needs trained weights: give ckpt_path=RUN/checkpoints/last.ckpt")
    trainer = one_device_trainer(cfg)
    checkpoint = Path(cfg.ckpt_path).absolute()
    run = run_with(checkpoint)
    module: Any = restored(cfg, checkpoint)
    data: Any = instantiate(cfg.data, folder=None, items=item_file_of(run))
    data.see_checkpoint(read_rest(checkpoint))
    # The file may have grown since: its new items come last, and the model has no rows of them.
    known = replace(data.interactions, item_ids=data.interactions.item_ids[: module.model.num_items])
    columns, users = data.columns[:3], Path(options.users) if options.users else None
    found = histories_of(users, columns, known)
    for count, what in ((found.unknown_items, "interactions with items"), (found.unknown_users, "users")):
        if count:
            print(f"{what} that the run does not know are left out: {count:,}")
    if not len(found.items):
        raise UserError(f"{users} has no user that the run knows; give histories: columns {', '.join(columns)}")
    module = on_device(module, trainer)
    most, size, parts = getattr(module.backbone, "max_length", data.max_length), int(options.batch_size), []
    for first in range(0, len(found.items), size):
        rows = [row.tolist() for row in found.items[first : first + size]]
        seen = rows if options.exclude_seen else [[]] * len(rows)
        with trainer.precision_plugin.forward_context(), torch.inference_mode():
            best = module.recommend([row[-most:] for row in rows], int(options.k), seen)
        parts.append((best.items.cpu().numpy(), best.scores.float().cpu().numpy()))
    numbers, scores = (np.concatenate(part) for part in zip(*parts, strict=True))
    path = Path(options.output or Path(cfg.output_dir) / "recommendations.parquet")
    table = write_recommendations(path, found.user_ids, numbers, scores, known.item_ids)
    print(f"{path}: {table.num_rows:,} recommendations for {len(found.items):,} users")
