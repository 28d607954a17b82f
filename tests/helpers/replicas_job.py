"""Fits under ``ReplicatedStrategy`` on two ranks, for test_replicas.py.

replicas_job.py FOLDER CASE:STRATEGY[:GROUP_BYTES] [...]
"""

from pathlib import Path
from typing import Any

import torch
from lightning_helpers import quiet_trainer
from ranks import run_command
from replicas_cases import CASES, STEPS, ByHand, Numbers, Plain, by_hand
from torch import Tensor

from lit_fused.parallel import ReplicatedStrategy, replicas
from lit_fused.parallel.collectives import objects_of_ranks

ON_GPUS = torch.cuda.device_count() >= 2


def weights(module: Plain) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def expected(case: str) -> dict[str, Tensor]:
    """Return the weights after the same steps in one process, from the mean of all ranks' losses."""
    module = CASES[case]()
    data = Numbers(module.dtype_)
    optimizers = module.configure_optimizers()
    for step in range(STEPS):
        module.before_step(step)
        indices = range(2 * module.accumulated * step, 2 * module.accumulated * (step + 1))
        if isinstance(module, ByHand):
            by_hand(module, [*indices], [data[i][1] for i in indices], optimizers, lambda loss: loss.backward())
            continue
        for index in indices:
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            (module.loss(index, data[index][1]) / len(indices)).backward()
            for name, buffer in module.named_buffers() if index % 2 else ():  # The second rank's are not kept.
                buffer.copy_(buffers[name])
        optimizers.step()
        optimizers.zero_grad()
    return weights(module)


def run(text: str, folder: Path) -> dict[str, Any]:
    case, strategy, *group = text.split(":")
    if group:
        replicas.GROUP_BYTES = int(group[0])
    module = CASES[case]()
    options: dict[str, Any] = {} if isinstance(module, ByHand) else {"accumulate_grad_batches": module.accumulated}
    trainer = quiet_trainer(
        folder,
        accelerator="gpu" if ON_GPUS else "cpu",
        devices=2,
        strategy=ReplicatedStrategy() if strategy == "ours" else strategy,
        use_distributed_sampler=False,
        max_epochs=1,
        limit_train_batches=STEPS * module.accumulated,
        **options,
    )
    trainer.fit(module)
    found = weights(module)
    return {"weights": found, "ranks": objects_of_ranks(found)}


if __name__ == "__main__":
    run_command(run)
