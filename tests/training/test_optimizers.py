"""Optimisers: one process, and several against it; what a step runs on distributed tensors."""

import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from errors_of import relative_error
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from parallel_cases import CLIP, EPSILON, LEARNING_RATE, PER_STEP, Case, backbone, batches
from parallel_fits import fit, launch, resume
from ranks import each
from tiny_models import tiny_batch, tiny_model
from torch.optim import _muon as torch_muon
from torch.utils.data import DataLoader, IterableDataset
from transformers import get_constant_schedule

from lit_fused import FusedCausalLMModule, UserError
from lit_fused.data import SyntheticDataModule
from lit_fused.parallel import FSDP2Strategy
from lit_fused.training import (
    MuonWithAdamW,
    constant_with_warmup,
    cosine_with_warmup,
    linear_with_warmup,
    warmup_stable_decay,
)
from lit_fused.training.optimizers import build_optimizer

MUON = partial(MuonWithAdamW, lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.1)
ADAFACTOR = partial(torch.optim.Adafactor, lr=LEARNING_RATE, weight_decay=0.1)
FUSED = partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.1, fused=True)
OPTIMIZERS: dict[str, Any] = {"muon": MUON, "adafactor": ADAFACTOR, "fused": FUSED}


def fitted(folder: Path, optimizer: Any, model: str = "llama", layers: int = 2, precision: Any = "32-true") -> Any:
    module = FusedCausalLMModule(backbone(model, layers), None, optimizer, get_constant_schedule)
    options: dict[str, Any] = {"accumulate_grad_batches": PER_STEP, "gradient_clip_val": CLIP, "max_epochs": 1}
    quiet_trainer(folder, precision=precision, **options).fit(module, loader(batches()))
    return module


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().double() for name, p in module.backbone.named_parameters()}


def exactly_orthogonal(grad: torch.Tensor, coefficients: Any, steps: int, eps: float) -> torch.Tensor:
    """torch's Newton-Schulz iteration, which it runs in bfloat16, in float64."""
    a, b, c = coefficients
    x = grad.double().T if grad.size(0) > grad.size(1) else grad.double()
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


def test_muon_steps_hidden_matrices_and_adamw_the_rest(tmp_path):
    module = fitted(tmp_path, MUON, "llama_tied")
    names = {id(p): name for name, p in module.backbone.named_parameters()}
    optimizer: Any = module.trainer.optimizers[0]
    by = {name: [] for name in ("muon", "adamw")}
    for group in optimizer.param_groups:
        by[group["algorithm"]] += [names[id(p)] for p in group["params"]]
    assert sorted([*by["muon"], *by["adamw"]]) == sorted(names.values())
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in by["muon"]} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert "model.embed_tokens.weight" in by["adamw"]
    assert {"momentum_buffer"} == {*optimizer.state[module.backbone.get_parameter(by["muon"][0])]}

    steps = [(group["algorithm"], group["params"], group["weight_decay"]) for group in optimizer.param_groups]
    assert {(name, decay) for name, _, decay in steps} == {("muon", 0.1), ("adamw", 0.0)}
    untied = fitted(tmp_path, MUON)
    decaying = [g["params"] for g in untied.trainer.optimizers[0].param_groups if g["weight_decay"] == 0.1]
    (of_adamw,) = (params for params in decaying if any(p is untied.backbone.lm_head.weight for p in params))
    assert len(of_adamw) == 1


