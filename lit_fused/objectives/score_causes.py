"""Say why a sampler's log-probabilities differ from a policy's: causes predict them, and the nearest one is named.

From the output layer's input and weight, the logits of a few hundred tokens give what the sampler's scores would be at
another temperature, without the softcap or the scale, of the neighbour's token, or with an output layer in another
precision. The temperature is fitted by Gauss-Newton. What no such cause explains is noise, and of noise there are two
kinds. Rounding is independent from token to token. Other weights move similar tokens alike: to first order the
difference is linear in the change of the weights, so that a regression on the other tokens, whose kernel is the inner
product of the scores' gradients, predicts a token's difference from theirs.

Differences are counted in roundings: one is what rounding hidden states and logits once makes of a score.

N tokens, D hidden, V vocabulary.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

NONE, UNKNOWN = "none", "unknown"
TEMPERATURE, SOFTCAP, SCALE = "temperature", "softcap", "scale"
WEIGHTS, SHIFT, TOKENIZER, MASK = "weights", "shift", "tokenizer", "mask"
HEAD, BODY = "precision of the head", "precision of the body"
_EXPLAINS = 0.8  # of the squared differences: the least for a cause that predicts each of them
_EXPLAINS_SHIFT = 0.95  # so too for a shift: any likely scores are nearer to those of other ids, which are tiny
_PREDICTED = 0.15  # so too for other weights, predicted from other tokens: rounding reaches 0.1, an old policy 0.25
# The most roundings, on average, of programs that compute the same in the same precision.
_ALIKE = {torch.bfloat16: 4.0, torch.float16: 4.0}
_ALIKE_FLOAT32 = 64.0  # The order of sums matters more than the last rounding.
_FEW = 16  # tokens: fewer are explained by chance, those of another policy by a temperature
_AS_NEAR = 0.05  # less explained: float32 and float16 are as near to scores that were rounded to bfloat16
_ENTRIES = 1 << 14  # of the vocabulary, whose weights are converted at once
_OF_BODY = 32.0  # of bfloat16, through all layers: two have 1 to 3, four 5
_OF_ROUNDING = 0.02  # nats per token, half of the mean square: the most that rounding makes


@dataclass(frozen=True)
class OutputLayer:
    """The output layer at N tokens, with what differs between hypotheses: all tensors of the same device."""

    hidden_states: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    targets: Tensor  # (N,)
    bias: Tensor | None
    scale: float
    softcap: float | None
    temperature: float

    def products(self, dtype: torch.dtype = torch.float32, bias: Tensor | None = None) -> Tensor:
        """Return the products (N, V) of hidden states and weight, with a bias, all rounded to ``dtype``, in it."""
        # A whole copy of the weight in float32 may be larger than all logits of the sample.
        weights = self.weight.split(_ENTRIES)
        biases = [None] * len(weights) if bias is None else bias.to(dtype).split(_ENTRIES)
        states = self.hidden_states.to(dtype)
        pairs = zip(weights, biases, strict=True)
        return torch.cat([torch.nn.functional.linear(states, part.to(dtype), added) for part, added in pairs], -1)

    def logits(self, products: Tensor, *, scaled: bool = True, capped: bool = True) -> Tensor:
        """Return logits (N, V) float32 at temperature one, computed in the dtype of the products (N, V)."""
        logits = products * self.scale if scaled else products
        logits = logits if self.bias is None else logits + self.bias.to(logits)
        logits = logits if self.softcap is None or not capped else self.softcap * torch.tanh(logits / self.softcap)
        return logits.float()

    def scores(self, logits: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return log-probabilities (N,) of targets."""
        targets = self.targets if targets is None else targets
        return (logits / self.temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


@dataclass(frozen=True)
class Sample:
    """N tokens whose scores are compared."""

    ours: Tensor  # (N,)
    samplers: Tensor  # (N,)
    before: Tensor  # (N, 2): our score of the position before, and its target; NaN and -1 where there is none
    after: Tensor  # (N, 2): so too of the position after


@dataclass(frozen=True)
class Finding:
    """A cause, what it says in words, and the share of the squared differences that it explains."""

    cause: str
    words: str
    explained: float


def _share(found: Tensor, sample: Sample, unit: Tensor, where: Tensor | None = None) -> float:
    """Return the share of the squared differences, in roundings, that a prediction (N,) explains."""
    valid = torch.ones_like(unit, dtype=torch.bool) if where is None else where
    if valid.sum() < 0.5 * len(valid):
        return 0.0
    before = ((sample.samplers - sample.ours) / unit)[valid].square().sum()
    return 1 - (((sample.samplers - found) / unit)[valid].square().sum() / before.clamp(min=1e-30)).item()


def _fitted_temperature(layer: OutputLayer, logits: Tensor, samplers: Tensor) -> float:
    """Return the factor on the temperature whose scores are nearest to the sampler's."""
    best, factor = (math.inf, 1.0), 1.0
    for _ in range(8):
        log_p = (logits / (layer.temperature * factor)).log_softmax(-1)
        own = logits.gather(-1, layer.targets[:, None])[:, 0]
        residual = samplers - log_p.gather(-1, layer.targets[:, None])[:, 0]
        best = min(best, (residual.square().sum().item(), factor))
        slope = (own - (log_p.exp() * logits).sum(-1)) / (layer.temperature * factor)  # of log(1 / factor)
        step = (slope * residual).sum() / slope.square().sum().clamp(min=1e-12)
        factor *= math.exp(-min(max(step.item(), -0.7), 0.7))
    return best[1]


def _predicted_by_others(layer: OutputLayer, differences: Tensor, unit: Tensor, error: Tensor, change: Tensor) -> float:
    """Return the share of the squared differences that a regression on the other tokens predicts.

    ``error`` (N, V) and ``change`` (N, D) are the gradients of the scores with respect to logits and hidden states.
    """
    states = torch.nn.functional.normalize(layer.hidden_states.float(), dim=-1)
    alike = states @ states.T
    # Two tokens with one context have the very same rounding.
    twins = (alike > 0.9999) & (layer.targets[:, None] == layer.targets)
    kept = ~twins.triu(1).any(0)
    target = (differences / unit)[kept]
    kernels = [(rows @ rows.T * alike / (unit[:, None] * unit))[kept][:, kept] for rows in (error, change)]
    kernel = sum(each / each.diagonal().mean().clamp(min=1e-30) for each in kernels)
    shares = []
    for ridge in (0.03, 0.3):
        noise = ridge * torch.eye(len(target), dtype=target.dtype, device=target.device)
        smoother = torch.linalg.solve(kernel + noise, kernel).T
        left_out = (target - smoother @ target) / (1 - smoother.diagonal())
        shares.append(1 - (left_out.square().sum() / target.square().sum().clamp(min=1e-30)).item())
    return max(shares)


def enough(least: float, tokens: int) -> float:
    """Return the share that a cause must explain of some tokens, if ``least`` of 16 is enough: of fewer so much that
    chance explains it as rarely."""
    return 1 - (1 - least) ** max((_FEW - 1) / max(tokens - 1, 0.1), 1)


def explain(layer: OutputLayer, sample: Sample, dtype: torch.dtype) -> Finding:
    """Return the cause of the differences of a sample. ``dtype`` is what the policy computes in."""
    products, index = layer.products(), torch.arange(len(layer.targets), device=layer.targets.device)
    logits = layer.logits(products)
    p = (logits / layer.temperature).softmax(-1)
    error = -p
    error[index, layer.targets] += 1
    slope = error if layer.softcap is None else error * (1 - (logits / layer.softcap) ** 2)
    parts = zip(slope.split(_ENTRIES, -1), layer.weight.split(_ENTRIES), strict=True)
    change = torch.stack([rows @ part.float() for rows, part in parts]).sum(0) * (layer.scale / layer.temperature)
    of_states = layer.hidden_states.float().norm(dim=-1) * change.norm(dim=-1) / change.shape[-1] ** 0.5
    of_logits = (logits.gather(-1, layer.targets[:, None])[:, 0] ** 2 + (p * logits).square().sum(-1)) / 3
    unit = (of_states.square() + of_logits / layer.temperature**2 + 1e-6).sqrt()
    difference = sample.samplers - sample.ours
    half = torch.finfo(torch.bfloat16).eps / 4
    size = (difference / unit).square().mean().sqrt().item() / half  # in roundings of bfloat16
    own = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) / 4
    is_alike = size * half / own <= _ALIKE.get(dtype, _ALIKE_FLOAT32)

    if is_alike and len(difference) < _FEW:  # One of the ways to round is near a few numbers by chance.
        return Finding(NONE, "", 0.0)
    causes = [each for each in _candidates(layer, sample, products, unit, dtype) if not is_alike or each.cause == HEAD]
    best = max(causes, key=lambda each: each.explained)
    if best.explained >= enough(_EXPLAINS_SHIFT if best.cause == SHIFT else _EXPLAINS, len(difference)):
        return best
    if is_alike:
        return Finding(NONE, "", 0.0)
    if len(difference) < _FEW:
        return Finding(UNKNOWN, f"{len(difference)} tokens are too few to name it", 0.0)
    correlation = torch.corrcoef(torch.stack([sample.ours, sample.samplers]))[0, 1].item()
    if difference.square().mean().sqrt() > 1 and not correlation > 0.4:
        return Finding(TOKENIZER, f"the scores' correlation is {correlation:.2f}", 0.0)
    predicted = _predicted_by_others(layer, difference, unit, slope, change)
    if predicted < _PREDICTED and size <= _OF_BODY and difference.square().mean() / 2 <= _OF_ROUNDING:
        if dtype in _ALIKE:  # Two programs that round in all layers differ by as much.
            return Finding(NONE, "", 0.0)
        return Finding(BODY, f"noise of {size:.1f} roundings of bfloat16, independent from token to token", 0.0)
    words = "similar tokens differ alike" if predicted >= _PREDICTED else "or other ids for some of the tokens"
    return Finding(WEIGHTS, words, max(predicted, 0.0))


