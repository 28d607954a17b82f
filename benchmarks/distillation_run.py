"""Compare whole distillation runs: ours in Lightning, both of TRL's trainers, Liger's fused loss and plain logits.

    python benchmarks/distillation_run.py --compile regional --minutes 7.5 --out distillation_run.json
    python benchmarks/distillation_run.py --tiny --steps 3      # on a CPU

A step is the forward pass of teacher and student, backward and fused AdamW, in bfloat16 with random weights; every
token but a row's first is learned. Each loss of each provider is a process of its own, and all models have the same
layers, attention, compilation and checkpointing. Steps are timed from one update to the next; tokens per second are the
median's. The loss of the first batch, and the gradient of the student's last norm, are compared with a float64
reference from the hidden states on. A provider beyond LARGEST_LOSS_ERROR or LARGEST_GRADIENT_ERROR has no speed.

TRL's trainers run as they are (`trainer.train()`), without clipping. `trl` is DistillationTrainer, whose loss is fused:
it is given the completions that it would generate, and computes the student's entropy for its log. `trl_gkd` is
GKDTrainer with lmbda=0, which has whole logits: it keeps TRL's default of autocast, which makes its softmax float32,
and empties the allocator's cache in each step. Neither mixes cross entropy into the divergence.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from cells import WARM_UP, add_limits, begin_warm_up, compile_layers, end_warm_up, peak_gib, qwen3, run_cells
from torch import Tensor

from lit_fused import DistillationLoss, FusedDistillationModule

PROVIDERS = ("lit_fused", "trl", "trl_gkd", "liger", "plain")
# A divergence, its beta in TRL's and Liger's trainers, and the weights of the divergence and of the cross entropy.
LOSSES = {
    "forward_kl": ("forward_kl", 0.0, 1.0, 0.0),
    "reverse_kl": ("reverse_kl", 1.0, 1.0, 0.0),
    "jsd": ("jsd", 0.5, 1.0, 0.0),
    "mixed": ("forward_kl", 0.0, 0.5, 0.5),
}
LARGEST_LOSS_ERROR, LARGEST_GRADIENT_ERROR = 0.01, 0.1
CHUNK = 256  # rows of the reference
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def mean_loss(name: str, student: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of logits (N, V)."""
    divergence, _, weight, cross_entropy_weight = LOSSES[name]
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    kl = partial(F.kl_div, log_target=True, reduction="batchmean")
    if divergence == "forward_kl":
        found = kl(log_p, log_q)
    elif divergence == "reverse_kl":
        found = kl(log_q, log_p)
    else:
        log_m = torch.logaddexp(log_p, log_q) - torch.tensor(2.0).log()
        found = (kl(log_m, log_p) + kl(log_m, log_q)) / 2
    if not cross_entropy_weight:
        return weight * found
    return weight * found + cross_entropy_weight * F.nll_loss(log_p, targets)


def reference(name: str, student: Any, teacher: Any, ids: Tensor) -> tuple[float, Tensor]:
    """Return the loss of a batch and the gradient of the student's last norm (its weight is one), in float64 from the
    hidden states on."""
    with torch.no_grad():
        hidden = [model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1) for model in (student, teacher)]
    weights = [model.lm_head.weight.detach().double() for model in (student, teacher)]
    targets, value = ids[:, 1:].flatten(), 0.0
    gradient = torch.zeros_like(weights[0][0])
    for ours, theirs, wanted in zip(*(states.split(CHUNK) for states in hidden), targets.split(CHUNK), strict=True):
        ours = ours.double().requires_grad_()
        share = len(wanted) / len(targets)
        loss = share * mean_loss(name, ours @ weights[0].T, theirs.double() @ weights[1].T, wanted)
        gradient += (torch.autograd.grad(loss, ours)[0] * ours.detach()).sum(0)
        value += loss.item()
    return value, gradient


