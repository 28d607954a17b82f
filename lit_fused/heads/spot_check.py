"""The spot check: a slice of a batch through the model's own forward and loss, and through the fused loss.

A fused loss computes logits by a formula that was identified once, and takes the place of the model's own loss. The
model may do something else: with labels, in training, with other arguments of a batch, or after some steps. So now and
then a slice of a batch, as it came, runs through the model as if there were no fused loss, in the mode that the model
is in. Its loss has to be the cross entropy of its logits, and the losses and gradients of its logits those of the
formula, and so have those of the fused loss.

The bound is the error of the run's own precision: what the formula loses in it, compared with float64.
"""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lit_fused.heads.capture import graph_leaves, weights_here, without_trace
from lit_fused.heads.slices import Leaf
from lit_fused.heads.spec import OutputHead
from lit_fused.ops.label_checks import IGNORE_INDEX

_LOSS, _GRADIENT = 1e-4, 2e-3  # relative: what an exact loss or gradient may differ by in any precision
_ROWS = 8192  # of a weight that are in float64 at a time
_TOKENS = 32  # that have logits in float64 at a time


@dataclass
class OwnResult:
    """The answer of a model's own forward: its mean loss (), or None, logits (B, T, V), and its auxiliary loss."""

    loss: Tensor | None
    logits: Tensor
    aux_loss: Tensor | None = None


@dataclass
class FusedResult:
    """The fused loss: its sum () over the targets, and the hidden states (B, T, D) that the head's layer got."""

    loss_sum: Tensor
    hidden_states: Tensor


