"""Build language models without memory, and give them their weights once a strategy has divided them.

``from_config`` and ``from_pretrained`` return an ordinary transformers model on the meta device: its tensors have a
shape and a dtype, but no numbers. A strategy divides them like real ones. Then :func:`materialize` builds or reads the
whole model once, on the CPU, by transformers' own code. On one device and under DDP each process does so. Where a
strategy has divided the model, rank 0 alone does, and sends one tensor after the other; a device holds its part and
one whole tensor.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from lit_fused.errors import UserError, checked_options
from lit_fused.models.hub import auto_class, config_of, read

_SOURCE, _ORIGIN = "_lit_fused_source", "_lit_fused_origin"  # attributes of the models that this file returns


@dataclass(frozen=True)
class Origin:
    """The folder or name on the hub that a pretrained model was loaded from, and how its vocabulary may grow."""

    path: str
    revision: str | None
    pad_to_multiple_of: int | None


@dataclass
class _Source:
    """Builds a model whole, on the CPU; it grows to ``rows`` vocabulary entries if they are given."""

    build: Callable[[], PreTrainedModel]
    dtype: torch.dtype | None = None  # of a checkpoint's parameters
    rows: int | None = None
    tied: set[frozenset[str]] = field(default_factory=set)

    def whole(self) -> PreTrainedModel:
        with ordinary_defaults():
            model = self.build()
            is_tied_otherwise = _ties(model) != self.tied
            if self.rows is not None:
                _resize(model, self.rows)
        if is_tied_otherwise:
            raise UserError(
                f"the weights of {model.name_or_path} are tied otherwise than its configuration says; set "
                "tie_word_embeddings to what is true in its config.json"
            )
        if any(p.dtype != (self.dtype or p.dtype) for p in model.parameters()):
            raise UserError(
                f"{type(model).__name__} keeps some of its weights in another dtype than {self.dtype}; load it in "
                "float32 and choose precision=bf16-true, or load it with at_once=True"
            )
        return model


@checked_options(seed=0)
def from_config(
    config: PreTrainedConfig,
    seed: int = 0,
    *,
    dtype: torch.dtype | str | None = None,
    attn_implementation: str | None = None,
    at_once: bool = False,
) -> PreTrainedModel:
    """Build a language model with random weights, by transformers' own rules.

    The model is on the meta device until the trainer's strategy has placed it or :func:`materialize` is called. The
    numbers are those that transformers draws on a CPU after ``torch.manual_seed(seed)``, the same under any strategy.

    Args:
        config: of a language model that transformers' auto classes know.
        seed: any integer. The process's random state is neither read nor changed.
        dtype: of the parameters; by default the configuration's, else float32.
        attn_implementation: as in transformers.
        at_once: build the whole model immediately, for wrappers that need the weights (PEFT).
    """
    options = {"dtype": dtype, "attn_implementation": attn_implementation}
    given = {name: value for name, value in options.items() if value is not None}
    build: Any = partial(auto_class(config).from_config, trust_remote_code=False, **given)
    source = _Source(partial(_drawn, build, copy.deepcopy(config), seed))  # the caller may change the model's
    return source.build() if at_once else _late(partial(build, config), source)


@checked_options()
def from_pretrained(
    path: str | Path,
    *,
    dtype: torch.dtype | str = torch.float32,
    attn_implementation: str | None = None,
    revision: str | None = None,
    vocab_size: int | None = None,
    pad_to_multiple_of: int | None = None,
    at_once: bool = False,
    load_in_4bit: bool = False,
) -> PreTrainedModel:
    """Build a language model with the weights of a Hugging Face checkpoint, by transformers' own ``from_pretrained``.

    The model is in evaluation mode, as in transformers: call ``train()`` before a fit (``train.py`` does). It is on the
    meta device until the trainer's strategy has placed it or :func:`materialize` is called; that reads the weights.

    Args:
        path: a folder, or a model's name on the hub.
        dtype: dtype of the parameters. Training needs float32, the default, whatever the checkpoint's dtype; "auto"
            takes the checkpoint's.
        attn_implementation: as in transformers.
        revision: a branch, tag or commit on the hub.
        vocab_size: see :func:`grow_vocabulary`. In a fit the module sets it by the tokenizer.
        pad_to_multiple_of: the vocabulary grows to a multiple of this number, now and in a fit.
        at_once: as in :func:`from_config`.
        load_in_4bit: hold the weights of linear layers but the output layer in 4 bits (bitsandbytes, NF4), at once.
            They are not trained: put adapters around the model.

    Raises:
        UserError: transformers cannot load the model, or some of its weights are missing.
    """
    options: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    folder = Path(path).expanduser()
    name = str(folder if folder.exists() else path)
    config = config_of(name, revision)
    dtype = config.dtype or torch.float32 if dtype == "auto" else dtype
    options["dtype"] = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if load_in_4bit:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    source = _Source(partial(read, name, copy.deepcopy(config), revision, **options), options["dtype"])
    if at_once or load_in_4bit or getattr(config, "quantization_config", None) is not None:
        model = source.build()
    else:
        build = partial(auto_class(config).from_config, config, trust_remote_code=False, **options)
        model = _late(build, source).eval()
        if model.can_generate():
            with suppress(OSError):  # the checkpoint has no generation config
                model.generation_config = GenerationConfig.from_pretrained(name, revision=revision or "main")
    setattr(model, _ORIGIN, Origin(name, revision, pad_to_multiple_of))
    if vocab_size is not None or pad_to_multiple_of is not None:
        grow_vocabulary(model, vocab_size, pad_to_multiple_of)
    return model


def origin_of(model: nn.Module | None) -> Origin | None:
    """Return the origin of a model that :func:`from_pretrained` returned; None for any other model."""
    return None if model is None else vars(model).get(_ORIGIN)


def is_deferred(model: nn.Module) -> bool:
    """Return whether some parameter or buffer has no numbers yet."""
    return any(tensor.is_meta for _, _, _, tensor in places_of(model))


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device | str = "cpu", *, divided: bool = False) -> None:
    """Fill in, on ``device``, every parameter and buffer of ``model`` that is on the meta device.

    ``model`` is, or contains, a model of :func:`from_config` or :func:`from_pretrained`. Tensors with numbers do not
    change, dtypes stay those of ``model``, and tied weights stay tied.

    Args:
        divided: each rank has a part of the model, as DTensors or because modules are missing. All ranks call this;
            rank 0 builds the whole model in CPU memory and sends it. Found out by itself where there are DTensors.

    Raises:
        UserError: a tensor is on the meta device and has no source; or, on all ranks, rank 0 could not build the model.
    """
    device = torch.device(device)
    divided = divided or any(isinstance(p, DTensor) for p in model.parameters())
    for backbone in [m for m in model.modules() if _SOURCE in vars(m) and is_deferred(m)]:
        source: _Source = vars(backbone)[_SOURCE]
        if divided:
            _receive(model, backbone, source, device)
        else:
            whole = {name: tensor.detach() for name, _, _, tensor in places_of(source.whole())}
            # They leave ``whole``, and so memory, in turn.
            _replace(backbone, lambda name, meta, whole=whole: whole.pop(name).to(device, meta.dtype))
    left = [name for name, _, _, tensor in places_of(model) if tensor.is_meta]
    if left:
        raise UserError(
            f"{left[0]} of {type(model).__name__} is on the meta device, and nothing says where its numbers come from; "
            "build the model with lit_fused.from_config or lit_fused.from_pretrained, or on a real device"
        )


def _receive(model: nn.Module, backbone: nn.Module, source: _Source, device: torch.device) -> None:
    """Give each rank's parts of ``backbone``, inside of ``model``, the numbers of the whole model, which rank 0 has."""
    whole, failure = None, None
    if dist.get_rank() == 0:
        try:
            whole = source.whole()
        except Exception as error:  # The other ranks wait for what comes next.
            failure = error
    # Buffers go with them: they are small, and some are in no state dict.
    sent: list[Any] = [repr(failure), {} if whole is None else dict(whole.named_buffers(remove_duplicate=False))]
    dist.broadcast_object_list(sent)
    said, buffers = sent
    if failure is not None:
        raise failure
    if said != "None":
        raise UserError(f"rank 0 could not build the model: {said}")

    def made(name: str, meta: Tensor) -> Tensor:
        return buffers[name].to(device, meta.dtype) if name in buffers else torch.empty_like(meta, device=device)

    _replace(backbone, made)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        model.to(device)  # FSDP2 refreshes its own references to the shards
    # A rank may have some of the names alone, so the options are not strict.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(backbone, {} if whole is None else whole.state_dict(), options=options)


