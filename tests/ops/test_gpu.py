"""On a CUDA device: our head and the foreign ones against float64, their memory, and the CUDA side of the monitor."""

import copy
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distillation_cases import HEADS, LOSSES, answer, as_dtype, case, in_float64, upcast
from head_cases import FEATURES, NAMES, choice, error, fused, grad_of, make, run, scored, upcast_scores, upcast_standard
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from tiny_models import ScaledInTraining

from lit_fused import (
    CrossEntropyLoss,
    FusedCausalLMModule,
    LanguageModel,
    LinearCrossEntropyLoss,
    PeakMemoryMonitor,
    UserError,
)
from lit_fused.ops import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_distillation,
    linear_distillation_reference,
    token_scores,
    token_scores_reference,
    top_items,
)

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
HIDDEN_SIZES = [96, 128, 136]  # Hopper has a path of its own up to 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("loss", LOSSES)
def test_errors_of_distillation_are_at_most_twice_those_of_upcast_logits(loss, head, dtype):
    tensors, targets, teacher, options = case(head, dtype, n=2000, d=128, v=5003)
    tensors, targets, options = [t.detach().to(DEVICE) for t in tensors], targets.to(DEVICE), options | LOSSES[loss]
    teacher = as_dtype(teacher, DEVICE)
    truth = answer(linear_distillation_reference, *in_float64(tensors, targets, teacher), **options)
    standard = answer(upcast, tensors, targets, teacher, **options)
    ours = answer(linear_distillation, tensors, targets, teacher, logits_budget_mib=8, **options)
    slack = 16 * torch.finfo(torch.float32).eps
    assert error(ours[0], truth[0]) <= 2 * error(standard[0], truth[0]) + slack
    for mine, theirs, exact in zip(ours[2], standard[2], truth[2], strict=True):
        assert error(mine, exact) <= 2 * error(theirs, exact) + slack
    halves = as_dtype(teacher, torch.bfloat16)
    mixed = answer(linear_distillation, tensors, targets, halves, **options)
    assert mixed[0].isfinite()
    assert all(gradient.isfinite().all() for gradient in mixed[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", [{}, {"recompute": True}, {"filter_eps": 0}], ids=str)
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
@pytest.mark.parametrize("feature", FEATURES)
def test_errors_of_the_chunked_head_are_at_most_twice_those_of_the_upcast_standard(feature, hidden_size, way, dtype):
    options = FEATURES[feature]
    if "filter_eps" in way:  # it does not smooth
        options = {name: value for name, value in options.items() if name != "label_smoothing"}
    tensors, targets = make(2000, hidden_size, 5003, dtype, bias="bias" in options)
    tensors, targets = [t.detach().to(DEVICE) for t in tensors], targets.to(DEVICE)
    truth = run(linear_cross_entropy_reference, [t.double() for t in tensors], targets, **options)
    standard = run(upcast_standard, tensors, targets, **options)
    ours = run(fused, tensors, targets, logits_budget_mib=8, **way, **options)
    slack = 4 * torch.finfo(torch.float32).eps
    assert error(ours[0], truth[0]) <= 2 * error(standard[0], truth[0]) + slack
    for name, value in truth[1].items():
        if name != "correct":
            assert error(ours[1][name], value) < 100 * torch.finfo(dtype).eps, name
    for mine, theirs, exact in zip(ours[2], standard[2], truth[2], strict=True):
        assert error(mine, exact) <= 2 * error(theirs, exact) + slack


# cut-cross-entropy filters its gradients and accumulates the hidden states' in bfloat16: a bound of its own, documented
FOREIGN = {"liger": 2.0, "torch_compile": 2.0, "cce": 40.0}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("impl", FOREIGN)
def test_foreign_backends_give_the_standards_loss_and_gradients_in_the_inputs_dtypes(impl, autocast):
    dtype = torch.float32 if autocast else torch.bfloat16
    tensors, targets = make(512, 128, 1024, dtype)
    hidden, weight = (0.3 * t.detach().to(DEVICE) for t in tensors)
    targets = targets.to(DEVICE)
    labels = F.pad(targets[None], (1, 0), value=-100)  # so that shifting gives the targets
    padded = F.pad(hidden, (0, 0, 0, 1))[None]

    def through_the_loss(hidden, weight, targets, **_):
        head = torch.nn.Linear(128, 1024, bias=False, device="meta")
        head.weight = torch.nn.Parameter(weight.detach())
        head.weight.register_post_accumulate_grad_hook(lambda parameter: setattr(weight, "grad", parameter.grad))
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            return LinearCrossEntropyLoss(impl, head)(hidden, labels), {}

    def standard(hidden, weight, targets, **_):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            return F.cross_entropy(F.linear(hidden[0, :-1], weight).float(), targets), {}

    def reference(hidden, weight, targets, **_):
        return linear_cross_entropy_reference(hidden[0, :-1], weight, targets)

    truth = run(reference, [padded.double(), weight.double()], targets)
    theirs = run(standard, [padded, weight], targets)
    found = run(through_the_loss, [padded, weight], targets)
    assert found[0].dtype == torch.float32
    assert error(found[0], truth[0]) <= 2 * error(theirs[0], truth[0]) + 1e-3
    for mine, other, exact in zip(found[2], theirs[2], truth[2], strict=True):
        assert mine.dtype == dtype
        assert error(mine, exact) <= FOREIGN[impl] * error(other, exact)


@pytest.mark.parametrize("impl", ["chunked", "liger", "torch_compile", "cce"])
def test_all_labels_ignored_is_zero_and_never_nan(impl):
    head = torch.nn.Linear(64, 512, bias=False, device=DEVICE, dtype=torch.bfloat16)
    hidden = torch.randn(2, 64, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    loss = LinearCrossEntropyLoss(impl, head)(hidden, torch.full((2, 64), -100, device=DEVICE))
    (loss / 0).backward()  # as a sum over no tokens that is divided by their number
    assert loss == 0
    assert torch.equal(grad_of(hidden), torch.zeros_like(hidden))
    assert torch.equal(grad_of(head.weight), torch.zeros_like(head.weight))


def trained_like(n: int, d: int, v: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Peaked rows whose targets follow Zipf's law: frequent entries get gradient from everywhere."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    weight = torch.randn(v, d, device=DEVICE, generator=generator) / d**0.5
    frequency = 1 / torch.arange(1, v + 1, device=DEVICE)
    targets = torch.multinomial(frequency, n, replacement=True, generator=generator)
    noise = torch.randn(n, d, device=DEVICE, generator=generator)
    hidden = 2 * noise + (9 + 2 * noise[:, :1]) * weight[targets]
    targets[::10] = -100
    return [hidden.bfloat16(), weight.bfloat16()], targets


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"z_loss": 1e-3}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("state", ["trained", "initial", "peaked"])
@pytest.mark.parametrize("hidden_size", [64, 128, 512])
def test_in_bfloat16_errors_are_at_most_those_of_the_upcast_standard_and_a_tenth(hidden_size, state, options):
    tensors, targets = trained_like(4096, hidden_size, 30_000)
    if state == "initial":
        tensors[1] = (0.02 * torch.randn_like(tensors[1]).float()).bfloat16()
    if state == "peaked":
        tensors[0][5] *= 20
    kept = {k: v for k, v in options.items() if k != "recompute"}
    truth = run(linear_cross_entropy_reference, [t.double() for t in tensors], targets, **kept)
    standard = run(upcast_standard, tensors, targets, **kept)
    ours = run(linear_cross_entropy, tensors, targets, logits_budget_mib=130, **options)  # two chunks
    assert error(ours[0], truth[0]) <= 1.1 * error(standard[0], truth[0]) + 1e-6
    for name, value in truth[1].items():
        assert error(ours[1][name], value) < 1e-3, name
    for mine, theirs, exact in zip(ours[2], standard[2], truth[2], strict=True):
        assert error(mine, exact) <= 1.1 * error(theirs, exact)


def test_float32_accumulation_is_more_precise_where_chunks_are_many():
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden, weight = (torch.randn(n, 256, device=DEVICE, generator=generator) for n in (8192, 2000))
    tensors = [(hidden + 1).bfloat16(), (weight / 16).bfloat16()]  # all chunks' gradients point the same way
    targets = torch.randint(2000, (8192,), device=DEVICE, generator=generator)
    truth = run(linear_cross_entropy_reference, [t.double() for t in tensors], targets)[2][1]

    def error_with(**options):
        return error(run(linear_cross_entropy, tensors, targets, logits_budget_mib=1, **options)[2][1], truth)

    precise, in_bfloat16 = (error_with(float32_accumulation=choice) for choice in (True, False))
    assert precise < 0.7 * in_bfloat16
    assert error_with() == precise  # 32 chunks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
@pytest.mark.parametrize("feature", FEATURES)
def test_per_token_gradients_are_those_of_the_reference(feature, hidden_size, dtype):
    options = FEATURES[feature]
    tensors, targets = make(1000, hidden_size, 3001, dtype, bias="bias" in options)
    tensors, targets = [t.detach().to(DEVICE) for t in tensors], targets.to(DEVICE)
    grad = torch.randn(targets.shape, device=DEVICE)
    reference = [t.double() for t in tensors]
    truth = run(linear_cross_entropy_reference, reference, targets, grad.double(), reduction="none", **options)
    ours = run(linear_cross_entropy, tensors, targets, grad, reduction="none", logits_budget_mib=1, **options)
    assert error(ours[0], truth[0]) < 30 * torch.finfo(dtype).eps
    for mine, exact in zip(ours[2], truth[2], strict=True):
        assert error(mine, exact) < 30 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [NAMES, ("log_prob",), ("entropy",), ("selected",)], ids="-".join)
@pytest.mark.parametrize("feature", ["plain", "everything"])
def test_token_scores_and_their_gradients_are_as_near_to_float64_as_those_of_rounded_logits(feature, wanted, dtype):
    options = {} if feature == "plain" else {"bias": True, "scale": 0.7, "softcap": 20.0}
    tensors, targets = trained_like(2000, 256, 8_000)
    bias = [torch.randn(8_000, device=DEVICE)] if feature == "everything" else []
    tensors = [t.to(dtype) for t in tensors + bias]
    selected = choice(targets, 8_000)
    expected, truth = scored(
        token_scores_reference, [t.double() for t in tensors], targets, selected, wanted, **options
    )
    standard, usual = scored(upcast_scores, tensors, targets, selected, wanted, **options)
    found, gradients = scored(token_scores, tensors, targets, selected, wanted, **options)  # two chunks
    epsilon = torch.finfo(torch.float32).eps
    for name in NAMES:
        usual_error = error(getattr(standard, name), getattr(expected, name))
        assert error(getattr(found, name), getattr(expected, name)) <= 1.1 * usual_error + 32 * epsilon, name
    assert (found.top1 == expected.top1).float().mean() >= (standard.top1 == expected.top1).float().mean() - 1e-3
    for ours, theirs, exact in zip(gradients, usual, truth, strict=True):
        assert ours.dtype == dtype
        assert error(ours, exact) <= (1.1 if feature == "plain" else 2) * error(theirs, exact) + 32 * epsilon


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [8000 + rest for rest in range(1, 8)])
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"label_smoothing": 0.1}], ids=str)
def test_a_vocabulary_of_any_length_has_at_most_the_errors_of_the_standard(options, vocabulary, dtype):
    tensors, targets = trained_like(2000, 256, vocabulary)
    tensors = [t.to(dtype) for t in tensors]
    smoothed = {name: value for name, value in options.items() if name == "label_smoothing"}
    truth = run(linear_cross_entropy_reference, [t.double() for t in tensors], targets, **smoothed)
    standard = run(upcast_standard, tensors, targets, **smoothed)
    found = run(linear_cross_entropy, tensors, targets, logits_budget_mib=8, **options)
    for mine, theirs, exact in zip(found[2], standard[2], truth[2], strict=True):
        assert error(mine, exact) <= 1.1 * error(theirs, exact)
    items = top_items(*tensors, 3, targets=targets, logits_budget_mib=8)
    scores = tensors[0].double() @ tensors[1].double().T
    torch.testing.assert_close(items.scores.double(), scores.topk(3).values, rtol=1e-4, atol=1e-4)


