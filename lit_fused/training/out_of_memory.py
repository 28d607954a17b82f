"""Say what can be changed where a step runs out of memory."""

from typing import TYPE_CHECKING

import torch

from lit_fused.errors import UserError
from lit_fused.memory import checkpointing_of
from lit_fused.parallel.checkpoint import newest_checkpoint

if TYPE_CHECKING:
    from lit_fused.training.trained_model import TrainedModel


class StepMemoryError(UserError, torch.OutOfMemoryError):
    """A step's torch.OutOfMemoryError in words that say what to change. Lightning's BatchSizeFinder knows it as one."""


class MemoryExplained:
    """A block of a training step of ``module``, whose error says what makes the step smaller, the cheapest first."""

    def __init__(self, module: "TrainedModel") -> None:
        self._module = module

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, torch.OutOfMemoryError) and not isinstance(error, StepMemoryError):
            raise StepMemoryError(_explained(error, self._module)) from error


def _explained(error: torch.OutOfMemoryError, module: "TrainedModel") -> str:
    model, rows = module.model, module.largest_batch[0]
    ways = ["loss=chunked"] if model.loss.builds_logits else []
    if model.transformers_model is not None and (chosen := checkpointing_of(model.backbone)) != "offload":
        ways.append("memory=checkpoint" if chosen == "none" else "memory=long")
    if rows > 1:
        ways.append("a smaller data.batch_size with a larger trainer.accumulate_grad_batches, of the same gradients")
    ways += ["precision=bf16-true", *([] if module.is_sharded else ["strategy=fsdp2 on several GPUs"])]
    step, newest = module.trainer.global_step, newest_checkpoint(module.trainer)
    said = ". ".join(str(error).split(". ")[:2]).removesuffix(".")  # The rest is about settings of the allocator.
    return (
        f"{said}. Step {step + 1}, of micro-batches of {' x '.join(map(str, module.largest_batch))} labels, needs more "
        f"memory: try {'; '.join(ways)}; mode=plan predicts what a step takes"
        + (f". The state of before is in {newest}" if newest else "")
    )
