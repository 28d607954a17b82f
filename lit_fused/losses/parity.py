"""Compare some tokens' loss with that of logits in float64, so that bfloat16 hides nothing but its own rounding.

What a run in the same precision loses against float64 is the limit. Log-probabilities are compared, because an offset
of a whole row, which costs bfloat16 its digits, changes no loss. What the model does to its logits is watched apart.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lit_fused.errors import UserError
from lit_fused.heads import OutputHead
from lit_fused.ops.label_checks import IGNORE_INDEX

_TOKENS, _NUMBERS = 64, 2**20  # that are compared: a few (n, V) in float64 are beside the batch, 8 MiB each
_LEAST = -100.0  # No loss shows the differences between smaller log-probabilities.
_FLOAT32 = 1e-4  # of the spread of a row's logits, as when the head was identified


def sampled_positions(targets: Tensor, vocabulary: int) -> Tensor:
    """Return 4 to 64 positions (n,) of targets (N,) that are valid, spread evenly, fewer of a large vocabulary."""
    valid = (targets != IGNORE_INDEX).nonzero().flatten()
    most = min(max(_NUMBERS // vocabulary, 4), _TOKENS)
    chosen = torch.linspace(0, len(valid) - 1, min(len(valid), most), dtype=torch.float64)
    return valid[chosen.long()]


def errors(hidden_states: Tensor, head: OutputHead) -> tuple[Tensor, Tensor]:
    """Return logits (n, V) in float64 of hidden states (n, D) and, for each row, the largest error that the run's
    precision makes in their log-probabilities. Raise a UserError if the layer itself makes larger errors."""
    rounded = own = head.logits(hidden_states)
    if head.shard is not None:  # No rank has the whole weight.
        return own.double(), torch.finfo(own.dtype).eps * own.double().abs().amax(-1)
    if not isinstance(head.layer, nn.Embedding):
        # FSDP2's hooks of a unit have gathered the weight; once more they would give it away.
        run = head.layer.forward if isinstance(head.layer, FSDPModule) else head.layer
        made = vars(head.layer).get("weight")  # by a hook, as pruning's: when the layer ran in the graph of this step
        own = head.transform(run(hidden_states[None])[0])
        if made is not None:
            vars(head.layer)["weight"] = made
    exact = _in_float64(hidden_states, head)
    lost = _distances(rounded, exact)
    _compare(own, exact, 3 * lost.maximum(lost.mean()))
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
    limits = lost + _FLOAT32 * of_expected.std(-1, correction=0) + 32 * torch.finfo(torch.float32).eps * largest
    differences = _distances(found, expected)
    if differences.isnan().any():
        raise UserError(
            "the output layer gives NaN or infinity for tokens of the first batch; look for them in the batch and in "
            "the model's weights"
        )
    worst = (differences / limits).argmax()
    if not (differences <= limits).all():
        raise UserError(
            f"the output layer gives log-probabilities that differ by {differences[worst].item():.3g} from those of "
            f"its weight, and rounding explains {limits[worst].item():.2g}. It computes something else than when it "
            "was identified: choose loss=standard, and please report this"
        )


def _distances(found: Tensor, expected: Tensor) -> Tensor:
    """Return the spread of each row's differences, which an offset of the row leaves out."""
    return (_log_probabilities(found) - _log_probabilities(expected)).std(-1, correction=0)


def _log_probabilities(logits: Tensor) -> Tensor:
    return logits.double().log_softmax(-1).clamp(min=_LEAST)
