"""The spot check: a slice of a batch through the model's own forward and loss, and through the fused loss.

A fused loss computes logits by a formula that was identified once, and takes the place of the model's own loss. The
model may do something else: with labels, in training, with other arguments of a batch, or after some steps. So now and
then a slice of a batch, as it came, runs through the model as if there were no fused loss, in the mode that the model
is in. Its loss has to be the cross entropy of its logits, and the losses and gradients of its logits those of the
formula, and so have those of the fused loss.

The bound is the error of the run's own precision: what the formula loses in it, compared with float64.

N tokens of the slice (B, T), D hidden, V vocabulary.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lit_fused.errors import UserError
from lit_fused.heads.capture import graph_leaves, without_trace
from lit_fused.heads.slices import leaf_before
from lit_fused.heads.spec import OutputHead
from lit_fused.ops.label_checks import IGNORE_INDEX

_LOSS, _GRADIENT = 1e-4, 2e-3  # relative: what an exact loss or gradient may differ by in any precision
_ROWS = 8192  # of a weight that are in float64 at a time
_TOKENS = 32  # that have logits in float64 at a time


@dataclass
class OwnPass:
    """The answer of a model's own forward: its mean loss (), or None, logits (B, T, V), and its auxiliary loss."""

    loss: Tensor | None
    logits: Tensor
    aux_loss: Tensor | None = None


@dataclass
class Labels:
    """The targets that a model's own loss has to predict.

    Attributes:
        targets: (B, T), what each position of the slice predicts, -100 where nothing.
        count: what the batch wants the sum to be divided by, as a model's own loss may do; None: the number of targets.
        other_targets: the targets of a loss that shifts labels where these are not shifted, or the other way.
        may_be_other: the own loss may be that of the other targets, in causal models that leave shifting to others.
    """

    targets: Tensor
    count: Any = None
    other_targets: Tensor | None = None
    may_be_other: bool = False


class SpotCheck:
    """Compares a model's own pass of a slice with the formula of its head, and with a fused loss; UserError where they
    differ. ``model`` is the one whose buffers and settings are given back, ``name`` its name."""

    def __init__(self, model: nn.Module, name: str, labels: Labels) -> None:
        self.model, self.name, self.labels, self.targets = model, name, labels, labels.targets

    def compare_own_loss(self, own: Callable[[], OwnPass], unlabelled: Callable[[], Tensor]) -> None:
        """Compare the model's own loss with the cross entropy of its own logits, and these with those that it gives
        without labels."""
        with without_trace(self.model):
            found = own()
        with without_trace(self.model):
            self._compare_without_labels(unlabelled(), found.logits)
        if found.logits.shape[:-1] == self.targets.shape:  # else the loss refuses such a batch
            self._count_of_own_loss(found, _losses(found.logits, self.targets))

    def compare_head(
        self, head: OutputHead, own: Callable[[], OwnPass], fused: Callable[[], tuple[Tensor, Callable[[], Tensor]]]
    ) -> None:
        """Compare the model's own pass, the formula of its head, and the fused loss. ``fused`` runs the model without
        labels and without its output layer; it returns the layer's input (B, T, D), and what sums the fused loss."""
        with without_trace(self.model), leaf_before(head.layer) as of_own:
            own_pass = own()
        with without_trace(self.model), leaf_before(head.layer) as of_fused:
            hidden_states, fused_sum = fused()
            with torch.random.fork_rng([hidden_states.device] if hidden_states.is_cuda else []):
                loss_sum = fused_sum()  # It refuses labels that cannot be.
            fits = own_pass.logits.shape[:-1] == self.targets.shape  # else the loss refuses the batch
            if not fits or not (self.targets != IGNORE_INDEX).any():  # It has run all the same, as on the other ranks.
                return
            losses = _losses(own_pass.logits, self.targets)
            count = self._count_of_own_loss(own_pass, losses)
            self._compare_without_labels(of_fused[-1], of_own[-1])
            # LoRA draws the same dropout again.
            formula = _formula(head, hidden_states, of_fused[-1], self.targets, own_pass.logits)
            self._compare_losses(head, losses, loss_sum, formula)
            # FSDP2 has freed the weight of a layer that is a unit of its own.
            if torch.is_grad_enabled() and not isinstance(head.layer, FSDPModule):
                own_sum = losses.sum() if own_pass.loss is None else own_pass.loss * count.to(losses.device)
                leaves = of_own[-1], of_fused[-1]
                self._compare_gradients(head, own_sum, own_pass.aux_loss, loss_sum, leaves, formula)

    def _compare_without_labels(self, found: Tensor, labelled: Tensor) -> None:
        if not labelled.isfinite().all():
            raise self._no_numbers()
        if found.shape != labelled.shape or _relative(found, labelled) > 1e-3 + 8 * torch.finfo(found.dtype).eps:
            raise UserError(
                f"what {self.name} computes is something else if it gets labels, and it is to run without them; make "
                "its forward compute the same with and without labels, or choose loss=model"
            )

    def _count_of_own_loss(self, own: OwnPass, losses: Tensor) -> Tensor:
        """Return what the own loss divides its sum by. An own loss of other targets that may be is left out of what
        follows."""
        labels, number = self.labels, (self.targets != IGNORE_INDEX).sum()
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
        counts = [number] if labels.count is None else [torch.as_tensor(labels.count), number]
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
            "output_router_logits=False in its configuration) or choose loss=model"
        )

    def _compare_losses(self, head: OutputHead, losses: Tensor, loss_sum: Tensor, formula: "_Formula") -> None:
        if not formula.losses.isfinite().all():
            raise self._no_numbers()
        distance = _rms(losses.detach() - formula.losses)
        limit = 3 * formula.lost + _LOSS * (1 + _rms(formula.losses))
        if not distance <= limit:
            raise self._other_logits(head, f"losses differ by {distance:.3g} nats, and rounding explains {limit:.2g}")
        found, expected = loss_sum.item(), formula.losses.sum().item()
        limit = 2 * formula.lost * len(formula.losses) + _LOSS * abs(expected)
        if abs(found - expected) <= limit:
            return
        if head.shard is not None:  # The model's own logits are all there is.
            raise self._other_logits(head, f"the fused loss is {found:.6g}, and that of its own logits {expected:.6g}")
        raise self._wrong_backend(
            f"the fused loss is {found:.6g} for the tokens of a slice, but logits in float64 give {expected:.6g}, and "
            f"rounding explains {limit:.2g}"
        )

    def _compare_gradients(
        self,
        head: OutputHead,
        own_sum: Tensor,
        aux_loss: Tensor | None,
        loss_sum: Tensor,
        leaves: tuple[Tensor, Tensor],
        formula: "_Formula",
    ) -> None:
        if not own_sum.requires_grad:
            raise self._other_logits(head, "their gradient is cut off")
        own_leaf, fused_leaf = leaves
        known = formula.leaves | {id(own_leaf), *map(id, graph_leaves(None if aux_loss is None else aux_loss.grad_fn))}
        if any(id(leaf) not in known for leaf in graph_leaves(own_sum.grad_fn)):
            raise self._other_logits(head, "another parameter is trained there")
        is_exact = loss_sum.requires_grad  # A backend may approximate its gradient.
        weights = [p for p in head.layer.parameters() if p.requires_grad and is_exact]
        of_own, *of_own_weights = _gradients(own_sum, [own_leaf, *weights])
        of_fused, *of_fused_weights = _gradients(loss_sum, [fused_leaf, *weights]) if is_exact else [of_own]
        limit = 3 * formula.lost_of_gradient + _GRADIENT
        expected = of_fused if formula.gradient is None else formula.gradient
        if is_exact and not _relative(of_fused, expected) <= limit:
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