def places_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield each parameter and buffer by each of its names, with its module and its name there."""
    for prefix, module in model.named_modules():
        own = [*module.named_parameters(recurse=False, remove_duplicate=False)]
        for attribute, tensor in [*own, *module.named_buffers(recurse=False, remove_duplicate=False)]:
            yield f"{prefix}.{attribute}".lstrip("."), module, attribute, tensor


def _replace(model: nn.Module, make: Callable[[str, Tensor], Tensor]) -> None:
    """Replace tensors on the meta device; those that are one stay one."""
    made: dict[Tensor, Tensor] = {}
    for name, module, attribute, meta in list(places_of(model)):
        if not meta.is_meta:
            continue
        if meta not in made:
            new = make(name, meta)
            made[meta] = nn.Parameter(new, meta.requires_grad) if isinstance(meta, nn.Parameter) else new
        setattr(module, attribute, made[meta])


@torch.no_grad()
def grow_vocabulary(model: PreTrainedModel, entries: int | None, pad_to_multiple_of: int | None = None) -> int:
    """Grow the embedding and the output layer, tied or not, to at least ``entries`` rows, by transformers'
    ``resize_token_embeddings``; return how many there are. New rows are about the mean of the old ones.

    Args:
        model: a model with weights, or one of :func:`from_pretrained` that has none yet and is not divided.
        entries: number of vocabulary entries; None for the current number. UserError if it is smaller.
        pad_to_multiple_of: the number of rows becomes a multiple of it.
    """
    table: Any = model.get_input_embeddings().weight
    before, multiple = len(table), pad_to_multiple_of or 1
    rows = -(-(before if entries is None else entries) // multiple) * multiple
    if rows < before:
        raise UserError(
            f"{type(model).__name__} has {before} entries in its vocabulary, and {rows} were asked for: rows that it "
            "has learned would go; give a vocab_size that is not smaller"
        )
    if rows > before:
        _resize(model, rows, means=not table.is_meta)
        if table.is_meta:
            vars(model)[_SOURCE].rows = rows
    return rows


def _resize(model: PreTrainedModel, rows: int, *, means: bool = True) -> None:
    with torch.random.fork_rng(devices=[]):  # the same numbers on every rank
        torch.default_generator.manual_seed(0)
        model.resize_token_embeddings(rows, mean_resizing=means)


@contextmanager
def ordinary_defaults() -> Iterator[None]:
    """Create tensors on the CPU and in float32 unless the code says otherwise: in ``configure_model``, Lightning sets
    the run's device and precision as defaults."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def _drawn(build: Callable[..., PreTrainedModel], config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build(config)


def _late(build: Callable[[], PreTrainedModel], source: _Source) -> PreTrainedModel:
    with torch.device("meta"):
        model = build()
    nn.Module.to(model, "meta")  # torch.FloatTensor(...), for one, ignores torch.device("meta")
    source.tied = _ties(model)
    setattr(model, _SOURCE, source)
    # Loading a state dict into tensors without numbers would silently do nothing.
    model.register_load_state_dict_pre_hook(_materialize_first)
    return model


def _materialize_first(module: nn.Module, *_: Any) -> None:
    if is_deferred(module):
        materialize(module)


def _ties(model: nn.Module) -> set[frozenset[str]]:
    names: dict[Tensor, set[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, set()).add(name)
    return {frozenset(shared) for shared in names.values() if len(shared) > 1}
