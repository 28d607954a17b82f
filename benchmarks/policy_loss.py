"""The whole loss of a policy, GRPO's, from the same hidden states: ours beside TRL's, verl's and Liger's, in one run.

    pip install "trl>=1.16" liger-kernel && pip install --no-deps verl
    python benchmarks/policy_loss.py --out docs/evidence/policy_loss    # 32k tokens, 152k entries
    python benchmarks/policy_loss.py --device cpu --shapes tiny

Completions have 2,048 tokens each and are compared in groups of eight. The sampler's log-probabilities are given, and
differ from the policy's by 0, 0.1 or 0.4 nats either way: rounding moves no ratio across the clip at 1 +- 0.2. The loss
has no KL term. "lit_fused" is PolicyLoss as FusedPolicyModule calls it, with the sums that it logs. "liger, GRPO" is
its LigerFusedLinearGRPOLoss. The others are log-probabilities and entropies of token_scores.py under the formula of
TRL's GRPOTrainer, without what TRL logs. Times, memory and errors are measured as there.
"""

import gc
from functools import cache, partial
from typing import Any

import torch
from linear_cross_entropy import SHAPES, Bench, Loss, gradient, inputs
from token_scores import PROVIDERS, Scores, judge, report, take_turns
from torch import Tensor

from lit_fused.objectives.policy_loss import PolicyLoss
from lit_fused.ops import TokenScores, token_scores, token_scores_reference

OF_SHAPES = ["rollouts, D=1024", "rollouts, D=2048"]
OTHERS = ["trl", "verl, chunks", "verl, Triton", "liger, CuTe", "compiled chunks", "logits"]
GROUP = 8
CLIP = 0.2


def rollouts(bench: Bench) -> dict[str, Tensor]:
    """Return rewards (B,) of completions with what is known of their groups, and the sampler's scores (B, T)."""
    tokens = len(bench.targets)
    completions = max(tokens // 2048, GROUP)
    generator = torch.Generator(bench.device).manual_seed(1)
    reward = torch.randn(completions, device=bench.device, generator=generator)
    groups = reward.view(-1, GROUP)
    of_groups = {"mean": groups.mean(1), "std": groups.std(1)}
    apart = torch.tensor([-0.4, -0.1, 0.0, 0.1, 0.4], device=bench.device)
    chosen = torch.randint(len(apart), (tokens,), device=bench.device, generator=generator)
    hidden, weight = bench.hidden.detach().double(), bench.weight.detach().double()
    log_prob = [
        token_scores_reference(h, weight, t).log_prob
        for h, t in zip(hidden.split(1024), bench.targets.split(1024), strict=True)
    ]
    sampler = (torch.cat(log_prob) - apart[chosen]).float().view(completions, -1)
    numbers = {name: value.repeat_interleave(GROUP) for name, value in of_groups.items()}
    batch = {"reward": reward, "sampler_log_probs": sampler} | {f"group_{k}": v for k, v in numbers.items()}
    batch["advantages"] = (reward - batch["group_mean"]) / (batch["group_std"] + 1e-4)
    return batch


def lit_fused(batch: dict[str, Tensor]) -> Loss:
    loss = PolicyLoss("grpo", clip_low=CLIP, clip_high=CLIP)
    given = {name: value for name, value in batch.items() if name != "advantages"}
    given["group_size"] = torch.full_like(batch["reward"], GROUP)

    def of(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        shape = batch["sampler_log_probs"].shape
        options: Any = loss.options | {"entropy": loss.needs_entropy}
        scores = token_scores(hidden.view(*shape, -1), weight, targets.view(shape), **options)
        output = loss.of_scores(TokenScores(*scores), targets.view(shape), given)
        return output.loss_sum / output.num_tokens

    return of


def liger(batch: dict[str, Tensor]) -> Loss:
    def of(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        sampler = batch["sampler_log_probs"]
        loss: Any = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="grpo")
        mask = torch.ones_like(sampler)
        rows = hidden.view(*sampler.shape, -1), weight, targets.view(sampler.shape), mask, batch["advantages"]
        return loss(*rows, old_per_token_logps=sampler)[0]

    return of


def grpo(log_prob: Tensor, sampler: Tensor, advantages: Tensor) -> Tensor:
    """Return the losses of tokens, as TRL's GRPOTrainer computes them."""
    ratio = (log_prob - sampler).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


def trls(scores: Scores, batch: dict[str, Tensor]) -> Loss:
    def of(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        log_prob, _, _ = scores(hidden, weight, targets, targets)
        sampler = batch["sampler_log_probs"]
        return grpo(log_prob.view(sampler.shape), sampler, batch["advantages"][:, None]).mean(-1).mean()

    return of


def truth(bench: Bench, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the gradients in float64, summed over chunks of 1024 tokens."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (bench.hidden, bench.weight))
    sampler = batch["sampler_log_probs"].double()
    advantages = batch["advantages"].double()[:, None].expand_as(sampler).flatten()
    for rows in torch.arange(len(hidden), device=hidden.device).split(1024):
        log_prob = token_scores_reference(hidden[rows], weight, bench.targets[rows]).log_prob
        (grpo(log_prob, sampler.flatten()[rows], advantages[rows]).sum() / len(hidden)).backward()
    return gradient(hidden), gradient(weight)


def measure(name: str, device: torch.device, providers: list[str], turns: int) -> list[dict[str, Any]]:
    bench = Bench(*inputs(SHAPES[name], device))
    batch = rollouts(bench)
    exact = cache(partial(truth, bench, batch))
    whole = {"lit_fused": lit_fused, "liger, GRPO": liger}
    losses = {p: whole[p](batch) if p in whole else trls(PROVIDERS[f"{p}, entropy"][1], batch) for p in providers}
    rows, work = judge(bench, losses, lambda provider: exact())
    exact.cache_clear()
    gc.collect()
    take_turns(bench, rows, work, turns)
    return rows


def main(arguments: list[str] | None = None) -> dict[str, list[dict[str, Any]]]:
    return report(measure, ["lit_fused", *OTHERS, "liger, GRPO"], OF_SHAPES, arguments)


if __name__ == "__main__":
    main()
