"""The spot check: a slice of a batch through the model's own forward and loss, and through the fused loss.

A fused loss computes logits by a formula that was identified once, and takes the place of the model's own loss. The
model may do something else: with labels, in training, with other arguments of a batch, or after some steps. So now and
then a slice of a batch, as it came, runs through the model as if there were no fused loss, in the mode that the model
is in. Its loss has to be the cross entropy of its logits, and the losses and gradients of its logits those of the
formula, and so have those of the fused loss. What the two passes leave in the model's buffers and attributes, and in
the entries of its output, has to be the same as well: some of it may be made of logits or labels.

The bound is the error of the run's own precision: what the formula loses in it, compared with float64.

N tokens of the slice (B, T), D hidden, V vocabulary.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lit_fused.errors import UserError
from lit_fused.heads.capture import graph_leaves
from lit_fused.heads.model_state import NOT_THERE, same_numbers, without_trace
from lit_fused.heads.slices import leaf_before
from lit_fused.heads.spec import OutputHead, has_own_rows
from lit_fused.ops.frozen_columns import row_parts
from lit_fused.ops.label_checks import IGNORE_INDEX

_LOSS, _GRADIENT = 1e-4, 2e-3  # relative: what an exact loss or gradient may differ by in any precision
_ROWS = 8192  # of a weight that are in float64 at a time
_TOKENS = 32  # that have logits in float64 at a time


@dataclass
class OwnPass:
    """The answer of a model's own forward: its mean loss (), or None, logits (B, T, V), its auxiliary loss, and all
    entries of its output."""

    loss: Tensor | None
    logits: Tensor
    aux_loss: Tensor | None = None
    entries: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class FusedPass:
    """The answer of the model's forward without labels and output layer: the layer's input (B, T, D), what sums the
    fused loss, and the entries of the output."""

    hidden_states: Tensor
    loss_sum: Callable[[], Tensor]
    entries: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Labels:
    """The targets that a model's own loss has to predict.

    Attributes:
        targets: (B, T), what each position of the slice predicts, -100 where nothing.
        counts: what the own loss may divide its sum by; None: the number of targets.
        other_targets: the targets of a loss that shifts labels where these are not shifted, or the other way.
        may_be_other: the own loss may be that of the other targets, in causal models that leave shifting to others.
    """

    targets: Tensor
    counts: tuple[Any, ...] = (None,)
    other_targets: Tensor | None = None
    may_be_other: bool = False


class SpotCheck:
    """Compares a model's own pass of a slice with the formula of its head, and with a fused loss; UserError where they
    differ. ``model`` is the one whose state is given back, ``name`` its name.

    ``own`` runs the model's own forward; given False, without labels. It returns None where its loss cannot take the
    labels of the slice."""

    def __init__(self, model: nn.Module, name: str, labels: Labels) -> None:
        self.model, self.name, self.labels, self.targets = model, name, labels, labels.targets

    def compare_own_loss(self, own: Callable[[bool], OwnPass | None]) -> None:
        """Compare the model's own loss with the cross entropy of its own logits, and these with those that it gives
        without labels."""
        with without_trace(self.model) as state:
            unlabelled = own(False)
            assert unlabelled is not None
            changed_without_labels = state.changes()
        with self._own_pass(own, None) as (found, _, changed):
            self._compare_without_labels(unlabelled.logits, found.logits)
            if found.logits.shape[:-1] == self.targets.shape:  # else the loss refuses such a batch
                self._count_of_own_loss(found, _losses(found.logits, self.targets))
        self._compare_changes(own, changed_without_labels, changed)

    def compare_head(
        self, head: OutputHead, own: Callable[[bool], OwnPass | None], fused: Callable[[], FusedPass]
    ) -> set[str]:
        """Compare the model's own pass, the formula of its head, and the fused loss. Return the names of the output's
        entries that are made of logits or labels, and so have no value in a fused pass."""
        # Each pass has its gradients before the model's state is given back: a graph may have some of it.
        with without_trace(self.model) as state, leaf_before(head.layer) as of_fused:
            fused_pass = fused()
            changed_by_fused = state.changes()
            found = _measured(head, fused_pass, of_fused[-1], self.targets)
        with self._own_pass(own, head.layer) as (own_pass, of_own, changed):
            made = {
                name
                for name, value in own_pass.entries.items()
                if name not in ("loss", "logits") and not same_numbers(fused_pass.entries.get(name), value)
            }
            if not (self.targets != IGNORE_INDEX).any():  # It has run all the same, as on the other ranks.
                return made
            if not of_own or own_pass.logits.shape != (*self.targets.shape, head.vocabulary):
                shape = tuple(own_pass.logits.shape)
                what = f"with labels they have the shape {shape}" if of_own else "its output layer does not run"
                raise self._other_logits(head, what)
            if own_pass.aux_loss is not None and "aux_loss" in made:
                raise UserError(
                    f"the own loss of {self.name} has an auxiliary loss that is made of its logits or labels, which a "
                    "fused loss does not give it; switch it off, or choose loss=model"
                )
            losses = _losses(own_pass.logits, self.targets)
            count = self._count_of_own_loss(own_pass, losses)
            self._compare_without_labels(of_fused[-1], of_own[-1])
            formula = found.formula or _of_own_logits(own_pass.logits, self.targets)
            self._compare_losses(head, losses, found.loss, formula)
            if found.gradients is not None:
                own_sum = losses.sum() if own_pass.loss is None else own_pass.loss * count.to(losses.device)
                self._compare_gradients(head, own_sum, own_pass.aux_loss, of_own[-1], found, formula)
        self._compare_changes(own, changed_by_fused, changed)
        return made

    @contextmanager
    def _own_pass(
        self, own: Callable[[bool], OwnPass | None], layer: nn.Module | None
    ) -> Iterator[tuple[OwnPass, list[Tensor], dict[str, Any]]]:
        """Yield the own pass, the inputs of the output layer in it, and what it changed in the model."""
        for with_labels in (True, False):
            with without_trace(self.model) as state, nullcontext([]) if layer is None else leaf_before(layer) as leaves:
                found = own(with_labels)
                if found is not None:
                    yield found, leaves, state.changes()
                    return

    def _compare_changes(
        self, own: Callable[[bool], OwnPass | None], by_fused: dict[str, Any], by_own: dict[str, Any]
    ) -> None:
        differ = _different(by_fused, by_own)
        if differ:
            with self._own_pass(own, None) as (_, _, once_more):  # A clock differs in each pass.
                differ -= _different(once_more, by_own)
        if differ:
            raise UserError(
                f"{self.name} makes {', '.join(sorted(differ)[:3])} of its logits or its labels, which it does not get "
                "with the loss that is trained: it would stay as it is, or be no number; leave it out of the model's "
                "forward, or choose loss=model"
            )

    def _compare_without_labels(self, found: Tensor, labelled: Tensor) -> None:
        if not labelled.isfinite().all():
            raise self._no_numbers()
        if found.shape != labelled.shape or _relative(found, labelled) > 1e-3 + 8 * torch.finfo(found.dtype).eps:
            raise UserError(
                f"what {self.name} computes is something else if it gets labels, and it is to run without them; make "
                "its forward compute the same with and without labels, choose loss=model, or say own_loss_differs=True "
                "if what it does with them is to be left out"
            )

    def _count_of_own_loss(self, own: OwnPass, losses: Tensor) -> Tensor:
        """Return what the own loss divides its sum by. An own loss of other targets that may be is left out of what
        follows."""
        labels, number = self.labels, (self.targets != IGNORE_INDEX).sum()
        counts = [number if count is None else torch.as_tensor(count) for count in labels.counts]
        if own.loss is None:
            return number
        aux = 0 if own.aux_loss is None else own.aux_loss.detach().float()
        loss, summed = own.loss.detach().float(), losses.detach().sum()
        if not summed.isfinite():
            return number
        # A loss in half precision is rounded as its logits are, however small it is.
        largest = own.logits.detach().abs().amax(-1).float().mean()
        limit = 1e-5 * loss.abs() + 2 * torch.finfo(own.loss.dtype).eps * torch.maximum(loss.abs(), largest)
        is_other = False
        if labels.other_targets is not None:
            others = _losses(own.logits.detach(), labels.other_targets).sum()
            mean = others / (labels.other_targets != IGNORE_INDEX).sum()
            is_other = bool((loss - aux - mean).abs() <= limit)
        may_be_other = is_other and labels.may_be_other
        for count in counts:
            if (loss - summed / count.to(summed.device) - aux).abs() <= limit:
                own.loss = None if may_be_other else own.loss  # Few digits do not tell them apart.
                return count
        if may_be_other:
            own.loss = None
            warnings.warn(
                f"the own loss of {self.name} does not shift the labels, and this module does; if its positions see "
                "later tokens, it would learn to copy",
                stacklevel=2,
            )
            return number
        if is_other:
            raise UserError(
                f"the own loss of {self.name} pairs positions and labels in another way than this module: one of the "
                "two shifts the labels by a position; choose the module for this kind of model (causal_lm, masked_lm "
                "or seq2seq_lm), or put labels that are not to be shifted into the batches as 'shift_labels'"
            )
        raise UserError(
            f"the own loss of {self.name} has a term that would not be trained, or weighs labels: it is {loss:.6g}, "
            f"but cross entropy and auxiliary loss are {summed / number + aux:.6g}; switch this off (a router's: "
            "output_router_logits=False in its configuration), choose loss=model, or say own_loss_differs=True if "
            "another loss is to take its place"
        )

    def _compare_losses(self, head: OutputHead, losses: Tensor, fused_loss: float, formula: "_Formula") -> None:
        if not formula.losses.isfinite().all():
            raise self._no_numbers()
        distance = _rms(losses.detach() - formula.losses)
        limit = 3 * formula.lost + _LOSS * (1 + _rms(formula.losses))
        if not distance <= limit:
            raise self._other_logits(head, f"losses differ by {distance:.3g} nats, and rounding explains {limit:.2g}")
        expected = formula.losses.sum().item()
        limit = 2 * formula.lost * len(formula.losses) + _LOSS * abs(expected)
        if abs(fused_loss - expected) <= limit:
            return
        if head.shard is not None:  # The model's own logits are all there is.
            what = f"the fused loss is {fused_loss:.6g}, and that of its own logits {expected:.6g}"
            raise self._other_logits(head, what)
        raise self._wrong_backend(
            f"the fused loss is {fused_loss:.6g} for the tokens of a slice, but logits in float64 give {expected:.6g}, "
            f"and rounding explains {limit:.2g}"
        )

    def _compare_gradients(
        self,
        head: OutputHead,
        own_sum: Tensor,
        aux_loss: Tensor | None,
        own_leaf: Tensor,
        fused: "_Measured",
        formula: "_Formula",
    ) -> None:
        assert fused.gradients is not None
        if not (own_sum.requires_grad and own_leaf.requires_grad):
            raise self._other_logits(head, "their gradient is cut off")
        of_aux_loss = graph_leaves(None if aux_loss is None else aux_loss.grad_fn)
        known = {id(leaf) for leaf in (own_leaf, *fused.leaves, *of_aux_loss)}
        if any(id(leaf) not in known for leaf in graph_leaves(own_sum.grad_fn)):
            raise self._other_logits(head, "another parameter is trained there")
        of_own, *of_own_weights = _gradients(own_sum, [own_leaf, *fused.weights])
        of_fused, *of_fused_weights = fused.gradients or [of_own]
        limit = 3 * formula.lost_of_gradient + _GRADIENT
        expected = of_fused if formula.gradient is None else formula.gradient
        if fused.gradients and not _relative(of_fused, expected) <= limit:
            raise self._wrong_backend("the gradient of the fused loss is another one than that of logits in float64")
        for own_gradient, gradient in ((of_own, expected), *zip(of_own_weights, of_fused_weights, strict=True)):
            difference = _relative(own_gradient, gradient)
            if not difference <= limit + 4 * torch.finfo(own_gradient.dtype).eps:
                raise self._other_logits(head, f"gradients differ by {difference:.2g}, as by a hook, clamp or detach")

    def _other_logits(self, head: OutputHead, what: str) -> UserError:
        return UserError(
            f"{self.name} does something to its logits that is not the formula which its loss uses ({head}): {what}. "
            "Leave its logits as they were when training began, or choose loss=standard, which uses the model's own"
        )

    def _no_numbers(self) -> UserError:
        return UserError(
            f"the output layer of {self.name} gets or gives NaN or infinity for tokens of this batch; look for them in "
            "the batch and in the model's weights"
        )

    def _wrong_backend(self, what: str) -> UserError:
        return UserError(f"{what} ({self.name}): the backend is wrong; choose loss=standard, and please report this")


def _different(found: dict[str, Any], expected: dict[str, Any]) -> set[str]:
    names = found.keys() | expected.keys()
    return {name for name in names if not same_numbers(found.get(name, NOT_THERE), expected.get(name, NOT_THERE))}


@dataclass
class _Formula:
    """The losses (N,) of a head's formula, the gradient of their sum at the input of its layer, None if it is not
    known, and what the run's precision loses of either."""

    losses: Tensor
    gradient: Tensor | None
    lost: float
    lost_of_gradient: float


