"""``Pipeline``: runs a batch in micro-batches, by a schedule of torch.distributed.pipelining, and returns its sums.

The last stage's hidden states go to the loss strategy micro-batch by micro-batch. It returns sums, which are added and
broadcast: every rank of the pipeline logs, stops and saves by the same numbers.

Receive buffers have a fixed shape. A batch whose rows do not divide into micro-batches is filled up with rows without
labels, and one of another shape gets a schedule of its own, which is told the shapes: to infer them it would run the
stages once more.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from lit_fused.errors import UserError
from lit_fused.losses.fused import token_losses
from lit_fused.losses.loss import Batch, LossOutput, labels_of
from lit_fused.metrics import sums_of
from lit_fused.models import documents_apart
from lit_fused.models.batch_checks import check_mask
from lit_fused.models.language_model import LanguageModel
from lit_fused.ops.label_checks import IGNORE_INDEX, check_range
from lit_fused.pipeline.division import DividedModel
from lit_fused.pipeline.stages import StageForwardPass

if TYPE_CHECKING:
    from lit_fused.pipeline.strategy import PipelineStrategy

_INPUTS = ("attention_mask", "position_ids")  # Every stage gets them, beside the token ids.
# A job maps a micro-batch's hidden states and rows to a result; in training, to that and the loss of backward.
_Job = Callable[[Tensor, Batch], Any]


class Pipeline:
    """Runs batches through the stages of all ranks of a pipeline, which all have to call the same methods.

    ``divided`` is what is left of the model on this rank; the schedule of its layout may not be that of ``strategy``.
    """

    def __init__(self, model: LanguageModel, divided: DividedModel, strategy: "PipelineStrategy") -> None:
        self.model = model
        self.divided = divided
        self.stages = divided.stages
        self.layout = strategy.layout
        self.microbatches = strategy.microbatches
        self.device = strategy.root_device
        self.group = strategy.device_mesh["pipeline_parallel"].get_group()
        self.last_rank = dist.get_global_rank(self.group, self.layout.rank_of(self.layout.num_stages - 1))
        # A stage's forward and the loss run in it; the plugin may be another one later.
        self.context: Callable[[], AbstractContextManager[Any]] = lambda: strategy.precision_plugin.forward_context()
        self._forward_pass = StageForwardPass(model, divided.decoder)
        self._rank = dist.get_rank(self.group)
        self.schedule_of_shape: tuple[torch.Size, Any] | None = None
        self._job: _Job = lambda *_: None
        self._found: list[Any] = []  # by the jobs of the micro-batches
        self._rows: Batch = {}  # the batch that runs, filled up
        self._names: dict[str, Any] = {}  # by kind of run: names of the loss's sums, known from its first batch
        self._refusal: str | None = None  # by the loss, for the first batch of a kind
        self._is_first = False
        for stage in self.stages.values():
            stage.context = self.context

    def train(self, batch: Batch, scale: Tensor) -> LossOutput:
        """Run forward and backward, with ``scale`` times the summed loss, and return the batch's sums, whose own
        backward gives the parameters these gradients: Lightning frees a step's between the two."""

        def job(hidden_states: Tensor, rows: Batch) -> tuple[LossOutput, Tensor]:
            leaf = hidden_states.detach().requires_grad_()
            output = self._loss_of(leaf, rows)
            loss = output.loss_sum * scale
            with torch.autocast(self.device.type, enabled=False):  # The context's autocast is for forward alone.
                loss.backward()
            # The schedule runs backward from another scalar with the same gradient, which is known by now. From the
            # loss GPipe would store every micro-batch's gradient of the head until the last forward.
            sums = LossOutput(output.loss_sum.detach(), output.num_tokens, stats=output.stats)
            assert leaf.grad is not None
            return sums, (hidden_states * leaf.grad).sum()

        sums = self._summed("training", self._run("training", batch, job))
        gradients = [(p, p.grad) for p in self.model.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        begin = torch.zeros((), device=self.device, requires_grad=True)
        return replace(sums, loss_sum=_WithGradients.apply(begin, sums.loss_sum, gradients))

    def __call__(self, batch: Batch) -> LossOutput:
        """Return the sums over one batch, without gradients."""
        return self._summed("evaluation", self._run("evaluation", batch, self._loss_of))

    def spot_check(self, batch: Batch) -> None:
        """Check what the model does behind its body, on the last stage (heads/spot_check.py)."""
        check_mask(batch)
        self._run("check", batch, lambda h, rows: self._forward_pass.spot_check({**rows, "hidden_states": h}))

    def token_losses(self, batch: Batch) -> Tensor:
        """Return the negative log-likelihood of each position's target, (B, T) float32, 0 where ignored."""

        def job(hidden_states: Tensor, rows: Batch) -> Tensor:
            return token_losses(self._forward_pass, {**rows, "hidden_states": hidden_states})

        losses = self._run("prediction", batch, job)
        count, length = labels_of(batch).shape
        shape = (count + self._missing(count), length)
        result = torch.cat(losses).float() if losses else torch.empty(shape, device=self.device)
        dist.broadcast(result, self.last_rank, group=self.group)
        return result[:count]

    def _find_packing(self, positions: Tensor) -> None:
        """Find out, on all ranks, whether the model keeps documents apart in rows like ``positions`` (B, T)."""
        model, copies = self.model, 2 * self.microbatches  # of each row, so that no micro-batch has one row alone

        def hidden_states(batch: Batch) -> tuple[Tensor]:
            rows = {name: value.repeat_interleave(copies, 0) for name, value in batch.items()}
            found = self._run("packing", rows, lambda hidden_states, _: hidden_states)
            return (torch.cat(found)[::copies] if found else torch.empty(0),)

        whole = SimpleNamespace(
            loss=model.loss,
            name=model.name,
            backbone=model.backbone,
            vocabulary=min(model.vocabulary, self.divided.embedding_rows),
            hidden_states=hidden_states,
            logits=hidden_states,
            spared_random_numbers=model.spared_random_numbers,
        )
        with self.context():
            found = documents_apart.find(whole, positions, ["positions"])
        model.packing = self._from_last_stage(found)

    def _loss_of(self, hidden_states: Tensor, rows: Batch) -> LossOutput:
        batch = {**rows, "hidden_states": hidden_states}
        output = self.model.compute(self._forward_pass, batch)
        if output.aux_loss is not None:
            raise UserError("an auxiliary loss is not supported under strategy=pp; choose strategy=ddp or fsdp2")
        return output

    def _run(self, kind: str, batch: Batch, job: _Job) -> list[Any]:
        """Run the stages, and on the last ``job`` for each micro-batch; return its results, there alone."""
        self._check(batch)
        if kind != "packing" and self.model.needs_packing_check(batch):
            if self.model.packing is None:
                self._find_packing(batch["position_ids"])
            self.model.check_packing(batch)
        self._is_first = kind not in self._names or kind == "check"
        self._job, self._found, self._refusal = job, [], None
        self._rows = rows = self._filled_up(batch)
        try:
            if kind == "training":
                options = {name: rows[name] for name in _INPUTS if name in rows}
                arguments = (rows["input_ids"],) if 0 in self.stages else ()
                target = torch.arange(len(rows["labels"]))  # The schedule names a micro-batch by its rows, on the host.
                self._schedule(rows["input_ids"].shape).step(*arguments, target=target, return_outputs=False, **options)
            else:
                self._forward(rows)
        finally:
            found, self._rows, self._job, self._found = self._found, {}, lambda *_: None, []
        if self._is_first:
            names = tuple(sums_of(found[0])) if found and isinstance(found[0], LossOutput) else None
            refusal, names = self._from_last_stage((self._refusal, names))
            if refusal is not None:
                raise UserError(refusal)
            self._names[kind] = names
        return found

    @torch.no_grad()
    def _forward(self, rows: Batch) -> None:
        """Run one micro-batch after the other through all stages. torch's schedules store what a forward alone does not
        need.

        Sends and receives are in the order of the micro-batches, and of the stages within each, so that no two ranks
        wait for each other, even if each call blocks. With one stage on each rank that is a pipeline.
        """
        sent: list[tuple[Any, Tensor]] = []
        for target in torch.arange(len(rows["labels"])).tensor_split(self.microbatches):
            part = _slice_of(rows, target)
            options = {name: part[name] for name in _INPUTS if name in part}
            inputs = part["input_ids"]
            for index, stage in sorted(self.stages.items()):
                if index and self.layout.rank_of(index - 1) != self._rank:
                    size = (*part["input_ids"].shape, self.divided.hidden_size)
                    inputs = torch.empty(size, dtype=stage.dtype, device=self.device)
                    dist.recv(inputs, group=self.group, group_src=self.layout.rank_of(index - 1))
                inputs = hidden_states = stage(inputs, **options).contiguous()
                if stage.is_last:
                    self._loss_function(hidden_states, target)
                elif self.layout.rank_of(index + 1) != self._rank:
                    to = self.layout.rank_of(index + 1)
                    sent.append((dist.isend(hidden_states, group=self.group, group_dst=to), hidden_states))
        for work, _ in sent:
            work.wait()
        for stage in self.stages.values():
            if isinstance(stage, FSDPModule):
                stage.reshard()  # A forward without backward leaves the root's parameters gathered.

    def _loss_function(self, hidden_states: Tensor, target: Tensor) -> Tensor:
        try:
            with self.context():
                result = self._job(hidden_states, _slice_of(self._rows, target))
        except UserError as error:
            if not self._is_first:
                raise
            self._refusal = str(error)  # All ranks raise it together, so that none waits for another.
            return hidden_states.sum() * 0
        found, loss = result if isinstance(result, tuple) else (result, hidden_states)
        self._found.append(found)
        return loss

    def _summed(self, kind: str, outputs: Sequence[LossOutput]) -> LossOutput:
        sums, names = [sums_of(output) for output in outputs], self._names[kind]
        if sums:
            total = torch.stack([torch.stack([part[name] for name in names]) for part in sums]).sum(0)
        else:
            total = torch.empty(len(names), dtype=torch.float64, device=self.device)
        dist.broadcast(total, self.last_rank, group=self.group)
        values = dict(zip(names, total, strict=True))
        return LossOutput(values.pop("loss_sum"), values.pop("num_tokens"), stats=values)

    def _from_last_stage(self, value: Any) -> Any:
        """Return the value that the last stage's rank passes. Waits for that rank, so it is for first batches only."""
        box = [value]
        dist.broadcast_object_list(box, self.last_rank, group=self.group)
        return box[0]

    def _check(self, batch: Batch) -> None:
        """Refuse on every rank a batch that would fail on one rank while the others wait for it."""
        labels, ids = labels_of(batch), batch.get("input_ids")
        known = ("input_ids", "labels", *_INPUTS, *self.model.loss.inputs)
        unknown = sorted(name for name, value in batch.items() if value is not None and name not in known)
        if unknown:
            raise UserError(
                f"under strategy=pp a batch has {', '.join(known)}; this one also has {', '.join(unknown)}, "
                "which no stage would get. Leave them out, or choose strategy=ddp or fsdp2"
            )
        if not isinstance(ids, Tensor) or ids.shape != labels.shape or not labels.numel():
            raise UserError("strategy=pp divides a batch by rows: expected input_ids and labels, integers (B, T)")
        if ids.device.type == "cpu":
            check_range(labels, self.model.vocabulary)

    def _filled_up(self, batch: Batch) -> dict[str, Tensor]:
        """Return the batch with enough copies of its last row, without labels, to divide into micro-batches."""
        count = len(batch["labels"])
        missing = self._missing(count)
        filled = {}
        for name in ("input_ids", "labels", *_INPUTS, *self.model.loss.inputs):
            value = batch.get(name)
            if value is None:
                continue
            value = value.expand(count, *value.shape[1:])  # A batch may have one row of position_ids for all.
            last = value[-1:].expand(missing, *value.shape[1:])
            last = torch.full_like(last, IGNORE_INDEX) if name == "labels" else last
            filled[name] = torch.cat([value, last]) if missing else value
        return filled

    def _missing(self, count: int) -> int:
        """Return how many rows fill up a batch of ``count``, so that no micro-batch parts rows that belong together."""
        return -count % (self.microbatches * self.model.loss.rows_together)

    def _schedule(self, shape: torch.Size) -> Any:
        """Return the schedule for token ids of this shape; only the last one's buffers stay in memory."""
        if self.schedule_of_shape is not None and self.schedule_of_shape[0] == shape:
            return self.schedule_of_shape[1]
        self.schedule_of_shape = None
        size = (shape[0] // self.microbatches, *shape[1:])
        stages = []
        for index, stage in self.stages.items():
            ids = torch.empty(size, dtype=torch.int64, device="meta")
            hidden_size = self.divided.hidden_size
            hidden_states = torch.empty(*size, hidden_size, dtype=stage.dtype, device="meta", requires_grad=True)
            shapes = ids if index == 0 else hidden_states, hidden_states
            stages.append(PipelineStage(stage, index, self.layout.num_stages, self.device, *shapes, group=self.group))
        kind = get_schedule_class(self.layout.schedule)
        own: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        schedule = kind(own, self.microbatches, loss_fn=self._loss_function, scale_grads=False)
        self.schedule_of_shape = shape, schedule
        return schedule


class _WithGradients(torch.autograd.Function):
    """A loss whose backward gives parameters the gradients that have been computed."""

    @staticmethod
    def forward(ctx: Any, begin: Tensor, loss: Tensor, gradients: list[tuple[Tensor, Tensor | None]]) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        for parameter, gradient in ctx.gradients:
            parameter.grad = gradient
        return None, None, None


def _slice_of(rows: Batch, target: Tensor) -> dict[str, Tensor]:
    return {name: value[int(target[0]) : int(target[-1]) + 1] for name, value in rows.items()}