class Clock:
    """Watch the steps of an optimiser: when each ends, the loss of the first and the gradient that it used."""

    def __init__(self, options: argparse.Namespace, student: Any) -> None:
        self.options, self.norm = options, student.model.norm.weight
        self.begin = time.perf_counter()
        self.moments: list[Any] = []
        self.losses: list[Tensor] = []
        self.gradient = self.norm.new_zeros(self.norm.shape, dtype=torch.float64)
        self.warm_up_s = float("nan")

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
        made.register_step_post_hook(self.step)
        return made

    def loss(self, value: Tensor) -> None:
        self.losses.append(value.detach())

    def step(self, *_: Any) -> None:
        if not self.moments:
            self.gradient += self.norm.grad
        if len(self.moments) == WARM_UP - 1:
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            self.warm_up_s = time.perf_counter() - self.begin
            end_warm_up(self.options)
        if DEVICE.type == "cuda":
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()  # without waiting for the device
            self.moments.append(moment)
        else:
            self.moments.append(time.perf_counter())

    def seconds(self) -> list[float]:
        pairs = zip(self.moments[WARM_UP - 1 :], self.moments[WARM_UP:], strict=False)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
            return [before.elapsed_time(after) / 1000 for before, after in pairs]
        return [after - before for before, after in pairs]


class Watch(L.Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.clock.loss(outputs["loss"])


def by_lightning(options: argparse.Namespace, student: Any, teacher: Any, batches: Tensor, clock: Clock) -> None:
    divergence, beta, weight, cross_entropy_weight = LOSSES[options.loss]
    loss = DistillationLoss(
        divergence,
        beta=beta if divergence == "jsd" else 0.5,
        divergence_weight=weight,
        cross_entropy_weight=cross_entropy_weight,
    )
    module = FusedDistillationModule(student, loss, clock.optimizer, teacher=teacher, compile=options.compile)
    trainer = L.Trainer(
        max_steps=len(batches), devices=1, precision="bf16-true", callbacks=[Watch(clock)], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    rows: Any = [{"input_ids": ids, "labels": ids} for ids in batches]
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=None))


