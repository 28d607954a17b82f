"""Measure how far tensors are from the truth."""

import torch
from torch import Tensor

ROUNDING = 8 * torch.finfo(torch.float32).eps  # Norms and rotary embeddings compute in float32 in a float64 model too.


def relative_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    assert found.keys() == truth.keys()
    difference = torch.stack([(found[n].double() - truth[n].double()).norm() for n in truth]).norm()
    return (difference / torch.stack([t.double().norm() for t in truth.values()]).norm()).item()
