"""The watch of every step: what a model makes of known numbers in place of its logits, against its head's formula."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_helpers import loader, quiet_trainer, ragged_batches
from logits_changes import CASES, Case, changed, hooked, outcome
from tiny_models import sharpen, tiny_batch, tiny_model
from torch import nn
from torchrun import call
from transformers import get_constant_schedule

from lit_fused import (
    CrossEntropyLoss,
    FusedCausalLMModule,
    LanguageModel,
    LinearCrossEntropyLoss,
    UserError,
)
from lit_fused.heads import OutputHead
from lit_fused.heads.capture import InputCapture
from lit_fused.heads.uniform_logits import column_of
from lit_fused.heads.watch import HeadWatch
from lit_fused.pipeline import PipelineStrategy

QUICK = {
    "a temperature, an attribute, annealed",
    "a temperature, a scalar buffer, filled",
    "a bias, a frozen parameter, filled",
    "the head's forward replaced",
    "rows sorted for the head",
    "`0.5 * x + 0.5 * x.detach()`",
    "the head under `no_grad`",
    "`self.lm_head(input=h)`, and no `use_cache`",
    "a gain for each token of the input",
    "a hook that halves some entries",
    "a backward hook put on the head",
    "a backward pre-hook put on the head",
    "a forward hook that looks at logits",
    "all but the 50 largest masked",
    "all that is far below the largest masked",
    "some entries masked in place",
    "the second half of the vocabulary halved",
    "rows taken apart and put together",
    "a plain module with V = D, logits for hidden states",
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.what, marks=() if case.what in QUICK else pytest.mark.slow) for case in CASES],
)
def test_a_model_that_does_something_to_its_logits_is_exact_or_refused(case: Case):
    assert outcome(case) == case.outcome
    assert {case.what for case in CASES} >= QUICK


class Anneals(L.Callback):
    """Changes the temperature once, before the batch of this number."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            pl_module.backbone.tau = 2.0


def annealed() -> FusedCausalLMModule:
    sgd = partial(torch.optim.SGD, lr=0.1)
    return FusedCausalLMModule(
        changed(lambda m, x, _: x / m.tau, tau=1.0), optimizer=sgd, scheduler=get_constant_schedule
    )


@pytest.mark.parametrize("last", [1, 2])
def test_a_fit_stops_before_the_step_that_would_be_wrong(last, tmp_path):
    module, right = annealed(), annealed()
    trainer = quiet_trainer(tmp_path, max_steps=3, callbacks=[Anneals(last)])
    with pytest.raises(UserError, match=r"Changed does something to its logits .*\(Linear .*a temperature, cap, mask"):
        trainer.fit(module, loader(ragged_batches(3)))
    quiet_trainer(tmp_path, max_steps=last).fit(right, loader(ragged_batches(3)))
    assert trainer.global_step == last
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), right.parameters(), strict=True))


def join(rank: int, folder: Path) -> None:
    # As under torchrun: otherwise Lightning would start the other rank once more.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "tests"}
    torch.distributed.init_process_group("gloo", f"file://{folder}/group", world_size=2, rank=rank)


def refused_on_both_ranks(rank: int, folder: Path, strategy: str) -> None:
    join(rank, folder)
    module = annealed()
    changes = [Anneals(2)] if rank == 1 else []
    sizes = {"fsdp2": (2, 1), "tp": (1, 2)}.get(strategy)
    placed = ModelParallelStrategy(*sizes) if sizes else strategy
    placed = PipelineStrategy(2) if strategy == "pp" else placed
    trainer = quiet_trainer(folder, devices=2, strategy=placed, max_steps=3, callbacks=changes)
    with pytest.raises(UserError, match="Changed does something to its logits"):
        trainer.fit(module, loader(ragged_batches(6)))
    assert trainer.global_step == 3, "the numbers of most steps are not waited for, but those of the last are read"


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "tp", "pp"])
def test_a_fault_of_one_rank_in_the_last_step_stops_all_ranks(strategy, tmp_path):
    call(refused_on_both_ranks, 2, tmp_path, strategy, timeout=120)


