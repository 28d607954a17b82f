"""Compile the layers of a fused model in its first training step on a GPU, as a module compiles those of its own.

By then the loop has moved the model and wrapped it, so that it can be seen whether anything is against it.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lit_fused.integrations.fused_pass import FusedPass
from lit_fused.memory import is_offloaded
from lit_fused.models.blocks import blocks
from lit_fused.models.compilation import compile_backbone, in_one_piece, take_back
from lit_fused.ops.backends import compiler_missing


class CompiledLayers:
    """Compiles each layer of a model where nothing is against it, and says so or why not."""

    def __init__(self, model: FusedPass) -> None:
        self._parts: list[nn.Module] = []
        self._is_in_use = False  # by a forward pass for a loss
        if model.is_compiled:  # by its owner
            return
        reason = _against(model)
        if reason is not None:
            rank_zero_info(f"The layers of the fused model are not compiled: {reason}.")
            return
        rank_zero_info(
            "The layers of the fused model are compiled with the first steps; "
            'lit_fused.fuse(model, compile="none") takes this back.'
        )
        self._parts = compile_backbone(model, "where possible", self._is_eager)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Run the layers compiled in a block, also without gradients."""
        self._is_in_use = True
        try:
            with in_one_piece() if self._parts else nullcontext():
                yield
        finally:
            self._is_in_use = False

    def _is_eager(self) -> bool:
        """Return whether the layers run uncompiled: generation would compile them for each new length."""
        return not torch.is_grad_enabled() and not self._is_in_use

    def take_back(self) -> None:
        """Let the layers run uncompiled from now on."""
        take_back(self._parts)


def _against(model: FusedPass) -> str | None:
    """Return what is against compiled layers."""
    inner = model.backbone
    layers = blocks(inner)
    if not layers:
        return f"{type(inner).__name__} has no repeated layers (modules in an nn.ModuleList)"
    if any(isinstance(module, FullyShardedDataParallel) for module in inner.modules()):
        return "this was never tested under FSDP1; choose FSDP2"
    if any(hasattr(p, "ds_id") for p in inner.parameters()):  # DeepSpeed's own mark
        return "this was never tested under DeepSpeed's ZeRO 3"
    if _is_tensor_parallel(inner):
        return "this was never tested under the tensor parallelism of transformers"
    replaced = [
        part for layer in layers for part in layer.modules() if "forward" in vars(part) and not is_offloaded(part)
    ]
    if replaced:  # as Liger does, and Accelerate's offloading
        return f"another library has replaced the forward of their {type(replaced[0]).__name__}"
    missing = compiler_missing(inner.device)  # type: ignore[arg-type]
    return None if missing is None else f"that needs {missing}"


def _is_tensor_parallel(model: nn.Module) -> bool:
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    by_fsdp2 = any(isinstance(module, FSDPModule) for module in model.modules())
    return bool(meshes) and (not by_fsdp2 or any("tp" in (mesh.mesh_dim_names or ()) for mesh in meshes))
