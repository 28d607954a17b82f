"""Tensor parallelism: the ranks of a group divide each matrix of the model and compute every token together.

The layers follow transformers' own plan for the model. Input embedding and output layer are divided here, by entries of
the vocabulary, tied or not, in parts that need not be equal. The trick is that the output layer's *input* is whole on
every rank: the fused loss takes it, with this rank's rows of the weight, and no logits are gathered. Called by anything
else (generation, the standard loss), the layer returns whole logits.

A plan can be wrong without a word, where ranks have copies of a parameter but each only a part of its gradient. So the
divided model is asked for the logits of eight tokens and their gradients, and they have to be those of the whole one.
Where weights come late no rank has a whole one: the same is then tried on a small twin of the model.
"""

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.heads import output_layer, peft_model
from lit_fused.heads.probe import evaluation_mode
from lit_fused.model import LanguageModel
from lit_fused.ops.linear_cross_entropy.plan import VocabularyShard
from lit_fused.parallel.fsdp import shard
from lit_fused.parallel.groups import check_copies
from lit_fused.weights import comes_late, is_deferred, materialize
from lit_fused.weights.twin import no_twin, twin_of

_COLUMNS = {"colwise", "colwise_gather_output", "colwise_rep"}
_ROWS = {"rowwise", "rowwise_rep", "rowwise_split_input"}
_COPIES = "replicated_with_grad_allreduce"
_PROBE_TOKENS = 8
_TWIN_LAYERS = 2


def parallelize(model: LanguageModel, mesh: DeviceMesh, device: torch.device) -> None:
    """Divide the model over ``mesh["tensor_parallel"]``, then shard it over ``mesh["data_parallel"]``, in place.

    One whose weights come late stays without them, but for one that has no twin.

    Raises:
        UserError: the divided model is not the whole one.
    """
    tensor, data = mesh["tensor_parallel"], mesh["data_parallel"]
    if tensor.size() > 1 and not _is_distributed(model):
        divide(model, tensor, device)
    if data.size() > 1 or tensor.size() == 1:
        shard(model, data)


def check_division(model: LanguageModel, ranks: int, *, training: bool) -> None:
    """Refuse what cannot be divided over so many ranks, or was never compared with the whole.

    Raises:
        UserError: with the class and what to choose.
    """
    if _is_distributed(model):
        sizes = {_tensor_parallel_size(p) for p in model.parameters() if isinstance(p, DTensor)} - {None}
        if sizes != {ranks}:
            raise UserError(
                "the model has been divided over other ranks by an earlier strategy; build it, and the module, anew"
            )
        return
    backbone, name = model.transformers_model, type(model.transformers_model or model.backbone).__name__
    otherwise = "choose strategy=fsdp2, which shards any model"
    if backbone is None:
        raise UserError(
            f"tensor parallelism needs a plan of transformers, and {name} is none of its models; {otherwise}"
        )
    if backbone.config.is_encoder_decoder:
        raise UserError(f"{name} is an encoder-decoder, for which tensor parallelism was never compared; {otherwise}")
    if peft_model(model.backbone) is not None:
        raise UserError(f"PEFT's adapters are not divided by the tensor-parallel plan of {name}; {otherwise}")
    if model.is_compiled:
        raise UserError(f"a compiled model cannot be divided; pass {name} without torch.compile, or {otherwise}")
    if is_deferred(backbone) and not comes_late(backbone):
        raise UserError(f"parameters of {name} are on the meta device; tensor parallelism divides a model with weights")
    of_modules, of_parameters = _styles(backbone)
    unknown = {*of_modules.values()} - _COLUMNS - _ROWS - {_COPIES} | {*of_parameters.values()}
    if unknown:
        raise UserError(
            f"the tensor-parallel plan of {name} has {', '.join(sorted(unknown))}, which was never compared; "
            f"{otherwise}"
        )
    if not any(style in _COLUMNS for style in of_modules.values()):
        raise UserError(f"transformers has no tensor-parallel plan for the layers of {name}; {otherwise}")
    _check_sizes(backbone, ranks)
    _check_vocabulary_layers(backbone)
    dropout = _dropout(backbone)
    if training and dropout:
        raise UserError(
            f"{name} has {dropout}, and ranks that compute a token together would drop different numbers of it; set "
            f"it to 0 in the model's configuration, or {otherwise}"
        )
    model.loss.check_vocabulary_parallel()


