"""Training with several real processes on gloo equals one process with the one large batch."""

import re

import pytest
import torch
import torch.nn.functional as F
from errors_of import relative_error
from head_cases import grad_of
from lightning_helpers import loader, quiet_trainer
from parallel_cases import CLIP, PER_STEP, STEPS, Case, backbone, batches
from parallel_fits import COMPILED, MATRIX, STRATEGIES, judge, launch, result_of

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
    Case(strategy, model)
    for strategy in ("pp_gpipe", "pp_bfs", "pp_zero_bubble", "pp_zbv", "pp_dualpipe")
    for model in ("llama_tied", "qwen3")
] + [Case("pp_interleaved_fsdp2", "llama_tied"), Case("pp_bfs_fsdp2", "qwen3")]

FILTERED = [Case(strategy, "llama_tied", "filtered") for strategy in STRATEGIES]
FILTERED += [Case("tp", "gemma2", "filtered", "bf16-mixed")]
PIPELINES = [case for case in TESTED if case.is_pipeline]
SHARDED = [case for case in TESTED if "fsdp" in case.strategy and not case.is_pipeline]
OTHERS = [case for case in TESTED if case not in PIPELINES + SHARDED]
SHARDED += [Case("fsdp2_kept", "llama"), Case("fsdp2_kept", "llama_tied")]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cases",
    [PIPELINES, SCHEDULES, SHARDED, OTHERS, FILTERED],
    ids=["pipelines", "schedules", "sharded", "others", "filtered"],
)
def test_most_of_the_matrix_equals_one_process(cases, tmp_path):
    launch(tmp_path, "run", cases, timeout=800)
    wrong = {}
    for case in cases:
        try:
            judge(case, tmp_path)
        except AssertionError as error:
            wrong[str(case)] = str(error)
    assert not wrong


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.timeout(280)
def test_compiled_layers_on_two_ranks_equal_one_process_without(tmp_path):
    cases = [case for case in COMPILED if case.strategy in ("ddp", "fsdp2", "pp")]
    cases += [case for case in COMPILED if case.strategy == "tp"][:1]
    launch(tmp_path, "run", cases, timeout=250)
    for case in cases:
        judge(case, tmp_path)


MASKED = [Case(strategy, "masked_eurobert_tied") for strategy in ("ddp", "fsdp2", "tp", "pp")]
MASKED += [Case("fsdp2", "masked_modernbert"), Case("pp", "masked_eurobert")]
MASKED_REFUSALS = {
    Case("pp", "masked_modernbert"): "strategy=pp cannot divide ModernBertForMaskedLM",
    Case("tp", "masked_modernbert"): "transformers' tensor-parallel plan of ModernBertForMaskedLM has no layers",
}


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_masked_language_models_on_two_ranks_equal_one_process(tmp_path):
    launch(tmp_path, "run", [*MASKED, *MASKED_REFUSALS], timeout=250)
    for case in MASKED:
        judge(case, tmp_path)
    for case, reason in MASKED_REFUSALS.items():
        refusal = torch.load(result_of(case, tmp_path), weights_only=False)["refusal"]
        assert reason in refusal, refusal


RESUMED = [
    Case("fsdp2", "llama_tied"),
    Case("fsdp2_kept", "llama"),
    Case("tp", "llama_tied"),
    Case("tp", "qwen3"),
]


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("cases", [RESUMED, [Case("fsdp2_tp", "qwen3_tied")]], ids=["two ranks", "four ranks"])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one_and_its_file_loads_anywhere(cases, tmp_path):
    launch(tmp_path, "resume", cases, timeout=250)
    for case in cases:
        result = torch.load(result_of(case, tmp_path), weights_only=False)
        assert relative_error(result["resumed"], result["at once"]) <= 1e-6, case

    for case in cases:
        if case.strategy == "fsdp2_kept":
            checkpoint = result_of(case, tmp_path).parent / "checkpoints" / "last.ckpt"
            module = FusedCausalLMModule(backbone(case.model))
            trainer = quiet_trainer(tmp_path, max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=CLIP)
            trainer.fit(module, loader(batches()[:4]), ckpt_path=checkpoint)
            assert trainer.current_epoch == 3


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_parameters_that_no_optimiser_has_are_neither_counted_nor_scaled(tmp_path):
    cases = [Case(strategy, "llama") for strategy in ("ddp", "fsdp2", "tp", "pp_gpipe")]
    launch(tmp_path, "partial", cases, timeout=150)
    for case in cases:
        model = backbone(case.model, case.layers).double()
        parts = {n: p for n, p in model.named_parameters() if "q_proj" in n or "lm_head" in n}
        start, left = {n: p.detach().clone() for n, p in model.named_parameters()}, {}
        for step in range(STEPS):
            window = batches()[step * PER_STEP : (step + 1) * PER_STEP]
            ids, labels = (torch.cat([b[name] for b in window]) for name in ("input_ids", "labels"))
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
            model.zero_grad()
            loss.backward()
            for name, p in model.named_parameters():
                if name not in parts:
                    left[name] = left.get(name, 0) + grad_of(p) / 4096 / case.data_parallel
                p.grad = grad_of(p) / (labels[:, 1:] != -100).sum()
            torch.nn.utils.clip_grad_norm_(parts.values(), CLIP)
            torch.optim.SGD(parts.values(), lr=1.0).step()
        found = torch.load(result_of(case, tmp_path), weights_only=False)
        changes = {n: p - start[n] for n, p in found["weights"].items()}
        assert relative_error(changes, {n: p - start[n] for n, p in model.named_parameters()}) < 1e-4, case
        assert relative_error({n: found["left"][n] for n in left}, left) < 1e-4, case


@pytest.mark.timeout(180)
def test_what_would_be_wrong_is_refused_before_training(tmp_path):
    refused = {
        Case("tp", "gpt2"): "transformers' tensor-parallel plan of GPT2LMHeadModel has no layers",
        Case("tp", "llama_tied", "cce"): "loss=cce has no vocabulary-parallel form.*choose loss=chunked",
        Case("tp", "qwen3_wrong_plan"): "plan changes Qwen3ForCausalLM: divided over ranks, .*[qk]_norm.weight or its",
        Case("tp_unlike", "llama"): "ranks of one tensor-parallel group got different batches",
    }
    for what in ("run", "score"):
        launch(tmp_path / what, what, list(refused), timeout=80)
        for case, message in refused.items():
            assert re.search(message, torch.load(result_of(case, tmp_path / what), weights_only=False)["refusal"])


def test_the_norm_of_sharded_gradients_counts_each_once():
    gradients = [torch.randn(5, 3), torch.randn(7)]
    expected = torch.cat([g.flatten() for g in gradients]).norm()
    torch.testing.assert_close(total_norm(gradients), expected)
    clip_to_norm(gradients, expected, 0.5)
    torch.testing.assert_close(total_norm(gradients), torch.tensor(0.5), rtol=1e-5, atol=0)
