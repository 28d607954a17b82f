"""Lightning's Trainer knows the strategies by name, whichever way the library is imported, and trains by them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from composed import composed
from hydra.utils import instantiate
from lightning.pytorch.strategies import StrategyRegistry
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from ranks import each

from lit_fused import FusedCausalLMModule
from lit_fused.strategy_names import STRATEGIES

TRAINER = "L.Trainer(strategy='lit_fused_fsdp2', accelerator='cpu', devices=2, logger=False)"


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning as L, lit_fused",
        "import lit_fused, lightning as L; lit_fused.FusedCausalLMModule",
        "from lit_fused import FusedCausalLMModule; import lightning as L",
    ],
)
def test_a_trainer_knows_the_names_after_an_import_of_the_library(imports):
    program = f"{imports}\nprint(type({TRAINER}.strategy).__name__)"
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=240)
    assert done.stdout.splitlines()[-1:] == ["FSDP2Strategy"], done.stderr


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_name_gives_the_strategy_that_the_command_has_under_it(name):
    group = name.removeprefix("lit_fused_")
    theirs = instantiate(composed(f"strategy={group}", "trainer.devices=4").trainer.strategy)
    ours = StrategyRegistry.get(name)
    assert type(ours) is type(theirs)
    for attribute in ("reduce_every_micro_batch", "reshard_after_forward", "mixed_precision_policy"):
        assert getattr(ours, attribute, None) == getattr(theirs, attribute, None)
    if hasattr(ours, "sizes_on"):
        assert ours.sizes_on(4) == theirs.sizes_on(4)


def fitted(strategy: str, folder: Path) -> Any:
    torch.manual_seed(0)
    module = FusedCausalLMModule(tiny_llama(num_key_value_heads=2))
    trainer = quiet_trainer(
        folder, strategy=strategy, accelerator="cpu", devices=2 if strategy != "auto" else 1, max_steps=2
    )
    trainer.fit(module, loader(ragged_batches(1) * 2))
    return trainer.callback_metrics["train/loss"].item()


@pytest.mark.slow
def test_a_fit_by_a_name_has_the_loss_of_one_process(tmp_path):
    found = each(fitted, 2, [*STRATEGIES], tmp_path)
    [alone] = each(fitted, 1, ["auto"], tmp_path).values()
    assert found == pytest.approx(dict.fromkeys(STRATEGIES, alone), rel=1e-5)
