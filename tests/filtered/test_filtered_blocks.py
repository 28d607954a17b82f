"""The blocks of kept columns that backward computes on Hopper."""

import pytest
import torch

from lit_fused.filtered import filtered_hopper
from lit_fused.ops.hopper.hopper_rows import TILE_COLUMNS
from lit_fused.ops.kernel_path import HeadCall, Inputs, Wanted
from lit_fused.ops.options import LossOptions
from lit_fused.planning.planned_heads import NoKernels


@pytest.mark.parametrize(
    ("tokens", "size", "vocabulary", "budget"),
    [(8192, 2048, 131072, 448.0), (65536, 2048, 262144, 448.0), (300, 520, 32000, 8.0), (4096, 4096, 151936, 64.0)],
)
def test_on_hopper_a_block_of_kept_columns_fits_the_budget_or_is_the_narrowest(tokens, size, vocabulary, budget):
    options = LossOptions(reduction="sum")
    call = HeadCall(options, -100, torch.bfloat16, Wanted(True, True, False), vocabulary=vocabulary, budget_mib=budget)
    hidden, weight = (torch.empty(n, size, dtype=torch.bfloat16, device="meta") for n in (tokens, vocabulary))
    blocks = filtered_hopper._KeptBlocks(Inputs(hidden, weight, None, hidden[:, 0]), call, NoKernels(), tokens)
    planned = blocks.width
    assert len(blocks.weight_BD) == blocks.numerators_RB.shape[1] == planned
    partial = [part_TC for part_TC in blocks.partial[:3] if part_TC is not None]
    rows = len(blocks.numerators_RB)
    parts = filtered_hopper.product_parts(rows, size, NoKernels().multiprocessors(hidden.device))
    product_bytes = rows * size * (4 * parts + 2) + 128 * (2 * vocabulary + 6 * size)  # and of rows in all columns
    found = sum(t.nbytes for t in (blocks.numerators_RB, blocks.weight_BD, *partial)) + product_bytes
    assert found <= budget * 2**20 or planned == filtered_hopper.MIN_BLOCK_TILES * TILE_COLUMNS
    wider = found * (planned + TILE_COLUMNS) / planned
    assert wider + 24 * vocabulary * -(-tokens // 2048) > 0.9 * budget * 2**20, "or is as wide as that allows"
