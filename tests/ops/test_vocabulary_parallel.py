"""The chunked head with its vocabulary divided over three real processes, against the float64 reference.

The ranks have the same tokens, or each has tokens of its own.
"""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from head_cases import FEATURES, NAMES, choice, error, make, run, scored, weights_of
from kernels_of import kernels_of
from ranks import Refusal, or_refusal
from ranks import call as call_in_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from vocabulary_ranks import group_of, joined, part_of, shard_of

from lit_fused import LinearCrossEntropyLoss, UserError, filtered
from lit_fused.heads import OutputHead
from lit_fused.ops import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
    token_scores,
    token_scores_reference,
    tokens_of_ranks,
    top_items,
)
from lit_fused.ops.vocabulary_parallel import ELSEWHERE, VocabularyShard
from lit_fused.parallel.tensor import divide_output_layer

RANKS = 3
NO_GROUP: Any = None
SPLITS = {"even": (33, 32, 32), "uneven": (60, 7, 30), "one_empty": (50, 0, 47), "two_ranks": (49, 48)}
OWN = ((0, 210), (210, 250), (250, 700))  # tokens of each rank; all of the second one's are ignored
OF_NONE = ((0, 250), (250, 250), (250, 700))


class Call(NamedTuple):
    feature: str = "everything"
    split: str = "uneven"
    dtype: str = "float64"  # "mixed" is bfloat16 by autocast
    reduction: str = "mean"
    recompute: bool = False
    kernels: str = ""  # the way whose Triton kernels run, in the interpreter
    all_ignored: bool = False
    drop_ignored: bool = False
    tokens: tuple[tuple[int, int], ...] = ()  # of each rank, where they differ
    rows: int = 90  # of a block of theirs at least: several blocks, of which the last has no token of some ranks

    def __str__(self) -> str:
        return "-".join(str(value) for value in self)

    def tokens_of(self, rank: int) -> slice:
        return slice(*self.tokens[rank]) if self.tokens else slice(None)


WAYS = [("mean", False), ("sum", True), ("none", False)]
OTHERS = Call(reduction="sum", tokens=OWN)
CALLS = [
    *(Call(feature, "uneven", "float64", *way) for feature in FEATURES for way in WAYS),
    *(Call("everything", split, "float64", *way) for split in ("even", "one_empty", "two_ranks") for way in WAYS),
    *(Call("everything", split, dtype) for split in SPLITS for dtype in ("float32", "bfloat16", "mixed")),
    *(Call("softcap", "uneven", dtype, "sum", True) for dtype in ("bfloat16", "float16", "mixed")),
    *(Call(feature, "one_empty", all_ignored=True) for feature in ("plain", "everything")),
    *(OTHERS._replace(feature=feature) for feature in FEATURES),
    *(
        Call(feature, "uneven", "float64", *way, tokens=OWN)
        for feature in ("everything", "token_weights")
        for way in WAYS[1:]
    ),
    *(OTHERS._replace(tokens=tokens, rows=rows) for tokens, rows in ((OWN, 8192), (OF_NONE, 90), (OF_NONE, 8192))),
    OTHERS._replace(tokens=OWN[1:2] * 3),  # no rank has a target
    *(OTHERS._replace(dtype=dtype, rows=rows) for dtype in ("float32", "bfloat16") for rows in (90, 8192)),
]
HOPPER = ("bias", "softcap", "z_loss")
OTHERS_OF_KERNELS = OTHERS._replace(dtype="float32", rows=400)
OF_KERNELS = [
    *(Call("everything", "one_empty", "float32", *way, kernels="logits") for way in WAYS),
    *(Call(f, "uneven", "float32", *way, kernels="hopper") for f, way in zip(HOPPER, WAYS, strict=True)),
    *(Call(f, "uneven", "float32", *way, kernels="narrow") for f, way in zip(HOPPER, WAYS[1:] + WAYS[:1], strict=True)),
    *(Call("bias", "two_ranks", "float32", kernels=way, drop_ignored=True) for way in ("hopper", "narrow", "logits")),
    *(Call("bias", "uneven", "float32", kernels=way, all_ignored=True) for way in ("hopper", "narrow", "logits")),
    *(OTHERS_OF_KERNELS._replace(recompute=recompute, kernels="logits") for recompute in (False, True)),
    OTHERS_OF_KERNELS._replace(feature="z_loss", kernels="hopper"),
    OTHERS_OF_KERNELS._replace(feature="softcap", recompute=True, kernels="hopper"),
    OTHERS_OF_KERNELS._replace(feature="bias", reduction="none", rows=8192, kernels="narrow"),
]