class Fills(L.Callback):
    """Fills the temperature, a buffer, before the second batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and "tau" in dict(pl_module.backbone.named_buffers()):
            pl_module.backbone.tau.fill_(2.0)


def fit_with_a_buffer_filled(loss: Any, folder: Path, **options: Any) -> float:
    model = changed(lambda m, x, _: x / m.tau, tau=torch.tensor(1.0))
    module = FusedCausalLMModule(
        model, loss, partial(torch.optim.SGD, lr=0.1), scheduler=get_constant_schedule, parity_check=False
    )
    trainer = quiet_trainer(folder, max_steps=2, callbacks=[Fills()], **options)
    trainer.fit(module, loader(ragged_batches(2)))
    return trainer.callback_metrics["train/loss"].item()


def exact_in_a_pipeline(rank: int, folder: Path, expected: float) -> None:
    join(rank, folder)
    found = fit_with_a_buffer_filled(
        LinearCrossEntropyLoss(), folder, devices=2, strategy=PipelineStrategy(2), log_every_n_steps=1
    )
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_pipelines_last_stage_identifies_the_head_again(tmp_path):
    expected = fit_with_a_buffer_filled(CrossEntropyLoss(), tmp_path, log_every_n_steps=1)
    call(exact_in_a_pipeline, 2, tmp_path, expected, timeout=120)


LOADED = {
    "a scalar buffer": (lambda m, x, _: x / m.state, torch.ones(()), torch.tensor(2.0)),
    "a scalar buffer, read by the host": (lambda m, x, _: x / m.state.item(), torch.ones(()), torch.tensor(2.0)),
    "a bias": (lambda m, x, _: x + m.state, torch.zeros(97), torch.linspace(-3, 3, 97)),
    "a frozen bias": (lambda m, x, _: x + m.state, nn.Parameter(torch.zeros(97), False), torch.linspace(-3, 3, 97)),
}


@pytest.mark.parametrize("name", LOADED)
def test_a_checkpoint_is_evaluated_with_its_own_numbers_behind_the_head(name, tmp_path):
    f, fresh, saved = LOADED[name]
    values, batches = [], loader(ragged_batches(3))
    for loss in (LinearCrossEntropyLoss(), CrossEntropyLoss()):
        module, trainer = FusedCausalLMModule(changed(f, state=fresh), loss), quiet_trainer(tmp_path)
        weights = module.state_dict() | {"model.backbone.state": saved}
        weights["model.backbone.lm_head.weight"] = 3 * weights["model.backbone.lm_head.weight"]
        torch.save({"state_dict": weights, "pytorch-lightning_version": L.__version__}, tmp_path / "x.ckpt")
        [first] = trainer.validate(module, batches, ckpt_path=tmp_path / "x.ckpt", verbose=False)
        predicted = trainer.predict(module, batches, ckpt_path=tmp_path / "x.ckpt")
        assert predicted is not None
        values.append([first["val/loss"], *(p["log_likelihood"].sum().item() for p in predicted)])  # type: ignore[index]
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def test_what_is_done_to_the_logits_in_evaluation_alone_is_refused_at_its_end(tmp_path):
    module = FusedCausalLMModule(changed(lambda m, x, _: x[..., :] if m.training else x * (1 + (x.shape[1] > 8))))
    trainer = quiet_trainer(tmp_path)
    for evaluate in (trainer.validate, trainer.test, trainer.predict):
        with pytest.raises(UserError, match="Changed does something to its logits"):
            evaluate(module, loader(ragged_batches(1)))


def test_the_watch_builds_no_logits_whatever_the_model_does_to_them():
    model, head_layer = nn.Module(), nn.Linear(1, 1)
    head_layer.weight = nn.Parameter(torch.ones(1, 1).expand(2**40, 1))  # so many logits could not be built
    model.register_buffer("bias", torch.ones(1).expand(2**39))
    head = OutputHead(head_layer, 0.5, 20.0, 2**39, (model, "bias"))
    capture, watch = InputCapture(head), HeadWatch()
    with capture, head.one_entry(3):
        logits: Any = head_layer(torch.randn(3, 7, 1))
        logits = logits.mul_(0.5).float().contiguous()[..., : 2**39] + model.bias
        watch.compare(head, capture, 20 * torch.tanh(logits.view(21, -1) / 20).view(3, 7, -1))
    assert watch.bits(torch.device("cpu")) == 0


FAULTS = {
    "depend on the vocabulary entry": lambda _, x: x * torch.linspace(1, 2, 97),
    "trains another parameter": lambda m, x: x + (0 * m.lm_head.weight).sum(),
    "a temperature, cap, mask": lambda _, x: x + 0.1 * x.detach(),
    "gradient is another one": lambda _, x: hooked(x, lambda g: 0.5 * g),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_on_a_cpu_a_fault_is_named_in_the_pass_that_has_it(fault):
    backbone = changed(lambda m, x, _: FAULTS[fault](m, x) if m.on else x, on=False)
    model = LanguageModel(backbone, LinearCrossEntropyLoss())
    model(tiny_batch())
    backbone.on = True
    with pytest.raises(UserError, match=rf"\(Linear \(97, 32\)\): [^;]*{fault}[^;]*\. Leave"):
        model(tiny_batch())


def test_rounding_where_a_bias_cancels_the_logits_is_no_fault():
    module, layer = nn.Module(), nn.Linear(1, 5)
    head = OutputHead(layer, 1 / 3, offset=(module, "bias"))
    capture, watch = InputCapture(head), HeadWatch()
    module.register_buffer("bias", torch.zeros(5))
    with capture:
        logits = layer(torch.randn(2, 3, 1))
        largest = max(column_of(capture.numbers[0]).flatten(), key=abs)
        module.bias = -largest[None] / 3
        watch.compare(head, capture, logits / 3 * (1 + 1e-5) + module.bias)
    assert watch.bits(torch.device("cpu")) == 0


def test_no_checkpoint_is_written_with_a_fault_that_has_not_been_read(tmp_path):
    module, trainer = annealed(), quiet_trainer(tmp_path, max_steps=1)
    trainer.fit(module, loader(ragged_batches(1)))
    module.model.watch.add_fault()
    with pytest.raises(UserError, match="Changed does something to its logits"):
        trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert not (tmp_path / "x.ckpt").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
def test_a_head_whose_layer_is_two_percent_off_is_refused(name, dtype):
    backbone: Any = sharpen(tiny_model(name, dtype))
    own = backbone.lm_head.forward
    backbone.lm_head.forward = lambda hidden: 1.02 * own(hidden)
    with pytest.raises(UserError, match=r"does not compute h W\^T \+ b"):
        LanguageModel(backbone, LinearCrossEntropyLoss()).prepare(torch.device("cpu"))
