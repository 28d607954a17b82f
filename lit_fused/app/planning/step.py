"""Two training steps on fake tensors, phase by phase as Lightning runs them, and what they take at their peak.

The second step counts as well as the first: it begins with the gradients of the first, which Lightning frees only after
the second forward, and with the optimiser's state. So the phases are those of ``PeakMemoryMonitor``: forward,
backward, optimizer.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers.utils.import_utils
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from lit_fused.app.planning.cuda import CudaFunctions
from lit_fused.app.planning.ledger import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    HEAD,
    OPTIMIZER,
    TEMPORARY,
    WORKSPACE,
    MemoryLedger,
)
from lit_fused.errors import UserError
from lit_fused.heads import OutputHead, output_layer
from lit_fused.losses import LinearCrossEntropyLoss
from lit_fused.models.compilation import blocks
from lit_fused.models.language_model import LanguageModel
from lit_fused.models.precision import RotaryHalfPrecision
from lit_fused.ops import foreign
from lit_fused.ops.backends import Backend, backend_attribute, backend_name

PHASES = ("forward", "backward", "optimizer")
# cuBLAS's workspace on a Hopper GPU is 32 MiB and lies in the caching allocator: one for the thread that runs forward,
# one for the thread that runs backward. On others it is 8 MiB.
_WORKSPACE_MIB = {9: 32, 10: 32}


@dataclass
class Peak:
    """Bytes by component at the moment when most were allocated."""

    components: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.components.values())


@dataclass(frozen=True)
class Spread:
    """How a model is spread over devices: as FSDP divides it, or whole on each.

    Attributes:
        shards: devices that have a part each of parameters, gradients and optimiser state.
        casts_units: a unit is cast to half precision once, when it is gathered (FSDP1 under mixed precision), where
            autocast casts at every product.
        whole_gradients: they are divided only after the last micro-batch.
        buckets: gradients have a copy in which they are exchanged (DDP without ``gradient_as_bucket_view``).
    """

    shards: int = 1
    casts_units: bool = False
    whole_gradients: bool = False
    buckets: bool = False

    def share(self, model: nn.Module) -> float:
        """Return a device's share of the divided numbers, relative to their size in the model that runs."""
        halves = self.casts_units and all(p.element_size() == 2 for p in model.parameters())
        return (2.0 if halves else 1.0) / self.shards

    def gathered(self, model: nn.Module) -> tuple[int, int]:
        """Bytes of the units that are whole in forward, and of what is added to them in backward.

        What is no repeated block is the root's, and whole all the time; of the blocks one, in backward two, and two
        blocks' gradients that wait for being reduced.
        """
        if self.shards == 1:
            return 0, 0
        largest = max((_size(block) for block in blocks(model)), default=0)
        root = _size(model) - sum(_size(block) for block in blocks(model))
        return root + largest, 3 * largest


