"""Fits of several processes, and their judgement by one process with the one large batch."""

from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from errors_of import relative_error
from head_cases import grad_of
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_helpers import loader
from parallel_cases import (
    CLIP,
    EPSILON,
    LEARNING_RATE,
    PER_STEP,
    STEPS,
    Case,
    backbone,
    batches,
    module_of,
    share_of,
    trainer_of,
    whole,
)
from ranks import Refusal, each
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from lit_fused import FusedCausalLMModule
from lit_fused.parallel.placement import reshard
from lit_fused.training.optimizers import weight_decay_groups

STRATEGIES = ("single", "ddp", "fsdp2", "tp", "fsdp2_tp", "context", "pp", "pp_ddp", "pp_fsdp2", "pp_interleaved")

MODELS = ("llama", "llama_tied", "qwen3", "qwen3_tied", "gemma2_untied", "gemma2")

MATRIX = [  # docs/evidence/strategies.json has all of it
    Case(strategy, model, loss, precision)
    for strategy in STRATEGIES
    for model in MODELS
    for loss in ("chunked", "cce", "standard")
    for precision in ("32-true", "bf16-mixed", "bf16-true")
    if not ("tp" in strategy and loss == "cce")  # refused
] + [
    Case("tp", model, "chunked", precision)  # further plans: biases, gathered and split projections, a scale
    for model in ("mistral", "phi", "olmo2", "gpt_neox", "granite", "cohere")
    for precision in ("32-true", "bf16-mixed")
]
MATRIX += [
    Case("fsdp2_policy", model, loss, "bf16-mixed") for model in MODELS for loss in ("chunked", "cce", "standard")
]


COMPILED = [
    Case(strategy, "llama", compile="regional")
    for strategy in ("ddp", "fsdp2", "context", "pp", "pp_interleaved", "pp_fsdp2")
]
COMPILED += [
    Case("tp", "llama_tied", compile="regional"),
    Case("tp", "llama_tied", precision="bf16-mixed", compile="regional"),
    Case("tp", "qwen3", precision="bf16-true", compile="regional"),
    Case("tp", "gemma2", compile="regional"),
    Case("fsdp2_tp", "llama_tied", compile="regional"),
    Case("fsdp2_tp", "qwen3", precision="bf16-mixed", compile="regional"),
    Case("fsdp2_policy", "llama", precision="bf16-mixed", compile="regional"),
]


