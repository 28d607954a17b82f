"""Folders of runs of an earlier version: their configuration names classes where they were then."""

from pathlib import Path

import pytest
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from lit_fused import FusedCausalLMModule
from lit_fused.app.restore import configuration_of, run_of

# A configuration as version 0.1 of November 2026 wrote it, without the parts that every version writes alike.
CONFIG = """
module:
  _target_: lit_fused.FusedCausalLMModule
  _partial_: true
  parity_check: true
  compile: ${compile}
  kernels: ${kernels}
model:
  _target_: lit_fused.from_config
  seed: ${seed}
  activation_checkpointing: false
  config:
    _target_: transformers.LlamaConfig
    vocab_size: ${data.vocab_size}
    hidden_size: 16
    intermediate_size: 24
    num_hidden_layers: 1
    num_attention_heads: 4
    num_key_value_heads: 4
data:
  _target_: lit_fused.data.SyntheticDataModule
  vocab_size: 300
loss:
  _target_: lit_fused.LinearCrossEntropyLoss
  impl: chunked
scheduler:
  _target_: lit_fused.modules.cosine_with_warmup
  _partial_: true
trainer:
  callbacks: ${oc.dict.values:callbacks}
  strategy:
    _target_: lit_fused.parallel.FSDP2Strategy
    timeout: ???
callbacks:
  resume_hint:
    _target_: lit_fused.callbacks.ResumeHint
    overrides: ${hydra:overrides.task}
    command:
      _target_: lit_fused.commands.command_line.command_line
  progress_bar:
    _target_: lit_fused.callbacks.progress_bar
logger:
  several:
  - _target_: lit_fused.loggers.tensorboard_logger
  - _target_: lit_fused.loggers.wandb_logger
  - _target_: lit_fused.loggers.mlflow_logger
generate:
  _target_: lit_fused.generation.GenerateOptions
seed: 1
compile: none
kernels: none
plan:
  _target_: lit_fused.commands.planning.PlanOptions
fit_batch:
  _target_: lit_fused.commands.fitting.FitBatchOptions
hydra:
  launcher:
    own_gpus:
      _target_: lit_fused.launching.OwnGpus
  callbacks:
    output_folder:
      _target_: lit_fused.reporting.hydra_callback.OutputFolderCheck
    sweep_report:
      _target_: lit_fused.reporting.hydra_callback.SweepReport
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(CONFIG)
    return tmp_path


def targets(node):
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    own = [node["_target_"]] if isinstance(node, dict) and "_target_" in node else []
    return [*own, *(name for child in children for name in targets(child))]


def test_every_name_in_the_configuration_of_an_old_run_is_found(run):
    assert run_of(run / "checkpoints" / "last.ckpt") == run
    with configuration_of(run) as cfg:
        found = targets(OmegaConf.to_container(cfg))
    assert len(found) == CONFIG.count("_target_:")
    for name in found:
        assert get_object(name) is not None, name


def test_the_module_of_an_old_run_is_built(run):
    with configuration_of(run) as cfg:
        module = instantiate(cfg.module)(instantiate(cfg.model), instantiate(cfg.loss))
    assert isinstance(module, FusedCausalLMModule)
    assert module.model.vocabulary == 300
