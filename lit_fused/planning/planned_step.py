"""The planner of ``lit_fused.plan``: run two training steps on fake tensors, phase by phase as Lightning does, and
count what they take at their peak.

The second step counts as well as the first: it begins with the optimiser's state. The phases are those of
``PeakMemoryMonitor``.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import lightning as L
import torch
import transformers.utils.import_utils
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import AdamW, Optimizer

from lit_fused.errors import UserError, explained
from lit_fused.heads import OutputHead, output_layer
from lit_fused.integrations.fused_pass import FusedPass
from lit_fused.losses import LossOutput
from lit_fused.memory import host_inputs
from lit_fused.models.language_model import LanguageModel
from lit_fused.models.load import places_of
from lit_fused.models.precision import RotaryHalfPrecision
from lit_fused.parallel import Placement
from lit_fused.planning import ledger as count
from lit_fused.planning.compiled_layers import layers_compiled
from lit_fused.planning.ledger import CudaFunctions
from lit_fused.planning.planned_context import rows_divided_by
from lit_fused.planning.planned_heads import GPU, heads_of
from lit_fused.planning.spread import Spread, capability_here
from lit_fused.training import FusedLMModule
from lit_fused.training.optimizers import build_optimizer, weight_decay_groups

PHASES = ("forward", "backward", "optimizer")
# cuBLAS's workspace on a Hopper GPU is 32 MiB and lies in the caching allocator: one for the thread that runs forward,
# one for the thread that runs backward. On others it is 8 MiB.
_WORKSPACE_MIB = {9: 32, 10: 32}
_MICRO_BATCHES = 2  # The later ones take what the second takes.
_MEASURE = "callbacks=measure trainer.max_steps=3 measures it"
_WITHOUT_TRAINER = Placement(None)


@dataclass(frozen=True)
class PlanOptions:
    """The GPU and the run that a plan is made for.

    Args:
        memory_gib: GiB of one device, to say what fits; None: of the GPU that is here, if there is one.
        compute_capability: decides which kernels run; None: that of the GPU that is here, else 9.0 (Hopper).
        precision, accumulate_grad_batches: as Lightning's.
        strategy: as Lightning's, its object or "auto" or "ddp"; or what it does, a :class:`Spread`.
        devices: how many, of all nodes.
        optimizer: called with the parameters that are trained; None: the module's own, of one that has none AdamW.
    """

    memory_gib: float | None = None
    compute_capability: float | None = None
    precision: str = "32-true"
    accumulate_grad_batches: int = 1
    strategy: Any = "auto"
    devices: int = 1
    optimizer: Callable[..., Optimizer] | None = None

    @classmethod
    def of(cls, trainer: L.Trainer) -> "PlanOptions":
        """Return the options of a trainer's run, on its own devices."""
        return cls(
            precision=str(trainer.precision),
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            strategy=trainer.strategy,
            devices=trainer.world_size,
        )

    @property
    def capability(self) -> tuple[int, int]:
        if self.compute_capability is None:
            return capability_here()
        return int(self.compute_capability), round(self.compute_capability * 10) % 10

    @property
    def device_gib(self) -> float | None:
        if self.memory_gib is not None or not torch.cuda.is_available():
            return self.memory_gib
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30

    @property
    def spread(self) -> Spread:
        return Spread.of(self.strategy, self.devices, self.accumulate_grad_batches)


@dataclass
class PlannedStep:
    """Says what a device needs at the peak of each phase of a step. ``print`` shows it as a table.

    Attributes:
        phases: bytes by component (``ledger.COMPONENTS``), of "forward", "backward" and "optimizer".
        parameters, trained: numbers of the module's, and of those that are trained.
        between_steps: bytes that stay allocated.
    """

    phases: dict[str, Counter[str]]
    parameters: int
    trained: int
    between_steps: int

    @property
    def peak(self) -> int:
        """The bytes of the largest phase."""
        return max(peak.total() for peak in self.phases.values())

    def __str__(self) -> str:
        lines = [("GiB", *self.phases)]
        for name in (*count.COMPONENTS, "total"):
            sizes = [peak.total() if name == "total" else peak[name] for peak in self.phases.values()]
            lines += [(name, *(f"{size / 2**30:.3f}" for size in sizes))] if any(sizes) else []
        return "\n".join(f"{name:<18}" + "".join(f"{cell:>11}" for cell in cells) for name, *cells in lines)


