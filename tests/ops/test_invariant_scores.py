"""Scores of a token have the same bits whatever is computed beside it, on a CPU and by the kernels of a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from head_cases import NAMES, choice, error, make, run, scored, upcast_scores
from kernels_of import kernels_of
from ranks import call as call_in_processes
from torch import Tensor
from vocabulary_ranks import group_of, shard_of

from lit_fused import UserError, filtered
from lit_fused.ops import linear_cross_entropy, linear_cross_entropy_reference, token_scores, token_scores_reference
from lit_fused.ops.invariant import invariant_path
from lit_fused.ops.kernel_path import HeadCall
from lit_fused.ops.options import LossOptions

FEATURES: dict[str, dict[str, Any]] = {"plain": {}, "everything": {"bias": True, "scale": 0.7, "softcap": 5.0}}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EPSILON = torch.finfo(torch.float32).eps

needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernels are compiled")
QUICK = ("everything", 257)  # in Triton's interpreter, where a call takes a second
CELLS = [
    *(("cpu", dtype, feature, vocabulary) for dtype in DTYPES for feature in FEATURES for vocabulary in (257, 1003)),
    *(
        pytest.param(
            "interpreter", "float32", *head, marks=[needs_interpreter, *([pytest.mark.slow] * (head != QUICK))]
        )
        for head in product(FEATURES, (257, 1003))
    ),
    # Compilation takes most of the time: few variants of the kernels.
    *(pytest.param("cuda", dtype, "everything", 1003, marks=pytest.mark.gpu) for dtype in ("float32", "bfloat16")),
]


@contextmanager
def at(place: str, backward: str = "hopper") -> Iterator[torch.device]:
    """Yield the device, and in the block use the kernels of a GPU in Triton's interpreter, or those of the device."""
    with kernels_of(backward) if place == "interpreter" else nullcontext():
        yield torch.device("cuda" if place == "cuda" else "cpu")


class Case:
    """A head and its rows on a device."""

    def __init__(
        self, dtype: str, feature: str, vocabulary: int, device: Any = "cpu", hidden_size: int = 0, rows: int = 150
    ) -> None:
        options = FEATURES[feature]
        # On a GPU those up to 128 have a backward of their own: one kernel more to compile.
        hidden_size = hidden_size or (72 if torch.device(device).type == "cpu" else 136)
        tensors, targets = make(rows, hidden_size, vocabulary, DTYPES[dtype], bias="bias" in options)
        self.tensors = [tensor.detach().to(device) for tensor in tensors]
        self.targets, self.options = targets.to(device), options
        self.bias = self.tensors[2] if "bias" in options else None
        self.selected = choice(self.targets, vocabulary, 3)

    def scores(self, rows: Any = slice(None), weight: Tensor | None = None, bias: Tensor | None = None, **more: Any):
        weight, bias = (self.tensors[1] if weight is None else weight), (self.bias if bias is None else bias)
        options: dict[str, Any] = self.options | {"bias": bias, "invariant": True} | more
        return token_scores(self.tensors[0][rows], weight, self.targets[rows], selected=self.selected[rows], **options)

    def exact(self) -> Any:
        hidden, weight = (tensor.double() for tensor in self.tensors[:2])
        options: dict[str, Any] = self.options | {"bias": None if self.bias is None else self.bias.double()}
        return token_scores_reference(hidden, weight, self.targets, selected=self.selected, **options)


def same_bits(found: Any, expected: Any) -> bool:
    def bits(x: Tensor) -> Tensor:
        return x if x.dtype == torch.int64 else (x.detach() + 0.0).view(torch.int32)  # ignored ones may be -0.0

    return all(torch.equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True))


def rows_of(scores: Any, rows: Any) -> list[Tensor]:
    return [numbers[rows] for numbers in scores]


