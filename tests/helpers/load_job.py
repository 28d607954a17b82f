"""Fits on two ranks of models whose weights come late, for test_load.py.

The model of a case is the name of a folder with a checkpoint, or, after "new_", of one that only its config.json is
taken of.
"""

from pathlib import Path
from typing import Any

from lightning_helpers import loader
from parallel_cases import Case, batches, module_of, share_of, trainer_of, whole
from parallel_fits import Recorder
from transformers import AutoConfig

import lit_fused
from lit_fused import UserError
from lit_fused.parallel import local
from lit_fused.parallel.collectives import objects_of_ranks

SEED = 5


class Start(Recorder):
    """The weights before the first step, and what was in a rank's memory then."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.weights = whole(trainer.strategy, pl_module, lambda p: p)
        self.buffers = {name: b.detach().clone() for name, b in pl_module.backbone.named_buffers()}
        layers = pl_module.backbone.get_output_embeddings(), pl_module.backbone.get_input_embeddings()
        head, embedding = (getattr(layer, "weight", None) for layer in layers)  # of a pipeline's rank, one at most
        self.head_is_tied = head is not None and head is embedding
        self.own_bytes = sum(local(p).nbytes for p in pl_module.backbone.parameters())


def deferred(name: str, folder: Path) -> Any:
    """The model of a name; "plan_" has a tensor-parallel plan that is wrong."""
    if name.startswith("plan_"):
        model = deferred(name.removeprefix("plan_"), folder)
        model.tp_plan = {name: style for name, style in model.tp_plan.items() if not name.endswith("_norm")}
        return model
    if name.startswith("new_"):
        return lit_fused.from_config(AutoConfig.from_pretrained(folder / name.removeprefix("new_")), SEED)
    return lit_fused.from_pretrained(folder / name).train()


def run(case: Case, folder: Path) -> dict[str, Any]:
    start, own = Start(), folder / str(case).replace(":", "_")
    trainer = trainer_of(case, own, max_epochs=1, accumulate_grad_batches=case.accumulated, callbacks=[start])
    part = loader(share_of(batches(), case))
    try:
        module = module_of(case, deferred(case.model, folder))
        trainer.fit(module, part)
        trained = whole(trainer.strategy, module, lambda p: p)
        trainer.validate(module, part, verbose=False)  # calls configure_model again
    except UserError as refusal:
        return {"refusal": objects_of_ranks(str(refusal))}
    return {
        "bytes": objects_of_ranks(start.own_bytes),
        "start": start.weights,
        "buffers": start.buffers,
        "tied": start.head_is_tied,
        "gradients": start.gradients,
        "losses": start.losses,
        "weights": trained,
    }
