"""Run two training steps on fake tensors, phase by phase as Lightning does, and count what they take at their peak.

The second step counts as well as the first: it begins with the optimiser's state. The phases are those of
``PeakMemoryMonitor``.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import transformers.utils.import_utils
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from lit_fused.app.planning import ledger as count
from lit_fused.app.planning.ledger import CudaFunctions
from lit_fused.errors import UserError, explained
from lit_fused.heads import OutputHead, output_layer
from lit_fused.losses import LinearCrossEntropyLoss
from lit_fused.models.language_model import LanguageModel
from lit_fused.models.load import places_of
from lit_fused.models.precision import RotaryHalfPrecision
from lit_fused.ops import foreign, operands
from lit_fused.ops.backends import Backend, backend_attribute, backend_name
from lit_fused.ops.operands import PlannedGPU
from lit_fused.parallel.sharded import stay_gathered, units

PHASES = ("forward", "backward", "optimizer")
# cuBLAS's workspace on a Hopper GPU is 32 MiB and lies in the caching allocator: one for the thread that runs forward,
# one for the thread that runs backward. On others it is 8 MiB.
_WORKSPACE_MIB = {9: 32, 10: 32}
_MEASURE = "callbacks=measure trainer.max_steps=3 measures it"


@dataclass(frozen=True)
class Spread:
    """Says how a model is spread over devices: as FSDP2 divides it, or whole on each.

    Attributes:
        shards: devices that have a part each of parameters, gradients and optimiser state.
        whole_gradients: they are divided only after the last micro-batch.
        whole_units: a unit stays whole between its forward and its backward; None: as FSDP2 chooses for the GPU.
        buckets: gradients have a copy in which they are exchanged (DDP without ``gradient_as_bucket_view``).
    """

    shards: int = 1
    whole_gradients: bool = False
    whole_units: bool | None = False
    buckets: bool = False

    @property
    def share(self) -> float:
        """A device's share of the divided numbers."""
        return 1.0 / self.shards

    def gathered(self, model: LanguageModel) -> tuple[int, int]:
        """Return the bytes of the units that are whole in forward, and of those added in backward: the root and one
        other, then another one and the gradients of two that wait to be reduced; or all, then these gradients."""
        if self.shards == 1:
            return 0, 0
        sizes = [sum(map(_size, unit)) for unit in units(model)]
        largest = max(sizes, default=0)
        if self.whole_units:
            return _size(model), 2 * largest
        return _size(model) - sum(sizes) + largest, 3 * largest