def test_one_step_of_muon_is_that_of_torchs_own_two_optimisers():
    torch.manual_seed(0)
    matrix, gain = torch.nn.Parameter(torch.randn(8, 6)), torch.nn.Parameter(torch.randn(6))
    twins = [torch.nn.Parameter(p.detach().clone()) for p in (matrix, gain)]
    ours = MuonWithAdamW([{"params": [matrix]}, {"params": [gain], "weight_decay": 0.0}], [matrix], lr=0.1)
    theirs = [
        torch.optim.Muon([twins[0]], 0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([twins[1]], 0.1, (0.9, 0.95), weight_decay=0.0),
    ]
    for step in range(3):
        for p, twin in zip((matrix, gain), twins, strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            twin.grad = p.grad.clone()
        for optimizer in (ours, *theirs):
            optimizer.step()
        again = MuonWithAdamW([{"params": [matrix]}, {"params": [gain], "weight_decay": 0.0}], [matrix])
        again.load_state_dict(ours.state_dict())
        ours = again
    assert torch.equal(matrix, twins[0])
    assert torch.equal(gain, twins[1])


MANY = [
    Case(strategy, "llama_tied", optimizer=optimizer)
    for optimizer in OPTIMIZERS
    for strategy in ("ddp", "fsdp2", "tp", "pp")
    if optimizer != "adafactor" or strategy in ("ddp", "pp")
]
REFUSED = {
    Case("fsdp2", "llama", optimizer="adafactor"): "Adafactor looks at whole matrices.*choose strategy=ddp",
    Case("tp", "llama", optimizer="adafactor"): "Adafactor looks at whole matrices.*choose strategy=ddp",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_several_processes_end_with_the_weights_of_one(tmp_path, monkeypatch):
    fits = launch(fit, [*MANY, *REFUSED], tmp_path, timeout=500)
    for case, said in REFUSED.items():
        assert re.search(said, fits[case]), case
    for case in MANY:
        found = fits[case]
        start = {name: p.detach().double() for name, p in backbone(case.model, case.layers).named_parameters()}
        alone = weights(fitted(tmp_path, OPTIMIZERS[case.optimizer], case.model, case.layers))
        with monkeypatch.context() as patch:
            patch.setattr(torch_muon, "_zeropower_via_newtonschulz", exactly_orthogonal)
            exact = weights(fitted(tmp_path, OPTIMIZERS[case.optimizer], case.model, case.layers, precision="64-true"))
        moved = [{n: w[n].double() - start[n] for n in start} for w in (found["weights"], alone, exact)]
        many, one = (relative_error(change, moved[2]) for change in moved[:2])
        assert many <= 2 * one + 1e-5, (case, many, one)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_they_resume(tmp_path):
    cases = [Case(strategy, "llama", optimizer=name) for name in ("muon", "fused") for strategy in ("fsdp2", "tp")]
    cases.append(Case("pp", "llama", optimizer="muon"))
    for case, result in launch(resume, cases, tmp_path, timeout=500).items():
        assert relative_error(result["resumed"], result["at once"]) <= 1e-6, case


def test_adamw_is_fused_where_that_is_left_open_and_the_device_has_it():
    model = FusedCausalLMModule(tiny_llama())
    groups = [{"params": list(model.parameters())}]
    choices = {None: True, True: True, False: False}
    for given, on_gpu in choices.items():
        for fused in (True, False):
            make = partial(torch.optim.AdamW, fused=given)
            optimizer = build_optimizer(make, groups, model.model, model, fused=fused)
            assert optimizer.defaults["fused"] is (on_gpu if fused else given)
    chosen = build_optimizer(model.make_optimizer, groups, model.model, model, fused=True)
    assert chosen.defaults["fused"], "the default leaves it open"
    assert build_optimizer(torch.optim.AdamW, groups, model.model, model, fused=True).defaults["fused"] is None


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_fused_optimizer_clips_in_mixed_precision_where_lightning_alone_would_not(algorithm, tmp_path):
    weights_of = []
    for fused in (False, True):
        optimizer = partial(torch.optim.SGD, lr=1.0, fused=fused)
        module = FusedCausalLMModule(tiny_llama(), None, optimizer, get_constant_schedule)
        clip: dict[str, Any] = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm}
        quiet_trainer(tmp_path, precision="bf16-mixed", max_epochs=1, **clip).fit(module, loader(ragged_batches(2)))
        weights_of.append(torch.cat([p.detach().flatten().double() for p in module.parameters()]))
    start = torch.cat([p.detach().flatten().double() for p in tiny_llama().parameters()])
    moved = [weights - start for weights in weights_of]
    assert 0 < moved[0].norm() < (2.1e-3 if algorithm == "norm" else 1)
    assert (moved[1] - moved[0]).norm() < 1e-4 * moved[0].norm()  # differences of rounded weights


def test_without_an_optimizer_and_a_schedule_there_are_the_documented_ones(tmp_path):
    module = FusedCausalLMModule(backbone("llama", 2))
    quiet_trainer(tmp_path, max_steps=1).fit(module, loader(batches()))
    optimizer: Any = module.trainer.optimizers[0]
    assert type(optimizer) is torch.optim.AdamW
    groups = [(g["initial_lr"], g["betas"], g["weight_decay"], g["eps"]) for g in optimizer.param_groups]
    assert groups == [(3e-4, (0.9, 0.95), 0.1, 1e-8), (3e-4, (0.9, 0.95), 0.0, 1e-8)]


@pytest.mark.parametrize(
    "schedule", [cosine_with_warmup, linear_with_warmup, constant_with_warmup, warmup_stable_decay]
)
def test_a_schedule_warms_up_for_a_twentieth_of_the_steps(schedule):
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    rates, scheduler = [], schedule(optimizer, num_training_steps=100)
    for _ in range(7):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:6] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert rates[6] == pytest.approx(1, abs=2e-2)


class WithoutLength(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(ragged_batches(2))


def test_a_schedule_over_epochs_of_data_without_a_length_is_refused(tmp_path):
    trainer = quiet_trainer(tmp_path, max_epochs=2)
    with pytest.raises(UserError, match="a learning-rate schedule needs the number of steps"):
        trainer.fit(FusedCausalLMModule(tiny_llama()), DataLoader(WithoutLength(), batch_size=None))


def saved_fit(folder: Path, optimizer: Any, ckpt_path: Path | None = None) -> Any:
    """Return the module of a fit of six steps that saves every third of them."""
    torch.manual_seed(0)
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    options: dict[str, Any] = {"max_steps": 6, "limit_val_batches": 0, "enable_checkpointing": True}
    model = tiny_llama(hidden_size=64, intermediate_size=128)
    module = FusedCausalLMModule(model, None, partial(optimizer, lr=1e-2), get_constant_schedule)
    quiet_trainer(folder, callbacks=[saving], **options).fit(
        module, SyntheticDataModule(61, 12, 2, 8, 1), ckpt_path=ckpt_path
    )
    return module


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, torch.optim.Adagrad, MuonWithAdamW])
def test_a_run_of_any_optimizer_resumes_with_the_same_bits(optimizer, tmp_path):
    through = saved_fit(tmp_path, optimizer)
    again = saved_fit(tmp_path, optimizer, tmp_path / "step=3.ckpt")
    assert all(torch.equal(weight, weights(again)[name]) for name, weight in weights(through).items())


