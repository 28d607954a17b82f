"""The chunked head with its vocabulary divided over three real processes, against the float64 reference."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from head_cases import FEATURES, NAMES, choice, error, make, run, scored
from kernels_of import kernels_of
from ranks import call as call_in_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from lit_fused import LinearCrossEntropyLoss, UserError
from lit_fused.heads import OutputHead
from lit_fused.ops import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
    token_scores,
    token_scores_reference,
)
from lit_fused.ops.vocabulary_parallel import ELSEWHERE, VocabularyShard
from lit_fused.parallel.tensor import divide_output_layer

RANKS = 3
SPLITS = {"even": (33, 32, 32), "uneven": (60, 7, 30), "one_empty": (50, 0, 47), "two_ranks": (49, 48)}


class Call(NamedTuple):
    feature: str = "everything"
    split: str = "uneven"
    dtype: str = "float64"  # "mixed" is bfloat16 by autocast
    reduction: str = "mean"
    recompute: bool = False
    kernels: str = ""  # the way whose Triton kernels run, in the interpreter
    all_ignored: bool = False
    drop_ignored: bool = False

    def __str__(self) -> str:
        return "-".join(str(value) for value in self)


WAYS = [("mean", False), ("sum", True), ("none", False)]
CALLS = [
    *(Call(feature, "uneven", "float64", *way) for feature in FEATURES for way in WAYS),
    *(Call("everything", split, "float64", *way) for split in ("even", "one_empty", "two_ranks") for way in WAYS),
    *(Call("everything", split, dtype) for split in SPLITS for dtype in ("float32", "bfloat16", "mixed")),
    *(Call("softcap", "uneven", dtype, "sum", True) for dtype in ("bfloat16", "float16", "mixed")),
    *(Call(feature, "one_empty", all_ignored=True) for feature in ("plain", "everything")),
]
HOPPER = ("bias", "softcap", "z_loss")
OF_KERNELS = [
    *(Call("everything", "one_empty", "float32", *way, kernels="logits") for way in WAYS),
    *(Call(f, "uneven", "float32", *way, kernels="hopper") for f, way in zip(HOPPER, WAYS, strict=True)),
    *(Call(f, "uneven", "float32", *way, kernels="narrow") for f, way in zip(HOPPER, WAYS[1:] + WAYS[:1], strict=True)),
    *(Call("bias", "two_ranks", "float32", kernels=way, drop_ignored=True) for way in ("hopper", "narrow", "logits")),
    *(Call("bias", "uneven", "float32", kernels=way, all_ignored=True) for way in ("hopper", "narrow", "logits")),
]


def inputs(call: Call) -> tuple[list[Tensor], Tensor, Tensor | None]:
    dtype = torch.float32 if call.dtype == "mixed" else getattr(torch, call.dtype)
    tensors, targets = make(n=300 if call.kernels else 700, dtype=dtype, bias="bias" in FEATURES[call.feature])
    if call.all_ignored:
        targets.fill_(-100)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(targets.shape, generator=generator) if call.reduction == "none" else None
    return tensors, targets, grad


def compute(call: Call, tensors: list[Tensor], shard: VocabularyShard | None) -> tuple[Any, ...]:
    """(loss, statistics, gradients) of one rank, or without a shard of a process that has the whole vocabulary."""
    _, targets, grad = inputs(call)
    options = FEATURES[call.feature] | {"shard": shard, "drop_ignored": call.drop_ignored, "logits_budget_mib": 1e-6}
    with torch.autocast("cpu", torch.bfloat16, enabled=call.dtype == "mixed"):
        return run(
            linear_cross_entropy, tensors, targets, grad, reduction=call.reduction, recompute=call.recompute, **options
        )


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


def scores_of(call: Call, tensors: list[Tensor], shard: VocabularyShard) -> tuple[Any, ...]:
    """Return a rank's scores, with entries of all ranks selected, and their gradients."""
    _, targets, _ = inputs(call)
    options = SCORED | {"shard": shard, "logits_budget_mib": 1e-6}
    scores, gradients = scored(token_scores, tensors, targets, choice(targets, 97), **options)
    return [number.detach() for number in scores], gradients


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


