"""Distillation of one linear output layer by another, one chunk of tokens at a time: the logits of neither are whole.

It is :mod:`lit_fused.ops.linear_cross_entropy` with another loss. A chunk has two matrix products, the student's and
the teacher's; the row work turns the student's into the gradient of the loss (``logits/divergence_rows``); two more
products carry it on, in forward. That is 6NDV operations for the student and 2NDV for the teacher.

N tokens, C chunk, D hidden, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import cross_entropy
from .cross_entropy import loss_of
from .kernel_path import (
    ForwardResult,
    Gradients,
    HeadCall,
    Inputs,
    KernelPath,
    KnownRows,
    RowResults,
    Wanted,
    indices_of,
    own_columns,
)
from .label_checks import IGNORE_INDEX, check_inputs
from .logits.divergence_rows import Divergence, DivergenceRows, Pair, RowSums
from .logits.logits_path import LogitsPath, LogitsSums
from .logits.rows_torch import Chunk
from .operators import one_graph_break
from .options import LossOptions
from .products import padded
from .user_error import UserError
from .vocabulary_parallel import VocabularyShard


class TeacherHead(NamedTuple):
    """A teacher's output layer and its input: ``logits = softcap(scale * hidden_states @ weight.T + bias)``, without
    gradients, in dtypes of its own."""

    hidden_states: Tensor  # (..., D'), one per hidden state of the student
    weight: Tensor  # (V, D'); under a shard the same entries as the student's
    bias: Tensor | None = None  # (V,)
    scale: float = 1.0
    softcap: float | None = None


_DIVERGENCE = {field.name for field in fields(Divergence)}


@one_graph_break
def linear_distillation(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher: TeacherHead,
    *,
    bias: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    token_weights: Tensor | None = None,
    shard: VocabularyShard | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a student beside its teacher, and its statistics: per token with target y
    ``cross_entropy_weight * (lse - logits[y]) + divergence_weight * D(teacher, student)``.

    Matrix products run in the autocast dtype if autocast is on, else in the inputs' own, as those of float64 always do,
    the teacher's in the teacher's; the rest is float32 (float64 for float64 hidden states of the student). Under
    ``torch.compile`` the call is one graph break.

    Args:
        hidden_states: (..., D) floating point, the input of the student's output layer.
        weight: (V, D).
        targets: (...) integer class indices in [0, V), or ``ignore_index``: already shifted. Tokens that are ignored
            count nothing, in the divergence too.
        teacher: the teacher's output layer and its input, for the same tokens and the same V entries.
        bias, token_weights, shard: those of :func:`lit_fused.ops.linear_cross_entropy`.
        options: fields of :class:`~lit_fused.ops.logits.divergence_rows.Divergence` (``divergence``, ``beta``,
            ``temperature``, ``divergence_weight``, ``cross_entropy_weight``), and ``scale``, ``softcap`` (the
            student's), ``reduction``, ``statistics``, ``recompute``, ``drop_ignored``, ``float32_accumulation``,
            ``logits_budget_mib`` and ``chunk_size`` of :func:`lit_fused.ops.linear_cross_entropy`. A chunk is that of
            both logits together.

    Returns:
        The loss, and detached sums over the valid targets: those of :func:`lit_fused.ops.linear_cross_entropy` for the
        student, "divergence" (D, nats) and "teacher_nll" (nats).

    Raises:
        UserError: shapes, dtypes, devices, vocabularies or options that do not fit. In backward:
            ``create_graph=True``, as there are no second derivatives.
    """
    divergence = Divergence(**{name: options.pop(name) for name in _DIVERGENCE & options.keys()})
    options_of_head = LossOptions(**options)
    if options_of_head.label_smoothing or options_of_head.z_loss:
        raise UserError("a distillation has no label_smoothing and no z_loss; leave them out")
    vocabulary = len(weight) if shard is None else shard.vocabulary
    _check_teacher(teacher, weight, targets, vocabulary)
    call = HeadCall.here(options_of_head, hidden_states, weight, bias, ignore_index, shard=shard)
    # Whatever divides the logits by T divides their scale, their bias and their softcap.
    cold = replace(options_of_head, scale=teacher.scale, softcap=teacher.softcap, statistics=False)
    nothing_wanted = {"wanted": Wanted(False, False, False), "vocabulary": vocabulary}
    teacher_call = HeadCall.here(cold, *teacher[:3], shard=shard, **nothing_wanted)

    def path_of(hidden_ND: Tensor, _: Tensor, call: HeadCall) -> KernelPath:
        with torch.no_grad():
            teacher_ND = teacher.hidden_states.reshape(-1, teacher.hidden_states.shape[-1]).contiguous()
            if len(hidden_ND) < len(teacher_ND):
                teacher_ND = teacher_ND[indices_of((targets.reshape(-1) >= 0) & (targets.reshape(-1) != ignore_index))]
            weight_VD = teacher.weight.to(teacher_call.compute_dtype)
        inputs = Inputs(teacher_ND.to(teacher_call.compute_dtype), weight_VD, teacher.bias, targets)
        return DistilledPath(teacher, inputs, teacher_call, divergence, cross_entropy.row_kernels(hidden_ND))

    call = replace(call, path_of=path_of, own_statistics=("divergence", "teacher_nll"))
    return loss_of(hidden_states, weight, bias, targets, token_weights, call)


