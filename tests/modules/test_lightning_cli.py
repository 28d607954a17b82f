"""Lightning's own command line builds the module from YAML."""

from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI

from lit_fused import FusedCausalLMModule
from lit_fused.data import SyntheticDataModule

pytest.importorskip("jsonargparse")

YAML = """
seed_everything: 1
trainer: {max_steps: 3, accelerator: cpu, logger: false, enable_checkpointing: false, enable_progress_bar: false}
model:
  backbone:
    class_path: transformers.LlamaForCausalLM
    init_args:
      config:
        class_path: transformers.LlamaConfig
        init_args: {vocab_size: 300, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1,
                    num_attention_heads: 2, num_key_value_heads: 2}
  loss:
    class_path: lit_fused.LinearCrossEntropyLoss
    init_args: {chunk_size: 64}
data: {vocab_size: 300, block_size: 16, batch_size: 2, num_train_batches: 4, num_val_batches: 1}
"""


def test_a_yaml_file_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(YAML)
    cli = LightningCLI(FusedCausalLMModule, SyntheticDataModule, args=["fit", "--config", "run.yaml"])
    assert cli.trainer.global_step == 3
    assert cli.trainer.callback_metrics["train/loss"] > 0
