"""The memory of Hopper's numerators, and the chunks into which tokens are cut for it."""

import pytest
import torch

from lit_fused.ops.hopper.numerators import Cut, Numerators, chosen_columns
from lit_fused.ops.kernel_path import HeadCall, Inputs, Wanted
from lit_fused.ops.options import LossOptions


def call(budget_mib: float, **options) -> HeadCall:
    options = LossOptions(statistics=False, **options)
    return HeadCall(options, 0, torch.bfloat16, torch.bfloat16, Wanted(True, True, False), budget_mib)


def rows_of(cut: Cut, tokens: int) -> list[int]:
    inputs = Inputs(torch.empty(tokens, 8), torch.empty(8, 8), None, torch.empty(tokens))
    chunks = Numerators(inputs, call(1), None, cut, stored=False).chunks()
    assert [i for chunk in chunks for i in range(tokens)[chunk]] == list(range(tokens))
    return [chunk.stop - chunk.start for chunk in chunks]


def test_tokens_up_to_the_hidden_size_are_one_chunk_in_the_gradients_memory():
    assert rows_of(Cut.of(4096, 4096, 128_256, call(448), 2), 4096) == [4096]
    assert rows_of(Cut.of(4000, 2048, 151_936, call(448), 4), 4000) == [4000]  # twice as many beside float32 sums


def test_half_of_the_memory_of_compiled_logits_is_enough_for_few_chunks():
    """docs/performance.md has their times."""
    assert rows_of(Cut.of(4096, 2048, 151_936, call(281.5), 2), 4096) == [2048, 768, 768, 512]
    assert rows_of(Cut.of(8192, 4096, 128_256, call(461), 2), 8192) == [4096, 1536, 1536, 1024]


def test_a_first_chunk_apart_is_left_out_where_it_saves_neither_a_chunk_nor_memory():
    for tokens, gradient_bytes, options in [
        (8192, 0, {}),  # the weight wants no gradient
        (8192, 2, {"chunk_size": 2048}),
        (256, 2, {}),
        (16384, 2, {}),  # 1024 of 16384 tokens
    ]:
        cut = Cut.of(tokens, 1024, 151_936, call(1400, **options), gradient_bytes)
        assert cut.first == 0
        assert rows_of(cut, tokens)[0] in (256, 2048, 4096)


@pytest.mark.parametrize("budget_mib", [1, 64, 448, 1441])
def test_what_is_stored_fits_into_the_budget_and_the_gradients_memory(budget_mib):
    for tokens in (1, 257, 1000, 4096, 5000, 70_000):
        for hidden_size, vocabulary in [(64, 501), (768, 65_536), (2304, 256_000), (4096, 128_256), (8192, 32_000)]:
            for gradient_bytes in (2, 4):
                cut = Cut.of(tokens, hidden_size, vocabulary, call(budget_mib), gradient_bytes)
                rows_of(cut, tokens)
                if cut.first:
                    assert 2 * cut.first <= hidden_size * gradient_bytes
                    assert 2 * cut.rows * vocabulary <= budget_mib * 2**20
                    assert 2 * cut.first * cut.width <= max(budget_mib * 2**20, 2 * cut.first * 256)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("vocabulary", "width"), [(1101, 256), (1101, 512), (1024, 256), (200, 256)])
def test_blocks_are_read_before_the_gradient_is_written_over_them(vocabulary, width, dtype):
    """The last block's gradient is written first."""
    first, hidden_size = 24, 24 if dtype == torch.bfloat16 else 16
    gradient_VD = torch.empty(vocabulary, hidden_size, dtype=dtype)
    inputs = Inputs(torch.empty(40, hidden_size).bfloat16(), gradient_VD.bfloat16(), None, torch.zeros(40))
    cut = Cut(rows=16, first=first, width=width)
    numerators = Numerators(inputs, call(1), None, cut, stored=True, gradient_VD=gradient_VD)
    chunk = numerators.chunks()[0]
    truth = torch.randn(first, vocabulary).bfloat16()
    blocks = numerators.blocks(chunk)
    for columns, numerators_CB in blocks:
        numerators_CB.copy_(truth[:, columns])
    entries = torch.tensor([0, vocabulary - 1, vocabulary // 2, 3, 3])
    assert torch.equal(chosen_columns(blocks, entries), truth[:, entries])
    for columns, numerators_CB in reversed(blocks):
        assert torch.equal(numerators_CB, truth[:, columns])
        gradient_VD[columns] = float("nan")
    assert gradient_VD.isnan().all()
