"""Which part of a whole tensor a rank holds, as an index for each dimension, and the tensor that it becomes.

Placements on the dimensions of a mesh divide a dimension one after the other, each as ``torch.chunk`` does: the last
part may be smaller, or empty. A strided one divides each of several groups alike: FSDP over what tensor parallelism has
divided already.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Index = tuple[slice | Tensor, ...]


def index_of(tensor: Tensor) -> Index:
    """Where this rank's part of ``tensor`` lies in the whole one: a slice per dimension, or positions (int64)."""
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
        positions[divided] = torch.cat([_chunk(group, size, rank) for group in groups])
    return tuple(_as_slice(p) for p in positions)


def part_shape(tensor: Tensor) -> torch.Size:
    """The shape of this rank's part."""
    return tensor.to_local().shape if isinstance(tensor, DTensor) else tensor.shape


def with_numbers(tensor: Tensor, local: Tensor) -> Tensor:
    """``tensor``, which is on the meta device, with ``local`` as this rank's part: a parameter where it was one."""
    made = local
    if isinstance(tensor, DTensor):
        made = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    for name, value in vars(tensor).items():
        if name not in vars(made):  # marks that others have put on a parameter
            setattr(made, name, value)
    return made


def _chunk(positions: Tensor, parts: int, rank: int) -> Tensor:
    width = -(-len(positions) // parts)
    return positions[rank * width : (rank + 1) * width]


def _as_slice(positions: Tensor) -> slice | Tensor:
    if not len(positions):
        return slice(0, 0)
    first, last = int(positions[0]), int(positions[-1])
    return slice(first, last + 1) if last - first + 1 == len(positions) else positions
