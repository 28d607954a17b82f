"""``mode=recommend``: the best items for users, or for histories, with a run's checkpoint, on one device."""

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from lit_fused.app.config import check_one_device, check_precision
from lit_fused.app.loggers import quiet_lightning
from lit_fused.app.recommend_options import RecommendOptions
from lit_fused.app.restore import configuration_of, restored, run_of
from lit_fused.data.interactions import histories_of, write_recommendations
from lit_fused.errors import UserError
from lit_fused.modules import FusedRecommenderModule


def recommend(cfg: DictConfig) -> None:
    options: RecommendOptions = instantiate(cfg.recommend)
    if cfg.ckpt_path is None:
        raise UserError("mode=recommend needs trained weights: give ckpt_path=RUN/checkpoints/last.ckpt")
    check_one_device(cfg, "Any strategy's checkpoint will do")
    with quiet_lightning():
        nothing = {"callbacks": [], "logger": [], "enable_model_summary": False, "enable_checkpointing": False}
        trainer: L.Trainer = instantiate(cfg.trainer, devices=1, max_steps=1, **nothing)
    check_precision(cfg.precision, trainer)
    checkpoint, here = Path(cfg.ckpt_path).absolute(), Path.cwd()
    run = run_of(checkpoint)
    with configuration_of(run, cfg.trust) as of_run:
        module: Any = restored(of_run, checkpoint)
        if not isinstance(module, FusedRecommenderModule):
            raise UserError(f"mode=recommend needs a run of module=recommender, and this is a {type(module).__name__}")
        items = run / "items.parquet"
        data: Any = instantiate(of_run.data, folder=None, items=items if items.is_file() else None)
        known, columns = data.interactions, data.columns[:3]
    users = None if options.users is None else here / options.users
    found = histories_of(users, columns, known)
    for count, what in ((found.unknown_items, "interactions with items"), (found.unknown_users, "users")):
        if count:
            print(f"{what} that the run's data do not have are left out: {count:,}")
    if not len(found.items):
        raise UserError(f"{users} has no user that the run knows; give histories: columns {', '.join(columns)}")
    plugin, device = trainer.strategy.precision_plugin, trainer.strategy.root_device
    module = plugin.convert_module(module).to(device)
    most, parts = module.backbone.max_length, []
    for first in range(0, len(found.items), options.batch_size):
        rows = [torch.from_numpy(row.copy()) for row in found.items[first : first + options.batch_size]]
        ids = torch.nn.utils.rnn.pad_sequence([row[-most:] for row in rows], True)
        ids = ids if ids.shape[1] else ids.new_zeros(len(rows), 1)
        with plugin.forward_context(), torch.inference_mode():
            best = module.recommend(ids, options.k, rows if options.exclude_seen else [[]] * len(rows))
        parts.append((best.items.cpu().numpy(), best.scores.float().cpu().numpy()))
    numbers, scores = (np.concatenate(part) for part in zip(*parts, strict=True))
    path = here / (options.output or Path(cfg.output_dir) / "recommendations.parquet")
    table = write_recommendations(path, found.user_ids, numbers, scores, known.item_ids)
    print(f"{path}: {table.num_rows:,} recommendations for {len(found.items):,} users")
