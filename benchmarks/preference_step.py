"""Compare a DPO step without logits with TRL's trainer (its fused head and plain logits) and Liger's chunked DPO loss.

    python benchmarks/preference_step.py --model qwen3_0_6b --out preference_0_6b.json
    python benchmarks/preference_step.py --model qwen3_1_7b --compile regional --out preference_1_7b.json
    python benchmarks/preference_step.py --model tiny --pairs 2 --length 32 --steps 3      # on a CPU

Each cell is a process of its own: forward of policy and reference, loss and backward in bfloat16 (random weights and
tokens, half of each row is the answer), without an optimiser. Tokens per second are the median's; GiB are the peak's.
Compilation counts towards the limit of the warm-up alone.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cells import SHAPES, WARM_UP, add_limits, begin_warm_up, compile_layers, end_warm_up, peak_gib, qwen3, run_cells
from torch import Tensor

from lit_fused import FusedPreferenceModule, PreferenceLoss
from lit_fused.models.compilation import compile_backbone

CELLS = ("lit_fused", "trl_fused", "plain", "liger")
BETA = 0.1


def answers_of(log_probs: Tensor, valid: Tensor) -> Tensor:
    return log_probs.where(valid, 0).sum(-1)


def step_of(
    cell: str, policy: torch.nn.Module, reference: torch.nn.Module, how: str, budget_mib: float | None
) -> Callable[..., Tensor]:
    """Return a function of (input_ids, labels), rows chosen and rejected in turn, that returns the loss of a batch."""
    if cell == "lit_fused":
        module = FusedPreferenceModule(
            policy, PreferenceLoss("dpo", beta=BETA, logits_budget_mib=budget_mib), reference=reference
        )
        for model in (module.model, module.frozen[0].model):
            compile_backbone(model, how)
        flags: dict[int, Tensor] = {}

        def own(ids: Tensor, labels: Tensor) -> Tensor:
            desirable = flags.setdefault(len(ids), (torch.arange(len(ids), device=ids.device) + 1) % 2)
            return module.model({"input_ids": ids, "labels": labels, "desirable": desirable}).loss

        return own
    if cell == "trl_fused":
        from trl.trainer.utils import add_fused_lm_head

        models: Any = (policy, reference)
        for model in models:
            add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1", "mean_logits", "log_sum_sq_probs"))
    if cell == "liger":
        from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

        loss = LigerFusedLinearDPOLoss(beta=BETA)

        models: Any = (policy, reference)

        def liger(ids: Tensor, labels: Tensor) -> Tensor:
            order = torch.cat([torch.arange(0, len(ids), 2), torch.arange(1, len(ids), 2)])
            ids, targets = ids[order], labels[order][:, 1:]
            hidden = models[0].model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
            with torch.no_grad():
                theirs = models[1].model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
            weights = [model.lm_head.weight for model in models]
            return loss(weights[0], hidden, targets, ref_input=theirs, ref_weight=weights[1])[0]

        return liger

    def sums(model: torch.nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        valid = labels[:, 1:] != -100
        if cell == "trl_fused":
            found = model(input_ids=ids, labels=labels, use_cache=False, fused_lm_head=True).log_probs
            return found[:, -valid.shape[1] :].where(valid, 0).sum(-1)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        picked = F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="none")
        return answers_of(-picked.view(valid.shape), valid)

    def theirs(ids: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            before = sums(reference, ids, labels)
        ratios = sums(policy, ids, labels) - before
        return -F.logsigmoid(BETA * (ratios[::2] - ratios[1::2])).mean()

    return theirs


def measure(options: argparse.Namespace) -> dict[str, Any]:
    begin_warm_up(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy, reference = (qwen3(options.model, seed, device) for seed in (0, 1))
    policy.train()
    reference.eval().requires_grad_(False)
    step = step_of(options.cell, policy, reference, options.compile, options.logits_budget_mib)
    if options.compile == "regional" and options.cell != "lit_fused":
        compile_layers(policy, reference)
    generator = torch.Generator().manual_seed(2)
    size = (2 * options.pairs, options.length)
    ids = torch.randint(policy.config.vocab_size, size, generator=generator).to(device)
    labels = ids.clone()
    labels[:, : options.length // 2] = -100
    seconds, value = [], 0.0
    for number in range(options.steps + WARM_UP):
        if number == WARM_UP:
            end_warm_up(options)
        start = time.perf_counter()
        policy.zero_grad()
        loss = step(ids, labels)
        loss.backward()
        value = loss.item()  # waits for the device
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    rate = ids.numel() / statistics.median(seconds[WARM_UP:])
    found = {"tokens_per_sec": round(rate, 1), "peak_gib": peak_gib(), "loss": value}
    return found | {"warm_up_s": round(sum(seconds[:WARM_UP]), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen3_0_6b")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", choices=("none", "regional"), default="none")
    parser.add_argument("--cell", choices=CELLS)
    parser.add_argument("--logits-budget-mib", type=float, help="of the cell lit_fused")
    parser.add_argument("--out", type=Path)
    add_limits(parser)
    options = parser.parse_args()
    if options.cell:
        print(json.dumps(measure(options)))
    else:
        run_cells([{"cell": cell} for cell in CELLS], options.out)


if __name__ == "__main__":
    main()
