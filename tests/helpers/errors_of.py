"""Measure how far tensors are from the truth."""

import torch
from torch import Tensor


def relative_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    assert found.keys() == truth.keys()
    difference = torch.stack([(found[n].double() - truth[n].double()).norm() for n in truth]).norm()
    return (difference / torch.stack([t.double().norm() for t in truth.values()]).norm()).item()
