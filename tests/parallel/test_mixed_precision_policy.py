"""FSDP2's mixed-precision policy: bfloat16 copies compute, float32 parameters are trained, summed and saved."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_helpers import loader
from parallel_cases import Case, as_strategy, batches, module_of, share_of, trainer_of
from parallel_fits import COMPILED, fit, judge, launch, resume
from ranks import Refusal, each
from tiny_models import tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lit_fused import LanguageModel, LinearCrossEntropyLoss
from lit_fused.errors import UserError
from lit_fused.models.blocks import blocks
from lit_fused.parallel import FSDP2Strategy
from lit_fused.parallel.checkpoint import read_checkpoint
from lit_fused.parallel.sharded import Sharded, stay_gathered
from lit_fused.planning.spread import Spread

MIXED = "bf16-mixed"
TOKENS = torch.arange(24).view(2, 12)


def test_three_accumulated_steps_are_as_close_to_the_large_batch_as_autocast_is(tmp_path):
    case = Case("fsdp2_policy", "llama_tied", precision=MIXED)
    judge(case, launch(fit, [case], tmp_path, timeout=180)[case], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_policy_beside_other_options_and_losses_is_as_close_to_the_large_batch_as_autocast_is(tmp_path):
    cases = [Case(strategy, "qwen3", precision=MIXED) for strategy in ("tp_policy", "fsdp2_tp_policy")]
    cases += [Case("fsdp2_policy", "gemma2", loss, MIXED) for loss in ("cce", "standard", "model")]
    cases += [Case("fsdp2_policy_late", "llama_tied", precision=MIXED)]
    for case, found in launch(fit, cases, tmp_path, timeout=350).items():
        judge(case, found, tmp_path)


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_compiled_layers_compute_with_the_copies(tmp_path):
    cases = [case for case in COMPILED if case.strategy == "fsdp2_policy"]
    for case, found in launch(fit, cases, tmp_path, timeout=250).items():
        judge(case, found, tmp_path)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path):
    case = Case("fsdp2_policy", "llama_tied", precision=MIXED)
    found = launch(resume, [case], tmp_path, timeout=180)[case]
    for name, weight in found["at once"].items():
        assert torch.equal(found["resumed"][name], weight), name


class HiddenStates(L.Callback):
    """Lists the dtypes of what layers get and give, from the first step on: before, float32 ones were tried."""

    def __init__(self) -> None:
        self.dtypes: set[str] = set()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        for layer in blocks(pl_module.backbone):
            layer.register_forward_hook(self.look)

    def look(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        values = *args, *(output if isinstance(output, tuple) else (output,))
        self.dtypes |= {str(value.dtype) for value in values if isinstance(value, Tensor)}


def record(case: Case, folder: Path) -> tuple[set[str], set[str]]:
    """Fit, validate, save and export; return the dtypes of hidden states, and those of weights and moments."""
    module, hidden_states = module_of(case), HiddenStates()
    saver = ModelCheckpoint(folder / case.strategy, save_last=True)
    trainer = trainer_of(case, folder, max_epochs=1, enable_checkpointing=True, callbacks=[saver, hidden_states])
    part = share_of(batches()[:4], case)
    trainer.fit(module, loader(part), loader(part))
    module.save_pretrained(folder / f"{case.strategy}_exported")
    (optimizer,) = trainer.optimizers
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    return hidden_states.dtypes, {str(t.dtype) for p in trained for t in (p, optimizer.state[p]["exp_avg"])}


@pytest.mark.slow
def test_hidden_states_are_bfloat16_between_layers_and_what_is_trained_and_saved_is_float32(tmp_path):
    cases = [Case(strategy, "llama", precision=MIXED) for strategy in ("fsdp2_policy", "our_fsdp2")]
    found = each(record, 2, cases, tmp_path, timeout=180)
    assert found[cases[0]] == ({"torch.bfloat16"}, {"torch.float32"})
    assert found[cases[1]] == ({"torch.float32"}, {"torch.float32"})

    saved = read_checkpoint(tmp_path / "fsdp2_policy" / "last.ckpt")["state_dict"]
    assert {weight.dtype for weight in saved.values()} == {torch.float32}
    exported = tmp_path / "fsdp2_policy_exported"
    assert json.loads((exported / "config.json").read_text())["dtype"] == "float32"
    for p in AutoModelForCausalLM.from_pretrained(exported).parameters():
        assert p.dtype == torch.float32
        assert p.ndim == 1 or not torch.equal(p, p.bfloat16().float())


def train(name: str) -> tuple[float, list[torch.dtype]]:
    """Return what two ranks make of weights and biases that bfloat16 would round, and what a layer gets."""
    model = LanguageModel(tiny_model(name).train(), LinearCrossEntropyLoss())
    model.prepare(torch.device("cpu"))
    Sharded(as_strategy(mixed_precision_policy=True))._divide(model)
    seen: list[torch.dtype] = []
    layer = blocks(model.backbone)[0]
    layer.register_forward_hook(
        lambda module, args, kwargs, output: seen.append(kwargs["position_embeddings"][0].dtype), with_kwargs=True
    )
    weights = torch.full(TOKENS.shape, 1 + 2**-12)
    with torch.autocast("cpu", torch.bfloat16):
        output = model({"input_ids": TOKENS, "labels": TOKENS, "token_weights": weights})
    output.loss_sum.backward()
    return output.num_tokens.item(), seen


@pytest.mark.slow
def test_the_weights_of_a_batch_and_what_a_model_keeps_in_float32_are_not_rounded():
    counted, of_rotary_embedding = each(train, 2, ["olmo2"], timeout=60)["olmo2"]
    assert counted == pytest.approx(22 * (1 + 2**-12), rel=1e-6)
    assert of_rotary_embedding == [torch.float32]


def test_a_policy_with_another_precision_is_refused(tmp_path):
    cases = [Case("fsdp2_policy", "llama", precision=precision) for precision in ("32-true", "bf16-true")]
    for case, found in each(fit, 2, cases, tmp_path, timeout=80).items():
        assert isinstance(found, Refusal)
        assert f"got precision={case.precision}; choose precision=bf16-mixed" in found


def test_units_whose_copies_are_little_of_a_devices_memory_stay_gathered():
    layers = [[nn.Linear(100, 100, bias=False)]]  # 40,000 bytes, and 20,000 as a copy
    assert [stay_gathered(layers, 1e6, in_bfloat16=copies) for copies in (False, True)] == [False, True]


@pytest.mark.parametrize("option", [{"mixed_precision_policy": True}, {"gather_head": False}])
def test_a_plan_does_not_take_a_policy_for_autocast_nor_rows_of_a_head_for_all(option):
    with pytest.raises(UserError, match="does not know what .* takes"):
        Spread.of(FSDP2Strategy(2, **option), 2, 1)
