"""Run a model in evaluation mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, and afterwards each of its modules into its own mode again."""
    modes = [(module, module.training) for module in model.modules()]  # the modes may differ, as in a frozen tower
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
