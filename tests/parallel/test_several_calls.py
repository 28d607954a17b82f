"""One trainer is called several times in two processes: it validates, fits, tests and fits again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_helpers import quiet_trainer
from parallel_cases import STRATEGIES, whole
from ranks import each
from tiny_models import tiny_model
from torch.utils.data import DataLoader

from lit_fused import FusedCausalLMModule, FusedRecommenderModule, SASRec

MODELS = ("llama", "qwen3_tied", "sasrec")


def run(case: tuple[str, str], folder: Path) -> dict[str, Any]:
    strategy, name = case
    torch.manual_seed(0)
    if name == "sasrec":
        backbone = SASRec(50, hidden_size=16, num_layers=1, num_heads=2, max_length=12, dropout=0.0)
        module: Any = FusedRecommenderModule(backbone)
    else:
        module = FusedCausalLMModule(tiny_model(name))
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 50, (12,), generator=generator) for _ in range(16)]
    batches = DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=4)  # type: ignore[arg-type]
    trainer = quiet_trainer(folder, strategy=STRATEGIES[strategy][2](), devices=2, max_epochs=1)
    losses = [trainer.validate(module, batches, verbose=False)[0]["val/loss"]]
    trainer.fit(module, batches, batches)
    losses.append(trainer.test(module, batches, verbose=False)[0]["test/loss"])
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, batches, batches)
    losses.append(trainer.validate(module, batches, verbose=False)[0]["val/loss"])
    return {"losses": losses, "weights": whole(trainer.strategy, module, lambda weight: weight)}


@pytest.mark.slow
def test_a_sharded_module_is_validated_fitted_tested_and_fitted_again_as_a_replicated_one(tmp_path):
    found = each(run, 2, [(strategy, model) for model in MODELS for strategy in ("ddp", "our_fsdp2")], tmp_path)
    for model in MODELS:
        copies, shards = found["ddp", model], found["our_fsdp2", model]
        assert copies["losses"][0] > copies["losses"][1] > copies["losses"][2]
        assert shards["losses"] == pytest.approx(copies["losses"], rel=1e-6), model
        assert shards["weights"].keys() == copies["weights"].keys()
        for name, value in copies["weights"].items():
            torch.testing.assert_close(shards["weights"][name], value, rtol=1e-4, atol=1e-6)
