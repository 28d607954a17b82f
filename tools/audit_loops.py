"""Cases of tools/audit.py: training loops and evaluations."""

import tempfile
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from audit import Case, same
from audit_models import V, llama
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import lit_fused
from lit_fused import FusedCausalLMModule, LinearCrossEntropyLoss

Batch = dict[str, Any]


def trainer(**options: Any) -> L.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "default_root_dir": tempfile.gettempdir(), "num_sanity_val_steps": 0}
    return L.Trainer(accelerator="cpu", devices=1, **quiet | options)


def loader(batches: list[Batch]) -> Any:
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def windows(count: int) -> list[Batch]:
    """Return batches whose numbers of labels differ widely."""
    generator, found = torch.Generator().manual_seed(3), []
    for number in range(count):
        ids = torch.randint(3, V, (2, 12), generator=generator)
        chosen = ids.clone()
        chosen[:, : (0, 9, 4, 11)[number % 4]] = -100
        found.append({"input_ids": ids, "labels": chosen})
    return found


def one_batch(parts: list[Batch]) -> Batch:
    return {name: torch.cat([part[name] for part in parts]) for name in ("input_ids", "labels")}


def plainly(steps: list[list[Batch]], clip: float = 0.0) -> Tensor:
    """Return the weights of a plain model after a step of SGD for each list of batches, taken as one batch."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parts in steps:
        batch = one_batch(parts)
        optimizer.zero_grad()
        if (batch["labels"][:, 1:] != -100).any():
            model(**batch).loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters())


class Sgd(FusedCausalLMModule):
    """The module, with plain SGD."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.backbone.parameters(), lr=0.1)


class Manual(Sgd):
    """Steps by hand after each window, and throws away the batches whose numbers are ``dropped``."""

    window, dropped = 1, frozenset[int]()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx in self.dropped:
            optimizer.zero_grad()
        elif (batch_idx + 1) % self.window == 0:
            self.average_gradients()
            optimizer.step()
            optimizer.zero_grad()


class Window(Manual):
    """Steps after two batches."""

    window = 2


class Dropping(Manual):
    """Drops the first batch."""

    dropped = frozenset({0})


class Halved(Sgd):
    """Returns half of the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 0.5 * super().training_step(batch, batch_idx)


class OwnMean(Sgd):
    """Returns a mean of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch).loss


class WithTerm(Sgd):
    """Adds a term of the weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 0.1 * next(self.backbone.parameters()).square().mean()


class Skipping(Sgd):
    """Leaves out each second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