def by_trl(options: argparse.Namespace, student: Any, teacher: Any, batches: Tensor, clock: Clock) -> None:
    """Train with TRL's DistillationTrainer, whose head is fused, or its GKDTrainer, which has the logits."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl.experimental.gkd import GKDConfig, GKDTrainer
    from trl.trainer.distillation_config import DistillationConfig
    from trl.trainer.distillation_trainer import DistillationTrainer

    fused, folder = options.cell == "trl", tempfile.TemporaryDirectory()
    tokenizer: Any = Tokenizer(models.WordLevel({"a": 0, "pad": 1}, unk_token="a"))
    count, rows, length = batches.shape
    of_all: dict[str, Any] = {
        "output_dir": folder.name, "max_steps": count, "per_device_train_batch_size": rows,
        "gradient_checkpointing": options.checkpointing, "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
        "bf16": not fused, "report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
        "use_cpu": DEVICE.type == "cpu", "beta": LOSSES[options.loss][1],
    }  # fmt: skip
    if fused:
        arguments: Any = DistillationConfig(**of_all)
        data = Dataset.from_dict({"prompt": ["a"] * (count * rows)})
    else:
        arguments = GKDConfig(**of_all, lmbda=0.0, max_length=length)
        data = Dataset.from_dict({"row": list(range(count * rows))})

    base: Any = DistillationTrainer if fused else GKDTrainer

    class InOrder(base):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

        def _prepare_inputs(self, inputs: Any) -> Any:
            if not fused:
                return super()._prepare_inputs(inputs)
            ids = batches[self._step].to(DEVICE, non_blocking=True)
            ones = torch.ones_like(ids)
            return {
                "prompt_ids": ids[:, :1], "prompt_mask": ones[:, :1], "completion_ids": ids[:, 1:],
                "completion_mask": ones[:, 1:], "num_items_in_batch": ones[:, 1:].sum(),
            }  # fmt: skip

        def compute_loss(self, *inputs: Any, **others: Any) -> Any:
            loss = super().compute_loss(*inputs, **others)
            clock.loss(loss)
            return loss

    def collate(numbers: Any) -> dict[str, Tensor]:
        ids = batches.flatten(0, 1)[[entry["row"] for entry in numbers]]
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    trainer: Any = InOrder(
        student,
        teacher_model=teacher,
        args=arguments,
        train_dataset=data,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="a", pad_token="pad"),
        optimizers=(clock.optimizer(student.parameters()), None),
        **({} if fused else {"data_collator": collate}),
    )
    trainer.train()


def by_hand(options: argparse.Namespace, student: Any, teacher: Any, batches: Tensor, clock: Clock) -> None:
    """Train in a loop, with Liger's head or with whole logits in float32."""
    _, beta, weight, cross_entropy_weight = LOSSES[options.loss]
    loss_of = None
    if options.cell == "liger":
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        loss_of = LigerFusedLinearJSDLoss(cross_entropy_weight, weight, beta)
    optimizer = clock.optimizer(student.parameters())
    for ids in batches:
        ids = ids.to(DEVICE, non_blocking=True)
        with torch.no_grad():
            theirs = teacher.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
        ours = student.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
        targets = ids[:, 1:].flatten()
        if loss_of is not None:
            loss = loss_of(ours, student.lm_head.weight, theirs, teacher.lm_head.weight, targets)
        else:
            with torch.no_grad():
                theirs = teacher.lm_head(theirs).float()
            loss = mean_loss(options.loss, student.lm_head(ours).float(), theirs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.loss(loss)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    begin_warm_up(options)
    if options.loss == "mixed" and options.cell.startswith("trl"):
        return {"error": "TRL's trainers mix no cross entropy into a divergence"}
    shapes = ("tiny", "tiny_wide") if options.tiny else ("qwen3_0_6b", "qwen3_1_7b")
    student, teacher = (qwen3(shape, seed, DEVICE) for seed, shape in enumerate(shapes))
    student.train()
    teacher.eval().requires_grad_(False)
    size = (options.steps + WARM_UP, options.rows, options.length)
    batches = torch.randint(student.config.vocab_size, size, generator=torch.Generator().manual_seed(2))
    if DEVICE.type == "cuda":
        batches = batches.pin_memory()  # as a loader's `pin_memory`: no provider's step begins with a wait
    wanted, wanted_gradient = reference(options.loss, student, teacher, batches[0].to(DEVICE))
    if options.checkpointing:
        student.gradient_checkpointing_enable()
    if options.compile == "regional" and options.cell != "lit_fused":
        compile_layers(student, teacher)
    torch.cuda.empty_cache()
    special: dict[str, Callable[..., None]] = {"lit_fused": by_lightning, "trl": by_trl, "trl_gkd": by_trl}
    clock = Clock(options, student)
    special.get(options.cell, by_hand)(options, student, teacher, batches, clock)
    value = clock.losses[0].item()
    error = abs(value - wanted) / wanted
    gradient_error = ((clock.gradient - wanted_gradient).norm() / wanted_gradient.norm()).item()
    found = {"value": value, "loss_error": error, "gradient_error": gradient_error}
    found |= {"last": clock.losses[-1].item(), "warm_up_s": round(clock.warm_up_s, 1)}
    if not (error <= LARGEST_LOSS_ERROR and gradient_error <= LARGEST_GRADIENT_ERROR):
        return found | {"error": f"wrong: the loss is {value:.5g}, and {wanted:.5g} in float64"}
    seconds = clock.seconds()
    rate = options.rows * options.length / statistics.median(seconds)
    found |= {"tokens_per_sec": round(rate, 1), "slowest_step_s": round(max(seconds), 4), "peak_gib": peak_gib()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models, and 2 rows of 32 tokens unless told")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=PROVIDERS)
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=["jsd", "forward_kl", "reverse_kl"])
    parser.add_argument("--rows", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--steps", type=int, default=40, help="measured ones: fewer end before the device is warm")
    parser.add_argument("--compile", choices=("none", "regional"), default="none", help="of both models' layers")
    parser.add_argument("--checkpointing", action="store_true", help="of the student's layers")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no process begins after")
    parser.add_argument("--out", type=Path, help="is written after each process")
    parser.add_argument("--cell", choices=PROVIDERS, help="measure this one here, and print it as JSON")
    parser.add_argument("--loss", choices=LOSSES)
    add_limits(parser)
    options = parser.parse_args()
    options.rows = options.rows or (2 if options.tiny else 4)
    options.length = options.length or (32 if options.tiny else 2048)
    if options.cell:
        print(json.dumps(measure(options)))
        return
    cells = [{"cell": cell, "loss": loss} for loss in options.losses for cell in options.providers]
    run_cells(cells, options.out, options.minutes)


if __name__ == "__main__":
    main()