def _formula(head: OutputHead, operands: Any, leaf: Tensor, targets: Tensor) -> _Formula:
    losses, exact = _in_parts(head, operands, targets, torch.float64)
    rounded_losses, rounded = _in_parts(head, operands, targets, None)
    lost = _rms(rounded_losses - losses)
    if exact is None or rounded is None or not operands[0].requires_grad:
        return _Formula(losses, None, lost, 0.0)
    given = exact.to(operands[0].dtype).view_as(operands[0])
    (gradient,) = torch.autograd.grad(operands[0], leaf, given, retain_graph=True)
    return _Formula(losses, gradient, lost, _relative(rounded, exact))


def _of_own_logits(logits: Tensor, targets: Tensor) -> _Formula:
    """Return what stands for a formula where no rank has the whole weight."""
    logits = logits.detach()
    lost = 4 * torch.finfo(logits.dtype).eps * logits.abs().amax().item()
    return _Formula(_losses(logits, targets).double(), None, lost, lost)


@dataclass
class _Measured:
    """The summed fused loss and its gradients, at the input of the head's layer and at its weights: none of a backend
    that approximates them, and None where gradients are off or the weight is not there.

    ``leaves`` are those of the graph of the head's operands; ``formula`` is None where no rank has the whole weight."""

    loss: float
    gradients: list[Tensor] | None
    weights: list[nn.Parameter]
    leaves: list[Tensor]
    formula: _Formula | None


