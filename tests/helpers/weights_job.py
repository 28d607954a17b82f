"""The processes of test_weights.py, started by torchrun: each case is a fit of a model whose weights come late.

    torchrun --nproc-per-node 2 tests/helpers/weights_job.py FOLDER CASE [CASE ...]

A case is STRATEGY:MODEL:LOSS:PRECISION, with the models that the test has left in FOLDER: MODEL is the name of a folder
there with a checkpoint, or, after "new_", of one that only its config.json is taken of. Rank 0 saves what it did.
"""

import os
import sys
from pathlib import Path
from typing import Any

from lightning_helpers import loader
from parallel_cases import Case, batches
from parallel_job import Recorder, file_of, module_of, share_of, trainer_of, whole
from pipeline_job import Scaled
from ranks import run_cases
from torch import Tensor
from transformers import AutoConfig

import lit_fused
from lit_fused import UserError
from lit_fused.parallel import local
from lit_fused.parallel.collectives import objects_of_ranks
from lit_fused.weights import deferred as deferred_module
from lit_fused.weights.rules import FromRules

SEED = 5


class Start(Recorder):
    """The weights before the first step, and what was in a rank's memory then."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0  # bytes that were given to tensors of the model on this rank

    def counting(self, with_numbers: Any) -> Any:
        def counted(*arguments: Any) -> Tensor:
            tensor = with_numbers(*arguments)
            self.given += local(tensor).nbytes
            return tensor

        return counted

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.weights = whole(trainer.strategy, pl_module, lambda p: p)
        self.buffers = {name: b.detach().clone() for name, b in pl_module.backbone.named_buffers()}
        layers = pl_module.backbone.get_output_embeddings(), pl_module.backbone.get_input_embeddings()
        head, embedding = (getattr(layer, "weight", None) for layer in layers)  # of a pipeline's rank, one at most
        self.head_is_tied = head is not None and head is embedding


def deferred(name: str, folder: Path) -> Any:
    """The model of a name; "changed_" is one that has no twin, "plan_" has a tensor-parallel plan that is wrong,
    "scaled_" does something to its hidden states that is no layer, "ranks_" begins with other numbers on each rank."""
    kind, _, rest = name.partition("_")
    if kind == "scaled":
        config = AutoConfig.from_pretrained(folder / rest)
        model, skeleton = deferred_module._without_memory(Scaled._from_config, config)
        return deferred_module._deferred(model, FromRules(skeleton, model.all_tied_weights_keys, SEED))
    if kind == "ranks":
        return lit_fused.from_config(AutoConfig.from_pretrained(folder / rest), int(os.environ["RANK"]))
    if kind in ("changed", "plan"):
        model = deferred(rest, folder)
        if kind == "plan":
            model._tp_plan = {name: style for name, style in model.tp_plan.items() if not name.endswith("_norm")}
        else:
            model.model.layers[-1].mlp.register_forward_hook(lambda module, inputs, output: 2 * output)
        return model
    if name.startswith("new_"):
        return lit_fused.from_config(AutoConfig.from_pretrained(folder / name.removeprefix("new_")), SEED)
    return lit_fused.from_pretrained(folder / name).train()


def run(case: Case, folder: Path) -> dict[str, Any]:
    start, own = Start(), folder / str(case).replace(":", "_")
    trainer = trainer_of(case, own, max_epochs=1, accumulate_grad_batches=case.accumulated, callbacks=[start])
    part = loader(share_of(batches(), case))
    with_numbers = deferred_module.with_numbers
    deferred_module.with_numbers = start.counting(with_numbers)
    try:
        module = module_of(case, deferred(case.model, folder))
        trainer.fit(module, part)
        trained = whole(trainer.strategy, module, lambda p: p)
        trainer.validate(module, part, verbose=False)  # calls configure_model again
    except UserError as refusal:
        return {"refusal": str(refusal)}
    finally:
        deferred_module.with_numbers = with_numbers
    return {
        "given": objects_of_ranks(start.given),
        "start": start.weights,
        "buffers": start.buffers,
        "tied": start.head_is_tied,
        "gradients": start.gradients,
        "losses": start.losses,
        "weights": trained,
    }


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    run_cases(lambda case: run(Case.parse(case), FOLDER), sys.argv[2:], lambda case: file_of(case, FOLDER))
