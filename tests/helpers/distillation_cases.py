"""Calls of distillation that tests have in common: losses, heads, a teacher, and an implementation's answer."""

from typing import Any

import torch
from head_cases import make
from torch import Tensor

from lit_fused.ops import TeacherHead, linear_distillation_reference

LOSSES: dict[str, dict[str, Any]] = {
    "forward_kl": {"divergence": "forward_kl"},
    "reverse_kl": {"divergence": "reverse_kl", "temperature": 2.0},
    "jsd": {"divergence": "jsd", "beta": 0.3, "temperature": 0.7},
    "mixed": {"divergence": "jsd", "beta": 0.8, "divergence_weight": 0.4, "cross_entropy_weight": 0.6},
    "hinton": {"temperature": 3.0, "divergence_weight": 9.0, "cross_entropy_weight": 0.5},
    "plain": {"divergence_weight": 0.0, "cross_entropy_weight": 1.0},
}
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"bias": True, "scale": 0.7, "softcap": 4.0, "teacher": {"scale": 1.3, "softcap": 5.0}},
}


def teacher_of(targets: Tensor, v: int = 97, d: int = 24, *, bias: bool = False, **head: Any) -> TeacherHead:
    generator = torch.Generator().manual_seed(7)
    sizes = [(len(targets), d), (v, d)] + ([(v,)] if bias else [])
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64) / 2 for size in sizes]
    return TeacherHead(tensors[0], tensors[1], tensors[2] if bias else None, **head)


def as_dtype(teacher: TeacherHead, to: torch.dtype | torch.device) -> TeacherHead:
    """Return the teacher in another dtype, or on another device."""
    tensors = {name: value.to(to) for name, value in teacher._asdict().items() if isinstance(value, Tensor)}
    return teacher._replace(**tensors)


def case(head: str, dtype: torch.dtype = torch.float64, **sizes: int) -> tuple[Any, Tensor, TeacherHead, Any]:
    options = dict(HEADS[head])
    has_bias = options.pop("bias", False)
    tensors, targets = make(dtype=dtype, bias=has_bias, **sizes)
    teacher = teacher_of(targets, len(tensors[1]), bias=has_bias, **options.pop("teacher", {}))
    return tensors, targets, as_dtype(teacher, dtype), options


def answer(function: Any, tensors: list[Tensor], targets: Tensor, teacher: TeacherHead, **options: Any) -> Any:
    """(loss, statistics, gradients) of one implementation, on copies of the tensors; of any reduction."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    bias = leaves[2] if len(leaves) > 2 else None
    loss, stats = function(leaves[0], leaves[1], targets, teacher, bias=bias, **options)
    generator = torch.Generator().manual_seed(2)
    incoming = torch.randn(loss.shape, generator=generator, dtype=torch.float64).to(loss)
    return loss.detach(), stats, torch.autograd.grad(loss, leaves, incoming)


def in_float64(tensors: list[Tensor], targets: Tensor, teacher: TeacherHead) -> tuple[Any, ...]:
    return [t.double() for t in tensors], targets, as_dtype(teacher, torch.float64)


def upcast(hidden: Tensor, weight: Tensor, targets: Tensor, teacher: TeacherHead, **options: Any) -> Any:
    """The same of logits that were rounded to the dtype of their products once, and then were float32."""
    bias, identity = options.pop("bias"), torch.eye(len(weight), device=weight.device)
    rounded = [(h @ w.T).float() for h, w in ((hidden, weight), (teacher.hidden_states, teacher.weight))]
    biases = [None if b is None else b.float() for b in (bias, teacher.bias)]
    of_teacher = TeacherHead(rounded[1], identity, biases[1], teacher.scale, teacher.softcap)
    return linear_distillation_reference(rounded[0], identity, targets, of_teacher, bias=biases[0], **options)