@dataclass
class _Formula:
    """The losses (N,) of a head's formula, the gradient of their sum at the input of its layer, None if it is not
    known, and what the run's precision loses of either."""

    losses: Tensor
    gradient: Tensor | None
    lost: float
    lost_of_gradient: float
    leaves: set[int]  # of the graph of its operands


def _formula(head: OutputHead, hidden_states: Tensor, leaf: Tensor, targets: Tensor, own_logits: Tensor) -> _Formula:
    operands = head.operands(hidden_states)
    graph = [operand for operand in operands if operand is not None]
    leaves = {id(found) for operand in graph for found in (operand, *graph_leaves(operand.grad_fn))}
    if head.shard is not None:  # No rank has the whole weight: the model's own logits stand for those of the formula.
        logits = own_logits.detach()
        lost = 4 * torch.finfo(logits.dtype).eps * logits.abs().amax().item()
        return _Formula(_losses(logits, targets).double(), None, lost, lost, leaves)
    losses, exact = _in_parts(head, operands, targets, torch.float64)
    rounded_losses, rounded = _in_parts(head, operands, targets, None)
    lost = _rms(rounded_losses - losses)
    if exact is None or rounded is None or not operands[0].requires_grad:
        return _Formula(losses, None, lost, 0.0, leaves)
    given = exact.to(operands[0].dtype).view_as(operands[0])
    (gradient,) = torch.autograd.grad(operands[0], leaf, given, retain_graph=True)
    return _Formula(losses, gradient, lost, _relative(rounded, exact), leaves)


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
    with_gradient, weight_VD, kind = torch.is_grad_enabled(), weight_VD.detach(), hidden_ND.device.type
    as_the_run, to = to is None and torch.is_autocast_enabled(kind), to or weight_VD.dtype
    with torch.autocast(kind, enabled=as_the_run):
        products = torch.cat([F.linear(hidden_ND.to(to), rows.to(to)) for rows in weight_VD.split(_ROWS)], -1)
        products.requires_grad_(with_gradient)
        logits = products * head.scale if bias_V is None else products * head.scale + bias_V.detach().to(to)
        logits = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
        losses = _losses(logits, targets)
        if not with_gradient:
            return losses.double(), None
        (of_products,) = torch.autograd.grad(losses.sum(), products)
        pairs = zip(of_products.split(_ROWS, -1), weight_VD.split(_ROWS), strict=True)
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


def _relative(found: Tensor, expected: Tensor) -> float:
    size = expected.double().norm().item()
    return (found.double() - expected.double()).norm().item() / (size or 1.0)
