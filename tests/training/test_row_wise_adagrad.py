"""Row-wise Adagrad against its formula, and in place of Adagrad where rows have one entry."""

import torch
from torch import nn

from lit_fused.training import RowWiseAdagrad


def test_a_step_is_that_of_the_formula_and_the_state_is_one_number_per_row():
    torch.manual_seed(0)
    table, bias = nn.Parameter(torch.randn(5, 4).double()), nn.Parameter(torch.randn(3).double())
    optimizer = RowWiseAdagrad([table, bias], lr=0.1, weight_decay=0.2)
    expected, sums = [p.detach().clone() for p in (table, bias)], [torch.zeros(5, 1), torch.zeros(3)]
    for _ in range(3):
        gradients = [torch.randn(5, 4).double(), torch.randn(3).double()]
        table.grad, bias.grad = (g.clone() for g in gradients)
        optimizer.step()
        for index, gradient in enumerate(gradients):
            square = gradient.square()
            sums[index] = sums[index] + (square.mean(1, keepdim=True) if gradient.ndim > 1 else square)
            step = 0.1 * gradient / (sums[index].sqrt() + 1e-8)
            expected[index] = expected[index] * (1 - 0.1 * 0.2) - step
    for found, truth in zip((table, bias), expected, strict=True):
        torch.testing.assert_close(found.detach(), truth, rtol=1e-6, atol=0)
    assert optimizer.state[table]["sum"].shape == (5, 1)
