"""Other ways to filter a backward, judged by what they would cost and give: no kernels, the mathematics alone.

    python benchmarks/filtered_alternatives.py --head wide_head.pt
    python benchmarks/filtered_alternatives.py --head head.pt --tokens 512 --device cpu

Three choices of ``filtered.py`` are varied, on hidden states of a trained model (``train_head.py``), in float32:

* which columns a group keeps: those with an entry above eps ("largest"), or as few as leave less than a fraction of the
  gradient's energy in the others: their squares' sum ("energy"), or only what a tail of 64 rows cannot have
  ("variance");
* how many rows share a tail distribution: the group, or some of its rows;
* which rows are a group: neighbours, rows sorted by their target, or clusters of similar hidden states, halved along
  their principal direction again and again.

Printed are the share of kept columns and the errors of both gradients, relative to the exact ones, with no rounding but
float32's. Targets' own entries are always exact, and their columns are kept where the rule keeps them.

N tokens, D hidden, R rows of a group, V vocabulary.
"""

import argparse
from pathlib import Path

import torch
from linear_cross_entropy import truth
from torch import Tensor

from lit_fused.ops.label_checks import IGNORE_INDEX

SETTINGS = [("largest", 2.0**-e) for e in (8, 10, 12, 14)] + [
    (rule, fraction) for rule in ("energy", "variance") for fraction in (0.02, 0.01, 0.005)
]
VARIANCE_ROWS = 64


def clusters(hidden_ND: Tensor, rows: int) -> Tensor:
    """(N,) an order of tokens in which ``rows`` neighbours are similar; N / rows is a power of two."""
    (tokens, hidden_size), generator = hidden_ND.shape, torch.Generator(hidden_ND.device).manual_seed(0)
    ordered_ND, order_N = hidden_ND, torch.arange(tokens, device=hidden_ND.device)
    size = tokens
    while size > rows:
        parts = ordered_ND.view(-1, size, hidden_size)
        centered = parts - parts.mean(1, keepdim=True)
        direction = torch.randn(len(parts), hidden_size, 1, device=hidden_ND.device, generator=generator)
        for _ in range(4):  # power iteration
            direction = centered.mT @ (centered @ direction)
            direction /= direction.norm(dim=1, keepdim=True)
        within = (centered @ direction)[..., 0].argsort(1)
        places = (within + size * torch.arange(len(parts), device=hidden_ND.device)[:, None]).view(-1)
        ordered_ND, order_N = ordered_ND[places], order_N[places]
        size //= 2
    return order_N


def probabilities(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """(N, V) softmax, zero at the target."""
    p_NV = hidden_ND.new_empty(len(hidden_ND), len(weight_VD))
    for rows in torch.arange(len(hidden_ND), device=hidden_ND.device).split(1024):
        p_NV[rows] = (hidden_ND[rows] @ weight_VD.T).softmax(1)
    return p_NV.scatter_(1, targets_N[:, None], 0)


def keep(p_RV: Tensor, rule: str, value: float) -> Tensor:
    """(V,) which columns a group keeps."""
    if rule == "largest":
        return p_RV.amax(0) > value
    total = p_RV.square().sum() + p_RV.sum(1).square().sum()  # of the gradient: the target's entry is the row's sum
    left_V = p_RV.square().sum(0)
    if rule == "variance":
        blocks = p_RV.view(-1, VARIANCE_ROWS, p_RV.shape[1]).sum(1)
        left_V = left_V - (blocks.square() / VARIANCE_ROWS).sum(0)
    ordered, order_V = left_V.sort()
    kept_V = torch.ones_like(left_V, dtype=torch.bool)
    kept_V[order_V[ordered.cumsum(0) <= value**2 * total]] = False
    return kept_V


def judge(
    p_NV: Tensor,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    norms: tuple[float, float],
    group: int,
    setting: tuple[str, float],
    tail_rows: int,
) -> tuple[float, float, float]:
    """Share of kept columns, and the errors of dh and dW; ``tail_rows`` of zero is no correction."""
    kept, hidden_error, weight_error_VD = 0.0, 0.0, torch.zeros_like(weight_VD)
    for p_RV, hidden_RD in zip(p_NV.split(group), hidden_ND.split(group), strict=True):
        kept_V = keep(p_RV, *setting)
        kept += kept_V.float().mean().item() * len(p_RV) / len(p_NV)
        tail_RV = p_RV * ~kept_V
        error_RV = tail_RV
        if tail_rows:
            blocks = tail_RV.view(-1, min(tail_rows, group), p_RV.shape[1])
            columns = blocks.sum(1, keepdim=True)
            distribution = columns / columns.sum(2, keepdim=True).clamp(min=1e-20)
            error_RV = tail_RV - (blocks.sum(2, keepdim=True) * distribution).view_as(tail_RV)
        hidden_error += (error_RV @ weight_VD).square().sum().item()
        weight_error_VD.addmm_(error_RV.T, hidden_RD)
    return kept, hidden_error**0.5 / norms[0], weight_error_VD.norm().item() / norms[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Other rules and corrections for a filtered backward.")
    parser.add_argument("--head", type=Path, required=True, help="a file of train_head.py")
    parser.add_argument("--groups", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()

    hidden, weight, targets = torch.load(options.head, map_location=options.device)["trained"]
    valid = (targets != IGNORE_INDEX).nonzero()[: options.tokens, 0]
    valid = valid[: 1 << (len(valid).bit_length() - 1)]  # clusters halve them
    hidden, targets = hidden[valid], targets[valid]
    _, d_hidden, d_weight = truth(hidden, weight, targets)
    norms = d_hidden.norm().item() * len(hidden), d_weight.norm().item() * len(hidden)  # of the sum, not the mean
    hidden, weight = hidden.float(), weight.float()
    orders = {
        "neighbours": torch.arange(len(hidden), device=hidden.device),
        "by target": targets.sort(stable=True).indices,
        "clusters": clusters(hidden, VARIANCE_ROWS),
    }
    print("| rows | group | rule | tail of rows | kept columns | dh error | dW error |\n|---|---|---|---|---|---|---|")
    for name, order in orders.items():
        p_NV = probabilities(hidden[order], weight, targets[order])
        torch.backends.cuda.matmul.allow_tf32 = True  # for the errors: digits of errors do not matter
        for group in [g for g in options.groups if g <= len(hidden)]:
            for rule, value in SETTINGS:
                for tail in dict.fromkeys((0, VARIANCE_ROWS, group)):
                    kept, *errors = judge(p_NV, hidden[order], weight, norms, group, (rule, value), tail)
                    cells = name, group, f"{rule} {value:g}", tail or "none", f"{100 * kept:.2f} %"
                    print(
                        "|", " | ".join(map(str, cells)), "|", " | ".join(f"{e:.2e}" for e in errors), "|", flush=True
                    )
        torch.backends.cuda.matmul.allow_tf32 = False


if __name__ == "__main__":
    main()
