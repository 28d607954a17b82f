"""Runs that are killed at random moments end as those that are not. ``make faults`` kills 200 times."""

from typing import Any

import pytest
from harness import chains

UNDISTURBED: dict[str, dict[str, Any]] = {}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
def test_after_any_kills_a_run_ends_bitwise_as_one_that_was_left_in_peace(seed, tmp_path):
    kills = chains(tmp_path, 5, seed, UNDISTURBED)
    assert len(kills) == 5