class Scaled(Sgd):
    """Doubles the gradients before the step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        for parameter in self.parameters():
            parameter.grad = None if parameter.grad is None else 2 * parameter.grad


def fitted(kind: type[Sgd], batches: list[Batch], expected: Tensor, loss: Any = None, **options: Any) -> str:
    """Train a module, and compare its weights."""
    module = kind(options.pop("named", None) or llama(), loss or LinearCrossEntropyLoss())
    trainer(max_epochs=1, **options).fit(module, loader(batches))
    found = torch.nn.utils.parameters_to_vector(module.backbone.parameters())
    return same(found - _start(), expected - _start(), 1e-3)


def without_labels(count: int) -> list[Batch]:
    return [batch | {"labels": torch.full_like(batch["labels"], -100)} for batch in windows(count)]


FOUR, NONE = windows(4), without_labels(2)


def weighted_windows() -> str:
    batches = [batch | {"token_weights": torch.linspace(0, 2, 24).view(2, 12)} for batch in FOUR[:2]]
    model = llama()
    batch = one_batch(batches)
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    targets = batch["labels"][:, 1:].flatten()
    weights = torch.cat([b["token_weights"] for b in batches])[:, 1:].flatten()
    losses = F.cross_entropy(logits, targets, reduction="none")
    (losses * weights).sum().div(weights[targets != -100].sum()).backward()
    moved = [p - 0.1 * p.grad if p.grad is not None else p for p in model.parameters()]
    expected = torch.nn.utils.parameters_to_vector(moved)
    return fitted(Sgd, batches, expected, accumulate_grad_batches=2)


def by_trainer(**options: Any) -> str:
    """Train by transformers' Trainer, fused and not, on ragged batches; compare the weights."""
    weights = []
    rows = [{name: value[0] for name, value in batch.items()} for batch in FOUR]
    for model in (lit_fused.fuse(llama()), llama()):
        with tempfile.TemporaryDirectory() as folder:
            arguments: dict[str, Any] = {"max_steps": 2, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
            arguments |= {"per_device_train_batch_size": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
            arguments |= {"save_strategy": "no", "logging_strategy": "no", "train_sampling_strategy": "sequential"}
            Trainer(model, TrainingArguments(folder, **arguments | options), train_dataset=rows).train()  # type: ignore[arg-type]
        weights.append(torch.nn.utils.parameters_to_vector(model.parameters()))
    return same(weights[0] - _start(), weights[1] - _start(), 1e-3)


def _start() -> Tensor:
    return torch.nn.utils.parameters_to_vector(llama().parameters())


def _doubled() -> Tensor:
    module = Scaled(llama())
    trainer(max_epochs=1).fit(module, loader(FOUR[:1]))
    return torch.nn.utils.parameters_to_vector(module.backbone.parameters())


LOOPS: dict[str, Callable[[], str]] = {
    "a batch a step": lambda: fitted(Sgd, FOUR, plainly([[b] for b in FOUR])),
    "four ragged batches a step": lambda: fitted(Sgd, FOUR, plainly([FOUR]), accumulate_grad_batches=4),
    "a last window that is shorter": lambda: fitted(
        Sgd, FOUR[:3], plainly([FOUR[:2], FOUR[2:3]]), accumulate_grad_batches=2
    ),
    "a batch without labels among others": lambda: fitted(
        Sgd, [FOUR[0], NONE[0]], plainly([FOUR[:1]]), accumulate_grad_batches=2
    ),
    "a whole window without labels": lambda: fitted(
        Sgd, [*NONE, *FOUR[:2]], plainly([NONE, FOUR[:2]]), accumulate_grad_batches=2
    ),
    "clipping over a window": lambda: fitted(
        Sgd, FOUR, plainly([FOUR], clip=0.1), accumulate_grad_batches=4, gradient_clip_val=0.1
    ),
    "weights of tokens over a window": weighted_windows,
    "batches that are left out": lambda: fitted(Skipping, FOUR, plainly([FOUR[:1], FOUR[2:3]])),
    "manual steps": lambda: fitted(Manual, FOUR, plainly([[b] for b in FOUR])),
    "manual steps over windows": lambda: fitted(Window, FOUR, plainly([FOUR[:2], FOUR[2:]])),
    "a manual batch whose gradients were dropped": lambda: fitted(Dropping, FOUR[:2], plainly([FOUR[1:2]])),
    "half of the loss": lambda: fitted(Halved, FOUR[:1], plainly([FOUR[:1]])),
    "a mean of one's own over a window": lambda: fitted(OwnMean, FOUR, plainly([FOUR]), accumulate_grad_batches=4),
    "a term that is added": lambda: fitted(WithTerm, FOUR[:1], plainly([FOUR[:1]])),
    "gradients that a hook doubles": lambda: same(_doubled() - _start(), 2 * (plainly([FOUR[:1]]) - _start()), 1e-3),
    "the standard loss": lambda: fitted(
        Sgd, FOUR, plainly([FOUR]), lit_fused.CrossEntropyLoss(), accumulate_grad_batches=4
    ),
    "a model by its name": lambda: fitted(Sgd, [], _start(), named="gpt2"),
    "a loss by its name": lambda: fitted(Sgd, FOUR, plainly([FOUR]), "chunked", accumulate_grad_batches=4),
    "transformers' Trainer": by_trainer,
    "transformers' Trainer, with accumulation": lambda: by_trainer(gradient_accumulation_steps=2),
    "two passes of the fit": lambda: fitted(Sgd, [*FOUR, *FOUR], plainly([FOUR, FOUR]), accumulate_grad_batches=4),
}


def evaluated(loss: Any, batches: list[Batch], name: str = "val/loss") -> float:
    module = FusedCausalLMModule(llama(), loss)
    [found] = trainer().validate(module, loader(batches), verbose=False)
    return found[name]


def plain_mean(batches: list[Batch]) -> Tensor:
    with torch.no_grad():
        return llama().eval()(**one_batch(batches)).loss


EVALUATION: dict[str, Callable[[], str]] = {
    "ragged batches": lambda: same(evaluated(LinearCrossEntropyLoss(), FOUR), plain_mean(FOUR)),
    "a batch without labels": lambda: same(evaluated(LinearCrossEntropyLoss(), [*FOUR, *NONE]), plain_mean(FOUR)),
    "no labels at all": lambda: same(evaluated(LinearCrossEntropyLoss(), NONE), 0.0),
    "a smoothed loss": lambda: same(evaluated(LinearCrossEntropyLoss(label_smoothing=0.3), FOUR), plain_mean(FOUR)),
    "a z-loss": lambda: same(evaluated(LinearCrossEntropyLoss(z_loss=0.1), FOUR), plain_mean(FOUR)),
    "perplexity": lambda: same(evaluated(LinearCrossEntropyLoss(), FOUR, "val/perplexity"), plain_mean(FOUR).exp()),
}


CASES = [
    *(Case("loops", name, run) for name, run in LOOPS.items()),
    *(Case("evaluation", name, run) for name, run in EVALUATION.items()),
]