def _measured(head: OutputHead, fused: FusedPass, leaf: Tensor, targets: Tensor) -> _Measured:
    hidden_states = fused.hidden_states
    with torch.random.fork_rng([hidden_states.device] if hidden_states.is_cuda else []):
        loss_sum = fused.loss_sum()  # It refuses labels that cannot be.
    operands = head.operands(hidden_states, in_parts=True)  # LoRA draws the same dropout again.
    given = [operand for operand in operands if operand is not None]
    leaves = [leaf for x in given for leaf in ([x] if x.grad_fn is None else graph_leaves(x.grad_fn))]
    has_targets = bool((targets != IGNORE_INDEX).any())
    formula = _formula(head, operands, leaf, targets) if head.shard is None and has_targets else None
    weights: list[nn.Parameter] = []
    gradients: list[Tensor] | None = None
    # FSDP2 has freed a layer that is a unit of its own; with rows of it, a rank without targets would be waited for.
    if torch.is_grad_enabled() and has_targets and not (isinstance(head.layer, FSDPModule) or has_own_rows(head.layer)):
        is_exact = loss_sum.requires_grad and leaf.requires_grad
        weights = [p for p in head.layer.parameters() if p.requires_grad and is_exact]
        gradients = _gradients(loss_sum, [leaf, *weights]) if is_exact else []
    return _Measured(loss_sum.item(), gradients, weights, leaves, formula)


