"""Rows divided over ranks have the loss and the gradients of whole rows; what would not is refused."""

import pytest
from context_cases import ARCHITECTURES, error
from ranks import each

KINDS = ("plain", "packed", "padded", "weighted", "shifted", "standard")
ROUNDING = 1e-6


def test_two_ranks_have_the_loss_and_gradients_of_whole_rows():
    others = [("mixtral", "padded"), ("phi3, longrope", "packed"), ("llama, dynamic", "packed apart")]
    found = each(error, 2, [("llama", kind) for kind in KINDS] + others)
    assert max(found.values()) < ROUNDING, found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_all_architectures_have_the_loss_and_gradients_of_whole_rows(size):
    masked = {name for name in ARCHITECTURES if name.startswith("masked")}  # They do not keep documents apart.
    cases = [(name, kind) for name in ARCHITECTURES for kind in ("plain", "packed", "packed apart", "padded")]
    cases = [case for case in cases if case[0] not in masked or "packed" not in case[1]]
    found = each(error, size, cases)
    assert max(found.values()) < ROUNDING, found
