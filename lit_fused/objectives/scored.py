"""The base of losses that need more than cross entropy: numbers of each token, with gradients, and no logits."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from lit_fused.losses import LinearCrossEntropyLoss, LossOutput
from lit_fused.losses.loss import Batch, Forward, Head
from lit_fused.ops import TokenScores, token_scores
from lit_fused.ops.label_checks import IGNORE_INDEX
from lit_fused.ops.options import LossOptions


class ScoredLoss(LinearCrossEntropyLoss):
    """A loss of the scores of a batch's tokens. A subclass writes :meth:`of_scores`, or :meth:`compute` if it
    needs more than one pass of scores.

    Whatever it averages over (pairs, groups, tokens) is the ``num_tokens`` of its sums, so that accumulation,
    parallelism and evaluation are as exact as for cross entropy. A row without labels has no weight: batches are filled
    up with such rows.

    Args:
        logits_budget_mib: size of the chunk of logits in MiB; None is the default of :func:`lit_fused.token_scores`.
        chunk_size: rows of that chunk, instead of its MiB.
        drop_ignored: on a GPU, take ignored tokens out before the products, for one wait for the device per step.
        float32_accumulation: sum a bfloat16 weight's gradient in float32; None does so where its precision needs it.
        invariant: give each token's scores the same bits in any batch, as :func:`lit_fused.token_scores` says.
    """

    inputs = ()
    replaces_own = False
    needs_entropy = False
    temperature = 1.0  # divides the logits

    def __init__(
        self,
        *,
        logits_budget_mib: float | None = None,
        chunk_size: int | None = None,
        drop_ignored: bool = False,
        float32_accumulation: bool | None = None,
        invariant: bool = False,
    ) -> None:
        super().__init__(
            logits_budget_mib=logits_budget_mib,
            chunk_size=chunk_size,
            drop_ignored=drop_ignored,
            float32_accumulation=float32_accumulation,
        )
        self.options |= LossOptions(invariant=invariant).changed()

    def of_scores(self, scores: TokenScores, targets: Tensor, batch: Batch) -> LossOutput:
        """Return the sums of a batch, of the scores (B, T) of its targets (B, T), which are -100 where ignored."""
        raise NotImplementedError

    def compute(self, model: Forward, batch: Batch) -> LossOutput:
        targets = model.targets(batch)
        hidden_states, head, aux_loss = model.hidden_states(batch)
        scores = self.scores(hidden_states, targets, head)
        parts: list[Any] = [x if x is None else model.whole_rows(x, batch) for x in scores]
        whole = TokenScores(*parts)
        output = replace(self.of_scores(whole, model.whole_rows(targets, batch), batch), aux_loss=aux_loss)
        self.look_at(scores, hidden_states, targets, head, model, batch)
        return output

    def look_at(
        self, scores: TokenScores, hidden_states: Tensor, targets: Tensor, head: Head, model: Forward, batch: Batch
    ) -> None:
        """Look at the scores of a batch that has been counted; a subclass that compares them with others overrides
        it."""

    def scores(
        self,
        hidden_states: Tensor,
        targets: Tensor,
        head: Head,
        selected: Tensor | None = None,
        temperature: float | None = None,
    ) -> TokenScores:
        """Return the scores (...) of targets (...) at hidden states (..., D), and of ``selected`` entries (..., K),
        under logits over a temperature (None: the loss's own), under a divided vocabulary as well."""
        hidden_states, weight, bias = head.operands(hidden_states, in_parts=True)
        formula = at_temperature(head, bias, self.temperature if temperature is None else temperature)
        options = formula | self.options | {"shard": head.shard, "entropy": self.needs_entropy}
        return token_scores(hidden_states, weight, targets, selected=selected, **options)

    def sums(self, hidden_states: Tensor, targets: Tensor, head: Head) -> LossOutput:
        # The check of the first batches compares the numbers that are trained on with the model's own logits.
        nll = -self.scores(hidden_states, targets, head, temperature=1.0).log_prob.sum()
        return LossOutput(nll, (targets != IGNORE_INDEX).sum(), stats={"nll": nll.detach()})


def at_temperature(head: Head, bias: Tensor | None, temperature: float) -> dict[str, Any]:
    """Return bias, scale and softcap of a head whose logits are divided by a temperature."""
    return {
        "bias": None if bias is None else bias / temperature,
        "scale": head.scale / temperature,
        "softcap": None if head.softcap is None else head.softcap / temperature,
    }
