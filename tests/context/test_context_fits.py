"""A fit whose ranks divide the rows of each batch is that of one process, to its checkpoints and exports."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from errors_of import relative_error
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_helpers import loader, quiet_trainer
from parallel_cases import Case, batches, module_of, share_of, trainer_of, whole
from parallel_fits import fit, folder_of, judge, launch
from peft import LoraConfig, get_peft_model
from preference_cases import pairs
from ranks import Refusal, each
from tiny_models import MODELS, ScaledInTraining, sharpen, tiny_backbone, tiny_batch, tiny_llama, tiny_model
from transformers import T5Config, T5ForConditionalGeneration

import lit_fused
from lit_fused import (
    FusedCausalLMModule,
    FusedMaskedLMModule,
    FusedPolicyModule,
    FusedPreferenceModule,
    ModelInternalLoss,
    PolicyLoss,
)
from lit_fused.context import ContextStrategy

FITS = [
    Case("context", "llama_tied"),
    Case("context", "qwen3", "standard"),
    Case("context", "gemma2"),
    Case("context", "masked_modernbert"),
    Case("context", "gemma2", precision="bf16-mixed"),
    Case("context_policy", "llama", precision="bf16-mixed"),
    Case("context_of_one", "qwen3"),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_steps_of_accumulated_batches_are_those_of_one_process(tmp_path):
    for case, found in launch(fit, [*FITS, Case("fsdp2_context", "llama_tied")], tmp_path, timeout=500).items():
        judge(case, found, tmp_path)


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_compiled_layers_of_divided_rows_equal_one_process_without(tmp_path):
    case = Case("context", "llama", compile="regional")
    judge(case, launch(fit, [case], tmp_path, timeout=280)[case], tmp_path)


def resumed_elsewhere(other: str, folder: Path) -> dict[str, Any]:
    """Three epochs at once, and two, after which the third is under another strategy."""
    cases = [Case("context", "llama_tied"), Case("context", "llama_tied"), Case(other, "llama_tied")]
    saver = ModelCheckpoint(folder / other, save_last=True)
    found = []
    for case, epochs, path in zip(cases, (3, 2, 3), (None, None, saver), strict=True):
        module = module_of(case)
        more: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saver]} if epochs == 2 else {}
        options = {"max_epochs": epochs, "accumulate_grad_batches": case.accumulated} | more
        trainer = trainer_of(case, folder_of(case, folder), **options)
        rows = loader(share_of(batches()[:4], case))
        trainer.fit(module, rows, ckpt_path=path.last_model_path if path else None)
        found.append(whole(trainer.strategy, module, lambda p: p))
    return {"at once": found[0], "resumed": found[2]}


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_rows_divided_otherwise_or_not_at_all(tmp_path):
    for other, found in each(resumed_elsewhere, 2, ["context_of_one", "context", "our_fsdp2"], tmp_path).items():
        assert relative_error(found["resumed"], found["at once"]) < 1e-5, other


LOGGED = ("train/loss", "train/aux_loss", "train/gradient_norm")


def adapted(name: str, folder: Path, strategy: str = "auto") -> tuple[list[float], Any]:
    """Return the losses of a fit of adapters, and the scores of whole rows that the trained model gives."""
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(name), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    module = FusedCausalLMModule(model, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    divided = strategy == "context"
    options: Any = {"devices": 1 + divided, "strategy": ContextStrategy() if divided else "auto", "max_epochs": 3}
    losses: list[float] = []

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: object, **__: object) -> None:
            losses.extend(x.item() for key, x in trainer.callback_metrics.items() if key in LOGGED)

    trainer = quiet_trainer(folder, **options, callbacks=[Losses()])
    rows = loader([tiny_batch(3, 19)])
    trainer.fit(module, rows)
    predicted: Any = trainer.predict(module, rows)
    return losses, predicted[0]


def test_adapters_and_routers_train_on_divided_rows_and_the_scores_are_of_whole_ones(tmp_path):
    for name, (losses, scores) in each(adapted, 2, ["llama", "mixtral"], tmp_path, "context").items():
        expected, expected_scores = adapted(name, tmp_path)
        assert len(losses) == 3 * len(LOGGED) if name == "mixtral" else 3 * (len(LOGGED) - 1)
        assert losses == pytest.approx(expected, rel=1e-6)
        for key, value in expected_scores.items():
            torch.testing.assert_close(scores[key], value)


def preferred(case: str, folder: Path) -> dict[str, float]:
    """Return what a fit of adapters on pairs has logged; without them, the model is the reference."""
    torch.manual_seed(0)
    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj", "v_proj"]))
    module = FusedPreferenceModule(model, optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0))
    strategy: Any = ContextStrategy() if case == "context" else "auto"
    options = {"devices": 2 if case == "context" else 1, "strategy": strategy, "max_epochs": 3}
    trainer = quiet_trainer(folder, **options)
    trainer.fit(module, loader([pairs(3, length=13)]))
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.slow
def test_a_model_without_its_adapters_is_the_reference_of_divided_rows(tmp_path):
    found, expected = each(preferred, 2, ["context"], tmp_path)["context"], preferred("one", tmp_path)
    assert expected["train/reward_margin"] != 0
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


REFUSED = {
    "heads": r"context_parallel_size=2 does not divide the 3 heads of LlamaAttention; choose a divisor of 3",
    "devices": r"2 devices cannot be grouped by context_parallel_size=3; choose trainer.devices",
    "recurrence": "MambaForCausalLM is not the same with its rows divided over ranks: .*; choose strategy=fsdp2",
    "convolution": "Lfm2ForCausalLM is not the same with its rows divided over ranks: the output of a token differs",
    "linear attention": "Qwen3NextForCausalLM is not the same with its rows divided over ranks",
    "several kinds": "FalconH1ForCausalLM is not the same with its rows divided over ranks",
    "positions of its own": "OPTForCausalLM is not the same with its rows divided over ranks: .* of a padded row",
    "biases": "MptForCausalLM is not the same with its rows divided over ranks",
    "encoder-decoder": "T5ForConditionalGeneration is no model of text with one",
    "plain module": "TinyBackbone is no model of transformers",
    "loss=model": "ModelInternalLoss needs whole rows of a batch, which strategy=context divides",
    "loss of one's own": "CallableLoss needs whole rows of a batch",
    "different batches": "ranks of one context-parallel group got different batches",
    "other entries": r"strategy=context divides the tokens of a batch, and a_mask is not one number for each",
    "whole": "compile=whole would be cut at every layer",
    "a policy's logits": "ScaledInTraining does something to its logits that is not the formula",
}  # fmt: skip
_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "recurrence": ("mamba", {}),
    "convolution": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "linear attention": (
        "qwen3_next",
        {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "linear_num_value_heads": 2}
        | {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    ),
    "several kinds": ("falcon_h1", {}),
    "positions of its own": ("opt", {}),
    "biases": ("mpt", {}),
    "heads": ("llama", {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3}),
}


def refused(case: str, folder: Path) -> None:
    kind, changes = _OTHERS.get(case, ("llama", {}))
    MODELS.setdefault(kind, (kind, MODELS["llama"][1]))
    model: Any = None if case in ("encoder-decoder", "plain module") else tiny_model(kind, **changes)
    batch, module, options = tiny_batch(2, 12), FusedCausalLMModule, {}
    if case == "encoder-decoder":
        model = T5ForConditionalGeneration(T5Config(vocab_size=97, d_model=32, d_kv=8, num_layers=1, num_heads=4))
        module = FusedMaskedLMModule
    elif case == "plain module":
        model = tiny_backbone()
    elif case == "loss of one's own":
        options["loss"] = lambda hidden_states, labels: hidden_states.mean()
    elif case == "loss=model":
        options["loss"] = ModelInternalLoss()
    elif case == "other entries":
        batch["a_mask"] = torch.ones(2, 3, 12)
    elif case == "a policy's logits":
        model, module = sharpen(tiny_llama(ScaledInTraining)), FusedPolicyModule
        batch["advantages"], options["loss"] = torch.ones(2, 12), PolicyLoss("ppo")
    elif case == "whole":
        options["compile"] = "whole"
    strategy = ContextStrategy(3 if case == "devices" else None)
    trainer = quiet_trainer(folder, devices=2, strategy=strategy, max_epochs=1)
    if case == "different batches":
        batch["input_ids"] = (batch["input_ids"] + trainer.global_rank) % 97
    trainer.fit(module(model, **options), loader([batch]))


@pytest.mark.slow
def test_what_cannot_be_divided_exactly_is_refused_by_name(tmp_path):
    found = each(refused, 2, REFUSED, tmp_path)
    wrong = {case: found[case] for case in REFUSED if not isinstance(found[case], Refusal)}
    assert not wrong
    for case, pattern in REFUSED.items():
        with pytest.raises(lit_fused.UserError, match=pattern):
            raise lit_fused.UserError(found[case])