def check_vocabularies(teacher: int, student: int) -> None:
    """Raise a UserError unless a teacher has as many entries as a student."""
    if teacher != student:
        raise UserError(
            f"the teacher's vocabulary has {teacher} entries and the student's {student}, so their probabilities "
            "cannot be compared; choose a teacher with the student's tokenizer and vocabulary"
        )


def _check_teacher(teacher: TeacherHead, weight: Tensor, targets: Tensor, vocabulary: int) -> None:
    check_vocabularies(len(teacher.weight), len(weight))
    # The targets have been checked, and what is not in the vocabulary is another rank's.
    check_inputs(teacher.hidden_states, teacher.weight, targets.clamp(min=-1, max=-1), teacher.bias, -1, vocabulary)


class DistilledPath(LogitsPath):
    """The path that stores the logits of a chunk, of student and teacher."""

    rows_have_factors = True

    def __init__(self, head: TeacherHead, teacher: Inputs, call: HeadCall, loss: Divergence, kernels: Any) -> None:
        super().__init__(kernels)
        self.head, self.teacher, self.teacher_call, self.loss = head, teacher, call, loss
        self.divergence_rows = DivergenceRows()
        if kernels.handles_ignored:
            from .logits.divergence_triton import TritonDivergenceRows

            self.divergence_rows = TritonDivergenceRows()

    def forward(self, inputs: Inputs, factor_N: Tensor | None, call: HeadCall) -> ForwardResult:
        found = self._computed(inputs, factor_N, call, gradients=call.gradients_in_forward)
        # Autograd saves them, so that it refuses a backward after they were changed in place.
        return found._replace(saved=tuple(tensor.detach() for tensor in self.head[:3] if tensor is not None))

    def backward(self, inputs: Inputs, known: KnownRows, saved: tuple[Tensor, ...], call: HeadCall) -> Gradients:
        found = self._computed(inputs, known.factor_N, call, gradients=True).gradients
        assert found is not None
        return found

    def _computed(self, inputs: Inputs, factor_N: Tensor | None, call: HeadCall, *, gradients: bool) -> ForwardResult:
        tokens, device = len(inputs.targets_N), inputs.hidden_ND.device
        results = RowResults.zeros(tokens, device, call)
        sums = RowSums(*torch.zeros(3, tokens, dtype=call.result_dtype, device=device))
        teacher_nll = torch.zeros((), dtype=call.result_dtype, device=device)
        summed = LogitsSums(inputs, call, self.kernels) if gradients else None
        if factor_N is None:
            factor_N = torch.ones(tokens, dtype=call.result_dtype, device=device)
        in_one_pass = gradients and self.loss.divergence == "forward_kl"
        for rows, pair, of_teacher in self._pairs(inputs, results, call):
            of_rows = sums.of(rows)
            if in_one_pass:
                self.divergence_rows.write_gradient(pair, of_rows, factor_N[rows])
            else:
                self.divergence_rows.write_sums(pair, of_rows)
            if call.shard is not None:
                of_all = torch.stack(of_rows)
                dist.all_reduce(of_all, group=call.shard.group)
                for number, total in zip(of_rows, of_all, strict=True):
                    number.copy_(total)
            of_rows.average_()
            teacher_nll += of_teacher.nll.sum()
            if summed is not None:
                if not in_one_pass:
                    self.divergence_rows.write_gradient(pair, of_rows, factor_N[rows])
                summed.add(rows, pair.student.products_CV)
        weights = self.loss.cross_entropy_weight, self.loss.divergence_weight
        results.loss.copy_(weights[0] * results.nll + weights[1] * sums.divergence)
        statistics = sums.divergence.sum(), teacher_nll
        return ForwardResult(results, None if summed is None else summed.finish(), statistics=statistics)

    def _pairs(self, inputs: Inputs, results: RowResults, call: HeadCall) -> Iterator[tuple[slice, Pair, RowResults]]:
        """Yield each chunk's slice, its products and their log-sum-exps, and the teacher's results."""
        temperature = self.loss.temperature
        tokens, ours, theirs = len(inputs.hidden_ND), inputs.weight_VD, self.teacher.weight_VD
        largest = max(len(ours), 1) if call.shard is None else call.shard.largest
        row_bytes = padded(largest) * (ours.itemsize + theirs.itemsize)
        size = call.chunk_rows(tokens, row_bytes)
        everything = slice(0, tokens)
        students = self._products(inputs.hidden_ND, ours, everything, size, call.frozen)
        teachers = self._products(self.teacher.hidden_ND, theirs, everything, size, self.teacher_call.frozen)
        for (rows, student_CV), (_, teacher_CV) in zip(students, teachers, strict=True):
            targets = inputs.targets_N[rows]
            student = Chunk(student_CV, targets, inputs.bias_V, call)
            teacher = Chunk(teacher_CV, targets, self.teacher.bias_V, self.teacher_call)
            of_rows = results.of(rows)
            self._write_results(student, of_rows)
            of_teacher = self._results_of(teacher, call)
            warm = of_rows, of_teacher
            if temperature != 1:
                warm = tuple(self._results_of(_at(chunk, temperature), call) for chunk in (student, teacher))
            columns = own_columns(targets, inputs, call)
            own = student._replace(targets_C=columns), teacher._replace(targets_C=columns)
            yield rows, Pair(*own, of_rows.lse, warm[0].lse, warm[1].lse, self.loss), of_teacher

    def _results_of(self, chunk: Chunk, call: HeadCall) -> RowResults:
        results = RowResults.zeros(len(chunk.targets_C), chunk.products_CV.device, call)
        self._write_results(chunk, results)
        return results

    def _write_results(self, chunk: Chunk, results: RowResults) -> None:
        """Write losses and log-sum-exps of every row, of all ranks' columns; the products stay as they are."""
        if chunk.call.shard is None:
            self.kernels.forward_rows(chunk, results, write_gradient=False)
        else:
            self._forward_rows_of_rank(chunk, results, False, None)


def _at(chunk: Chunk, temperature: float) -> Chunk:
    """Return the same products as those of logits over the temperature, of which only log-sum-exps are wanted."""
    options, bias_V = chunk.call.options, chunk.bias_V
    cap = None if options.softcap is None else options.softcap / temperature
    warm = replace(options, scale=options.scale / temperature, softcap=cap, statistics=False)
    dtype = chunk.call.result_dtype
    bias_V = None if bias_V is None else bias_V.to(dtype) / temperature
    return chunk._replace(bias_V=bias_V, call=replace(chunk.call, options=warm))