class Recorder(L.Callback):
    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] | None = None  # of the first step; empty on ranks that hold no whole ones
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: object) -> None:
        if self.gradients is None:
            self.gradients = whole(trainer.strategy, pl_module, lambda p: p.grad)

    def on_train_batch_end(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.losses.append(trainer.callback_metrics["train/loss"].item())
            self.norms.append(trainer.callback_metrics["train/gradient_norm"].item())


def fit(case: Case, folder: Path) -> dict[str, Any]:
    """Fit a case, and return what the first rank has of it."""
    folder = folder_of(case, folder)
    torch._dynamo.reset()
    counters.clear()
    module, recorder = module_of(case), Recorder()
    trainer = trainer_of(case, folder, max_epochs=1, accumulate_grad_batches=case.accumulated, callbacks=[recorder])
    part = share_of(batches(masked=case.is_masked), case)
    trainer.fit(module, loader(part), loader(part))
    reshard(module.model)  # Validation leaves the root's parameters gathered, under a policy as bfloat16 copies.
    weights = whole(trainer.strategy, module, lambda p: p)
    prompt = batches()[0]["input_ids"][:1, :4].to(module.device)
    can_say = not case.is_pipeline and not case.is_masked
    said = module.generate(prompt, max_new_tokens=5, do_sample=False).cpu() if can_say else None
    if case.strategy in ("fsdp2", "tp"):
        assert module(input_ids=prompt).logits.shape == (*prompt.shape, module.model.vocabulary)
    if "tp" in case.strategy and can_say:
        assert_ranks_sample_the_same(module, prompt)
    module.save_pretrained(folder / "exported")
    return {
        "gradients": recorder.gradients,
        "losses": recorder.losses,
        "norms": recorder.norms,
        "weights": weights,
        "val/loss": trainer.callback_metrics["val/loss"].item(),
        "said": said,
        "graphs": counters["stats"]["unique_graphs"],
    }


def assert_ranks_sample_the_same(module: FusedCausalLMModule, prompt: Tensor) -> None:
    torch.manual_seed(dist.get_rank())
    sampled = module.generate(prompt.to(module.device), max_new_tokens=5, do_sample=True)
    strategy: Any = module.trainer.strategy
    of_group = strategy.device_mesh["tensor_parallel"]
    sampled_by: list[Any] = [None] * of_group.size()
    dist.all_gather_object(sampled_by, sampled.tolist(), group=of_group.get_group())
    assert sampled_by == sampled_by[:1] * of_group.size()


def resume(case: Case, folder: Path) -> dict[str, Any]:
    """Three epochs at once, and two with a checkpoint and the third from it by another module and trainer."""
    folder = folder_of(case, folder)
    part = share_of(batches(masked=case.is_masked)[:4], case)
    modules = [module_of(case) for _ in range(3)]
    at_once = trainer_of(case, folder, max_epochs=3)
    at_once.fit(modules[0], loader(part))
    saver = ModelCheckpoint(folder / "checkpoints", save_last=True)
    first = trainer_of(case, folder, max_epochs=2, enable_checkpointing=True, callbacks=[saver])
    first.fit(modules[1], loader(part))
    second = trainer_of(case, folder, max_epochs=3)
    second.fit(modules[2], loader(part), ckpt_path=saver.last_model_path)
    assert second.global_step == at_once.global_step
    return {
        name: whole(trainer.strategy, module, lambda p: p)
        for name, trainer, module in (("at once", at_once, modules[0]), ("resumed", second, modules[2]))
    }


def train_here(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """One process, the model's own logits, one large batch per step."""
    return _trained(case.model, case.layers, dtype, case.precision == "bf16-mixed" and dtype == torch.float32)


@cache
def _trained(name: str, layers: int, dtype: torch.dtype, is_mixed: bool) -> dict[str, Any]:
    model, is_masked = backbone(name, layers).to(dtype), name.startswith("masked")
    for buffer, _ in model.named_buffers():
        if buffer.endswith("inv_freq"):
            owner, _, attribute = buffer.rpartition(".")
            whole = dict(backbone(name, layers).named_buffers())[buffer]
            setattr(model.get_submodule(owner), attribute, whole)
    optimizer = torch.optim.AdamW(weight_decay_groups(model), lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.1)
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        window = batches(masked=is_masked)[step * PER_STEP : (step + 1) * PER_STEP]
        ids, labels = (torch.cat([b[name] for b in window]) for name in ("input_ids", "labels"))
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            logits = model(input_ids=ids, use_cache=False).logits
        logits, labels = (logits, labels) if is_masked else (logits[:, :-1], labels[:, 1:])
        logits = logits.flatten(0, 1).to(torch.promote_types(dtype, torch.float32))
        loss = F.cross_entropy(logits, labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            result["gradients"] = {n: grad_of(p).clone() for n, p in model.named_parameters()}
        result["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        result["losses"].append(loss.item())
    result["weights"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    result["model"] = model
    return result


def precision_dtype(case: Case) -> torch.dtype:
    """Return the dtype of the parameters."""
    return torch.bfloat16 if case.precision == "bf16-true" else torch.float32


def folder_of(case: Case, folder: Path) -> Path:
    return folder / str(case).replace(":", "_")


def launch(function: Any, cases: list[Case], folder: Path, timeout: float) -> dict[Case, Any]:
    """Return what :func:`fit` or :func:`resume` returns for each case, run by as many processes as it has ranks."""
    found: dict[Case, Any] = {}
    for ranks in sorted({case.ranks for case in cases}):
        found |= each(function, ranks, [case for case in cases if case.ranks == ranks], folder, timeout=timeout)
    return found


def judge(case: Case, result: Any, folder: Path) -> None:
    """The first step's gradients, the losses and the weights after three steps; then what is said and exported."""
    assert not isinstance(result, Refusal), result
    assert result["graphs"] or case.compile == "none"
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
    # A norm is no further off than the gradients are; later steps begin at other weights.
    assert result["norms"][0] == pytest.approx(truth["norms"][0], rel=limits["gradients"])

    auto: Any = AutoModelForMaskedLM if case.is_masked else AutoModelForCausalLM
    exported = auto.from_pretrained(folder_of(case, folder) / "exported")
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
