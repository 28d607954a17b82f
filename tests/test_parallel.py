"""Training with several real processes on gloo equals one process with the one large batch."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning_helpers import loader, quiet_trainer
from parallel_cases import CLIP, EPSILON, LEARNING_RATE, PER_STEP, STEPS, Case, backbone, batches
from torch import Tensor, nn
from torchrun import run
from transformers import AutoModelForCausalLM

from lit_fused import FusedCausalLMModule
from lit_fused.modules.base import weight_decay_groups
from lit_fused.parallel import clip_by_norm, total_norm

JOB = Path(__file__).with_name("parallel_job.py")
QUICK = [
    Case("fsdp2", "llama"),
    Case("fsdp2", "llama_tied"),
    Case("fsdp", "llama_tied"),
    Case("fsdp2", "gemma2", "chunked", "bf16-mixed"),
    Case("ddp", "llama_tied", "filtered"),
    Case("tp", "gemma2", "filtered", "bf16-mixed"),
    Case("tp", "llama_tied"),
    Case("tp", "qwen3"),
    Case("pp", "llama_tied"),
    Case("pp_interleaved", "qwen3"),
]
STRATEGIES = ("single", "ddp", "fsdp", "fsdp2", "tp", "fsdp2_tp", "pp", "pp_ddp", "pp_fsdp2", "pp_interleaved")
MODELS = ("llama", "llama_tied", "qwen3", "qwen3_tied", "gemma2_untied", "gemma2")
MATRIX = [  # docs/parallelism_matrix.md has all of it
    Case(strategy, model, loss, precision)
    for strategy in STRATEGIES
    for model in MODELS
    for loss in ("chunked", "cce", "standard")
    for precision in ("32-true", "bf16-mixed", "bf16-true")
    if (strategy, precision) != ("fsdp", "bf16-mixed")  # there is no autocast for it on a CPU
    if not ("tp" in strategy and loss == "cce")  # refused
] + [
    Case("tp", model, "chunked", precision)  # further plans: biases, gathered and split projections, a scale
    for model in ("mistral", "phi", "olmo2", "gpt_neox", "granite", "cohere")
    for precision in ("32-true", "bf16-mixed")
]
TESTED = [  # every strategy with every model, loss and precision, though not each with each
    case
    for case in MATRIX
    if (case.loss == "chunked") + (case.model in ("llama_tied", "gemma2")) + (case.precision == "32-true") >= 2
]
SCHEDULES = [  # beside 1F1B and Interleaved1F1B, which the matrix has
    Case(strategy, model)
    for strategy in ("pp_gpipe", "pp_bfs", "pp_zero_bubble", "pp_zbv", "pp_dualpipe")
    for model in ("llama_tied", "qwen3")
] + [Case("pp_interleaved_fsdp2", "llama_tied"), Case("pp_bfs_fsdp2", "qwen3")]

FILTERED = [Case(strategy, "llama_tied", "filtered") for strategy in STRATEGIES]


def train_here(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """One process, the model's own logits, one large batch per step."""
    model = backbone(case.model, case.layers).to(dtype)
    for name, _ in model.named_buffers():
        if name.endswith("inv_freq"):
            owner, _, attribute = name.rpartition(".")
            whole = dict(backbone(case.model, case.layers).named_buffers())[name]
            setattr(model.get_submodule(owner), attribute, whole)
    optimizer = torch.optim.AdamW(weight_decay_groups(model), lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.1)
    result: dict[str, Any] = {"losses": []}
    for step in range(STEPS):
        window = batches()[step * PER_STEP : (step + 1) * PER_STEP]
        ids, labels = (torch.cat([b[name] for b in window]) for name in ("input_ids", "labels"))
        with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16-mixed" and dtype == torch.float32):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits.to(torch.promote_types(dtype, torch.float32)), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            result["gradients"] = {n: p.grad.clone() for n, p in model.named_parameters()}
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        result["losses"].append(loss.item())
    result["weights"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    result["model"] = model
    return result


def precision_dtype(case: Case) -> torch.dtype:
    """Of the parameters."""
    return torch.bfloat16 if case.precision == "bf16-true" else torch.float32


def relative_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    assert found.keys() == truth.keys()
    difference = torch.stack([(found[n].double() - truth[n].double()).norm() for n in truth]).norm()
    return (difference / torch.stack([t.double().norm() for t in truth.values()]).norm()).item()


def result_of(case: Case, folder: Path) -> Path:
    return folder / str(case).replace(":", "_") / "result.pt"


def launch(folder: Path, what: str, cases: list[Case], timeout: float) -> None:
    for ranks in sorted({case.ranks for case in cases}):
        run(JOB, ranks, folder, what, *(case for case in cases if case.ranks == ranks), timeout=timeout)


def judge(case: Case, folder: Path) -> None:
    """The first step's gradients, the losses and the weights after three steps; then what is said and exported."""
    result = torch.load(result_of(case, folder), weights_only=False)
    truth = train_here(case, torch.float64)
    # the error of one process with the standard loss in the same precision; AdamW turns small gradients into steps
    usual = train_here(case, precision_dtype(case))
    limits = {key: 2 * relative_error(usual[key], truth[key]) for key in ("gradients", "weights")}
    limits["losses"] = 2e-2
    if case.precision == "32-true":
        limits = {"gradients": 1e-5, "weights": max(1e-5, limits["weights"]), "losses": 1e-5}
    for key in ("gradients", "weights"):
        assert relative_error(result[key], truth[key]) <= limits[key], key
    assert result["losses"] == pytest.approx(truth["losses"], rel=limits["losses"])

    exported = AutoModelForCausalLM.from_pretrained(result_of(case, folder).parent / "exported")
    for name, p in exported.named_parameters():
        assert torch.equal(p.float(), result["weights"][name].float()), name
    if result["said"] is None:
        return
    exported.eval()
    prompt, said = batches()[0]["input_ids"][:1, :4], result["said"]
    if "tp" in case.strategy and case.precision == "bf16-true":
        # sums in another order may choose another one of logits that are nearly equal
        ids = said[:, :-1]  # generate() masks what it takes for padding in the prompt, and does not count it
        mask = ((ids != exported.config.pad_token_id) | (torch.arange(8) >= 4)).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = exported(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, 3:].float()
        chosen = logits.gather(-1, said[:, 4:, None])[..., 0]
        assert (logits.amax(-1) - chosen <= 2**-6 * logits.abs().amax(-1)).all()
    else:
        assert torch.equal(exported.generate(prompt, max_new_tokens=5, do_sample=False), said)


@pytest.mark.timeout(280)
def test_ranks_equal_one_process_with_the_one_large_batch(tmp_path):
    launch(tmp_path, "run", QUICK, timeout=250)
    for case in QUICK:
        judge(case, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_most_of_the_matrix_equals_one_process(tmp_path):
    launch(tmp_path, "run", TESTED + SCHEDULES + FILTERED, timeout=1300)
    wrong = {}
    for case in TESTED + SCHEDULES + FILTERED:
        try:
            judge(case, tmp_path)
        except AssertionError as error:
            wrong[str(case)] = str(error)
    assert not wrong


RESUMED = [
    Case("fsdp2", "llama_tied"),
    Case("fsdp2_file", "llama"),
    Case("fsdp", "llama"),
    Case("tp", "llama_tied"),
    Case("tp_file", "qwen3"),
]


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "cases", [RESUMED, pytest.param([Case("fsdp2_tp", "qwen3_tied")], marks=pytest.mark.slow)], ids=["quick", "slow"]
)
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one_and_its_file_loads_anywhere(cases, tmp_path):
    launch(tmp_path, "resume", cases, timeout=250)
    for case in cases:
        result = torch.load(result_of(case, tmp_path), weights_only=False)
        assert relative_error(result["resumed"], result["at once"]) <= 1e-6, case

    for case in cases:
        if case.strategy.endswith("_file"):
            checkpoint = result_of(case, tmp_path).parent / "checkpoints" / "last.ckpt"
            module = FusedCausalLMModule(backbone(case.model))
            trainer = quiet_trainer(tmp_path, max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=CLIP)
            trainer.fit(module, loader(batches()[:4]), ckpt_path=checkpoint)
            assert trainer.current_epoch == 3


@pytest.mark.timeout(180)
def test_what_would_be_wrong_is_refused_before_training(tmp_path):
    refused = {
        Case("tp", "gpt2"): "transformers has no tensor-parallel plan for the layers of GPT2LMHeadModel",
        Case("tp", "llama_tied", "cce"): "loss=cce has no vocabulary-parallel form.*choose loss=chunked",
        Case("tp", "qwen3_wrong_plan"): "plan changes Qwen3ForCausalLM: divided over ranks, .*[qk]_norm.weight or its",
        Case("tp_unlike", "llama"): "ranks of one tensor-parallel group got different batches",
        Case("fsdp_head", "llama"): "has made a unit of Linear, to which the output layer's weight belongs",
    }
    for what in ("run", "score"):
        launch(tmp_path / what, what, list(refused), timeout=80)
        for case, message in refused.items():
            assert re.search(message, torch.load(result_of(case, tmp_path / what), weights_only=False)["refusal"])


def test_the_norm_of_sharded_gradients_counts_each_once():
    gradients = [torch.randn(5, 3), torch.randn(7)]
    expected = torch.cat([g.flatten() for g in gradients]).norm()
    torch.testing.assert_close(total_norm(gradients), expected)
    torch.testing.assert_close(clip_by_norm(gradients, 0.5), expected)
    torch.testing.assert_close(total_norm(gradients), torch.tensor(0.5), rtol=1e-5, atol=0)