def _in_parts(head: OutputHead, operands: Any, targets: Tensor, to: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Return :func:`_by_formula`, of a few tokens at a time: logits in float64 would be a large tensor."""
    hidden, weight, bias = operands
    parts = zip(hidden.detach().flatten(0, -2).split(_TOKENS), targets.flatten().split(_TOKENS), strict=True)
    losses, gradients = zip(*(_by_formula(head, rows, weight, bias, y, to) for rows, y in parts), strict=True)
    return torch.cat(losses), None if gradients[0] is None else torch.cat(gradients)


def _by_formula(
    head: OutputHead, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets: Tensor, to: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the losses (N,) and the gradient (N, D) of their sum, None where gradients are off, computed in a dtype;
    None: in that of the run. Autograd would keep the whole weight in float64, so products with it are outside."""
    with_gradient, kind = torch.is_grad_enabled(), hidden_ND.device.type
    as_the_run, to = to is None and torch.is_autocast_enabled(kind), to or weight_VD.dtype
    with torch.autocast(kind, enabled=as_the_run):
        products = torch.cat([F.linear(hidden_ND.to(to), rows.to(to)) for rows in row_parts(weight_VD, _ROWS)], -1)
        products.requires_grad_(with_gradient)
        logits = products * head.scale if bias_V is None else products * head.scale + bias_V.detach().to(to)
        logits = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
        losses = _losses(logits, targets)
        if not with_gradient:
            return losses.double(), None
        (of_products,) = torch.autograd.grad(losses.sum(), products)
        pairs = zip(of_products.split(_ROWS, -1), row_parts(weight_VD, _ROWS), strict=True)
        gradient: Any = sum(part @ rows.to(part.dtype) for part, rows in pairs)
    return losses.detach().double(), gradient.double()


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy (N,) of logits (..., V) at N targets, zero where ignored, in at least float32."""
    logits = logits.flatten(0, -2)
    logits, targets = logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.to(logits.device)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")


def _gradients(loss: Tensor, of: list[Tensor]) -> list[Tensor]:
    """Return gradients, zeros where there is none, of each rank's part of a divided weight."""
    found = torch.autograd.grad(loss, of, allow_unused=True, materialize_grads=True)
    return [g.to_local() if isinstance(g, DTensor) else g for g in found]


def _rms(numbers: Tensor) -> float:
    return numbers.double().square().mean().sqrt().item()


def _relative(found: Tensor, expected: Tensor) -> float:  # in parts: float64 copies would be a run's largest tensors
    rows = max(2**20 // max(expected[:1].numel(), 1), 1) if expected.ndim else 1
    parts = zip(*(t.split(rows) for t in torch.atleast_1d(found, expected)), strict=True)
    squares = [torch.stack([(f.double() - e.double()).square().sum(), e.double().square().sum()]) for f, e in parts]
    distance, size = torch.stack(squares).sum(0).sqrt().tolist()
    return distance / (size or 1.0)
