"""Build models without memory; fill in their weights once a strategy has decided which part each rank needs.

``from_config`` and ``from_pretrained`` return an ordinary transformers model whose tensors are on the meta device: they
have a shape and a dtype, but no numbers. A strategy divides them like real ones. Then :func:`materialize` reads this
rank's part of each remaining tensor from its source. A rank never needs more memory than its own part and one whole
tensor.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as transformers_initialization
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from lit_fused.errors import UserError, checked_options
from lit_fused.weights.from_checkpoint import FromCheckpoint, check_pickled, safetensors_files
from lit_fused.weights.growth import ORIGIN, Origin, grow_vocabulary
from lit_fused.weights.location import config_of, locate
from lit_fused.weights.rules import SOURCE, FromRules, Index, named_tensors, ordinary_defaults, places_of


@checked_options(seed=0)
def from_config(
    config: PreTrainedConfig,
    seed: int = 0,
    *,
    dtype: torch.dtype | str | None = None,
    attn_implementation: str | None = None,
    activation_checkpointing: bool = False,
    at_once: bool = False,
) -> PreTrainedModel:
    """Build a language model with random weights by transformers' own rules, determined by ``seed`` alone.

    The model is on the meta device until the trainer's strategy has divided it or :func:`materialize` is called. The
    numbers depend on the configuration, the seed and the tensor's name, so they are the same under any strategy.

    Args:
        config: of a causal language model, or of an encoder-decoder.
        seed: any integer. The process's random state is neither read nor changed.
        dtype: of the parameters; by default the configuration's, else float32.
        attn_implementation: as in transformers.
        activation_checkpointing: store one tensor per layer for backward, and compute the others twice.
        at_once: build the whole model immediately, for a model whose rules cannot run for one tensor at a time, and
            for wrappers that need the weights (PEFT). The seed then gives other numbers.
    """
    options: dict[str, Any] = {} if dtype is None else {"dtype": _dtype(dtype)}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    build = partial(auto_class(config).from_config, trust_remote_code=False, **options)
    if at_once:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return _checkpointed(build(config), activation_checkpointing)
    model, skeleton = _without_memory(build, config)
    _checkpointed(model, activation_checkpointing)
    return _deferred(model, FromRules(skeleton, model.all_tied_weights_keys, seed))


@checked_options()
def from_pretrained(
    path: str | Path,
    *,
    dtype: torch.dtype | str = torch.float32,
    attn_implementation: str | None = None,
    revision: str | None = None,
    vocab_size: int | None = None,
    pad_to_multiple_of: int | None = None,
    activation_checkpointing: bool = False,
    at_once: bool = False,
) -> PreTrainedModel:
    """Build a language model with the weights of a Hugging Face checkpoint (safetensors, in one file or several).

    The model is in evaluation mode, as in transformers: call ``train()`` before a fit (``train.py`` does). It is on the
    meta device until the trainer's strategy has divided it or :func:`materialize` is called. Then each process reads
    its part of each tensor from the files. A tensor that transformers makes of several stored ones (experts, fused
    projections) is made whole first.

    Args:
        path: a folder, or a model's name on the hub.
        dtype: dtype of the parameters. Training needs float32, the default, whatever the checkpoint's dtype; "auto"
            takes the checkpoint's.
        attn_implementation: as in transformers.
        revision: a branch, tag or commit on the hub.
        vocab_size: number of vocabulary entries, at least those of the checkpoint, for a tokenizer with added tokens.
            In a fit the module sets it: see :func:`lit_fused.weights.grow_vocabulary`.
        pad_to_multiple_of: the vocabulary grows to a multiple of this number, now and in a fit.
        activation_checkpointing: as in :func:`from_config`.
        at_once: build the whole model immediately, by transformers' own ``from_pretrained``.

    Raises:
        UserError: there is no such model, it cannot be read this way, or weights are missing, superfluous or of
            another shape.
    """
    options: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    where: dict[str, Any] = {} if revision is None else {"revision": revision}
    name = locate(path, revision)
    config = config_of(name, revision)
    options["dtype"] = _dtype(config.dtype or torch.float32) if dtype == "auto" else _dtype(dtype)
    try:
        if at_once:
            check_pickled(Path(name))  # A name on the hub is no folder; its files are the hub's to scan.
            model = auto_class(config).from_pretrained(name, config=config, trust_remote_code=False, **options, **where)
        else:
            model = _late(name, config, options, where)
        _checkpointed(model, activation_checkpointing)
    except UserError:
        raise
    except (OSError, ValueError, ImportError) as error:  # an unknown class or attention, or a missing file
        raise UserError(f"{path} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    setattr(model, ORIGIN, Origin(name, revision, pad_to_multiple_of))
    if vocab_size is not None or pad_to_multiple_of is not None:
        grow_vocabulary(model, vocab_size, pad_to_multiple_of)
    return model


def _late(name: str, config: PreTrainedConfig, options: dict[str, Any], where: dict[str, Any]) -> PreTrainedModel:
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"{name} is quantised; load it with at_once=True, by transformers' own from_pretrained")
    files = safetensors_files(name, where.get("revision"))
    build = partial(auto_class(config).from_config, trust_remote_code=False, **options)
    model, skeleton = _without_memory(build, config)
    dtype = options["dtype"]
    if dtype != torch.float32 and model._get_dtype_plan(dtype):
        raise UserError(
            f"{type(model).__name__} keeps some of its weights in float32 when it is loaded in {dtype}; load it in "
            "float32 and choose precision=bf16-true, or load it with at_once=True"
        )
    source = FromCheckpoint(skeleton, model.all_tied_weights_keys, files, name)
    # transformers' own loading sets this too; save_pretrained reads it
    model._weight_conversions = source.conversions_used  # type: ignore[assignment]
    if model.can_generate():
        with suppress(OSError):  # the checkpoint has no generation config
            model.generation_config = GenerationConfig.from_pretrained(name, **where)
    return _deferred(model.eval(), source)


def is_deferred(model: nn.Module) -> bool:
    """Return whether some parameter or buffer has no numbers yet."""
    return any(tensor.is_meta for _, tensor in named_tensors(model))


def comes_late(model: nn.Module) -> bool:
    """Return whether the model has no numbers yet and :func:`materialize` can fill them in."""
    return is_deferred(model) and any(SOURCE in vars(module) for module in model.modules())


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Fill in, on ``device``, every parameter and buffer of ``model`` that is on the meta device.

    ``model`` is, or contains, a model of :func:`from_config` or :func:`from_pretrained`. It may have changed since, if
    its modules have the same names: parameters may be DTensors on any mesh (this rank gets its part), modules may be
    missing, dtypes may differ. Tensors with numbers do not change, and tied weights stay tied. Processes do not
    communicate.

    Raises:
        UserError: a tensor is on the meta device and has no source.
    """
    with ordinary_defaults():
        for backbone in [m for m in model.modules() if SOURCE in vars(m)]:
            _materialize(backbone, vars(backbone)[SOURCE], torch.device(device))
    left = [name for name, tensor in named_tensors(model) if tensor.is_meta]
    if left:
        raise UserError(
            f"{left[0]} of {type(model).__name__} is on the meta device, and nothing says where its numbers come from; "
            "build the model with lit_fused.from_config or lit_fused.from_pretrained, or on a real device"
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        model._apply(lambda tensor: tensor)  # FSDP2 refreshes its own references to the shards


def _materialize(backbone: nn.Module, source: FromRules, device: torch.device) -> None:
    for prefix, module in backbone.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise UserError(
                    f"{source.name} keeps a tensor that is neither parameter nor buffer ({prefix}.{attribute}), of "
                    "which nobody knows the numbers; build it with at_once=True"
                )
    names: dict[Tensor, str] = {}
    places: dict[Tensor, list[tuple[dict[str, Any], str]]] = {}  # a tied weight has several
    for name, tensors, attribute, tensor in places_of(backbone):
        if tensor.is_meta:
            names.setdefault(tensor, name)
            places.setdefault(tensor, []).append((tensors, attribute))
    for tensor, name in names.items():
        if source.shapes.get(name) != tensor.shape:
            raise UserError(
                f"{name}, {tuple(tensor.shape)}, of {source.name} has been changed since the model was built "
                f"({tuple(source.shapes.get(name, ())) or 'without it'}), and has no numbers; change it after "
                "lit_fused.materialize(model), or build it with at_once=True"
            )
    # All results are allocated first, so that temporary tensors leave no holes in the heap.
    parts = {
        t: torch.empty((t.to_local() if isinstance(t, DTensor) else t).shape, dtype=t.dtype, device=device)
        for t in names
    }
    for tensor, name in names.items():
        part = source.read(name, index_of(tensor))
        assert part.shape == parts[tensor].shape, f"{name}: {part.shape} for {parts[tensor].shape}"
        made = with_numbers(tensor, parts.pop(tensor).copy_(part))
        for tensors, attribute in places[tensor]:
            tensors[attribute] = made
    source.close()


def index_of(tensor: Tensor) -> Index:
    """Return the index of this rank's part in the whole tensor: per dimension a slice, or positions (int64).

    Placements on the dimensions of a mesh divide a tensor's dimension one after the other, each like ``torch.chunk``:
    the last part may be smaller, or empty. A strided placement divides each of several groups: FSDP on top of tensor
    parallelism.
    """
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


def _checkpointed(model: PreTrainedModel, wanted: bool) -> PreTrainedModel:
    if wanted and not model.supports_gradient_checkpointing:
        raise UserError(f"{type(model).__name__} has no activation checkpointing; leave activation_checkpointing out")
    if wanted:  # newer versions renamed gradient_checkpointing_enable
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def _deferred(model: PreTrainedModel, source: FromRules) -> PreTrainedModel:
    setattr(model, SOURCE, source)
    # Loading a state dict into tensors without numbers would silently do nothing.
    model.register_load_state_dict_pre_hook(_materialize_first)
    return model


def _materialize_first(module: nn.Module, *_: Any) -> None:
    if is_deferred(module):
        materialize(module)


def _without_memory(
    build: Callable[[PreTrainedConfig], PreTrainedModel], config: PreTrainedConfig
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the model, and a copy of it whose tied weights are not tied, both on the meta device."""
    with torch.device("meta"), transformers_initialization.meta_device_safe_creation_ops():
        with transformers_initialization.no_tie_weights():
            skeleton = build(copy.deepcopy(config))
        model = build(config)
    for made in (model, skeleton):
        nn.Module.to(made, "meta")  # torch.FloatTensor(...), for one, ignores torch.device("meta")
    return model, skeleton


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' auto class for a language model; UserError if it has none. Of the types that are causal or
    masked models, those are masked whose checkpoint is of such a class (bert-base: BertForMaskedLM), unless
    ``is_decoder`` is set. Decoders that hear (Voxtral) are among its sequence-to-sequence models."""
    kinds: list[Any] = [AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, AutoModelForMaskedLM]
    fitting = [kind for kind in kinds if type(config) in kind._model_mapping]
    if not fitting:
        raise UserError(
            f"transformers' auto classes have no language model for a {type(config).__name__}; if there is one, build "
            "it by its own class and pass it to the module"
        )
    if config.is_encoder_decoder and AutoModelForSeq2SeqLM in fitting:
        return AutoModelForSeq2SeqLM
    model_type: Any = config.model_type
    masked = MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(model_type)
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, masked)
    was_masked = masked in (config.architectures or [causal]) and not getattr(config, "is_decoder", False)
    return AutoModelForMaskedLM if AutoModelForMaskedLM in fitting and was_masked else fitting[0]


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UserError(f"dtype must be a floating-point dtype such as float32 or bfloat16, got {dtype!r}")
    return found