def inputs(call: Call) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """The tensors of all tokens, and the gradient of each one's loss."""
    dtype = torch.float32 if call.dtype == "mixed" else getattr(torch, call.dtype)
    n = 300 if call.kernels and not call.tokens else 700
    tensors, targets = make(n=n, dtype=dtype, bias="bias" in FEATURES[call.feature])
    if call.all_ignored or call.tokens:
        targets[slice(None) if call.all_ignored else slice(*OWN[1])] = -100
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(targets.shape, generator=generator) if call.reduction == "none" else None
    return tensors, targets, grad


def compute(
    call: Call, tensors: list[Tensor], shard: VocabularyShard | None = None, tokens: Any = slice(None)
) -> tuple[Any, ...]:
    """(loss, statistics, gradients) of one rank, or without a shard of a process that has the whole vocabulary."""
    options = {"shard": shard, "drop_ignored": call.drop_ignored, "logits_budget_mib": 1e-6}
    with torch.autocast("cpu", torch.bfloat16, enabled=call.dtype == "mixed"):
        return by(linear_cross_entropy, call, tensors, tokens, recompute=call.recompute, **options)


def by(function: Any, call: Call, tensors: list[Tensor], tokens: Any, **options: Any) -> tuple[Any, ...]:
    _, targets, grad = inputs(call)
    options |= FEATURES[call.feature] | {"reduction": call.reduction}
    if "token_weights" in options:
        options["token_weights"] = weights_of(targets)[tokens]
    operands = [tensors[0].detach()[tokens], *tensors[1:]], targets[tokens], None if grad is None else grad[tokens]
    return run(function, *operands, **options)


# A model does this to its output layer's output, and keeps so many of 97 entries (in three parts: 33 + 33 + 31).
HEADS: dict[str, dict[str, Any]] = {
    "bias": {},
    "scaled": {"scale": 0.3, "softcap": 4.0},
    "sliced": {"n_out": 90},
    "two parts": {"n_out": 60, "scale": 0.5},
    "added": {"offset": True, "n_out": 80},
}


class WithOffset(nn.Linear):
    def __init__(self, entries: int) -> None:
        super().__init__(16, 97, dtype=torch.float64)
        self.register_buffer("offset", torch.randn(entries, dtype=torch.float64))


def head_of(name: str, mesh: DeviceMesh | None) -> OutputHead:
    """A head, whole or divided over a mesh."""
    torch.manual_seed(0)
    options = dict(HEADS[name])
    layer = WithOffset(options.get("n_out", 97))
    if options.pop("offset", False):
        options["offset"] = (layer, "offset")
    if mesh is not None:
        divide_output_layer(layer, mesh, None)
    return OutputHead(layer, **options)


