"""A divided vocabulary whose ranks have tokens of their own, over real processes, against the float64 reference."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from head_cases import FEATURES, NAMES, choice, error, make, run, weights_of
from kernels_of import kernels_of
from ranks import Refusal, or_refusal
from ranks import call as call_in_processes
from torch import Tensor

from lit_fused import filtered
from lit_fused.ops import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
    token_scores,
    token_scores_reference,
    tokens_of_ranks,
    top_items,
)
from lit_fused.ops.vocabulary_parallel import VocabularyShard

ROWS = (60, 7, 30)  # of the vocabulary on each rank
TOKENS = ((0, 210), (210, 250), (250, 700))  # of each rank; all of the second one's are ignored
OF_NONE = ((0, 250), (250, 250), (250, 700))


class Call(NamedTuple):
    feature: str = "everything"
    dtype: str = "float64"
    reduction: str = "sum"
    recompute: bool = False
    parts: tuple[tuple[int, int], ...] = TOKENS
    rows: int = 90  # of a block at least: several blocks, of which the last has no token of some ranks
    kernels: str = ""  # the way whose Triton kernels run, in the interpreter

    @property
    def options(self) -> dict[str, Any]:
        return FEATURES[self.feature] | {"reduction": self.reduction}


CALLS = [
    *(Call(feature) for feature in FEATURES),
    *(Call("everything", "float64", *way) for way in (("sum", True), ("none", False))),
    *(Call("token_weights", "float64", *way) for way in (("sum", True), ("none", False))),
    *(Call("everything", parts=parts, rows=rows) for parts in (TOKENS, OF_NONE) for rows in (90, 8192)),
    Call("everything", parts=(TOKENS[1],) * 3),  # no rank has a target
    *(Call("everything", dtype, rows=rows) for dtype in ("float32", "bfloat16") for rows in (90, 8192)),
]
OF_KERNELS = [
    *(Call("everything", "float32", "sum", recompute, rows=400, kernels="logits") for recompute in (False, True)),
    *(
        Call(feature, "float32", "sum", feature == "softcap", rows=400, kernels="hopper")
        for feature in ("z_loss", "softcap")
    ),
    Call("bias", "float32", "none", rows=8192, kernels="narrow"),
]


def inputs(call: Call) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """The tensors of all ranks' tokens, and the gradient of each token's loss."""
    tensors, targets = make(dtype=getattr(torch, call.dtype), bias=True)
    tensors = tensors if "bias" in FEATURES[call.feature] else tensors[:2]
    targets[slice(*TOKENS[1])] = -100
    grad = torch.randn(len(targets), generator=torch.Generator().manual_seed(1))
    return tensors, targets, grad if call.reduction == "none" else None


def work(rank: int, folder: Path, calls: list[Call]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(ROWS))
    start = sum(ROWS[:rank])
    shard = VocabularyShard(start, sum(ROWS), max(ROWS), dist.group.WORLD, tokens_differ=True)  # type: ignore[arg-type]
    results = {}

    def own(call: Call) -> tuple[list[Tensor], Tensor, Tensor | None, slice]:
        tensors, targets, grad = inputs(call)
        mine = slice(*call.parts[rank])
        own_rows = [t.detach()[start : start + ROWS[rank]] for t in tensors[1:]]
        return [tensors[0].detach()[mine], *own_rows], targets[mine], None if grad is None else grad[mine], mine

    for call in calls:
        tokens_of_ranks.LEAST_ROWS = call.rows
        tensors, targets, grad, mine = own(call)
        options = call.options | {"shard": shard, "recompute": call.recompute, "logits_budget_mib": 1e-6}
        if "token_weights" in options:
            options["token_weights"] = weights_of(inputs(call)[1])[mine]
        with kernels_of(call.kernels):
            results[call] = run(linear_cross_entropy, tensors, targets, grad, **options)
    tokens_of_ranks.LEAST_ROWS = 90
    tensors, targets, _, mine = own(Call("bias"))
    hidden, weight, bias = leaves = [t.requires_grad_() for t in tensors]
    selected = choice(inputs(Call())[1], 97)[mine]
    scores = token_scores(hidden, weight, targets, bias, 0.7, 4.0, selected, shard=shard)
    factors = numbers_like(700, 7)
    total = sum((getattr(scores, name) * factors[name][mine]).sum() for name in NAMES)
    gradients = torch.autograd.grad(total, leaves)  # type: ignore[arg-type]
    invariant = token_scores(hidden.float(), weight.float(), targets, shard=shard, invariant=True)
    refused = [
        or_refusal(lambda: top_items(hidden, weight, 3, shard=shard)),
        or_refusal(lambda: filtered.linear_cross_entropy(hidden, weight, targets, shard=shard)),
    ]
    found = {
        "results": results,
        "scores": ({n: getattr(scores, n).detach() for n in NAMES}, gradients),
        "refused": refused,
        "invariant": invariant,
    }
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def numbers_like(tokens: int, k: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = {name: (tokens, k) if name == "selected" else (tokens,) for name in NAMES}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return answers_of(CALLS, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def ranks_of_kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return answers_of(OF_KERNELS, tmp_path_factory.mktemp("ranks"))


def answers_of(calls: list[Call], folder: Path) -> list[dict[str, Any]]:
    call_in_processes(work, len(ROWS), folder, calls, timeout=120)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(len(ROWS))]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(map(str, call)))
def test_each_rank_gets_the_sums_of_its_tokens_and_the_gradients_of_the_whole(call: Call, ranks):
    check(call, ranks)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("call", OF_KERNELS, ids=lambda call: "-".join(map(str, call)))
def test_so_does_it_by_the_kernels(call: Call, ranks_of_kernels):
    check(call, ranks_of_kernels)


def check(call: Call, ranks: list[dict[str, Any]]) -> None:
    tensors, targets, grad = inputs(call)
    wide = [t.detach().double() for t in tensors]
    wide_grad = None if grad is None else grad.double()
    all_of = torch.cat([torch.arange(*part) for part in call.parts])
    grad_of_all = None if grad is None else grad[all_of]
    truth, usual = (
        run(function, [x[0].detach()[all_of], *x[1:]], targets[all_of], grad_of_all, **call.options)
        for function, x in ((linear_cross_entropy_reference, wide), (linear_cross_entropy, tensors))
    )
    found = [rank["results"][call] for rank in ranks]
    floor = {"float64": 1e-13, "float32": 4e-6, "bfloat16": 1e-6}[call.dtype]
    for (loss, stats, _), part in zip(found, call.parts, strict=True):
        mine = slice(*part)
        options = dict(call.options)
        if "token_weights" in options:
            options["token_weights"] = weights_of(targets)[mine]
        grad_of_part = None if wide_grad is None else wide_grad[mine]
        of_part = run(
            linear_cross_entropy_reference, [wide[0][mine], *wide[1:]], targets[mine], grad_of_part, **options
        )
        assert error(loss, of_part[0]) <= 2 * error(usual[0], truth[0]) + 1e4 * floor
        if call.dtype == "float64":
            assert error(loss, of_part[0]) <= floor
            for name, value in of_part[1].items():
                assert error(stats[name], value) <= 10 * floor, name
    gradients = [torch.cat([gradients[place] for *_, gradients in found]) for place in range(len(tensors))]
    for ours, theirs, expected in zip(gradients, usual[2], truth[2], strict=True):
        assert ours.dtype == theirs.dtype
        assert error(ours, expected) <= 2 * error(theirs, expected) + floor


@pytest.mark.timeout(240)
def test_each_rank_gets_the_token_scores_of_its_tokens(ranks):
    tensors, targets, _ = inputs(Call("bias"))
    hidden, weight, bias = leaves = [t.detach().requires_grad_() for t in tensors]
    expected = token_scores_reference(hidden, weight, targets, bias, 0.7, 4.0, choice(targets, 97))
    factors = numbers_like(700, 7)
    total = sum((getattr(expected, name) * factors[name]).sum() for name in NAMES)
    truth = torch.autograd.grad(total, leaves)  # type: ignore[arg-type]
    found = [rank["scores"] for rank in ranks]
    for name in NAMES:
        assert error(torch.cat([scores[name] for scores, _ in found]), getattr(expected, name).detach()) < 1e-12
    for gradients, exact in zip(zip(*(gradients for _, gradients in found), strict=True), truth, strict=True):
        assert error(torch.cat(gradients), exact) < 1e-12


@pytest.mark.timeout(240)
def test_invariant_scores_have_the_bits_of_one_process(ranks):
    tensors, targets, _ = inputs(Call("bias"))
    expected = token_scores(tensors[0].float(), tensors[1].float(), targets, invariant=True)
    for name in ("log_prob", "lse", "entropy"):
        found = torch.cat([getattr(rank["invariant"], name).detach() for rank in ranks])
        assert torch.equal(found, getattr(expected, name).detach()), name


def test_what_needs_the_same_tokens_on_all_ranks_is_refused(ranks):
    for rank in ranks:
        for refused in rank["refused"]:
            assert isinstance(refused, Refusal)
            assert "choose gather_head=true" in refused
