"""On a CUDA device: our head and the foreign ones against float64, their memory, and the CUDA side of the monitor."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from test_linear_cross_entropy import FEATURES, error, make, run

from lit_fused import FusedCausalLMModule, LinearCrossEntropyLoss, PeakMemoryMonitor
from lit_fused.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def upcast_standard(hidden, weight, targets, *, bias=None, scale=1.0, softcap=None, label_smoothing=0.0, z_loss=0.0):
    logits = scale * F.linear(hidden, weight).float()
    logits = logits if bias is None else logits + bias.float()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
    return loss + z_loss * (logits.logsumexp(-1) ** 2)[targets != -100].mean(), {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
def test_errors_of_the_chunked_head_are_at_most_twice_those_of_the_upcast_standard(feature, recompute, dtype):
    options = FEATURES[feature]
    tensors, targets = make(2000, 128, 5003, dtype, bias="bias" in options)
    tensors, targets = [t.detach().to(DEVICE) for t in tensors], targets.to(DEVICE)
    truth = run(linear_cross_entropy_reference, [t.double() for t in tensors], targets, **options)
    standard = run(upcast_standard, tensors, targets, **options)
    ours = run(linear_cross_entropy, tensors, targets, recompute=recompute, logits_budget_mib=4, **options)
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
        del head.weight
        head.weight = weight
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
    loss.backward()
    assert loss == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(head.weight.grad, torch.zeros_like(head.weight))


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
        linear_cross_entropy(hidden, weight, targets, logits_budget_mib=64)[0].backward()
        extra[n] = torch.cuda.max_memory_allocated() - before
        weight.grad = None
    rows_and_gradients = (64 + 4 * 64) * 2**20 + v * d * (4 + 2)  # the buffer, float32 tiles, dW twice
    assert extra[2048] < rows_and_gradients + 64 * 2**20
    assert extra[16384] - extra[2048] < 8 * 14336 * d * 4  # a few (N, D), nothing of (N, V)


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
