"""Compare some tokens' loss with the model's own, so that bfloat16 hides nothing but its own rounding.

The model's operations on logits run on known float32 numbers: what its output layer gave, and noise that shows what
these logits do not. They are compared with the head's formula in float32, and the layer with a product in float64, by
what a run in the same precision loses against it. Log-probabilities are compared, because an offset of a whole row,
which costs bfloat16 its digits, changes no loss.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.heads import OutputHead
from lit_fused.losses.loss import Batch, ForwardPass
from lit_fused.ops.label_checks import IGNORE_INDEX

_TOKENS, _NUMBERS = 64, 2**20  # that are compared: a few (n, V) in float64 are beside the batch, 8 MiB each
_LEAST = -100.0  # No loss shows the differences between smaller log-probabilities.
_FLOAT32 = 1e-4  # of the spread of a row's logits, as when the head was identified


def sampled_positions(targets: Tensor, head: OutputHead | None) -> Tensor:
    """Return 4 to 64 positions (n,) of targets (N,) that are valid, spread evenly, fewer of a large vocabulary."""
    valid = (targets != IGNORE_INDEX).nonzero().flatten()
    most = _TOKENS if head is None else min(max(_NUMBERS // head.vocabulary, 4), _TOKENS)
    chosen = torch.linspace(0, max(len(valid) - 1, 0), min(len(valid), most), dtype=torch.float64)
    return valid[chosen.long()]


def sampled(model: ForwardPass, batch: Batch) -> tuple[Tensor, Tensor, Tensor, OutputHead] | None:
    """Return hidden states (n, D), own logits (n, V) in at least float32 and targets (n,) of some tokens, and the head;
    None without targets. Raise a UserError if the logits are not the head's."""
    targets = model.targets(batch).flatten()
    positions = sampled_positions(targets, model.prepare_hidden_states())
    if not len(positions):  # Other ranks run the model, and this rank has parts of its parameters.
        model.hidden_states_and_logits(batch, targets.new_zeros(1))
        return None
    hidden_states, output, logits, head = model.hidden_states_and_logits(batch, positions)
    if output is not None:
        formula = head.transform(output)
        lost = 4 * _distances(formula.to(logits.dtype), formula)  # by a model that rounds its logits
        _compare(logits, formula, lost)
    return hidden_states, logits[: len(positions)], targets[positions], head


def errors(hidden_states: Tensor, logits: Tensor, head: OutputHead) -> tuple[Tensor, Tensor]:
    """Return logits (n, V) in float64 and, for each row, the largest error that the run's precision makes in their
    log-probabilities. Raise a UserError if the own ``logits`` have larger errors."""
    rounded = head.logits(hidden_states)
    if head.shard is not None:  # No rank has the whole weight.
        exact = logits.double()
        return exact, torch.finfo(rounded.dtype).eps * exact.abs().amax(-1)
    exact = _in_float64(hidden_states, head)
    lost = _distances(rounded, exact)
    _compare(logits, exact, 3 * lost.maximum(lost.mean()))
    return exact, (_log_probabilities(rounded) - _log_probabilities(exact)).abs().amax(-1)


def _in_float64(hidden_states: Tensor, head: OutputHead) -> Tensor:
    with torch.autocast(hidden_states.device.type, enabled=False):
        hidden_states, weight, bias = head.operands(hidden_states)
        products = [F.linear(hidden_states.double(), rows.double()) for rows in weight.split(8192)]
    logits = head.scale * torch.cat(products, -1) + (0 if bias is None else bias.double())
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def _compare(found: Tensor, expected: Tensor, lost: Tensor) -> None:
    of_expected = _log_probabilities(expected)
    largest = expected.double().logsumexp(-1).abs() - _LEAST
    limits = lost + _FLOAT32 * of_expected.std(-1) + 32 * torch.finfo(torch.float32).eps * largest
    differences = _distances(found, expected)
    worst = (differences / limits).argmax()
    if not (differences <= limits).all():
        raise UserError(
            f"the model's own logits give log-probabilities that differ by {differences[worst].item():.3g} from those "
            f"of its output layer, and rounding explains {limits[worst].item():.2g}. The model does something to its "
            "logits that it did not do when it was asked: choose loss=standard, and please report this"
        )


def _distances(found: Tensor, expected: Tensor) -> Tensor:
    """Return the spread of each row's differences, which an offset of the row leaves out."""
    return (_log_probabilities(found) - _log_probabilities(expected)).std(-1, correction=0)


def _log_probabilities(logits: Tensor) -> Tensor:
    return logits.double().log_softmax(-1).clamp(min=_LEAST)