class SpotCheck:
    """Compares a model's own pass of a slice with the formula of its head, and with a fused loss.

    Args:
        model: the one whose buffers and settings are given back.
        name: of the model, for sentences.
        targets: (B, T), what each position of the slice predicts, -100 where nothing.
        count: what the batch wants the sum to be divided by, as a model's own loss may do; None: the number of targets.
        other_targets: the targets of a loss that shifts labels where these are not shifted, or the other way.
        may_be_other: the own loss may be that of the other targets, in causal models that leave shifting to others.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        targets: Tensor,
        count: Any = None,
        other_targets: Tensor | None = None,
        may_be_other: bool = False,
    ) -> None:
        self.model, self.name, self.targets = model, name, targets
        number = (targets != IGNORE_INDEX).sum()
        self.counts = [number] if count is None else [torch.as_tensor(count), number]
        self.other_targets, self.may_be_other = other_targets, may_be_other

    def of_own_loss(self, own: Callable[[], OwnResult], unlabelled: Callable[[], Tensor] | None) -> str | None:
        """Return what differs between the model's own loss and the cross entropy of its own logits, or of those that it
        gives without labels, or None."""
        with without_trace(self.model):
            found = own()
        if unlabelled is not None:
            with without_trace(self.model):
                fault = self._fault_of_labels(unlabelled(), found.logits)
            if fault is not None:
                return fault
        if found.logits.shape[:-1] != self.targets.shape:  # The loss refuses such a batch.
            return None
        return self._fault_of_loss(found, _losses(found.logits, self.targets))

    def of_head(
        self,
        head: OutputHead,
        own: Callable[[], OwnResult],
        fused: Callable[[Callable[[], Any] | None], FusedResult],
        *,
        thorough: bool,
    ) -> str | None:
        """Return what differs between the model's own pass, the formula of its head and the fused loss, or None.

        ``fused`` runs the fused loss. It is given a function that calls the head's layer alone, with the input that the
        layer had in the own pass; or, for a ``thorough`` check, None: it runs the whole model once more.
        """
        first, second = Leaf(head.layer), Leaf(head.layer)
        with without_trace(self.model), first.of_calls():
            own_pass = own()
        with without_trace(self.model), second.of_calls(), ExitStack() as here:
            fused_pass = fused(None if thorough else first.call_again)
            here.enter_context(weights_here(head.layer, fused_pass.hidden_states))
            fits = own_pass.logits.shape[:-1] == self.targets.shape  # else the loss refuses the batch
            if not fits or not (self.targets != IGNORE_INDEX).any():  # It has run all the same, as on the other ranks.
                return None
            losses = _losses(own_pass.logits, self.targets)
            fault = self._fault_of_loss(own_pass, losses)
            if fault is not None:
                return fault
            fault = self._fault_of_labels(second.value, first.value)
            if fault is not None:
                return fault
            formula = _formula(head, fused_pass.hidden_states, self.targets, second, own_pass.logits)
            fault = self._fault_of_losses(head, losses, fused_pass, formula)
            # FSDP2 has freed the weight of a layer that is a unit of its own, and Accelerate loads one anew.
            has_gone = isinstance(head.layer, FSDPModule) or hasattr(head.layer, "_hf_hook")
            if fault is None and torch.is_grad_enabled() and not has_gone:
                fault = self._fault_of_gradients(head, own_pass, losses, fused_pass, formula, first, second)
            return fault

    def _fault_of_labels(self, found: Tensor, labelled: Tensor) -> str | None:
        """Compare what a model gave without and with labels."""
        if not labelled.isfinite().all():
            return self._of_no_numbers()
        if found.shape == labelled.shape and _relative(found, labelled) <= 1e-3 + 8 * torch.finfo(found.dtype).eps:
            return None
        return (
            f"what {self.name} computes is something else if it gets labels, and it is to run without them; make its "
            "forward compute the same with and without labels, or choose loss=model"
        )

    def _fault_of_loss(self, own: OwnResult, losses: Tensor) -> str | None:
        if own.loss is None:
            return None
        aux = 0 if own.aux_loss is None else own.aux_loss.detach().float()
        loss, summed = own.loss.detach().float(), losses.detach().sum()
        known = summed + aux
        # A loss in half precision is rounded as its logits are, however small it is.
        largest = own.logits.detach().abs().amax(-1).float().mean()
        limit = 1e-5 * loss.abs() + 2 * torch.finfo(own.loss.dtype).eps * torch.maximum(loss.abs(), largest)
        if not summed.isfinite():
            return None
        is_other = self._is_of_other_targets(loss - aux, own.logits.detach(), limit)
        for count in self.counts:
            self._count, known = count, summed / count.to(summed.device) + aux
            if (loss - known).abs() <= limit:
                own.loss = None if is_other and self.may_be_other else own.loss  # Few digits do not tell them apart.
                return None
        if is_other and self.may_be_other:
            own.loss = None
            warnings.warn(
                f"the own loss of {self.name} does not shift the labels, and this module does; if its positions see "
                "later tokens, it would learn to copy",
                stacklevel=2,
            )
            return None
        if is_other:
            return (
                f"the own loss of {self.name} pairs positions and labels in another way than this module: one of the "
                "two shifts the labels by a position; choose the module for this kind of model (causal_lm, masked_lm "
                "or seq2seq_lm), or put labels that are not to be shifted into the batches as 'shift_labels'"
            )
        return (
            f"the own loss of {self.name} has a term that would not be trained, or weighs labels: it is {loss:.6g}, "
            f"but cross entropy and auxiliary loss are {known:.6g}; switch this off (a router's: "
            "output_router_logits=False in its configuration) or choose loss=model"
        )

    def _is_of_other_targets(self, loss: Tensor, logits: Tensor, limit: Tensor) -> bool:
        if self.other_targets is None:
            return False
        mean = _losses(logits, self.other_targets).sum() / (self.other_targets != IGNORE_INDEX).sum()
        return bool((loss - mean).abs() <= limit)

    def _fault_of_losses(self, head: OutputHead, losses: Tensor, fused: FusedResult, formula: "_Formula") -> str | None:
        if not formula.losses.isfinite().all():
            return self._of_no_numbers()
        distance = _rms(losses.detach() - formula.losses)
        limit = 3 * formula.lost + _LOSS * (1 + _rms(formula.losses))
        if not distance <= limit:
            return self._of_logits(head, f"losses differ by {distance:.3g} nats, and rounding explains {limit:.2g}")
        found, expected = fused.loss_sum.item(), formula.losses.sum().item()
        limit = 2 * formula.lost * len(formula.losses) + _LOSS * abs(expected)
        if not abs(found - expected) <= limit and head.shard is not None:  # The model's own is all there is.
            return self._of_logits(head, f"the fused loss is {found:.6g}, and that of its own logits {expected:.6g}")
        if not abs(found - expected) <= limit:
            return self._of_backend(
                f"the fused loss is {found:.6g} for the tokens of a slice, but logits in float64 give {expected:.6g}, "
                f"and rounding explains {limit:.2g}"
            )
        return None

    def _fault_of_gradients(
        self,
        head: OutputHead,
        own: OwnResult,
        losses: Tensor,
        fused: FusedResult,
        formula: "_Formula",
        first: Leaf,
        second: Leaf,
    ) -> str | None:
        own_sum = losses.sum() if own.loss is None else own.loss * self._count.to(losses.device)
        of_aux = () if own.aux_loss is None else graph_leaves(own.aux_loss.grad_fn)
        if not own_sum.requires_grad:
            return self._of_logits(head, "their gradient is cut off")
        known = formula.leaves | {id(leaf) for leaf in (first.value, *of_aux)}
        if any(id(leaf) not in known for leaf in graph_leaves(own_sum.grad_fn)):
            return self._of_logits(head, "another parameter is trained there")
        is_exact = fused.loss_sum.requires_grad
        weights = [p for p in head.layer.parameters() if p.requires_grad and is_exact]
        of_own, *of_own_weights = _gradients(own_sum, [first.value, *weights])
        of_fused, *of_fused_weights = _gradients(fused.loss_sum, [second.value, *weights]) if is_exact else [of_own]
        limit = 3 * formula.lost_of_gradient + _GRADIENT
        expected = formula.gradient if formula.gradient is not None else of_fused
        if is_exact and not _relative(of_fused, expected) <= limit:
            return self._of_backend("the gradient of the fused loss is another one than that of logits in float64")
        for own_gradient, gradient in ((of_own, expected), *zip(of_own_weights, of_fused_weights, strict=True)):
            difference = _relative(own_gradient, gradient)
            if not difference <= limit + 4 * torch.finfo(own_gradient.dtype).eps:
                return self._of_logits(head, f"gradients differ by {difference:.2g}, as by a hook, clamp or detach")
        return None

    def _of_logits(self, head: OutputHead, what: str) -> str:
        return (
            f"{self.name} does something to its logits that is not the formula which its loss uses ({head}): {what}. "
            "Leave its logits as they were when training began, or choose loss=standard, which uses the model's own"
        )

    def _of_no_numbers(self) -> str:
        return (
            f"the output layer of {self.name} gets or gives NaN or infinity for tokens of this batch; look for them in "
            "the batch and in the model's weights"
        )

    def _of_backend(self, what: str) -> str:
        return f"{what} ({self.name}): the backend is wrong; choose loss=standard, and please report this"


@dataclass
class _Formula:
    """The losses (N,) of a head's formula, the gradient of their sum at the input of its layer, None if it is not
    known, and what the run's precision loses of either."""

    losses: Tensor
    gradient: Tensor | None
    lost: float
    lost_of_gradient: float
    leaves: set[int]  # of the graph of its operands