def _size(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


@dataclass
class Prediction:
    """Bytes by component at the peak of each phase of a step."""

    phases: dict[str, Counter[str]]
    parameters: int  # numbers
    trained: int
    between_steps: int  # bytes

    @property
    def peak(self) -> int:
        return max(peak.total() for peak in self.phases.values())


def predict(
    model: LanguageModel,
    make_optimizer: Callable[[nn.Module], Optimizer],
    make_batch: Callable[[], dict[str, Tensor]],
    *,
    precision: str = "32-true",
    accumulate_grad_batches: int = 1,
    gpu: PlannedGPU,
    division: Spread = Spread(),
    frozen: Sequence[LanguageModel] = (),
) -> Prediction:
    """Predict the memory of the largest of a GPU's training steps.

    Args:
        model: on any device, the meta device for instance; it cannot be used afterwards.
        make_optimizer, make_batch: called with the model; for every micro-batch, on the CPU.
        precision, accumulate_grad_batches: as Lightning's.
        gpu, division: the GPU; how the model is spread over devices.
        frozen: models that the loss runs beside this one, without gradients.

    Raises:
        UserError: a loss or a precision is unknown, or the model or the optimiser asks for the numbers of fake tensors.
    """
    for each in (model, *frozen):
        _replace_tensors(each, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"))
    forward_context, *_ = (_prepared_for(precision, each) for each in (model, *frozen))
    ledger = count.MemoryLedger(len(output_layer(model.backbone).weight))  # type: ignore[arg-type]
    if isinstance(model.loss, LinearCrossEntropyLoss):
        model.loss.backend = allocating(model.loss.backend, gpu, ledger)
        for each in (model, *frozen):
            text = None if each.transformers_model is None else each.transformers_model.config.get_text_config()
            softcap = getattr(text, "final_logit_softcapping", None)
            each.replace_head(OutputHead(output_layer(each.backbone), softcap=softcap))
    if division.whole_units is None:
        division = replace(division, whole_units=stay_gathered(units(model), gpu.memory_mib * 2**20))
    planned = mock.patch.object(operands, "PreparedRows", functools.partial(operands.PreparedRows, planned=gpu))
    name = type(model.transformers_model or model.backbone).__name__
    what = f"{name} cannot be planned: what it or the optimizer does depends on numbers that a plan does not have"
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with explained(what, _MEASURE), fake, ledger, CudaFunctions(), _as_if_real(), planned:
        run = _Run(ledger, model, frozen, make_batch, forward_context, division)
        optimizer = run.build(make_optimizer)
        for _ in range(2):
            run.step(optimizer, accumulate_grad_batches)
        run.buckets.clear()
    for peak in run.peaks.values():
        peak[count.WORKSPACE] = 2 * _WORKSPACE_MIB.get(gpu.capability[0], 8) * 2**20
    parameters, trained = (sum(p.numel() for p in some) for some in (model.parameters(), run.trained))
    return Prediction(run.peaks, parameters, trained, ledger.live.total())


def allocating(backend: Backend, gpu: PlannedGPU, ledger: count.MemoryLedger) -> Backend:
    """Return a backend like this one that allocates what it does on a GPU, as the output head's, and computes nothing.
    Raises UserError if the backend does not say what it allocates."""
    make = backend_attribute(backend, "allocating")
    if make is None:
        known = [name for name, function in vars(foreign).items() if backend_attribute(function, "allocating")]
        raise UserError(
            f"mode=plan does not know what loss.impl={backend_name(backend)} allocates; it knows {', '.join(known)}; "
            + _MEASURE
        )
    run_on_fake_tensors = make(gpu)

    @functools.wraps(backend)
    def run(hidden_states: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Any:
        with ledger.under(count.HEAD):
            return run_on_fake_tensors(hidden_states, weight, targets, **options)

    for attribute in ("requirement", "fallback"):  # they are about this machine, the plan is about another GPU
        vars(run).pop(attribute, None)
    return run


@dataclass
class _Run:
    """Steps on fake tensors, which the model, and those that are frozen beside it, are given first."""

    ledger: count.MemoryLedger
    model: LanguageModel
    frozen: Sequence[LanguageModel]
    make_batch: Callable[[], dict[str, Tensor]]
    context: Callable[[], AbstractContextManager[Any]]
    division: Spread

    def __post_init__(self) -> None:
        ledger, division = self.ledger, self.division
        self.peaks: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
        in_forward, in_backward = division.gathered(self.model)
        for each in self.frozen:
            in_forward += division.gathered(each)[0]
            with ledger.under(count.FROZEN, division.share):
                _replace_tensors(each, _empty)
        self.gathered = in_forward, in_backward
        with ledger.under(count.WEIGHTS, division.share):
            _replace_tensors(self.model, _empty, lambda b: b)
        _replace_tensors(self.model, lambda p: p.data, _empty)
        self.model.train()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        kept = 1.0 if division.whole_gradients else division.share
        for p in self.trained:
            p.register_post_accumulate_grad_hook(lambda p: ledger.move(p.grad, count.GRADIENTS, kept))
        with ledger.under(count.GRADIENTS):
            self.buckets = [torch.empty_like(p) for p in self.trained] if division.buckets else []
        ledger.heading = count.TEMPORARY

    def build(self, make_optimizer: Callable[[nn.Module], Optimizer]) -> Optimizer:
        optimizer = make_optimizer(self.model)
        for group in optimizer.param_groups:  # on a GPU torch's optimisers, but Adafactor, default to foreach
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = type(optimizer).__name__ != "Adafactor"
        return optimizer

    def step(self, optimizer: Optimizer, micro_batches: int) -> None:
        """Run as a module does, which frees the last step's gradients before forward."""
        optimizer.zero_grad()
        self.ledger.start_phase()
        for index in range(micro_batches):
            in_forward, in_backward = self.gathered
            units = [self._units(in_forward)]
            with self.ledger.under(count.ACTIVATIONS):
                batch = self.make_batch()
                with self.context():
                    loss = self.model(batch).loss_sum
            if index == 0:
                optimizer.zero_grad()
            self._end_of("forward")
            units.append(self._units(in_backward))
            with self.ledger.under(count.TEMPORARY):
                # loss.backward() is a torch function: it, and checkpointing in it, would run without CudaFunctions.
                ones = torch.ones_like(loss)
                torch.autograd.graph._engine_run_backward((loss,), (ones,), False, False, (), True, True)
            del units, loss, ones, batch
            self._end_of("backward")
        with self.ledger.under(count.TEMPORARY, self.division.share):
            optimizer.step()
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self.ledger.move(value, count.OPTIMIZER)
        self._end_of("optimizer")

    def _units(self, size: int) -> Tensor:
        with self.ledger.under(count.GATHERED):
            return torch.empty(size, dtype=torch.uint8)

    def _end_of(self, phase: str) -> None:
        if self.ledger.peak.total() >= self.peaks[phase].total():
            self.peaks[phase] = +self.ledger.peak  # without zeros
        self.ledger.start_phase()


def _as_if_real() -> AbstractContextManager[Any]:
    """Make transformers build masks for fake tensors as it does for real ones, not those that fit any input."""
    return mock.patch.object(transformers.utils.import_utils, "is_fake_tensor", return_value=False)


def _prepared_for(precision: str, model: LanguageModel) -> Callable[[], AbstractContextManager[Any]]:
    if precision in ("32-true", "32", 32):
        return nullcontext
    if precision in ("bf16-mixed", "16-mixed"):
        dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
        return lambda: torch.autocast("cpu", dtype=dtype)
    if precision in ("bf16-true", "16-true"):
        plugin = RotaryHalfPrecision(precision)
        plugin.convert_module(model)
        return plugin.forward_context
    raise UserError(
        f"mode=plan knows precision=32-true, bf16-mixed, 16-mixed, bf16-true and 16-true, got {precision!r}; "
        + _MEASURE
    )


def stand_in(model: nn.Module) -> nn.Module:
    """Give the model fake tensors. On the meta device it would count as deferred, and adapters would be refused."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        _replace_tensors(model, _empty)
    return model


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu")


def _replace_tensors(
    model: nn.Module, parameter: Callable[[Tensor], Tensor], buffer: Callable[[Tensor], Tensor] | None = None
) -> None:
    made: dict[Tensor, Tensor] = {}
    for _, module, name, tensor in list(places_of(model)):
        if tensor not in made:
            is_parameter = isinstance(tensor, nn.Parameter)
            new = (parameter if is_parameter or buffer is None else buffer)(tensor)
            made[tensor] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
        setattr(module, name, made[tensor])
