"""The best items and the ranks of targets against a full sort of all scores in float64."""

import pytest
import torch
from head_cases import live_bytes
from ranks import call as call_in_processes
from torch import Tensor
from vocabulary_ranks import shard_of

import lit_fused
from lit_fused.errors import UserError


def sorted_items(scores: Tensor, exclude: list[list[int]]) -> list[list[int]]:
    """Return every row's items, but the excluded ones, from the best on; of equal ones the lower first."""
    rows = []
    for row, gone in zip(scores.tolist(), exclude, strict=True):
        rows.append(sorted((i for i in range(len(row)) if i not in gone), key=lambda i: (-row[i], i)))
    return rows


def case(n: int = 50, d: int = 8, v: int = 203, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(*s, generator=generator).double() for s in ((n, d), (v, d), (v,)))
    return hidden, weight, bias, torch.randint(v, (n,), generator=generator)


def seen_of(targets: Tensor, v: int = 203) -> list[list[int]]:
    rows = [torch.randint(v, (i % 7,)).tolist() for i in range(len(targets))]
    return [[item for item in row if item != target] for row, target in zip(rows, targets.tolist(), strict=True)]


@pytest.mark.parametrize("budget", [1e-6, 0.01, None])
def test_items_and_ranks_are_those_of_a_full_sort(budget):
    hidden, weight, bias, targets = case()
    exclude = seen_of(targets)
    found = lit_fused.top_items(
        hidden, weight, 7, exclude, bias, targets, scale=0.7, padding_item=0, logits_budget_mib=budget
    )
    scores = 0.7 * hidden @ weight.T + bias
    expected = sorted_items(scores, [[*row, 0] for row in exclude])
    assert found.items.tolist() == [row[:7] for row in expected]
    assert torch.equal(found.scores, scores.gather(1, found.items).to(found.scores.dtype)) or torch.allclose(
        found.scores, scores.gather(1, found.items), rtol=1e-13
    )
    ranks = [row.index(t) if t in row else 203 for row, t in zip(expected, targets.tolist(), strict=True)]
    assert found.ranks is not None
    assert found.ranks.tolist() == ranks
    assert not found.scores.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_scores_are_ordered_by_their_items_in_every_dtype(dtype):
    hidden, weight, _, targets = case()
    hidden, weight = hidden.round().to(dtype), weight.round().clamp(-1, 1).to(dtype)  # Many of the sums are equal.
    found = lit_fused.top_items(hidden, weight, 10, targets=targets, logits_budget_mib=0.02)
    expected = sorted_items(hidden.double() @ weight.double().T, [[]] * len(hidden))
    assert found.items.tolist() == [row[:10] for row in expected]
    assert found.ranks is not None
    assert found.ranks.tolist() == [row.index(t) for row, t in zip(expected, targets.tolist(), strict=True)]


def test_an_excluded_target_is_behind_all_items_and_no_target_has_no_rank():
    hidden, weight, _, _ = case(n=3, v=5)
    found = lit_fused.top_items(hidden, weight, 5, [[2], [], []], targets=torch.tensor([2, -1, -100]))
    assert found.ranks is not None
    assert found.ranks.tolist() == [5, -1, -1]
    assert found.items[0, 4] == -1
    assert found.scores[0, 4] == -torch.inf
    assert sorted(found.items[0, :4].tolist()) == [0, 1, 3, 4]


@pytest.mark.parametrize("form", [torch.tensor, lambda rows: torch.tensor(rows, dtype=torch.int32), list])
def test_seen_items_are_padded_tensors_or_ragged_lists(form):
    hidden, weight, _, _ = case(n=2)
    best = lit_fused.top_items(hidden, weight, 2).items.tolist()
    found = lit_fused.top_items(hidden, weight, 1, form([[best[0][0], -1], [-1, -1]]))
    assert found.items.tolist() == [[best[0][1]], [best[1][0]]]
    ragged = lit_fused.top_items(hidden, weight, 1, [torch.tensor(best[0][:1]), []])
    assert ragged.items.tolist() == found.items.tolist()


def test_leading_dimensions_and_no_rows():
    hidden, weight, _, targets = case()
    flat = lit_fused.top_items(hidden, weight, 3, targets=targets)
    shaped = lit_fused.top_items(hidden.view(5, 10, 8), weight, 3, targets=targets.view(5, 10))
    assert flat.ranks is not None
    assert shaped.ranks is not None
    assert torch.equal(shaped.items.view(50, 3), flat.items)
    assert torch.equal(shaped.ranks.flatten(), flat.ranks)
    none = lit_fused.top_items(hidden[:0], weight, 3, [], targets=targets[:0])
    assert none.items.shape == (0, 3)
    assert none.ranks is not None
    assert none.ranks.shape == (0,)


def rounded_case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, bias, targets = case()
    return hidden.round(), weight.round().clamp(-1, 1), bias.round(), targets


def on_rank(rank: int) -> dict[str, Tensor]:
    """A process: the best items of all ranks, from its part of them, of which that of rank 2 is empty."""
    hidden, weight, bias, targets = rounded_case()
    shard, own = shard_of(rank, (120, 83, 0))
    options = {"padding_item": 0, "logits_budget_mib": 0.01, "shard": shard}
    exclude = [[(7 * row) % 203, (row + 121) % 203] for row in range(50)]
    found = lit_fused.top_items(hidden, weight[own], 150, exclude, bias[own], targets, **options)
    return found._asdict()


def test_a_divided_catalogue_gives_every_rank_the_items_of_the_whole():
    hidden, weight, bias, targets = rounded_case()
    exclude = [[(7 * row) % 203, (row + 121) % 203] for row in range(50)]
    whole = lit_fused.top_items(hidden, weight, 150, exclude, bias, targets, padding_item=0)
    for found in call_in_processes(on_rank, 3, timeout=100):
        for name, value in found.items():
            assert torch.equal(value, getattr(whole, name)), name


def test_memory_is_a_chunk():
    hidden, weight, _, targets = case(n=2048, v=4000)
    hidden, weight = hidden.float(), weight.float()
    with live_bytes() as counter:
        lit_fused.top_items(hidden, weight, 16, [[1]] * 2048, targets=targets, logits_budget_mib=4)
    assert counter.peak < 2 * 4 * 2**20


def test_mistakes_are_sentences():
    hidden, weight, _, targets = case(n=2)
    for error, options in {
        "k must be a number of items from 1 to the catalogue's 203, got 0": {"k": 0},
        "exclude has items for 1 rows, but there are 2": {"k": 1, "exclude": [[1]]},
        "exclude must be items from 0 to 202, or -1 for none, got values from 1 to 203": {
            "k": 1,
            "exclude": [[1], [203]],
        },
        "exclude must name items by integers": {"k": 1, "exclude": [[1.5], []]},
        "targets must be items from 0 to 202": {"k": 1, "targets": targets + 203},
    }.items():
        with pytest.raises(UserError, match=error):
            lit_fused.top_items(hidden, weight, **options)
    weight[3, 0] = torch.nan
    with pytest.raises(UserError, match="some scores of items are not finite"):
        lit_fused.top_items(hidden, weight, 1)
