"""``lit_fused.reduce_memory(model)``: what a model keeps for backward, and what its MLPs hold at a time."""

from collections import Counter
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from lit_fused.errors import UserError, check_choice, check_whole
from lit_fused.heads import transformers_model
from lit_fused.memory.host_inputs import HostInputs
from lit_fused.memory.offloaded_layer import OffloadedLayer
from lit_fused.memory.token_chunks import TokenModules, chunked_class, own_class
from lit_fused.models.blocks import blocks

_Model = TypeVar("_Model", bound=nn.Module)
_RECOMPUTES = "recomputes_layers"  # attribute of a model whose layers this file lets transformers compute again


def reduce_memory(model: _Model, *, checkpointing: str = "none", mlp_chunk_tokens: int | str | None = None) -> _Model:
    """Let a model need less memory in training, in place, and return it. Losses and gradients stay the same but for
    rounding, and so do names and parameters. A second call replaces the first; one without options takes it
    back. Call it before ``torch.compile``, DDP and FSDP; before or after ``lit_fused.fuse`` and PEFT.

    Args:
        model: a transformers model, or PEFT's wrapper around one.
        checkpointing: "recompute": of each layer its input alone is kept for backward, which computes the layer again,
            by transformers' own ``activation_checkpointing_enable``. "offload": and the input is kept in the host's
            memory, copied beside the computation. On a CPU it stays there.
        mlp_chunk_tokens: MLPs compute so many tokens at a time, and again in backward. "auto": a sixteenth of a batch's
            tokens, at least 2048. Only modules that an experiment finds to act on each token alone, of mixtures the
            experts; a line says how many they are.

    Raises:
        UserError: no transformers model, or one without layers; and in a step, where the host has too little memory.
    """
    check_choice("checkpointing", checkpointing, ("none", "recompute", "offload"))
    if isinstance(mlp_chunk_tokens, str):
        check_choice("mlp_chunk_tokens", mlp_chunk_tokens, ("auto",))
    elif mlp_chunk_tokens is not None:
        check_whole("mlp_chunk_tokens", mlp_chunk_tokens, 1)
    inner = transformers_model(model)
    if checkpointing == "none" and mlp_chunk_tokens is None and inner is None:
        return model
    if inner is None:
        raise UserError(f"reduce_memory takes a transformers model, got {type(model).__name__}; leave it out")
    _take_back(inner)
    layers = _outermost(blocks(inner))
    if not layers:
        raise UserError(f"{type(inner).__name__} has no repeated layers, whose memory could be reduced; leave it out")
    if mlp_chunk_tokens is not None:
        _chunk_mlps(inner, layers, None if isinstance(mlp_chunk_tokens, str) else mlp_chunk_tokens)
    if checkpointing == "recompute":
        getattr(inner, "activation_checkpointing_enable", inner.gradient_checkpointing_enable)()
        setattr(inner, _RECOMPUTES, True)
    elif checkpointing == "offload":
        inputs, kinds = HostInputs(), Counter(map(type, layers))
        for layer in layers:
            layer.forward = OffloadedLayer(layer, inputs, kinds[type(layer)])
    return model


def checkpointing_of(model: nn.Module) -> str:
    """Return "none", "recompute" or "offload", also where a loop has chosen it."""
    inner = transformers_model(model)
    if inner is None:
        return "none"
    if any(map(is_offloaded, inner.modules())):
        return "offload"
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in inner.modules())
    return "recompute" if recomputes else "none"


def is_offloaded(module: nn.Module) -> bool:
    """Return whether a module is a layer whose input is kept on the host."""
    return isinstance(vars(module).get("forward"), OffloadedLayer)


def _take_back(model: PreTrainedModel) -> None:
    for module in model.modules():
        if is_offloaded(module):
            del module.forward
        module.__class__ = own_class(module) or type(module)
    if vars(model).pop(_RECOMPUTES, False):
        getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()


def _outermost(layers: list[nn.Module]) -> list[nn.Module]:
    inside = {part for layer in layers for part in layer.modules() if part is not layer}
    return [layer for layer in layers if layer not in inside]


def _chunk_mlps(model: PreTrainedModel, layers: list[nn.Module], tokens: int | None) -> None:
    from lightning.pytorch.utilities import rank_zero_info  # It takes seconds.

    found = TokenModules(model.config.get_text_config().hidden_size)
    chunked = [[*found.of(layer)] for layer in layers]
    for module, dims in (each for of_layer in chunked for each in of_layer):
        module.__class__ = chunked_class(type(module), dims, tokens)
    rank_zero_info(f"The MLPs of {sum(map(bool, chunked))} of {len(layers)} layers compute in chunks of tokens.")
