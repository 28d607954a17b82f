"""Train every architecture of transformers on two processes for a step, and compare with one process.

    PYTHONPATH=tests/helpers torchrun --nproc-per-node 2 tools/architectures_on_ranks.py fsdp2 [late]

The strategy is ddp, fsdp2, tp or pp_gpipe. Tiny models are trained by SGD in float32; with "late" their weights
are made after the strategy has divided them. Each has to end with the weights of one process, or to be refused by a
sentence. Two GPUs are used if there are.
"""

import logging
import os
import sys
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from architectures import ENTRIES, Entry, language_model, sharpen, tiny_batch, tiny_config, tiny_model
from lightning_helpers import loader, quiet_trainer
from parallel_cases import ON_GPUS, STRATEGIES
from torch import Tensor
from transformers import PreTrainedModel

import lit_fused
from lit_fused import FusedCausalLMModule, FusedMaskedLMModule, FusedSeq2SeqLMModule, LinearCrossEntropyLoss, UserError

RATE = 0.02
LIMIT = 1e-3  # of the difference from the step of one process, to that step; float32 rounds weights to 1e-7


def model_of(entry: Entry, *, late: bool) -> PreTrainedModel:
    """Build a model in a mode that draws no random numbers, in which a trainer leaves it."""
    if late:
        return lit_fused.from_config(tiny_config(entry), seed=3).train(entry.model_type == "reformer")
    model = tiny_model(entry)
    sharpen(model)
    return model


def in_one_process(entry: Entry, *, late: bool) -> tuple[dict[str, Any], dict[str, Tensor], float]:
    """Return a batch, the weights after a step with it, and the size of the step."""
    backbone, is_masked = model_of(entry, late=late), entry.task == "masked"
    lit_fused.materialize(backbone)
    model, batch = language_model(backbone, masked=is_masked), tiny_batch(backbone, masked=is_masked)
    model.prepare(torch.device("cpu"))
    model(batch).loss.backward()
    steps = {name: RATE * p.grad for name, p in backbone.named_parameters() if p.grad is not None}
    weights = {name: p.detach() - steps.get(name, 0) for name, p in backbone.named_parameters()}
    return batch, weights, torch.stack([step.norm() for step in steps.values()]).norm().item()


def on_ranks(entry: Entry, strategy: str, batch: dict[str, Any], *, late: bool) -> dict[str, Tensor]:
    """Return the weights after a step in which both ranks have the same batch; on rank 0 all of them."""
    backbone: Any = model_of(entry, late=late)
    pairs = FusedSeq2SeqLMModule if backbone.config.is_encoder_decoder else FusedCausalLMModule
    module = (FusedMaskedLMModule if entry.task == "masked" else pairs)(
        backbone, LinearCrossEntropyLoss(), partial(torch.optim.SGD, lr=RATE)
    )
    options: dict[str, Any] = {"devices": 2, "strategy": STRATEGIES[strategy][2](), "use_distributed_sampler": False}
    options["accelerator"] = "cuda" if ON_GPUS else "cpu"
    quiet_trainer(Path("unused"), max_steps=1, **options).fit(module, loader([batch]))
    with module.placement.whole_weights(module.backbone) as whole:
        weights = module.backbone.named_parameters() if whole is None else whole.items()
        return {name: weight.detach().cpu() for name, weight in weights}


def verdict(entry: Entry, strategy: str, *, late: bool) -> str:
    try:
        batch, expected, size = in_one_process(entry, late=late)
    except UserError as error:
        return f"refused: {error}"
    except Exception as error:  # transformers' own, of many kinds: the entry says nothing of a strategy
        return f"not run in one process: {type(error).__name__}: {error}"
    try:
        found = on_ranks(entry, strategy, batch, late=late)
    except UserError as error:
        return f"refused: {error}"
    except Exception as error:  # whatever it is, it is what is looked for, and the other entries are run
        return f"FAILED: {type(error).__name__}: {error}"
    if os.environ["RANK"] != "0":
        return ""
    difference = torch.stack([(found[name] - p).norm() for name, p in expected.items()]).norm().item() / size
    return "exact" if difference < LIMIT else f"WRONG: {difference:.1e}"


def main(strategy: str, *options: str) -> None:
    """Print what is neither exact nor refused (all but the exact, with "verbose"), and how many are what."""
    verdicts: Counter[str] = Counter()
    for entry in ENTRIES:
        said = verdict(entry, strategy, late="late" in options)
        kind = said.partition(":")[0]
        verdicts[kind] += 1
        if os.environ["RANK"] == "0" and kind != "exact" and ("verbose" in options or kind != "refused"):
            print(f"{entry} {said}", flush=True)
    if os.environ["RANK"] == "0":
        print(f"{' '.join([strategy, *options])}: {dict(verdicts)}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    main(*sys.argv[1:])