def work(rank: int, folder: Path, calls: list[Call]) -> None:
    """A process: every call, as the rank of its part of the vocabulary; what came is saved."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    groups: dict[int, Any] = {ranks: dist.new_group(list(range(ranks))) for ranks in (2, 3)}
    results, scores = {}, {}
    for call in calls:
        sizes = SPLITS[call.split]
        if rank >= len(sizes):
            continue
        start = sum(sizes[:rank])
        shard = VocabularyShard(start, sum(sizes), max(sizes), groups[len(sizes)])
        tensors, _, _ = inputs(call)
        with torch.no_grad():
            tensors[1:] = [t[start : start + sizes[rank]] for t in tensors[1:]]
        with kernels_of(call.kernels):
            results[call] = compute(call, tensors, shard)
        of_kernels = call.kernels == "hopper" and call.split == "two_ranks"
        if of_kernels or (not call.kernels and (call.feature, call.reduction) == ("everything", "none")):
            with kernels_of(call.kernels):
                scores[call] = scores_of(call, tensors, shard)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tensor_parallel",))
    heads = {name: head_answers(head_of(name, mesh)) for name in HEADS}
    shard = VocabularyShard(33 * rank, 97, 33, groups[3])
    sure = [confident(options, 33 * rank, shard) for options in WAYS_OF_CONFIDENT]
    saved = {"results": results, "heads": heads, "scores": scores, "confident": sure}
    torch.save(saved, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return answers_of(CALLS, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def ranks_of_kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return answers_of(OF_KERNELS, tmp_path_factory.mktemp("ranks"))


def answers_of(calls: list[Call], folder: Path) -> list[dict[str, Any]]:
    call_in_processes(work, RANKS, folder, calls, timeout=120)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def norm(found: Tensor, truth: Tensor) -> float:
    """The error of something that may be all zeros."""
    return error(found, truth) if truth.double().norm() > 0 else found.double().norm().item()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_divided_vocabulary_gives_the_loss_and_the_gradients_of_the_whole(call: Call, ranks):
    check(call, ranks)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("call", OF_KERNELS, ids=str)
def test_so_do_the_kernels(call: Call, ranks_of_kernels):
    check(call, ranks_of_kernels)


@pytest.mark.timeout(240)
def test_a_divided_vocabulary_gives_the_token_scores_of_the_whole_on_every_rank(ranks):
    check_scores(ranks, 1e-12)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_so_do_the_kernels_of_token_scores(ranks_of_kernels):
    check_scores(ranks_of_kernels, 64 * torch.finfo(torch.float32).eps)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", range(len(WAYS_OF_CONFIDENT)))
def test_in_float32_confident_rows_are_as_near_to_float64_as_those_of_the_whole(way, ranks):
    parts = [rank["confident"][way] for rank in ranks]
    found = [parts[0][0], parts[0][1][0], torch.cat([gradients[1] for _, gradients in parts])]
    whole, truth = (confident(WAYS_OF_CONFIDENT[way], dtype=dtype) for dtype in (torch.float32, torch.float64))
    for ours, usual, exact in zip(found, [whole[0], *whole[1]], [truth[0], *truth[1]], strict=True):
        assert error(ours, exact) <= 2 * error(usual, exact) + 1e-3


def check_scores(ranks: list[dict[str, Any]], largest: float) -> None:
    for call in ranks[0]["scores"]:
        tensors, targets, _ = inputs(call._replace(feature="everything"))
        wide = [t.detach().double() for t in tensors]
        expected, truth = scored(token_scores_reference, wide, targets, choice(targets, 97), **SCORED)
        found = [rank["scores"][call] for rank in ranks[: len(SPLITS[call.split])]]
        for numbers, gradients in found:
            assert all(torch.equal(number, first) for number, first in zip(numbers, found[0][0], strict=True))
            assert torch.equal(gradients[0], found[0][1][0])
        numbers = dict(zip((*NAMES, "top1"), found[0][0], strict=True))
        tops = torch.stack([numbers["top1"], expected.top1], 1)  # under a cap, largest ones may be equal when rounded
        tops = scored(token_scores_reference, wide, targets, tops, **SCORED)[0].selected
        assert error(tops[:, 0], tops[:, 1]) < largest
        for name in NAMES:
            assert error(numbers[name], getattr(expected, name)) < largest, name
        parts = zip(*(gradients[1:] for _, gradients in found), strict=True)
        for ours, exact in zip([found[0][1][0], *(torch.cat(part) for part in parts)], truth, strict=True):
            assert error(ours, exact) < largest


def check(call: Call, ranks: list[dict[str, Any]]) -> None:
    tensors, targets, grad = inputs(call)
    truth = run(
        linear_cross_entropy_reference,
        [t.double() for t in tensors],
        targets,
        None if grad is None else grad.double(),
        reduction=call.reduction,
        **FEATURES[call.feature],
    )
    usual = compute(call, tensors, None)  # of one process in the same precision
    found = [rank["results"][call] for rank in ranks[: len(SPLITS[call.split])]]
    floor = {"float64": 1e-13, "float32": 4e-6}.get(call.dtype, 1e-6)

    for loss, stats, gradients in found:
        assert torch.equal(loss, found[0][0])
        assert stats.keys() == truth[1].keys()
        assert all(torch.equal(value, found[0][1][name]) for name, value in stats.items())
        assert torch.equal(gradients[0], found[0][2][0])
    assert norm(found[0][0], truth[0]) <= 2 * norm(usual[0], truth[0]) + floor
    if call.dtype != "float64":  # the cap rounds the largest logits to one number: of those none counts here
        assert found[0][1].pop("correct") <= usual[1].pop("correct")
    for name in usual[1]:
        value = truth[1][name]
        assert norm(found[0][1][name], value) <= 2 * norm(usual[1][name], value) + 10 * floor, name
    parts = zip(*(gradients[1:] for _, _, gradients in found), strict=True)
    whole = [found[0][2][0], *(torch.cat(part) for part in parts)]
    for ours, theirs, expected in zip(whole, usual[2], truth[2], strict=True):
        assert ours.dtype == theirs.dtype
        assert norm(ours, expected) <= 2 * norm(theirs, expected) + floor


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
    shard = VocabularyShard(start, vocabulary, largest, group=None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"97 rows of a weight cannot be the entries from {start} on"):
        linear_cross_entropy(tensors[0], tensors[1], targets, shard=shard)


def test_a_target_belongs_to_the_rank_that_has_its_row():
    shard = VocabularyShard(10, 30, 10, group=None)  # type: ignore[arg-type]
    columns = shard.local(torch.tensor([9, 10, 19, 20, -100]), rows=10)
    assert columns.tolist() == [ELSEWHERE, 0, 9, ELSEWHERE, -1]