def _size(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


@dataclass
class Prediction:
    """Peaks of the phases of a step, in bytes."""

    phases: dict[str, Peak]
    parameters: int  # numbers
    trained: int
    after_step: Peak  # what stays until the next step

    @property
    def peak(self) -> Peak:
        return max(self.phases.values(), key=lambda peak: peak.total)


def predict(
    model: LanguageModel,
    make_optimizer: Callable[[nn.Module], Optimizer],
    make_batch: Callable[[], dict[str, Tensor]],
    *,
    precision: str = "32-true",
    accumulate_grad_batches: int = 1,
    capability: tuple[int, int] = (9, 0),
    division: Spread = Spread(),
) -> Prediction:
    """Predict the memory of the largest of a GPU's training steps.

    Args:
        model: on any device, the meta device for instance; it is of no other use afterwards.
        make_optimizer: called with the model.
        make_batch: called for every micro-batch; on the CPU.
        precision: Lightning's.
        accumulate_grad_batches: micro-batches of a step.
        capability: compute capability of the GPU.
        division: of the model over devices.

    Raises:
        UserError: the model or the optimiser asks for numbers, which fake tensors do not have, or a loss or a precision
            is not known.
    """
    _replace_tensors(model, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"))
    if division.casts_units and "mixed" in precision:
        precision = precision.replace("mixed", "true")
    forward_context = _prepared_for(precision, model)
    layer = output_layer(model.backbone)
    vocabulary = len(layer.weight)  # type: ignore[arg-type]
    ledger = MemoryLedger(vocabulary)
    if isinstance(model.loss, LinearCrossEntropyLoss):
        model.loss.backend = allocating(model.loss.backend, capability, ledger)
        text = None if model.transformers_model is None else model.transformers_model.config.get_text_config()
        model.replace_head(OutputHead(layer, softcap=getattr(text, "final_logit_softcapping", None)))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), ledger, CudaFunctions(), _as_if_real():
            share = division.share(model)
            gathered = division.gathered(model)
            with ledger.divided(share):
                _replace_tensors(model, _empty, lambda b: b)
            _replace_tensors(model, lambda p: p.data, _empty)
            model.train()
            trained = [p for p in model.parameters() if p.requires_grad]
            kept = 1.0 if division.whole_gradients else share
            for p in trained:
                p.register_post_accumulate_grad_hook(lambda p: ledger.move(p.grad, GRADIENTS, kept))
            with ledger.under(GRADIENTS):
                buckets = [torch.empty_like(p) for p in trained] if division.buckets else []
            ledger.heading = TEMPORARY
            optimizer = make_optimizer(model)
            _as_on_a_gpu(optimizer)
            run = _Run(ledger, model, optimizer, make_batch, forward_context, accumulate_grad_batches)
            run.share, run.gathered = share, gathered
            run.step()
            run.step()
            del buckets
    except UserError:
        raise
    except Exception as error:  # a model's own code, given tensors without numbers
        raise UserError(
            f"{type(model.transformers_model or model.backbone).__name__} cannot be planned: what it or the optimizer "
            f"does depends on numbers that a plan does not have ({type(error).__name__}: {_first_line(error)}); "
            "mode=fit_batch measures it on a GPU"
        ) from error
    workspace = 2 * _WORKSPACE_MIB.get(capability[0], 8) * 2**20
    phases = {phase: Peak({**components, WORKSPACE: workspace}) for phase, components in run.peaks.items()}
    parameters = sum(p.numel() for p in model.parameters())
    return Prediction(phases, parameters, sum(p.numel() for p in trained), Peak(dict(ledger.live)))


def allocating(backend: Backend, capability: tuple[int, int], ledger: MemoryLedger) -> Backend:
    """Return a backend of the same name and options that allocates what this one does, and computes nothing.

    Args:
        backend: the one to be planned.
        capability: compute capability of the GPU.
        ledger: what the backend allocates is entered there as the output head's.

    Raises:
        UserError: the backend does not say what it allocates.
    """
    make = backend_attribute(backend, "allocating")
    if make is None:
        known = [name for name, function in vars(foreign).items() if backend_attribute(function, "allocating")]
        raise UserError(
            f"mode=plan does not know what loss.impl={backend_name(backend)} allocates; it knows {', '.join(known)}. "
            "mode=fit_batch measures any loss"
        )
    run_on_fake_tensors = make(capability)

    @functools.wraps(backend)
    def run(hidden_states: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Any:
        with ledger.under(HEAD):
            return run_on_fake_tensors(hidden_states, weight, targets, **options)

    for attribute in ("requirement", "fallback"):  # of the GPU that is planned for, not of this machine
        vars(run).pop(attribute, None)
    return run


class _Run:
    def __init__(
        self,
        ledger: MemoryLedger,
        model: LanguageModel,
        optimizer: Optimizer,
        make_batch: Callable[[], dict[str, Tensor]],
        context: Callable[[], AbstractContextManager[Any]],
        micro_batches: int,
    ) -> None:
        self.ledger, self.model, self.optimizer = ledger, model, optimizer
        self.make_batch, self.context, self.micro_batches = make_batch, context, micro_batches
        self.peaks: dict[str, dict[str, int]] = {phase: {} for phase in PHASES}
        self.share, self.gathered = 1.0, (0, 0)

    def step(self) -> None:
        """In Lightning's order: gradients are freed after the first micro-batch's forward."""
        self.ledger.start_phase()
        for index in range(self.micro_batches):
            in_forward, in_backward = self.gathered
            units = [self._units(in_forward)]
            with self.ledger.under(ACTIVATIONS):
                batch = self.make_batch()
                with self.context():
                    loss = self.model(batch).loss_sum
            if index == 0:
                self.optimizer.zero_grad()
            self._end_of("forward")
            units.append(self._units(in_backward))
            with self.ledger.under(TEMPORARY):
                _backward(loss)
            del units, loss, batch
            self._end_of("backward")
        with self.ledger.under(TEMPORARY), self.ledger.divided(self.share):
            self.optimizer.step()
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self.ledger.move(value, OPTIMIZER)
        self._end_of("optimizer")

    def _units(self, size: int) -> Tensor:
        with self.ledger.under(GATHERED):
            return torch.empty(size, dtype=torch.uint8)

    def _end_of(self, phase: str) -> None:
        found = {name: size for name, size in self.ledger.peak.items() if size}
        if sum(found.values()) >= sum(self.peaks[phase].values()):
            self.peaks[phase] = found
        self.ledger.start_phase()


def _backward(loss: Tensor) -> None:
    """``loss.backward()`` is a torch function itself: it would run without :class:`CudaFunctions`, and so would what
    checkpointing computes again."""
    ones = torch.ones_like(loss)
    torch.autograd.graph._engine_run_backward((loss,), (ones,), False, False, (), True, True)


@contextmanager
def _as_if_real() -> Iterator[None]:
    """Let transformers treat fake tensors as real ones within the block.

    For a fake tensor it makes the masks that a program for any input would need.
    """
    asked = transformers.utils.import_utils.is_fake_tensor
    transformers.utils.import_utils.is_fake_tensor = lambda x: False
    try:
        yield
    finally:
        transformers.utils.import_utils.is_fake_tensor = asked


def _prepared_for(precision: str, model: LanguageModel) -> Callable[[], AbstractContextManager[Any]]:
    """Cast the model as Lightning does, and return what it enters around a forward pass."""
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
        "mode=fit_batch measures any"
    )


def stand_in(model: nn.Module) -> nn.Module:
    """The model with fake tensors in the place of its numbers: on the meta device it would be taken for one whose
    numbers come later, around which there may be no adapters."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        _replace_tensors(model, _empty)
    return model


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu")


def _replace_tensors(
    model: nn.Module, parameter: Callable[[Tensor], Tensor], buffer: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Put other tensors in the place of all parameters and buffers; what is tied stays tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(parameter(p), p.requires_grad)
                module._parameters[name] = made[id(p)]  # type: ignore[assignment]
        for name, b in module._buffers.items():
            if b is not None:
                if id(b) not in made:
                    made[id(b)] = (buffer or parameter)(b)
                module._buffers[name] = made[id(b)]


def _as_on_a_gpu(optimizer: Optimizer) -> None:
    """torch's optimisers work on all parameters of a GPU at once unless they are told otherwise; not so Adafactor."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = type(optimizer).__name__ != "Adafactor"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")
