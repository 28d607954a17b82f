"""Mix the training rows of several data sets by weights, in an order that (seed, epoch) alone decides.

An epoch has as many rows as the sets together. Each set gives its share of them, from an endless stream of its rows:
one permutation of all of them after the other. So no row comes again before all others of its set have come, a small
set with a large weight is repeated, and a large one with a small weight goes on in the next epoch where it stopped.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, cast

import numpy as np
from torch import Tensor

from lit_fused.data.packing import Rows
from lit_fused.data.tokens import Integers


class MixedRows(Rows):
    """The rows of several sets, one set after the other; ``draw`` mixes them in the proportions of ``weights``, numbers
    of 0 or more by the sets' names. None: each row comes once in an epoch. Sets of weight 0 have no rows here."""

    def __init__(self, rows: Mapping[str, Rows], weights: Mapping[str, float] | None) -> None:
        self.sets = {name: part for name, part in rows.items() if weights is None or weights[name] > 0}
        lengths = np.array([len(part) for part in self.sets.values()])
        self.starts = [0, *accumulate(lengths.tolist())]
        self.num_rows = self.starts[-1]
        wanted = lengths if weights is None else np.array([float(weights[name]) for name in self.sets])
        self.counts = shares(self.num_rows, wanted)
        shares_of_tokens = [part.share_of_tokens for part in self.sets.values()]
        if None not in shares_of_tokens:
            self.share_of_tokens = float(np.average(cast(Any, shares_of_tokens), weights=self.counts))

    def draw(self, seed: int, epoch: int) -> Integers:
        """Return the order of an epoch, (rows,)."""
        parts = []
        for number, (rows, start, count) in enumerate(zip(self.sets.values(), self.starts, self.counts, strict=False)):
            first, length = epoch * count, len(rows)
            passes = range(first // length, -(-(first + count) // length))
            # NumPy fills seeds up with zeros: the last number tells these from the shuffle below.
            stream = [np.random.default_rng([seed, number, i, 1]).permutation(length) for i in passes]
            skipped = first - passes.start * length
            parts.append(start + np.concatenate(stream)[skipped : skipped + count])
        return np.random.default_rng([seed, epoch]).permutation(np.concatenate(parts))

    def _row(self, index: int) -> dict[str, Tensor]:
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        return [*self.sets.values()][number][index - self.starts[number]]


def shares(total: int, weights: Any) -> list[int]:
    """Divide ``total`` in proportion to ``weights`` (n,), all above 0, into whole numbers of at least 1."""
    exact = total * weights / weights.sum()
    counts = np.maximum(1, np.floor(exact).astype(np.int64))
    for _ in range(abs(total - int(counts.sum()))):
        if counts.sum() < total:
            counts[np.argmax(exact - counts)] += 1
        else:
            counts[np.argmax(np.where(counts > 1, counts - exact, -np.inf))] -= 1
    return counts.tolist()
