"""The memory of Hopper's numerators, and the chunks into which tokens are cut for it."""

import pytest
import torch

from lit_fused.ops.hopper.numerators import MIB, Cut, Numerators, Sizes, chosen_columns
from lit_fused.ops.kernel_path import HeadCall, Inputs, Wanted
from lit_fused.ops.options import LossOptions
from lit_fused.ops.products import padded


def call(dtype: torch.dtype = torch.bfloat16, **options) -> HeadCall:
    return HeadCall(LossOptions(**{"statistics": False, **options}), 0, dtype, dtype, Wanted(True, True, False), 1)


def cut_of(
    tokens: int, hidden_size: int, vocabulary: int, budget_mib: float, gradient_bytes: int = 2, **options
) -> Cut:
    sizes = Sizes.of(hidden_size, vocabulary, call(), gradient_bytes)
    return Cut.of(tokens, sizes, budget_mib, options.get("chunk_size"))


def rows_of(cut: Cut, tokens: int) -> list[int]:
    """Return the rows of each chunk, which have to have every token once."""
    inputs = Inputs(torch.empty(tokens, 8).bfloat16(), torch.empty(8, 8), None, torch.empty(tokens))
    chunks = Numerators(inputs, call(), None, cut, stored=False).chunks()
    assert [i for chunk in chunks for i in range(tokens)[chunk]] == list(range(tokens))
    return [chunk.stop - chunk.start for chunk in chunks]


def test_the_weights_gradient_saves_chunks():
    """Without it there would be 6, 6, 2 and 4."""
    assert rows_of(cut_of(4096, 2048, 151_936, 281.5), 4096) == [2560, 768, 768]  # half of torch.compile's memory
    assert rows_of(cut_of(8192, 4096, 128_256, 461), 8192) == [5120, 1536, 1536]  # likewise
    assert rows_of(cut_of(4096, 4096, 128_256, 1441), 4096) == [4096]
    assert rows_of(cut_of(16384, 4096, 151_936, 1441, 4), 16384) == [11776, 4608]  # float32 has twice the room


def test_a_first_chunk_apart_is_left_out_where_it_saves_no_chunk():
    assert rows_of(cut_of(8192, 4096, 128_256, 1441), 8192) == [4096] * 2
    assert rows_of(cut_of(16384, 1024, 151_936, 1441), 16384) == [4096] * 4
    assert rows_of(cut_of(8192, 4096, 128_256, 461, 0), 8192) == [1536] * 5 + [512]  # the weight wants no gradient
    assert rows_of(cut_of(8192, 4096, 128_256, 461, chunk_size=2048), 8192) == [2048] * 4
    assert rows_of(cut_of(256, 4096, 128_256, 461), 256) == [256]


SHAPES = [(64, 501), (768, 65_536), (2048, 151_936), (2304, 256_000), (4096, 128_256), (8192, 32_000)]


@pytest.mark.parametrize("budget_mib", [1, 64, 281.5, 448, 1441])
@pytest.mark.parametrize("gradient_bytes", [2, 4])
def test_what_is_stored_fits_into_the_budget_and_the_gradients_memory(gradient_bytes, budget_mib):
    for hidden_size, vocabulary in SHAPES:
        sizes = Sizes.of(hidden_size, vocabulary, call(), gradient_bytes)
        for tokens in (1, 257, 1000, 4096, 5000, 70_000):
            cut = Cut.of(tokens, sizes, budget_mib, None)
            rows_of(cut, tokens)
            if not cut.first:
                continue
            least = 256 * sizes.whole_row_bytes
            assert cut.rows * sizes.whole_row_bytes <= max(budget_mib * MIB, least)
            ends = [*cut.starts[1:], padded(vocabulary)]
            own = ends[0] * 2 * cut.first + cut.first * sizes.row_bytes
            assert own <= cut.rows * sizes.whole_row_bytes
            for start, end in zip(cut.starts[1:], ends[1:], strict=True):
                assert (end - ends[0]) * cut.first <= start * sizes.capacity  # it ends before its gradient begins


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(384, 2000), (600, 2000), (384, 1101), (384, 1024), (300, 700)])
def test_blocks_are_read_before_the_gradient_is_written_over_them(vocabulary, tokens, dtype):
    """The last block's gradient is written first. A rank's part of the vocabulary may be smaller than the largest."""
    hidden_size = 384 if dtype == torch.bfloat16 else 192
    cut = Cut.of(tokens, Sizes.of(hidden_size, vocabulary, call(), dtype.itemsize), 2.0, None)
    assert len(cut.starts) > 1
    for own in (vocabulary, vocabulary - 300, 100):
        gradient_VD = torch.empty(own, hidden_size, dtype=dtype)
        hidden_ND = torch.empty(tokens, hidden_size).bfloat16()
        inputs = Inputs(hidden_ND, gradient_VD.bfloat16(), None, torch.zeros(tokens))
        numerators = Numerators(inputs, call(), None, cut, stored=True, gradient_VD=gradient_VD)
        truth = torch.randn(cut.first, own).bfloat16()
        blocks = numerators._blocks_of(numerators.chunks()[0])
        numerators.room.product_RD.fill_(float("nan"))
        for columns, numerators_CB in blocks:
            numerators_CB.copy_(truth[:, columns])
        numerators.room.partial.maxima_TC.fill_(float("nan"))
        entries = torch.tensor([0, own - 1, own // 2, 3, 3])
        assert torch.equal(chosen_columns(blocks, entries), truth[:, entries])
        for columns, numerators_CB in reversed(blocks):
            assert torch.equal(numerators_CB, truth[:, columns])
            gradient_VD[columns] = float("nan")
        assert gradient_VD.isnan().all()