def test_adamw_with_8_bits_resumes_with_the_same_bits(tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    fitted = partial(saved_fit, tmp_path)
    through = fitted(bitsandbytes.optim.AdamW8bit)
    moments = {state["state1"].dtype for state in through.trainer.optimizers[0].state.values()}
    assert moments == {torch.uint8, torch.float32}
    again = fitted(bitsandbytes.optim.AdamW8bit, tmp_path / "step=3.ckpt")
    assert all(torch.equal(weight, weights(again)[name]) for name, weight in weights(through).items())


MANY_AT_ONCE = {
    "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "muon": MUON,
    "at once": partial(torch.optim.SGD, lr=1e-3, foreach=True),
}


def step_as_on_a_gpu(optimizer: str, folder: Path) -> None:
    """Fit under tensor parallelism, where torch updates many parameters at once."""
    sys.modules["torch.optim.optimizer"].__dict__["_get_foreach_kernels_supported_devices"] = lambda: ["cpu"]
    backbone = tiny_model("llama", attention_bias=True)
    module = FusedCausalLMModule(backbone, optimizer=MANY_AT_ONCE[optimizer], scheduler=get_constant_schedule)
    strategy = FSDP2Strategy(tensor_parallel_size=2)
    trainer = quiet_trainer(folder, devices=2, strategy=strategy, max_steps=2, use_distributed_sampler=False)
    trainer.fit(module, loader([tiny_batch(), tiny_batch()]))


@pytest.mark.slow
def test_gains_that_are_whole_are_stepped_beside_biases_that_ranks_divide(tmp_path):
    said = each(step_as_on_a_gpu, 2, MANY_AT_ONCE, tmp_path, timeout=100)
    assert said.pop("at once").startswith("SGD with foreach=True cannot update parameters of which some are divided")
    assert said == {"sgd": None, "muon": None}