def _candidates(
    layer: OutputLayer, sample: Sample, products: Tensor, unit: Tensor, dtype: torch.dtype
) -> list[Finding]:
    """Return each cause that predicts the scores, the likelier first."""
    found, logits = [], layer.logits(products)
    if layer.scale != 1:
        scores = layer.scores(layer.logits(products, scaled=False))
        found.append(Finding(SCALE, f"without the factor {layer.scale:.4g}", _share(scores, sample, unit)))
    if layer.softcap is not None:
        scores = layer.scores(layer.logits(products, capped=False))
        found.append(Finding(SOFTCAP, f"without the cap of {layer.softcap:g}", _share(scores, sample, unit)))
    for side, where in ((sample.before, "before"), (sample.after, "after")):
        scores, exists = side[:, 0], side[:, 1] >= 0
        found.append(Finding(SHIFT, f"they are of the position {where}", _share(scores, sample, unit, exists)))
        scores = layer.scores(logits, side[:, 1].long().clamp(min=0))
        found.append(Finding(SHIFT, f"they are of the token {where}", _share(scores, sample, unit, exists)))
    heads: dict[str, float] = {}
    for other in (torch.float32, torch.bfloat16, torch.float16):
        if other == dtype or (other == torch.float32 and dtype == torch.float64):
            continue
        ways = [logits]
        if other != torch.float32:  # Operands, products or logits are rounded, and what follows is computed so.
            both = layer.products(other), products.to(other)
            ways = [*map(layer.logits, both), *(layer.logits(each.float()) for each in both), logits.to(other).float()]
            if layer.bias is not None:  # It may be added before the products are rounded.
                ways.append(replace(layer, bias=None).logits(layer.products(other, layer.bias / layer.scale).float()))
        heads[str(other).removeprefix("torch.")] = max(_share(layer.scores(way), sample, unit) for way in ways)
    explained = max(heads.values())
    near = [name for name, share in heads.items() if share >= explained - _AS_NEAR]
    found.append(Finding(HEAD, f"theirs is in {' or '.join(near)}", explained))
    factor = _fitted_temperature(layer, logits, sample.samplers)
    scores = layer.scores(logits / factor)
    # Any other formula is nearer than a temperature that has been fitted only if it explains as much.
    explained = _share(scores, sample, unit) - 1e-3
    found.append(
        Finding(TEMPERATURE, f"theirs is {layer.temperature * factor:.3g}, not {layer.temperature:g}", explained)
    )
    return found