def test_float32_weights_under_autocast_get_float32_gradients_as_exact_as_the_standards():
    tensors, targets = trained_like(2048, 256, 20_000)
    tensors = [t.float() for t in tensors]

    def under_autocast(function):
        def call(*arguments, **options):
            with torch.autocast("cuda", torch.bfloat16):
                return function(*arguments, **options)

        return call

    truth = run(linear_cross_entropy_reference, [t.double() for t in tensors], targets)
    standard = run(under_autocast(upcast_standard), tensors, targets)
    ours = run(under_autocast(linear_cross_entropy), tensors, targets)
    for mine, theirs, exact in zip(ours[2], standard[2], truth[2], strict=True):
        assert mine.dtype == torch.float32
        assert error(mine, exact) <= 1.1 * error(theirs, exact)


def step(tensors: list[torch.Tensor], targets: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    if options.get("scores"):
        selected = targets.clamp(min=-1)[:, None] + torch.arange(3, device=DEVICE)
        *scores, _ = token_scores(leaves[0], leaves[1], targets, selected=selected)
        loss = torch.cat([numbers.flatten() for numbers in scores]).sum()
    else:
        loss, _ = fused(leaves[0], leaves[1], targets, **options)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


CALLS = [{}, {"recompute": True}, {"label_smoothing": 0.1}, {"filter_eps": 2**-10}, {"scores": True}]


@pytest.mark.parametrize("options", CALLS, ids=str)
def test_a_step_waits_for_nothing_and_its_memory_does_not_grow(options):
    tensors, targets = trained_like(2000, 128, 10_000)
    step(tensors, targets, **options)
    torch.cuda.synchronize()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step(tensors, targets, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_reserved() == reserved


@pytest.mark.parametrize("options", CALLS, ids=str)
def test_a_step_can_be_captured_in_a_cuda_graph_and_replayed_on_other_data(options):
    tensors, targets = trained_like(2000, 128, 10_000)
    hidden, other_targets = tensors[0].flip(0), targets.flip(0)
    expected = step([hidden, tensors[1]], other_targets, **options)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(tensors, targets, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(tensors, targets, **options)
    tensors[0].copy_(hidden)
    targets.copy_(other_targets)
    graph.replay()
    for found, exact in zip(results, expected, strict=True):
        assert torch.equal(found, exact)


@pytest.mark.parametrize("options", CALLS, ids=str)
def test_results_are_the_same_in_every_run(options):
    tensors, targets = trained_like(4096, 256, 20_000)
    first = step(tensors, targets, **options)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(step(tensors, targets, **options), first, strict=True))


@pytest.mark.parametrize("feature", ["plain", "z_loss", "everything"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_filter_does_in_bfloat16_on_the_device_what_it_does_in_float64(feature, reduction):
    """Two groups of rows, of which the second is ragged: to the error that the exact head has."""
    options = FEATURES[feature] | {"label_smoothing": 0.0, "reduction": reduction}
    tensors, targets = trained_like(3000, 256, 20_000)
    tensors[0] *= 1.5  # so peaked that most rows are within the filter's bounds
    if "bias" in options:
        tensors.append(torch.randn(20_000, device=DEVICE, dtype=torch.bfloat16))
    grad = torch.linspace(0.5, 2, len(targets), device=DEVICE) if reduction == "none" else None
    truth = run(fused, [t.double() for t in tensors], targets, grad, filter_eps=2**-10, **options)
    options["drop_ignored"] = True  # as in float64, where groups are made of what is left
    ours = run(fused, tensors, targets, grad, filter_eps=2**-10, **options)
    exact = run(fused, tensors, targets, grad, **options)
    exact_truth = run(fused, [t.double() for t in tensors], targets, grad, **options)
    for name in ("dropped_mass", "kept_columns", "exact_tokens"):
        assert ours[1][name].item() == pytest.approx(truth[1][name].item(), rel=0.01), name
    assert truth[1]["dropped_mass"] > 0 or "softcap" in options
    for mine, expected, theirs, right in zip(ours[2], truth[2], exact[2], exact_truth[2], strict=True):
        assert error(mine, expected) <= 2 * error(theirs, right)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])  # the second runs in CUDA graphs
def test_a_compiled_caller_has_no_graph_break(mode):
    tensors, targets = trained_like(512, 128, 5000)
    tensors = [tensor.requires_grad_() for tensor in tensors]

    def caller(hidden, weight):
        hidden = hidden * 1.5
        loss = 2 * linear_cross_entropy(hidden, weight, targets)[0]
        return loss + token_scores(hidden, weight, targets).entropy.mean()

    expected = caller(*tensors)
    gradients = torch.autograd.grad(expected, tensors)
    compiled = torch.compile(caller, fullgraph=True, mode=mode)
    for _ in range(3):
        loss = compiled(*tensors)
        assert torch.allclose(loss, expected, rtol=1e-2)
        for mine, theirs in zip(torch.autograd.grad(loss, tensors), gradients, strict=True):
            assert error(mine, theirs) <= 0.01


def in_parts(tensors: list[torch.Tensor], targets: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """Sums of calls with few tokens each."""
    loss, d_hidden, d_weight = torch.zeros((), device=DEVICE), [], torch.zeros_like(tensors[1], dtype=torch.float32)
    for start in range(0, len(targets), rows):
        part = slice(start, start + rows)
        found = step([tensors[0][part], tensors[1]], targets[part], reduction="sum")
        loss += found[0]
        d_hidden.append(found[1])
        d_weight += found[2].float()
    return [loss, torch.cat(d_hidden), d_weight]


@pytest.mark.parametrize(
    ("n", "hidden_size", "options"),
    [
        (16_384, 136, {}),
        (16_384, 64, {}),
        (20_480, 136, {"logits_budget_mib": 8192}),
        (20_480, 64, {"logits_budget_mib": 8192, "label_smoothing": 1e-30}),
    ],
    ids=["default", "narrow", "hopper", "logits"],
)
def test_more_than_two_to_the_31_logits_are_right(n, hidden_size, options):
    """16,384 x 256,000 in all, and 10,240 x 256,000 in one chunk, are beyond 32-bit offsets."""
    tensors, targets = trained_like(n, hidden_size, 256_000)
    expected = in_parts(tensors, targets, 1024)
    found = step(tensors, targets, reduction="sum", **options)
    for mine, exact in zip(found, expected, strict=True):
        assert error(mine, exact) < 6e-3


def test_a_label_outside_the_vocabulary_stops_the_run_which_says_what_labels_may_be():
    program = """
import torch
from lit_fused.ops import linear_cross_entropy
hidden, weight = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (512, 1000))
targets = torch.arange(512, device="cuda") + 600
linear_cross_entropy(hidden, weight, targets)[0].backward()
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "labels must lie in [0, 1000)" in done.stdout + done.stderr


def test_extra_memory_is_a_chunk_and_the_gradients_and_does_not_grow_with_tokens_by_vocabulary():
    d, v = 256, 100_000
    weight = torch.randn(v, d, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    extra = {}
    for n in (2048, 16384):
        hidden = torch.randn(n, d, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(v, (n,), device=DEVICE)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(hidden, weight, targets, logits_budget_mib=64, float32_accumulation=False)[0].backward()
        extra[n] = torch.cuda.max_memory_allocated() - before
        weight.grad = None
    assert extra[2048] < 64 * 2**20 + 2 * v * d + 2 * 2048 * d + 2**21
    assert extra[16384] - extra[2048] < 2 * 14336 * d + 2**21  # the hidden states' gradient and a few numbers per token


def test_a_small_hidden_size_needs_the_gradients_and_no_chunk():
    tensors, targets = trained_like(8192, 64, 300_000)
    leaves = [t.detach().requires_grad_() for t in tensors]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(leaves[0], leaves[1], targets)[0].backward()
    gradients = 2 * (8192 + 300_000) * 64
    products = 4 * 3 * 8192 * 64  # three programs' parts
    counts = 12 * 300_000  # of targets
    assert torch.cuda.max_memory_allocated() - before < gradients + products + counts + 2**22


def test_evaluation_takes_less_than_300_mib_beside_a_vocabulary_of_256000():
    tensors, targets = trained_like(8192, 256, 256_000)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        linear_cross_entropy(tensors[0], tensors[1], targets)
    assert torch.cuda.max_memory_allocated() - before < 300 * 2**20


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "bf16-true"])
def test_a_fit_on_the_device_logs_allocated_and_reserved_peaks_per_phase(precision, tmp_path):
    monitor = PeakMemoryMonitor()
    module = FusedCausalLMModule(tiny_llama(vocab_size=20_000), optimizer=partial(torch.optim.AdamW, lr=1e-2))
    trainer = quiet_trainer(tmp_path, max_steps=4, accelerator="gpu", precision=precision, callbacks=[monitor])
    trainer.fit(module, loader(ragged_batches(5, batch=8)))
    metrics: dict[str, Any] = trainer.callback_metrics
    assert metrics["train/loss"].isfinite()
    assert metrics["memory/peak_reserved_gib"] >= metrics["memory/peak_allocated_gib"] > 0
    assert set(monitor.peaks) == {"forward", "backward", "optimizer"}


PRECISIONS = ["32-true", "16-mixed", "bf16-mixed", "bf16-true"]
TRAINABLE = [(i, p) for i in ["chunked", *FOREIGN] for p in PRECISIONS if (i, p) != ("cce", "32-true")]


@pytest.mark.parametrize(("impl", "precision"), TRAINABLE)
def test_the_first_batch_passes_its_check_and_a_model_that_changes_its_logits_in_training_does_not(
    impl, precision, tmp_path
):
    loss = LinearCrossEntropyLoss(impl)
    trainer = partial(quiet_trainer, tmp_path, max_steps=2, accelerator="gpu", precision=precision)
    batches = loader(ragged_batches(2, batch=8))
    sizes: dict[str, Any] = {"vocab_size": 1024, "hidden_size": 64, "initializer_range": 0.2}  # cut-cross-entropy's
    trainer().fit(FusedCausalLMModule(tiny_llama(**sizes), loss), batches)
    if precision != "bf16-true":  # the class is made by hand, in float32
        changed = ScaledInTraining(tiny_llama(**sizes).config)
        with pytest.raises(UserError, match="does something to its logits that is not the formula"):
            trainer().fit(FusedCausalLMModule(changed, loss), batches)


@pytest.mark.parametrize("way", [torch.compile, lambda model: model.compile() or model])
def test_a_backbone_compiled_by_inductor_gives_the_loss_and_gradients_of_the_plain_one(way):
    batch = {name: value.to(DEVICE) for name, value in ragged_batches(1, batch=4)[0].items()}
    plain, inner = tiny_llama().to(DEVICE), tiny_llama().to(DEVICE)  # pyright: ignore[reportArgumentType]
    expected = LanguageModel(plain, LinearCrossEntropyLoss())(batch).loss
    expected.backward()
    model = LanguageModel(way(inner), LinearCrossEntropyLoss())
    model.prepare(DEVICE)
    model(batch).loss.backward()
    inner.zero_grad()
    found = model(batch).loss
    found.backward()
    whole = torch.stack([grad_of(p).norm() for p in plain.parameters()]).norm()
    rounding = 64 * torch.finfo(torch.float32).eps
    assert abs(found - expected) <= rounding * expected
    for (name, p), q in zip(plain.named_parameters(), inner.parameters(), strict=True):
        assert (grad_of(p) - grad_of(q)).norm() <= rounding * whole, name


@pytest.mark.parametrize("rank", [4, 16])
def test_lora_on_the_output_layer_has_gradients_as_near_to_float64_as_those_of_pefts_own_forward(rank):
    peft = pytest.importorskip("peft")
    model = tiny_llama(vocab_size=5003, hidden_size=128, initializer_range=0.05)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=["lm_head", "q_proj"]))
    for name, p in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)
    batch = {name: value.to(DEVICE) for name, value in ragged_batches(1, batch=64)[0].items()}

    def gradients(dtype: torch.dtype, loss: Any) -> list[torch.Tensor]:
        twin = copy.deepcopy(adapted).to(DEVICE, dtype)
        LanguageModel(twin, loss)(batch).loss.backward()
        return [p.grad for p in twin.parameters() if p.requires_grad]

    truth = gradients(torch.float64, CrossEntropyLoss())
    standard = gradients(torch.bfloat16, CrossEntropyLoss())
    ours = gradients(torch.bfloat16, LinearCrossEntropyLoss())
    assert len(ours) == len(truth) == 6
    for mine, theirs, exact in zip(ours, standard, truth, strict=True):
        assert error(mine, exact) <= 1.5 * error(theirs, exact)
