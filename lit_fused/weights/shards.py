"""Compute which part of a whole tensor a rank has, and make a tensor of that part.

Placements on the dimensions of a mesh divide a tensor's dimension one after the other, each like ``torch.chunk``: the
last part may be smaller, or empty. A strided placement divides each of several groups: FSDP on top of tensor
parallelism.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Index = tuple[slice | Tensor, ...]


def index_of(tensor: Tensor) -> Index:
    """Return the index of this rank's part in the whole tensor: per dimension a slice, or positions (int64)."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    positions = [torch.arange(size, device="cpu") for size in tensor.shape]
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the mesh of the parameter"
    for placement, rank, size in zip(tensor.placements, coordinate, tensor.device_mesh.shape, strict=True):
        if placement.is_replicate():
            continue
        divided = getattr(placement, "dim", None)
        assert divided is not None, f"a parameter cannot be {placement}"
        groups = positions[divided].chunk(getattr(placement, "split_factor", 1))
        widths = [-(-len(group) // size) for group in groups]
        parts = [group[rank * width : (rank + 1) * width] for group, width in zip(groups, widths, strict=True)]
        positions[divided] = torch.cat(parts)
    return tuple(_as_slice(p) for p in positions)


def part_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of this rank's part."""
    return tensor.to_local().shape if isinstance(tensor, DTensor) else tensor.shape


def with_numbers(tensor: Tensor, local: Tensor) -> Tensor:
    """Return a tensor, or parameter, like ``tensor`` on the meta device, with ``local`` as this rank's part."""
    made = local
    if isinstance(tensor, DTensor):
        made = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    for name, value in vars(tensor).items():
        if name not in vars(made):  # attributes that other code has set on a parameter
            setattr(made, name, value)
    return made


def _as_slice(positions: Tensor) -> slice | Tensor:
    if not len(positions):
        return slice(0, 0)
    first, last = int(positions[0]), int(positions[-1])
    return slice(first, last + 1) if last - first + 1 == len(positions) else positions