def _formula(head: OutputHead, hidden_states: Tensor, targets: Tensor, leaf: Leaf, own_logits: Tensor) -> _Formula:
    leaf.draw_again()  # LoRA draws its dropout.
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
    (gradient,) = torch.autograd.grad(operands[0], leaf.value, given, retain_graph=True)
    return _Formula(losses, gradient, lost, _relative(rounded, exact), leaves)


def _in_parts(head: OutputHead, operands: Any, targets: Tensor, to: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Return :func:`_by_formula`, of a few tokens at a time: logits in float64 would be a large tensor."""
    hidden, weight, bias = operands
    parts = zip(hidden.detach().flatten(0, -2).split(_TOKENS), targets.flatten().split(_TOKENS), strict=True)
    found = [_by_formula(head, (rows, weight, bias), labels, to) for rows, labels in parts]
    gradients = [gradient for _, gradient in found if gradient is not None]
    return torch.cat([losses for losses, _ in found]), torch.cat(gradients) if gradients else None


def _by_formula(
    head: OutputHead, operands: Any, targets: Tensor, to: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Return the losses (N,) of the operands of a head and the gradient (N, D) of their sum, None where gradients are
    off, computed in a dtype; None: in that of the run."""
    with_gradient = torch.is_grad_enabled()
    hidden, weight, bias = operands
    weight, kind = weight.detach(), hidden.device.type
    as_the_run, to = to is None and torch.is_autocast_enabled(kind), to or weight.dtype
    with torch.autocast(kind, enabled=as_the_run):
        products = torch.cat([F.linear(hidden.to(to), rows.to(to)) for rows in weight.split(_ROWS)], -1)
        products.requires_grad_(with_gradient)
        logits = products * head.scale if bias is None else products * head.scale + bias.detach().to(to)
        logits = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
        losses = _losses(logits, targets)
        if not with_gradient:
            return losses.double(), None
        (of_products,) = torch.autograd.grad(losses.sum(), products)
        pairs = zip(of_products.split(_ROWS, -1), weight.split(_ROWS), strict=True)
        gradient = sum(part @ rows.to(part.dtype) for part, rows in pairs)
    assert isinstance(gradient, Tensor)
    return losses.detach().double(), gradient.double()


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy (N,) of logits (..., V) at N targets, zero where ignored, in at least float32."""
    logits = logits.flatten(0, -2)
    logits, targets = logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.to(logits.device)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")


def _gradients(loss: Tensor, of: list[Tensor]) -> list[Tensor]:
    """Return gradients, zeros where there is none, of each rank's part of a divided weight."""
    if not loss.requires_grad:
        return [torch.zeros_like(tensor) for tensor in of]
    found = torch.autograd.grad(loss, of, allow_unused=True, materialize_grads=True)
    return [g.to_local() if isinstance(g, DTensor) else g for g in found]


def _rms(numbers: Tensor) -> float:
    return numbers.double().square().mean().sqrt().item()


def _relative(found: Tensor, expected: Tensor) -> float:
    size = expected.double().norm().item()
    return (found.double() - expected.double()).norm().item() / (size or 1.0)