def head_answers(head: OutputHead) -> dict[str, Tensor]:
    """The loss and its gradients, by the chunked head and by logits."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 30, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(head.vocabulary, (2, 30), generator=generator)
    loss = LinearCrossEntropyLoss(output_embeddings=head)
    answers = {}
    for name in ("chunked", "logits"):
        if name == "chunked":
            mean = loss(hidden, labels)
        else:
            logits = loss.forward_logits(hidden)
            assert logits.shape == (2, 30, head.vocabulary)
            mean = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        gradients = torch.autograd.grad(mean, [hidden, *head.layer.parameters()])
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
        answers |= {f"{name} {what}": value for what, value in zip("lhwb", [mean.detach(), *whole], strict=True)}
    return answers


SCORED = {"bias": True, "scale": 0.7, "softcap": 4.0}


def scores_of(call: Call, function: Any, tensors: list[Tensor], **options: Any) -> tuple[Any, Any]:
    """Return the scores of some tokens, with entries of all ranks selected, and their gradients."""
    _, targets, _ = inputs(call)
    return scored(function, tensors, targets, choice(targets, 97), **SCORED, **options)


WAYS_OF_CONFIDENT: list[dict[str, Any]] = [{}, {"recompute": True}, {"reduction": "none"}, {"scores": True}]


def confident(
    options: dict[str, Any], start: int = 0, shard: VocabularyShard | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Any]:
    """The mean loss of confident rows, or by token scores, and its gradients."""
    weight = 5 * F.normalize(torch.randn(97, 24, generator=torch.Generator().manual_seed(0))).to(dtype)
    targets = torch.arange(0, 96, 3)
    tensors = [weight[targets], weight if shard is None else weight[start : start + shard.largest]]
    if "scores" in options:
        scores, gradients = scored(token_scores, tensors, targets, targets[:, None], ("log_prob",), shard=shard)
        return -scores.log_prob.detach().mean(), gradients
    grad = torch.full((32,), 1 / 32, dtype=dtype) if "reduction" in options else None
    loss, _, gradients = run(linear_cross_entropy, tensors, targets, grad, shard=shard, **options)
    return loss.mean(), gradients


def work(rank: int, calls: list[Call]) -> dict[str, Any]:
    """A process: every call, as the rank of its part of the vocabulary."""
    results, scores = {}, {}
    for call in calls:
        tokens_of_ranks.LEAST_ROWS = call.rows
        group_of(len(SPLITS[call.split]))
        if rank == len(SPLITS[call.split]):
            continue
        shard, own = shard_of(rank, SPLITS[call.split], tokens_differ=bool(call.tokens))
        tensors = part_of(inputs(call)[0], own)
        of_kernels = call.kernels == "hopper" and call.split == "two_ranks"
        with kernels_of(call.kernels):
            results[call] = compute(call, tensors, shard, call.tokens_of(rank))
            if of_kernels or (not call.kernels and (call.feature, call.reduction) == ("everything", "none")):
                options = {"tokens": call.tokens_of(rank), "shard": shard, "logits_budget_mib": 1e-6}
                found, gradients = scores_of(call, token_scores, tensors, **options)
                scores[call] = [number.detach() for number in found], gradients
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tensor_parallel",))
    heads = {name: head_answers(head_of(name, mesh)) for name in HEADS}
    shard, own = shard_of(rank, (33, 33, 31))
    sure = [confident(options, own.start, shard) for options in WAYS_OF_CONFIDENT]

    shard, own = shard_of(rank, SPLITS["uneven"], tokens_differ=True)
    hidden, weight = part_of(inputs(OTHERS)[0][:2], own)
    hidden, targets = hidden[OTHERS.tokens_of(rank)], inputs(OTHERS)[1][OTHERS.tokens_of(rank)]
    refused = [
        or_refusal(lambda: top_items(hidden, weight, 3, shard=shard)),
        or_refusal(lambda: filtered.linear_cross_entropy(hidden.requires_grad_(), weight, targets, shard=shard)),
    ]
    tokens_of_ranks.LEAST_ROWS = 90
    invariant = token_scores(hidden.detach().float(), weight.float(), targets, shard=shard, invariant=True)
    found = {"results": results, "heads": heads, "scores": scores, "confident": sure}
    return found | {"refused": refused, "invariant": invariant}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return call_in_processes(work, RANKS, CALLS, timeout=120)


@pytest.fixture(scope="module")
def ranks_of_kernels() -> list[dict[str, Any]]:
    return call_in_processes(work, RANKS, OF_KERNELS, timeout=280)


def norm(found: Tensor, truth: Tensor) -> float:
    """The error of something that may be all zeros."""
    return error(found, truth) if truth.double().norm() > 0 else found.double().norm().item()


@pytest.mark.parametrize("call", CALLS + [pytest.param(call, marks=pytest.mark.slow) for call in OF_KERNELS], ids=str)
def test_a_divided_vocabulary_gives_the_loss_of_each_ranks_tokens_and_the_gradients_of_the_whole(call: Call, request):
    tensors, _, _ = inputs(call)
    wide = [t.detach().double() for t in tensors]
    tokens: Any = torch.cat([torch.arange(*own) for own in call.tokens]) if call.tokens else slice(None)
    truth = by(linear_cross_entropy_reference, call, wide, tokens)
    usual = compute(call, tensors, tokens=tokens)  # of one process in the same precision
    ranks = request.getfixturevalue("ranks_of_kernels" if call.kernels else "ranks")
    found = [rank["results"][call] for rank in ranks[: len(SPLITS[call.split])]]
    floor = {"float64": 1e-13, "float32": 4e-6}.get(call.dtype, 1e-6)
    gradients = [torch.cat(parts) for parts in zip(*(gradients for *_, gradients in found), strict=True)]
    if not call.tokens:
        found = [joined(found)]
        gradients = found[0][2]
    of_part = truth
    for rank, (loss, statistics, *_) in enumerate(found):
        slack = floor
        if call.tokens:
            of_part = by(linear_cross_entropy_reference, call, wide, call.tokens_of(rank))
            slack = floor if call.dtype == "float64" else 1e4 * floor
        assert norm(loss, of_part[0]) <= 2 * norm(usual[0], truth[0]) + slack
        if call.dtype != "float64":  # the cap rounds the largest logits to one number: of those none counts here
            assert statistics.pop("correct") <= usual[1]["correct"]
        assert statistics.keys() <= of_part[1].keys()
        for name, value in statistics.items():
            assert norm(value, of_part[1][name]) <= 2 * norm(usual[1][name], truth[1][name]) + 10 * slack, name
    for ours, theirs, expected in zip(gradients, usual[2], truth[2], strict=True):
        assert ours.dtype == theirs.dtype
        assert norm(ours, expected) <= 2 * norm(theirs, expected) + floor


@pytest.mark.parametrize("fixture", ["ranks", pytest.param("ranks_of_kernels", marks=pytest.mark.slow)])
def test_a_divided_vocabulary_gives_each_rank_the_token_scores_of_its_tokens(fixture, request):
    largest = 1e-12 if fixture == "ranks" else 64 * torch.finfo(torch.float32).eps
    ranks = request.getfixturevalue(fixture)
    assert ranks[0]["scores"]
    for call in ranks[0]["scores"]:
        wide = [t.detach().double() for t in inputs(call._replace(feature="everything"))[0]]
        expected, truth = scores_of(call, token_scores_reference, wide)
        found = [rank["scores"][call] for rank in ranks[: len(SPLITS[call.split])]]
        first, of_hidden = found[0][0], found[0][1][0]
        if call.tokens:
            first = [torch.cat(numbers) for numbers in zip(*(numbers for numbers, _ in found), strict=True)]
            of_hidden = torch.stack([gradients[0] for _, gradients in found]).sum(0)
        else:
            for others, gradients in found:
                assert all(torch.equal(number, same) for number, same in zip(others, first, strict=True))
                assert torch.equal(gradients[0], of_hidden)
        numbers = dict(zip((*NAMES, "top1"), first, strict=True))
        tops = torch.stack([numbers["top1"], expected.top1], 1)  # under a cap, largest ones may be equal when rounded
        tops = scored(token_scores_reference, wide, inputs(call)[1], tops, **SCORED)[0].selected
        assert error(tops[:, 0], tops[:, 1]) < largest
        for name in NAMES:
            assert error(numbers[name], getattr(expected, name)) < largest, name
        parts = zip(*(gradients[1:] for _, gradients in found), strict=True)
        for ours, exact in zip([of_hidden, *map(torch.cat, parts)], truth, strict=True):
            assert error(ours, exact) < largest


@pytest.mark.parametrize("way", range(len(WAYS_OF_CONFIDENT)))
def test_in_float32_confident_rows_are_as_near_to_float64_as_those_of_the_whole(way, ranks):
    parts = [rank["confident"][way] for rank in ranks]
    found = [parts[0][0], parts[0][1][0], torch.cat([gradients[1] for _, gradients in parts])]
    whole, truth = (confident(WAYS_OF_CONFIDENT[way], dtype=dtype) for dtype in (torch.float32, torch.float64))
    for ours, usual, exact in zip(found, [whole[0], *whole[1]], [truth[0], *truth[1]], strict=True):
        assert error(ours, exact) <= 2 * error(usual, exact) + 1e-3


def test_invariant_scores_of_own_tokens_have_the_bits_of_one_process(ranks):
    (hidden, weight, _), targets, _ = inputs(OTHERS)
    expected = token_scores(hidden.float(), weight.float(), targets, invariant=True)
    for name in ("log_prob", "lse", "entropy"):
        found = torch.cat([getattr(rank["invariant"], name).detach() for rank in ranks])
        assert torch.equal(found, getattr(expected, name).detach()), name


def test_what_needs_the_same_tokens_on_all_ranks_is_refused(ranks):
    for refused in (refused for rank in ranks for refused in rank["refused"]):
        assert isinstance(refused, Refusal)
        assert "choose gather_head=true" in refused


@pytest.mark.parametrize("name", HEADS)
def test_a_divided_output_layer_is_the_whole_one_for_the_loss_and_for_logits(name, ranks):
    whole = head_answers(head_of(name, None))
    assert error(whole["chunked w"], whole["logits w"]) < 1e-12
    for rank in ranks:
        for what, expected in whole.items():
            assert error(rank["heads"][name][what], expected) < 1e-12, what


@pytest.mark.parametrize(("start", "vocabulary", "largest"), [(-1, 97, 97), (1, 97, 97), (0, 96, 97), (0, 97, 96)])
def test_a_part_that_does_not_fit_is_refused_before_any_rank_waits(start, vocabulary, largest):
    tensors, targets = make()
    shard = VocabularyShard(start, vocabulary, largest, group=NO_GROUP)
    with pytest.raises(UserError, match=f"97 rows of a weight cannot be the entries from {start} on"):
        linear_cross_entropy(tensors[0], tensors[1], targets, shard=shard)


def test_a_target_belongs_to_the_rank_that_has_its_row():
    shard = VocabularyShard(10, 30, 10, group=NO_GROUP)
    columns = shard.local(torch.tensor([9, 10, 19, 20, -100]), rows=10)
    assert columns.tolist() == [ELSEWHERE, 0, 9, ELSEWHERE, -1]