@pytest.mark.parametrize(("place", "dtype", "feature", "vocabulary"), CELLS)
def test_bits_do_not_depend_on_other_rows_their_order_chunks_or_packing(place, dtype, feature, vocabulary, monkeypatch):
    with at(place) as device:
        case = Case(dtype, feature, vocabulary, device)
        whole = case.scores()
        order = torch.randperm(150, generator=torch.Generator().manual_seed(3)).to(device)
        for rows in (order, *order.split([1, 2, 64, 83])):
            assert same_bits(case.scores(rows), rows_of(whole, rows))
        packed = case.scores(order[:100].view(2, 5, 10))
        assert same_bits(packed, rows_of(whole, order[:100].view(2, 5, 10)))
        assert same_bits(case.scores(drop_ignored=True), whole)
        monkeypatch.setattr(invariant_path, "CHUNK_ROWS", 64)
        assert same_bits(case.scores(), whole)
        no_entropy = case.scores(order[:9], entropy=False)
        assert same_bits(no_entropy[:2], rows_of(whole, order[:9])[:2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_cpu_bits_do_not_depend_on_threads(dtype):
    case = Case(dtype, "everything", 1003, hidden_size=1000)
    one = case.scores()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert same_bits(case.scores(), one)
        assert same_bits(case.scores(slice(7, 8)), rows_of(one, slice(7, 8)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_where_the_tensors_lie_in_memory(place, dtype):
    """Nor on strides; a hidden size that no copy engine takes is copied."""
    with at(place) as device:
        for hidden_size in (136, 99):
            case = Case(dtype, "everything", 257, device, hidden_size)
            whole, (hidden, weight, bias) = case.scores(), case.tensors
            moved = []
            for tensor in (hidden, weight, bias):
                memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=device)
                moved.append(memory[1:].view_as(tensor).copy_(tensor))
            case.tensors, case.bias = moved, moved[2]
            assert same_bits(case.scores(), whole)
            case.tensors = [hidden, torch.cat([weight, weight], 1)[:, :hidden_size], bias]
            assert same_bits(case.scores(), whole)


@pytest.mark.parametrize(("place", "dtype", "feature", "vocabulary"), CELLS)
def test_scores_are_as_near_to_float64_as_those_of_the_fast_path(place, dtype, feature, vocabulary):
    with at(place) as device:
        case = Case(dtype, feature, vocabulary, device)
        exact, found, fast = case.exact(), case.scores(), case.scores(invariant=False)
    for name in NAMES:
        usual = error(getattr(fast, name), getattr(exact, name))
        assert error(getattr(found, name), getattr(exact, name)) <= 1.2 * usual + EPSILON, name
    if dtype == "float32":
        assert torch.equal(found.top1, exact.top1)


@pytest.mark.parametrize(("place", "dtype", "feature", "vocabulary"), CELLS)
def test_gradients_are_right_and_the_same_in_every_run(place, dtype, feature, vocabulary):
    with at(place) as device:
        case = Case(dtype, feature, vocabulary, device)
        given = case.tensors, case.targets, case.selected
        _, truth = scored(token_scores_reference, [t.double() for t in case.tensors], *given[1:], **case.options)
        _, usual = scored(upcast_scores, *given, **case.options)
        _, found = scored(token_scores, *given, invariant=True, **case.options)
        _, again = scored(token_scores, *given, invariant=True, **case.options)
    for ours, second, theirs, exact in zip(found, again, usual, truth, strict=True):
        assert ours.dtype == DTYPES[dtype]
        assert torch.equal(ours, second)
        assert error(ours, exact) <= 2 * error(theirs, exact) + 32 * EPSILON


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_loss_of_a_token_has_the_bits_of_its_log_probability(place):
    with at(place) as device:
        case = Case("float32", "everything", 1003, device)
        (hidden, weight, bias), targets = case.tensors, case.targets
        options: dict[str, Any] = {"bias": bias, "scale": 0.7, "softcap": 5.0}
        losses, _ = linear_cross_entropy(hidden, weight, targets, reduction="none", invariant=True, **options)
        assert torch.equal(losses, -case.scores().log_prob)
        options = {"scale": 0.7, "softcap": 5.0, "z_loss": 1e-2}
        truth = run(linear_cross_entropy_reference, [t.double() for t in case.tensors], targets, **options)
        found = run(linear_cross_entropy, case.tensors, targets, invariant=True, **options)
    assert error(found[0], truth[0]) < 8 * EPSILON
    assert found[1]["correct"] == truth[1]["correct"]
    for name, value in truth[1].items():
        assert error(found[1][name], value) < 16 * EPSILON, name
    for ours, exact in zip(found[2], truth[2], strict=True):
        assert error(ours, exact) < 32 * EPSILON


def test_rows_beyond_all_bounds_and_masked_entries_give_no_nan_and_the_same_bits():
    case = Case("float32", "everything", 1003)
    hidden, _, bias = case.tensors
    case.options = {}
    hidden[::7] *= 1e4
    bias[:600] = -torch.inf  # a whole tile, and some targets
    whole, fast, exact = case.scores(), case.scores(invariant=False), case.exact()
    for name in NAMES:
        ours, usual, truth = (getattr(scores, name).double() for scores in (whole, fast, exact))
        finite = truth.isfinite()
        assert torch.equal(ours.isfinite(), finite)
        assert error(ours[finite], truth[finite]) <= 1.2 * error(usual[finite], truth[finite]) + EPSILON, name
    assert same_bits(case.scores(slice(14, 15)), rows_of(whole, slice(14, 15)))


def test_a_compiled_caller_gets_the_same_bits():
    case = Case("float32", "everything", 257)
    compiled = torch.compile(case.scores, backend="eager", fullgraph=True)
    assert same_bits(compiled(), case.scores())


SPLITS = {
    "1": (1003,),
    "2": (502, 501),
    "2, uneven": (513, 490),
    "4": (251, 251, 251, 250),
    "4, uneven": (600, 7, 0, 396),
    "4, in the first tile": (90, 1, 2, 910),
    "4, at tiles": (512, 0, 491, 0),
}


def parts(rank: int, place: str, dtypes: list[str], ranks: int) -> dict[tuple[str, str], Any]:
    """A process: the scores of each split, of which it is a rank."""
    device = f"cuda:{rank}" if place == "cuda" else "cpu"
    if place == "cuda":
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
    found = {}
    for name, sizes in SPLITS.items():
        if len(sizes) <= ranks:
            group_of(len(sizes))
        if rank >= len(sizes) or len(sizes) > ranks:
            continue
        shard, own = shard_of(rank, sizes)
        for dtype in dtypes:
            with at(place, "logits"):  # Hopper's own takes no empty part.
                case = Case(dtype, "everything", 1003, device)
                part = [case.tensors[0], *(tensor[own] for tensor in case.tensors[1:])]
                given = {"weight": part[1], "bias": part[2], "shard": shard}
                scores, few = case.scores(**given), case.scores(slice(3, 9), **given)
                options = case.options | {"invariant": True, "shard": shard}
                _, gradients = scored(token_scores, part, case.targets, case.selected, **options)
            found[name, dtype] = [[x.detach().cpu() for x in group] for group in (scores, few, gradients)]
    return found


@pytest.mark.parametrize(
    ("place", "dtypes"),
    [
        ("cpu", ["float32", "bfloat16"]),
        pytest.param("interpreter", ["float32"], marks=[needs_interpreter, pytest.mark.slow]),
        pytest.param("cuda", ["float32", "bfloat16"], marks=pytest.mark.gpu),
    ],
)
def test_bits_do_not_depend_on_the_ranks_that_divide_the_vocabulary(place, dtypes):
    ranks = 4 if place != "cuda" else min(torch.cuda.device_count(), 4)
    if place == "cuda" and ranks < 2:
        pytest.skip("needs two GPUs")
    found = call_in_processes(parts, ranks, place, dtypes, ranks, timeout=200)
    for name, sizes in SPLITS.items():
        for dtype in dtypes if len(sizes) <= ranks else ():
            with at(place) as device:
                case = Case(dtype, "everything", 1003, device)
                whole = [x.cpu() for x in case.scores()]
            of_ranks = [rank[name, dtype] for rank in found[: len(sizes)]]
            for scores, few, _ in of_ranks:
                assert same_bits(scores, whole), name
                assert same_bits(few, rows_of(whole, slice(3, 9))), name
            wide = [tensor.double() for tensor in case.tensors]
            _, truth = scored(token_scores_reference, wide, case.targets, case.selected, **case.options)
            _, usual = scored(upcast_scores, case.tensors, case.targets, case.selected, **case.options)
            gradients = [[rank[2][place] for rank in of_ranks] for place in range(3)]
            ours = [gradients[0][0], torch.cat(gradients[1]), torch.cat(gradients[2])]
            for mine, theirs, exact in zip(ours, usual, truth, strict=True):
                assert error(mine, exact.cpu()) <= 2 * error(theirs, exact) + 32 * EPSILON, name


def test_what_has_no_invariant_path_says_so():
    case = Case("float32", "plain", 257)
    (hidden, weight), targets = case.tensors, case.targets
    with pytest.raises(UserError, match="invariant=True has no label_smoothing"):
        linear_cross_entropy(hidden, weight, targets, label_smoothing=0.1, invariant=True)
    with pytest.raises(UserError, match="the filtered backward and distillation have no invariant=True"):
        filtered.linear_cross_entropy(hidden.requires_grad_(), weight, targets, invariant=True)
    call = HeadCall.here(LossOptions(invariant=True), hidden, weight, None)
    with pytest.raises(UserError, match="invariant=True needs a CPU, or a Hopper GPU .* torch.float32 on meta"):
        invariant_path.tile_kernels(hidden.to("meta"), call)