def check_same_batch(batch: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Ranks that compute a token together need the same ones. Waits for the batch, and for the others.

    Raises:
        UserError: they have different batches.
    """
    mine = {
        name: (tuple(value.shape), zlib.crc32(value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()))
        for name, value in batch.items()
        if isinstance(value, Tensor)
    }
    of_ranks: list[Any] = [None] * mesh.size()
    dist.all_gather_object(of_ranks, mine, group=mesh.get_group())
    if any(batches != mine for batches in of_ranks):
        raise UserError(
            "ranks of one tensor-parallel group got different batches, but they compute every token together: leave "
            "the sampler to Lightning (use_distributed_sampler=True), or give your own the data-parallel rank "
            "(device_mesh['data_parallel']); a loader that shuffles needs the same seed on every rank "
            "(lightning.seed_everything)"
        )


@contextmanager
def same_random_numbers(mesh: DeviceMesh, device: torch.device) -> Iterator[None]:
    """Within the block, ranks that compute a token together draw the same numbers; afterwards each its own again."""
    seed = torch.randint(2**62, (), device="cpu").to(device)
    dist.broadcast(seed, group=mesh.get_group(), group_src=0)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        yield


def _is_distributed(model: LanguageModel) -> bool:
    return any(isinstance(p, DTensor) for p in model.parameters())


def _tensor_parallel_size(p: DTensor) -> int | None:
    mesh = p.device_mesh
    return mesh["tensor_parallel"].size() if "tensor_parallel" in (mesh.mesh_dim_names or ()) else None


def _styles(backbone: PreTrainedModel) -> tuple[dict[str, str], dict[str, str]]:
    """The plan of the layers, by the names of modules, and that of single parameters."""
    plan = backbone.tp_plan or {}
    own = (output_layer(backbone), backbone.get_input_embeddings())
    modules = [name for name, module in backbone.named_modules() if module not in own]
    parameters = [name for name, _ in backbone.named_parameters()]

    def planned(names: list[str]) -> dict[str, str]:
        generic = {name: re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names}
        return {name: plan[generic[name]] for name in names if generic[name] in plan}

    return planned(modules), planned(parameters)


def _check_sizes(backbone: PreTrainedModel, ranks: int) -> None:
    config, name = backbone.config.get_text_config(), type(backbone).__name__
    for attribute, what in (("num_attention_heads", "attention heads"), ("num_key_value_heads", "key/value heads")):
        heads = getattr(config, attribute, None)
        if isinstance(heads, int) and heads % ranks:
            raise UserError(
                f"{name} has {heads} {what}, which tensor_parallel_size={ranks} does not divide; choose one that does"
            )
    for layer, style in _styles(backbone)[0].items():
        if style == _COPIES:
            continue
        linear: Any = backbone.get_submodule(layer)
        size, what = (linear.out_features, "outputs") if style in _COLUMNS else (linear.in_features, "inputs")
        if size % ranks:
            raise UserError(
                f"{layer} of {name} has {size} {what}, which tensor_parallel_size={ranks} does not divide; choose one "
                "that does"
            )


def _check_vocabulary_layers(backbone: PreTrainedModel) -> None:
    layer, embedding, name = output_layer(backbone), backbone.get_input_embeddings(), type(backbone).__name__
    if not isinstance(layer, nn.Linear) or not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        raise UserError(
            f"tensor parallelism divides an nn.Embedding and an nn.Linear; {name} has {type(embedding).__name__} and "
            f"{type(layer).__name__}; choose strategy=fsdp2, which shards any model"
        )
    names_of: dict[int, list[str]] = {}
    for parameter_name, p in backbone.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(p), []).append(parameter_name)
    tied = 2 if layer.weight is embedding.weight else 1
    shared = [names for p, names in names_of.items() if len(names) > (tied if p == id(embedding.weight) else 1)]
    if shared:
        raise UserError(
            f"{name} shares a parameter between {' and '.join(shared[0])}, for which tensor parallelism was never "
            "compared; choose strategy=fsdp2, which shards any model"
        )


def _dropout(backbone: PreTrainedModel) -> str | None:
    """A probability of dropout that is not zero, by its name."""
    settings = vars(backbone.config.get_text_config()).items()
    of_model = [(n, v) for n, v in settings if "drop" in n and not n.startswith("classifier")]
    found = [f"{n}={v}" for n, v in of_model if isinstance(v, float) and v > 0]
    found += [f"{n}.p={m.p}" for n, m in backbone.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
    return found[0] if found else None


def divide(model: LanguageModel, mesh: DeviceMesh, device: torch.device) -> None:
    """Divide over a mesh of one dimension a model that :func:`check_division` has passed; it moves to ``device``, but
    for one whose weights come late and whose small twin has been divided exactly."""
    backbone = model.transformers_model
    assert backbone is not None
    if is_deferred(backbone) and _twin_is_exact(backbone, mesh, device):
        _divide_layers(backbone, mesh)
        return
    materialize(backbone)
    _copy_from_first_rank(backbone, device)
    compared = _copied(backbone)
    try:
        expected = _answers(backbone, compared)
    except Exception as error:  # the model's own, of many kinds
        raise UserError(
            f"{type(backbone).__name__} cannot be compared with its parts: it does not run with eight tokens on "
            f"{backbone.device} ({type(error).__name__}: {error}). Load it with attn_implementation='sdpa'; or choose "
            "strategy=fsdp2, which shards any model"
        ) from error
    _divide_layers(backbone, mesh)
    model.to(device)
    _compare(type(backbone).__name__, _answers(backbone, compared), expected, backbone.dtype, mesh)


def _twin_is_exact(backbone: PreTrainedModel, mesh: DeviceMesh, device: torch.device) -> bool:
    """Divide a small model like this one and compare it; False, with a warning, if there is none."""
    twin = twin_of(backbone, _TWIN_LAYERS, device)
    if twin is None:
        return False
    twin._tp_plan = backbone.tp_plan  # which may have been changed
    compared = _copied(twin)
    try:
        expected = _answers(twin, compared)
    except Exception as error:  # its own, about the other sizes; the whole model will tell
        no_twin(backbone, error)
        return False
    _divide_layers(twin, mesh)
    _compare(type(backbone).__name__, _answers(twin, compared), expected, twin.dtype, mesh)
    return True


def _copied(backbone: PreTrainedModel) -> list[str]:
    """The parameters that every rank has the whole of."""
    embedding, layer = backbone.get_input_embeddings(), output_layer(backbone)
    divided = {f"{name}.weight" for name, style in _styles(backbone)[0].items() if style != _COPIES}
    divided |= {n for n, p in backbone.named_parameters() if p is embedding.weight or p is layer.weight}
    return [n for n, _ in backbone.named_parameters() if n not in divided]


def _divide_layers(backbone: PreTrainedModel, mesh: DeviceMesh) -> None:
    embedding: Any = backbone.get_input_embeddings()
    layer: Any = output_layer(backbone)
    styles, _ = _styles(backbone)
    tied = layer.weight is embedding.weight
    for name, style in styles.items():
        if style == _COPIES:
            _sum_gradients(backbone.get_submodule(name), mesh.get_group())
        else:
            _divide_layer(backbone.get_submodule(name), style, mesh)
    _divide_embedding(embedding, mesh)
    divide_output_layer(layer, mesh, embedding.weight if tied else None)


def check_copied_numbers(model: LanguageModel, mesh: DeviceMesh) -> None:
    """What ranks have copies of must be equal, where each has made its own.

    Raises:
        UserError: it is not.
    """

    def is_copy(tensor: Tensor) -> bool:
        if not isinstance(tensor, DTensor):
            return True
        over = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=False))
        return "tensor_parallel" not in over or over["tensor_parallel"].is_replicate()

    check_copies({name: p for name, p in model.named_parameters() if is_copy(p)}, mesh["tensor_parallel"].get_group())


def _copy_from_first_rank(backbone: nn.Module, device: torch.device) -> None:
    """What ranks have copies of must be equal, however each came by its model."""
    for tensor in [*backbone.parameters(), *backbone.buffers()]:
        sent = tensor.detach().to(device).contiguous()
        dist.broadcast(sent, src=0)
        tensor.detach().copy_(sent)


def _divide_layer(layer: nn.Module, style: str, mesh: DeviceMesh) -> None:
    try:
        from transformers.distributed.tensor_parallel import (
            ALL_PARALLEL_STYLES,  # pyright: ignore[reportPrivateImportUsage]
        )
    except ImportError as error:
        raise UserError(
            "this version of transformers has no transformers.distributed.tensor_parallel.ALL_PARALLEL_STYLES, which "
            "tensor parallelism needs; install transformers 5.17 to 5.23, or choose strategy=fsdp2"
        ) from error
    for name, _ in list(layer.named_parameters(recurse=False)):
        ALL_PARALLEL_STYLES[style].shard_param(layer, name, mesh)
    ALL_PARALLEL_STYLES[style].install_forward(layer, mesh)


def _sum_gradients(layer: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradient of the layer's parameters over ranks that each have a copy and see a part of what it acts on.

    Each backward's own gradient, not the accumulated one. FSDP replaces parameters, so they are looked up when they are
    used.
    """
    own_forward, hooked = layer.forward, {}

    def summed(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=group)
        return gradient

    def forward(*args: Any, **kwargs: Any) -> Any:
        for name, p in layer.named_parameters(recurse=False):
            if p.requires_grad and hooked.get(name) is not p:
                p.register_hook(summed)
                hooked[name] = p
        return own_forward(*args, **kwargs)

    layer.forward = forward


def _divide_embedding(embedding: Any, mesh: DeviceMesh) -> None:
    """Each rank looks up its own entries; the sum over ranks is the embedding."""
    own_forward: Callable[[Tensor], Tensor] = embedding.forward
    group = mesh.get_group()

    def forward(input_ids: Tensor) -> Tensor:
        shard = VocabularyShard.of(embedding.weight)
        part = embedding.weight.to_local()
        rows = input_ids - shard.start
        mine = (rows >= 0) & (rows < len(part))
        inside = (input_ids >= 0) & (input_ids < shard.vocabulary)
        torch._assert_async(inside.all(), f"input_ids must lie in [0, {shard.vocabulary})")  # pyright: ignore[reportPrivateImportUsage]
        padding = embedding.padding_idx
        if padding is not None:
            padding = padding - shard.start if shard.start <= padding < shard.start + len(part) else None
        with _replaced(embedding, part, padding):
            embedded = own_forward(rows.where(mine, 0))
        return _SumOverRanks.apply(embedded.masked_fill(~mine[..., None], 0), group)

    _divide_parameter(embedding, "weight", mesh)
    embedding.forward = forward


@contextmanager
def _replaced(embedding: nn.Embedding, weight: Tensor, padding_idx: int | None) -> Iterator[None]:
    own = embedding._parameters["weight"], embedding.padding_idx
    embedding._parameters["weight"] = weight  # type: ignore[assignment]
    embedding.padding_idx = padding_idx
    try:
        yield
    finally:
        embedding._parameters["weight"], embedding.padding_idx = own


def divide_output_layer(layer: Any, mesh: DeviceMesh, tied_weight: nn.Parameter | None) -> None:
    """Whole logits from whole hidden states; what a fused loss takes instead are the layer's input and parameters."""
    group = mesh.get_group()

    def forward(hidden_states: Tensor) -> Tensor:
        hidden_states = _SumGradientOverRanks.apply(hidden_states, group)
        bias = None if layer.bias is None else layer.bias.to_local()
        part = F.linear(hidden_states, layer.weight.to_local(), bias)
        shape = torch.empty(*part.shape[:-1], layer.weight.shape[0], device="meta")
        logits = DTensor.from_local(
            part, mesh, [Shard(part.ndim - 1)], run_check=False, shape=shape.shape, stride=shape.stride()
        )
        return logits.redistribute(placements=[Replicate()]).to_local()

    if tied_weight is None:
        _divide_parameter(layer, "weight", mesh)
    else:
        layer.weight = tied_weight
    if layer.bias is not None:
        _divide_parameter(layer, "bias", mesh)
    layer.forward = forward


def _divide_parameter(layer: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """By its first dimension; every rank has the whole of it, and keeps its part."""
    whole = layer.get_parameter(name)
    parts = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
    layer.register_parameter(name, nn.Parameter(parts, requires_grad=whole.requires_grad))


class _SumOverRanks(torch.autograd.Function):
    """The sum, in place; its gradient is the same on every rank, and each rank's own."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.mark_dirty(tensor)
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class _SumGradientOverRanks(torch.autograd.Function):
    """The tensor, which is the same on every rank; of its gradient each has a part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def _answers(backbone: PreTrainedModel, parameters: list[str]) -> dict[str, Tensor]:
    """What the model makes of tokens from all over the vocabulary: their embeddings, their logits, and gradients of a
    sum of these with respect to the parameters of those names and to what the layers get."""
    embedding: Any = backbone.get_input_embeddings()
    embedded: list[Tensor] = []

    def scaled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        # to a size of one: gradients of a fresh model's, whose embeddings are small, would outweigh all others
        embedded.extend((output, (output / output.float().square().mean().sqrt()).detach().requires_grad_()))
        return embedded[1]

    tokens = torch.linspace(0, embedding.weight.shape[0] - 1, _PROBE_TOKENS, device=backbone.device).long()[None]
    hook = embedding.register_forward_hook(scaled)
    default, tf32 = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    torch.set_default_dtype(torch.float32)  # Lightning sets another for half precision
    torch.set_float32_matmul_precision("highest")
    try:
        with evaluation_mode(backbone), torch.inference_mode(False), torch.enable_grad():
            logits = backbone(input_ids=tokens, use_cache=False).logits.float()
            weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
            trained = {name: p for name in parameters if (p := backbone.get_parameter(name)).requires_grad}
            score = (logits * weights.to(logits.device)).sum()
            inputs = {"the first layer's input": embedded[1]} | trained
            gradients = torch.autograd.grad(score, list(inputs.values()), materialize_grads=True)
    finally:
        hook.remove()
        torch.set_default_dtype(default)
        torch.set_float32_matmul_precision(tf32)
    found = {"the embedding": embedded[0], "the output": logits}
    found |= dict(zip(inputs, gradients, strict=True))
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().float().cpu() for name, t in found.items()
    }


def _compare(
    name: str, found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype, mesh: DeviceMesh
) -> None:
    """The divided model's answers with those of the whole one, and with those of the group's first rank, which are made
    of the same numbers. All ranks raise, or none."""
    flat = torch.cat([found[part].flatten() for part in expected]).to(mesh.device_type)
    dist.broadcast(flat, group=mesh.get_group(), group_src=0)
    sizes = [t.numel() for t in expected.values()]
    of_first = dict(zip(expected, flat.cpu().split(sizes), strict=True))
    limit, noise = (0.02, 1e-6) if dtype.itemsize >= 4 else (0.2, 0.02)  # a wrong gradient lacks what others have
    gradients = [t for part, t in expected.items() if part not in ("the embedding", "the output")]
    floor = noise * max(t.norm().item() for t in gradients)  # some are zero but for rounding

    def difference(part: str) -> float:
        mine, truth = found[part], expected[part]
        from_whole = (mine - truth).norm() / truth.norm().clamp(min=floor)
        from_first = (mine.flatten() - of_first[part]).norm() / mine.norm().clamp(min=torch.finfo(torch.float32).tiny)
        return torch.stack([from_whole, from_first]).nan_to_num(nan=math.inf).max().item()

    differences = {part: difference(part) for part in expected}
    worst = max(differences, key=lambda part: differences[part])
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (worst, differences[worst]))
    part, value = max(of_ranks, key=lambda found: found[1])
    if value > limit:
        raise UserError(
            f"transformers' tensor-parallel plan changes {name}: divided over ranks, {part} or its gradient differs by "
            f"{value:.1%} from that of the whole model; choose strategy=fsdp2, which shards any model"
        )
