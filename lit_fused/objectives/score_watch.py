"""Compare the log-probabilities that a sampler gave with those that the policy computes: how far, where, and why.

Both are of the same tokens, of two programs: an engine that samples and the trainer. Where they differ without a word,
importance ratios are wrong, and rewards fall.

B completions, T positions, D hidden, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.objectives import score_causes
from lit_fused.objectives.policy import kl_estimate
from lit_fused.objectives.score_causes import MASK, NONE, SHIFT, TOKENIZER, UNKNOWN, Finding, OutputLayer, Sample

SAMPLE = 256  # tokens from which the cause is found, however large the batch is
_ADVICE = {
    score_causes.TEMPERATURE: "give the sampler's temperature as loss.temperature, or sample with that of the loss",
    score_causes.SOFTCAP: "the sampler's model lacks the softcap of the logits",
    score_causes.SCALE: "the sampler's model lacks the scale of the logits",
    score_causes.WEIGHTS: "the sampler has other weights, older ones for instance; load the policy's before it samples",
    score_causes.SHIFT: "a score belongs to the position that predicts its token; move them by one",
    score_causes.TOKENIZER: "the sampler's ids are of another tokenizer; give it the token ids themselves",
    score_causes.MASK: "tokens are trained that have no score; look at the labels and at where scores are written",
    score_causes.HEAD: "compute the output layer of both in the same precision",
    score_causes.BODY: "run the layers of both in the same precision",
    UNKNOWN: "hidden_states, weight and targets of 16 tokens or more tell the cause",
}


@dataclass(frozen=True)
class ScoreReport:
    """How far a sampler's scores are from the policy's, over the tokens that are trained, and why.

    Attributes:
        tokens: that were compared.
        k1, k3: estimates of KL(sampler, policy) in nats per token: the mean of ``samplers - ours``, and one that is
            never negative.
        beyond_2x: the share of tokens whose ratio of probabilities is above 2 or below 1/2.
        largest_ratio: of a token, the larger over the smaller probability.
        by_position: k3 of the tokens that begin at position 0, 1, 2, 4, 8, ... of their completion.
        cause: "none" (within the rounding of the dtype), "temperature", "softcap", "scale", "weights", "shift",
            "tokenizer", "mask", "precision of the head", "precision of the body", or "unknown".
        words: what is known of the cause, such as the fitted temperature.
        explained: the share of the squared differences that the cause predicts; 0 where it predicts none of them.
    """

    tokens: int
    k1: float
    k3: float
    beyond_2x: float
    largest_ratio: float
    by_position: dict[int, float]
    cause: str
    words: str
    explained: float

    def __str__(self) -> str:
        numbers = (
            f"KL {self.k3:.3g} nats per token (k3; k1 {self.k1:.3g}), {self.beyond_2x:.2%} of {self.tokens:,} tokens "
            f"beyond 2x, largest ratio {self.largest_ratio:.3g}"
        )
        if self.cause == NONE:
            return f"the sampler's log-probabilities are the policy's within rounding: {numbers}"
        words = f" ({self.words})" if self.words else ""
        share = f", {self.explained:.0%} explained" if self.explained > 0 else ""
        return f"the sampler's log-probabilities are not the policy's. Cause: {self.cause}{words}{share}; " + (
            f"{_ADVICE[self.cause]}. {numbers}"
        )


@torch.no_grad()
def compare_scores(
    ours: Tensor,
    samplers: Tensor,
    mask: Tensor,
    *,
    hidden_states: Tensor | None = None,
    weight: Tensor | None = None,
    targets: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    dtype: torch.dtype | None = None,
) -> ScoreReport:
    """Return how far a sampler's log-probabilities are from a policy's, and the cause.

    From scores alone it tells a wrong mask, a shift by one position, another tokenizer, and whether they agree. With
    the output layer's input and weight it tells every cause, from at most 256 tokens.

    Args:
        ours, samplers: (B, T) log-probabilities in nats, at the positions that predict the tokens.
        mask: (B, T) bool, where tokens are trained.
        hidden_states: (B, T, D), the output layer's input.
        weight: (V, D), with ``bias`` (V,), ``scale`` and ``softcap`` as of :func:`lit_fused.token_scores`.
        targets: (B, T), what each position predicts.
        temperature: that divides the policy's logits.
        dtype: that the policy computes in; None: that of the hidden states, or of autocast.

    Raises:
        UserError: hidden states, targets, scores or a mask of other positions than ``ours``.
    """
    states = None if hidden_states is None else hidden_states[..., 0]
    numbered = {"samplers": samplers, "mask": mask, "hidden_states": states, "targets": targets}
    for name, given in numbered.items():
        if given is not None and given.shape != ours.shape:
            raise UserError(
                f"{name} must be of the same positions as ours, {tuple(ours.shape)}, got {tuple(given.shape)}; of T "
                "tokens T - 1 are predicted, from hidden_states[:, :-1]"
            )
    ours, samplers = ours.float(), samplers.to(ours.device).float()
    # A log-probability of exactly zero, or none at all, is what a mask leaves behind.
    filled = mask & (~samplers.isfinite() | (samplers >= 0)) & (ours < -1e-3)
    compared = mask & ~filled
    finite = samplers.where(samplers.isfinite(), 0)
    difference = (finite - ours).where(mask, 0)
    k1, k3 = difference, kl_estimate(finite, ours).where(mask, 0)
    tokens = int(mask.sum())
    place = (mask.long().cumsum(-1) - 1).clamp(min=0)
    bins = torch.where(place > 0, place.float().log2().floor().long() + 1, 0)
    numbers = {
        "tokens": tokens,
        "k1": (k1.sum() / max(tokens, 1)).item(),
        "k3": (k3.sum() / max(tokens, 1)).item(),
        "beyond_2x": ((difference.abs() > torch.tensor(2.0).log().item()).sum() / max(tokens, 1)).item(),
        "largest_ratio": difference.abs().max().exp().item() if tokens else 1.0,
        "by_position": {
            (1 << number) >> 1: k3[mask & (bins == number)].mean().item() for number in bins[mask].unique().tolist()
        },
    }
    layer = None if hidden_states is None or weight is None or targets is None else (hidden_states, weight, targets)
    found = Finding(NONE, "", 0.0)
    if tokens and filled.sum() * 2 > tokens:
        found = Finding(MASK, f"{int(filled.sum())} of {tokens} tokens have no score below 0", 0.0)
    elif compared.any():
        rows = compared.flatten().nonzero()[:, 0]
        rows = rows[torch.linspace(0, len(rows) - 1, min(SAMPLE, len(rows)), device=rows.device).long()]
        sample = _sample(ours, samplers, compared, targets, rows)
        if len(rows) > 4 and sample.samplers.min() == sample.samplers.max():
            found = Finding(MASK, f"all scores are {sample.samplers[0].item():g}", 0.0)
        elif layer is None:
            found = _of_scores_alone(sample)
        else:
            autocast = ours.device.type if torch.is_autocast_enabled(ours.device.type) else None
            computed = layer[0].dtype if autocast is None else torch.get_autocast_dtype(autocast)
            with torch.autocast(ours.device.type, enabled=False):
                at_rows = layer[0].flatten(0, -2)[rows], layer[1], layer[2].flatten()[rows]
                output = OutputLayer(*at_rows, bias, scale, softcap, temperature)
                found = score_causes.explain(output, sample, dtype or computed)
        if filled.any() and found.cause in (NONE, UNKNOWN, score_causes.BODY):
            found = Finding(MASK, f"{int(filled.sum())} of {tokens} tokens have no score below 0", 0.0)
    return ScoreReport(**numbers, cause=found.cause, words=found.words, explained=found.explained)


def _sample(ours: Tensor, samplers: Tensor, mask: Tensor, targets: Tensor | None, rows: Tensor) -> Sample:
    """Return the scores of some tokens, given their places in the flattened batch, with their neighbours'."""
    # Without targets, one is enough to say that there is a neighbour.
    entries = torch.where(mask, torch.ones_like(ours) if targets is None else targets.float(), -1.0)
    pairs = torch.stack([ours.where(mask, torch.nan), entries], -1)
    none = torch.tensor([torch.nan, -1.0], device=ours.device).expand(len(ours), 1, 2)
    before, after = torch.cat([none, pairs[:, :-1]], 1), torch.cat([pairs[:, 1:], none], 1)
    flat = [each.flatten(0, 1)[rows] for each in (ours, samplers, before, after)]
    return Sample(*flat)


def _of_scores_alone(sample: Sample) -> Finding:
    """Return what the scores themselves tell."""
    difference = sample.samplers - sample.ours
    size = difference.square().mean().sqrt().item()
    if size <= 64 * torch.finfo(torch.float32).eps:
        return Finding(NONE, "", 0.0)
    for side, where in ((sample.before, "before"), (sample.after, "after")):
        exists = side[:, 1] >= 0
        explained = 1 - (sample.samplers - side[:, 0])[exists].square().mean().item() / size**2
        if explained >= score_causes.enough(0.91, int(exists.sum())):
            return Finding(SHIFT, f"they are of the position {where}", explained)
    if len(difference) > 16 and size > 1:
        correlation = torch.corrcoef(torch.stack([sample.ours, sample.samplers]))[0, 1].item()
        if not correlation > 0.4:
            return Finding(TOKENIZER, f"the scores' correlation is {correlation:.2f}", 0.0)
    return Finding(UNKNOWN, "", 0.0)
