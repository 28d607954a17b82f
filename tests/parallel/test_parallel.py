"""Training with several real processes on gloo equals one process with the one large batch."""

import re

import pytest
import torch
from errors_of import relative_error
from lightning_helpers import loader, quiet_trainer
from parallel_cases import CLIP, Case, backbone, batches
from parallel_fits import COMPILED, MATRIX, STRATEGIES, fit, folder_of, judge, launch, resume

from lit_fused import FusedCausalLMModule
from lit_fused.parallel import clip_to_norm, total_norm

TWO_WAYS = ("fsdp2_tp", "pp_ddp", "pp_fsdp2")  # every model is tested with each of the two alone
TESTED = [  # every strategy with every model, loss and precision, each of which one model shows
    case
    for case in MATRIX
    if (
        (case.loss, case.precision) == ("chunked", "32-true")
        and (case.strategy not in TWO_WAYS or case.model in ("llama_tied", "qwen3"))
    )
    or (case.model, case.loss, case.precision)
    in {
        ("llama_tied", "cce", "32-true"),
        ("llama_tied", "chunked", "bf16-true"),
        ("gemma2", "standard", "32-true"),
        ("gemma2", "chunked", "bf16-mixed"),
    }
]
SCHEDULES = [  # beside 1F1B and Interleaved1F1B, which the matrix has
    Case(strategy, model) for strategy in ("pp_gpipe", "pp_bfs") for model in ("llama_tied", "qwen3")
] + [Case("pp_interleaved_fsdp2", "llama_tied"), Case("pp_bfs_fsdp2", "qwen3")]

FILTERED = [Case(strategy, "llama_tied", "filtered") for strategy in STRATEGIES]
FILTERED += [Case("tp", "gemma2", "filtered", "bf16-mixed")]
PIPELINES = [case for case in TESTED if case.is_pipeline]
SHARDED = [case for case in TESTED if "fsdp" in case.strategy and not case.is_pipeline]
OTHERS = [case for case in TESTED if case not in PIPELINES + SHARDED]
SHARDED += [Case("fsdp2_kept", "llama"), Case("fsdp2_kept", "llama_tied")]
SHARDED += [c for c in MATRIX if (c.strategy, c.loss) == ("fsdp2_policy", "chunked") and c not in TESTED]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cases",
    [PIPELINES, SCHEDULES, SHARDED, OTHERS, FILTERED],
    ids=["pipelines", "schedules", "sharded", "others", "filtered"],
)
def test_most_of_the_matrix_equals_one_process(cases, tmp_path):
    wrong = {}
    for case, found in launch(fit, cases, tmp_path, timeout=800).items():
        try:
            judge(case, found, tmp_path)
        except AssertionError as error:
            wrong[str(case)] = str(error)
    assert not wrong


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_compiled_layers_on_two_ranks_equal_one_process_without(tmp_path):
    cases = [case for case in COMPILED if case.strategy in ("ddp", "fsdp2", "pp")]
    cases += [case for case in COMPILED if case.strategy == "tp"][:1]
    for case, found in launch(fit, cases, tmp_path, timeout=250).items():
        judge(case, found, tmp_path)


MASKED = [Case(strategy, "masked_eurobert_tied") for strategy in ("ddp", "fsdp2", "tp", "pp")]
MASKED += [Case("fsdp2", "masked_modernbert"), Case("pp", "masked_eurobert")]
MASKED_REFUSALS = {
    Case("pp", "masked_modernbert"): "strategy=pp cannot divide ModernBertForMaskedLM",
    Case("tp", "masked_modernbert"): "transformers' tensor-parallel plan of ModernBertForMaskedLM has no layers",
}


@pytest.mark.slow
def test_masked_language_models_on_two_ranks_equal_one_process(tmp_path):
    found = launch(fit, [*MASKED, *MASKED_REFUSALS], tmp_path, timeout=250)
    for case in MASKED:
        judge(case, found[case], tmp_path)
    for case, reason in MASKED_REFUSALS.items():
        assert reason in found[case]


RESUMED = [Case("fsdp2", "llama_tied"), Case("fsdp2_kept", "llama"), Case("tp", "llama_tied"), Case("tp", "qwen3")]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [RESUMED, [Case("fsdp2_tp", "qwen3_tied")]], ids=["two ranks", "four ranks"])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one_and_its_file_loads_anywhere(cases, tmp_path):
    for case, result in launch(resume, cases, tmp_path, timeout=250).items():
        assert relative_error(result["resumed"], result["at once"]) <= 1e-6, case

    for case in cases:
        if case.strategy == "fsdp2_kept":
            checkpoint = folder_of(case, tmp_path) / "checkpoints" / "last.ckpt"
            module = FusedCausalLMModule(backbone(case.model))
            trainer = quiet_trainer(tmp_path, max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=CLIP)
            trainer.fit(module, loader(batches()[:4]), ckpt_path=checkpoint)
            assert trainer.current_epoch == 3


def test_what_would_be_wrong_is_refused_before_training(tmp_path):
    refused = {
        Case("tp", "gpt2"): "transformers' tensor-parallel plan of GPT2LMHeadModel has no layers",
        Case("tp", "llama_tied", "cce"): "loss=cce has no vocabulary-parallel form.*choose loss=chunked",
        Case("tp", "qwen3_wrong_plan"): "plan changes Qwen3ForCausalLM: divided over ranks, .*[qk]_norm.weight or its",
        Case("tp_unlike", "llama"): "ranks of one tensor-parallel group got different batches",
    }
    for case, found in launch(fit, [*refused], tmp_path, timeout=80).items():
        assert re.search(refused[case], found)


def test_the_norm_of_sharded_gradients_counts_each_once():
    gradients = [torch.randn(5, 3), torch.randn(7)]
    expected = torch.cat([g.flatten() for g in gradients]).norm()
    torch.testing.assert_close(total_norm(gradients), expected)
    clip_to_norm(gradients, expected, 0.5)
    torch.testing.assert_close(total_norm(gradients), torch.tensor(0.5), rtol=1e-5, atol=0)