def predicted(module: nn.Module, options: PlanOptions, batch: Any) -> PlannedStep:
    """Return what the largest training step takes; :func:`lit_fused.plan` has the arguments."""
    gpu = GPU(options.capability, 1024 * (options.device_gib or 0))
    frozen = [each.model for each in getattr(module, "frozen", ())]
    trained = module.model if isinstance(module, FusedLMModule) else module
    layer = _output_layer(trained)
    ledger = count.MemoryLedger(-1 if layer is None else len(layer.weight))  # type: ignore[arg-type]
    what = f"{_name(trained)} cannot be planned: what it or the optimizer does depends on numbers that a plan has not"
    with explained(what, _MEASURE), ExitStack() as borrowed:
        for each in (trained, *frozen):
            borrowed.enter_context(_own_tensors_kept(each))
            _replace_tensors(each, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"))
            for model in each.modules():
                if isinstance(model, LanguageModel):
                    borrowed.enter_context(_with_head(model))
        context, *_ = (_prepared_for(options.precision, each) for each in (trained, *frozen))
        borrowed.enter_context(mock.patch.object(FusedPass, "check"))  # There are no numbers to be compared.
        borrowed.enter_context(_host_of_a_gpu(ledger))
        for mode in (FakeTensorMode(allow_non_fake_inputs=True), ledger, CudaFunctions(), _as_if_real()):
            borrowed.enter_context(mode)
        borrowed.enter_context(heads_of(gpu, ledger))
        if options.spread.row_parts > 1:
            borrowed.enter_context(rows_divided_by(options.spread.row_parts))
        if isinstance(module, FusedLMModule) and module._compile != "none":
            borrowed.enter_context(layers_compiled(trained, ledger, context))
        run = _Run(
            ledger, trained, frozen, lambda: _loss_of(module, apply_to_collection(batch, Tensor, _empty)), context
        )
        run.begin(options.spread, gpu)
        optimizer = _optimizer_of(module, options)
        run.step(optimizer, min(options.accumulate_grad_batches, _MICRO_BATCHES))
        run.buckets.clear()
        parameters, learned = (sum(p.numel() for p in some) for some in (trained.parameters(), run.trained))
        between_steps = ledger.live.total()
    workspace = 2 * _WORKSPACE_MIB.get(gpu.capability[0], 8) * 2**20
    peaks = {phase: peak + Counter({count.WORKSPACE: workspace}) for phase, peak in run.peaks.items()}
    return PlannedStep(peaks, parameters, learned, between_steps)


def _loss_of(module: nn.Module, batch: Any) -> Tensor:
    """Return the loss () of a batch: of a language model the sum, whose mean takes no memory."""
    if isinstance(module, FusedLMModule):
        is_own = type(module).compute_loss is not FusedLMModule.compute_loss
        found: Any = module.compute_loss(batch) if is_own else _WITHOUT_TRAINER.evaluate(module.model, batch)
    elif isinstance(module, LanguageModel):
        found = _WITHOUT_TRAINER.evaluate(module, batch)
    elif isinstance(module, L.LightningModule):
        found = module.training_step(batch, 0)
    else:
        found = module(**batch) if isinstance(batch, Mapping) else module(batch)
    if isinstance(found, LossOutput):
        return found.loss_sum
    found = found["loss"] if isinstance(found, Mapping) else getattr(found, "loss", found)
    if not isinstance(found, Tensor) or found.ndim:
        got = f"a tensor {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise UserError(f"{_name(module)} must return a loss to be planned, a scalar, got {got}")
    return found


def _optimizer_of(module: nn.Module, options: PlanOptions) -> Optimizer:
    """Return the first optimiser of the module, as it would be on a GPU."""
    if options.optimizer is not None:
        optimizer: Any = options.optimizer([p for p in module.parameters() if p.requires_grad])
    elif isinstance(module, FusedLMModule):
        groups, fused = weight_decay_groups(module.model, module.no_decay), options.precision != "16-mixed"
        optimizer = build_optimizer(module.make_optimizer, groups, module.model, module, fused=fused)
    elif isinstance(module, L.LightningModule):
        optimizer = module.configure_optimizers()
        while not isinstance(optimizer, Optimizer):
            optimizer = optimizer["optimizer"] if isinstance(optimizer, Mapping) else optimizer[0]
    else:
        optimizer = AdamW(p for p in module.parameters() if p.requires_grad)
    for group in optimizer.param_groups:  # on a GPU torch's optimisers, but Adafactor, default to foreach
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = type(optimizer).__name__ != "Adafactor"
    return optimizer


@dataclass
class _Run:
    """Steps on fake tensors, which the model, and those that are frozen beside it, are given first."""

    ledger: count.MemoryLedger
    model: nn.Module
    frozen: Sequence[LanguageModel]
    loss: Callable[[], Tensor]
    context: Callable[[], AbstractContextManager[Any]]

    def begin(self, spread: Spread, gpu: GPU) -> None:
        ledger, self.spread = self.ledger, spread
        self.peaks: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
        in_forward, in_backward = spread.gathered(self.model, gpu.memory_mib)
        for each in self.frozen:
            in_forward += spread.gathered(each, gpu.memory_mib)[0]
            with ledger.under(count.FROZEN, spread.share):
                _replace_tensors(each, _empty)
        self.gathered = in_forward, in_backward
        with ledger.under(count.WEIGHTS, spread.share):
            _replace_tensors(self.model, _empty, lambda b: b)
        _replace_tensors(self.model, lambda p: p.data, _empty)
        self.model.train()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        kept = 1.0 if spread.whole_gradients else spread.share
        for p in self.trained:
            p.register_post_accumulate_grad_hook(lambda p: ledger.move(p.grad, count.GRADIENTS, kept))
        with ledger.under(count.GRADIENTS):
            self.buckets = [torch.empty_like(p) for p in self.trained] if spread.buckets else []
        ledger.heading = count.TEMPORARY

    def step(self, optimizer: Optimizer, micro_batches: int) -> None:
        """Run the first step, and count those that follow: in forward and backward they have the optimiser's state."""
        self.ledger.start_phase()
        in_forward, in_backward = self.gathered
        for _ in range(micro_batches):
            units = [self._units(in_forward)]
            with self.ledger.under(count.ACTIVATIONS), self.context():
                loss = self.loss()
            self._end_of("forward")
            units.append(self._units(in_backward))
            with self.ledger.under(count.TEMPORARY):
                ones = torch.ones_like(loss)
                count.run_backward(loss, ones)
            del units, loss, ones
            self._end_of("backward")
        for _ in range(2):  # The first one makes the state.
            with self.ledger.under(count.TEMPORARY, self.spread.share):
                optimizer.step()
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        self.ledger.move(value, count.OPTIMIZER)
            self._end_of("optimizer")
        for phase in ("forward", "backward"):
            self.peaks[phase] += Counter({count.OPTIMIZER: self.ledger.live[count.OPTIMIZER]})

    def _units(self, size: int) -> Tensor:
        with self.ledger.under(count.GATHERED):
            return torch.empty(size, dtype=torch.uint8)

    def _end_of(self, phase: str) -> None:
        if self.ledger.peak.total() >= self.peaks[phase].total():
            self.peaks[phase] = +self.ledger.peak  # without zeros
        self.ledger.start_phase()


def _as_if_real() -> AbstractContextManager[Any]:
    """Let transformers take fake tensors for real ones: for fake ones it makes masks that fit any input, which take
    more memory."""
    return mock.patch.object(transformers.utils.import_utils, "is_fake_tensor", return_value=False)


@contextmanager
def _host_of_a_gpu(ledger: count.MemoryLedger) -> Iterator[None]:
    """Let what is kept on the host take no memory of the GPU, and what comes back take new memory there."""

    def to_host(tensor: Tensor) -> tuple[list[Tensor], None]:
        with ledger.under(count.HOST):
            return [torch.empty_like(tensor)], None

    def to_device(kept: Any) -> tuple[Tensor, None]:
        return torch.empty_like(kept.pieces[0]), None

    with (
        mock.patch.object(host_inputs, "to_host", to_host),
        mock.patch.object(host_inputs, "to_device", to_device),
        mock.patch.object(host_inputs, "free_host_memory", return_value=sys.maxsize),
    ):
        yield


def _prepared_for(precision: str, model: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
    if precision in ("32-true", "32"):
        return nullcontext
    if precision in ("bf16-mixed", "16-mixed"):
        dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
        return lambda: torch.autocast("cpu", dtype=dtype)
    if precision in ("bf16-true", "16-true"):
        plugin = RotaryHalfPrecision(precision)
        plugin.convert_module(model)
        return plugin.forward_context
    raise UserError(
        f"a plan knows precision=32-true, bf16-mixed, 16-mixed, bf16-true and 16-true, got {precision!r}; {_MEASURE}"
    )


@contextmanager
def _with_head(model: LanguageModel) -> Iterator[None]:
    """Describe the head of a model that has none yet: to identify it takes numbers."""
    if model.head is not None:
        yield
        return
    text = None if model.transformers_model is None else model.transformers_model.config.get_text_config()
    softcap = getattr(text, "final_logit_softcapping", None)
    model.replace_head(OutputHead(output_layer(model.backbone), softcap=softcap))
    try:
        yield
    finally:
        model.replace_head(None)


def _output_layer(model: nn.Module) -> nn.Module | None:
    """Return the output layer, whose results are entered as the output head's; None where it is not known."""
    if isinstance(model, LanguageModel):
        return output_layer(model.backbone)
    found: list[Any] = [m for m in model.modules() if hasattr(m, "get_output_embeddings")]
    return next((layer for m in found if hasattr(layer := m.get_output_embeddings(), "weight")), None)


def _name(module: nn.Module) -> str:
    return type(module.transformers_model or module.backbone if isinstance(module, LanguageModel) else module).__name__


@contextmanager
def _own_tensors_kept(model: nn.Module) -> Iterator[None]:
    """Give a model its tensors and modes back at the end of a block."""
    own = [(module, name, tensor) for _, module, name, tensor in places_of(model)]
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, name, tensor in own:
            setattr(module, name, tensor)
        for module, mode in modes:
            module.training = mode


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
