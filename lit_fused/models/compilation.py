"""``torch.compile`` of the blocks of a model, or of all of it. No parameter and no name of one changes.

Compiling each layer (``regional``) costs one compilation for all that are alike, and composes with FSDP2. Compiling the
whole backbone (``whole``) can fuse a little more, but takes many times as long to begin.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.distributed.tensor import DTensor

from lit_fused.errors import UserError
from lit_fused.models.blocks import blocks, part_to_compile
from lit_fused.models.documents_attention import takes_its_place
from lit_fused.models.language_model import LanguageModel
from lit_fused.ops.backends import compiler_missing

COMPILE = ("none", "auto", "regional", "whole")


def check_compile(model: LanguageModel, how: str, device: torch.device) -> None:
    """Refuse, by a UserError, to compile a model, or on a machine, for which ``how`` cannot work."""
    if how == "none":
        return
    if model.is_compiled:
        raise UserError(f"the model is compiled already; leave compile={how} out, or pass it without torch.compile")
    if how != "whole" and not blocks(model.backbone):
        raise UserError(
            f"{type(model.backbone).__name__} has no repeated layers (modules in an nn.ModuleList), which "
            "compile=regional compiles; choose compile=whole"
        )
    missing = compiler_missing(device)
    if missing is not None:
        raise UserError(f"compile={how} needs {missing}; or choose compile=none")


def compile_backbone(model: LanguageModel, how: str, is_eager: Callable[[], bool] = lambda: False) -> list[nn.Module]:
    """Compile in place, after a strategy has sharded the model, and return what is compiled. The first batch triggers
    the compilation itself.

    "where possible" is "regional", taken back with a warning if the compiler fails. (torch's suppress_errors would hide
    the errors of all other compiled code of the process as well, and of layers that are compiled later.) Layers run
    without compilation in calls for which ``is_eager()`` is true.
    """
    layers = [(block, part_to_compile(block)) for block in blocks(model.backbone)]
    if how == "where possible":  # torch 2.13 fails where a graph has checkpoints and DTensors
        layers = [(block, part) for block, part in layers if part is block or not _is_divided(part)]
    parts = {"none": [], "whole": [model.backbone]}.get(how, [part for _, part in layers])
    if how == "whole":
        takes_its_place(model.transformers_model)
    for part in parts:
        part.compile(dynamic=False if _is_divided(part) else None)
        if how == "where possible":
            part._compiled_call_impl = partial(_call, part._compiled_call_impl, part, parts, is_eager)
    return parts


def take_back(parts: list[nn.Module]) -> None:
    """Let parts of a model run without compilation again."""
    for part in parts:
        part._compiled_call_impl = None


def in_one_piece() -> AbstractContextManager[None]:
    """Compile each layer as one graph in a block. DDP makes torch's compiler cut what it compiles where a bucket of
    gradients is full. Layers that are compiled one by one end often enough, and the pieces of one cost more launches
    and lose what would be fused."""
    config: Any = torch._dynamo.config  # pyright: ignore[reportAttributeAccessIssue]
    return config.patch(optimize_ddp=False)


def _is_divided(part: nn.Module) -> bool:
    """Return whether tensor parallelism has divided a part. Where sizes of products of divided matrices are symbols,
    torch's compiler fails by an endless recursion, so each size is compiled for itself."""
    meshes = [p.device_mesh for p in part.parameters() if isinstance(p, DTensor)]
    return any("tensor_parallel" in (mesh.mesh_dim_names or ()) for mesh in meshes)


def _call(
    compiled: Callable[..., Any],
    part: nn.Module,
    parts: list[nn.Module],
    is_eager: Callable[[], bool],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if torch.compiler.is_compiling():  # Code around the layer is compiled together with it.
        return compiled(*args, **kwargs)
    if is_eager():
        with torch.compiler.set_stance("force_eager"):
            return compiled(*args, **kwargs)
    try:
        return compiled(*args, **kwargs)
    except torch._dynamo.exc.TorchDynamoException as error:  # pyright: ignore[reportAttributeAccessIssue]
        rank_zero_warn(f"{type(part).__name__} cannot be compiled, and no layer of the model is: {error}")
        take_back(parts)
        return part(*args, **kwargs)
