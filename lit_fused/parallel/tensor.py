"""Tensor parallelism: the ranks of a group divide each matrix of the model and compute every token together.

The layers follow transformers' own plan for the model, which gives each a style: its outputs or its inputs are divided,
or it is copied and its gradient summed. This file divides input embedding and output layer, tied or not, by entries of
the vocabulary, into parts that need not be equal. The output layer's *input* is whole on every rank: the fused loss
takes it with this rank's rows of the weight. Other callers (generation, the standard loss) get whole logits.

A plan can be wrong without an error, if ranks have copies of a parameter but only parts of its gradient. So the divided
model's logits of eight tokens, and their gradients, have to equal those of the whole model. If weights come late, a
small twin of the model is compared instead.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from lit_fused.errors import UserError, explained
from lit_fused.heads import evaluation_mode, output_layer, peft_model
from lit_fused.models.language_model import LanguageModel
from lit_fused.models.load import is_deferred
from lit_fused.ops.backends import backend_name
from lit_fused.ops.vocabulary_parallel import VocabularyShard
from lit_fused.parallel.collectives import objects_of_ranks, send_weights
from lit_fused.parallel.twin import small_twin

COLUMNS = {"colwise", "colwise_gather_output", "colwise_rep"}
ROWS = {"rowwise", "rowwise_rep", "rowwise_split_input"}
COPIES = "replicated_with_grad_allreduce"
_OTHERWISE = "choose strategy=fsdp2, which shards any model"


def check_plan(model: LanguageModel, ranks: int, *, training: bool) -> None:
    """Raise UserError for a model that cannot be divided over ``ranks`` exactly, or was never tested."""
    if is_distributed(model):
        return
    for reason in _refusals(model, ranks, training):
        raise UserError(f"{reason} {_OTHERWISE}")
    check_divided_loss(model, "choose loss=chunked or loss=standard, or strategy=fsdp2")


def check_divided_loss(model: LanguageModel, otherwise: str) -> None:
    """Raise UserError, which ends with what to choose, if a loss cannot take an output layer that ranks divide."""
    if not model.loss.divides_vocabulary:
        backend: Any = getattr(model.loss, "backend", type(model.loss))
        what = "has no vocabulary-parallel form, for an output layer that ranks divide"
        raise UserError(f"loss={backend_name(backend)} {what}; {otherwise}")


def _refusals(model: LanguageModel, ranks: int, training: bool) -> Iterator[str]:
    """Yield why a model cannot be divided, up to another choice. What comes later expects that nothing came before."""
    backbone, name = model.transformers_model, model.name
    if backbone is None or peft_model(model.backbone) is not None or model.is_compiled:
        yield f"tensor parallelism divides a model of transformers, without PEFT's adapters and torch.compile; {name}:"
        return
    of_modules, of_parameters = planned_styles(backbone)
    unknown = {*of_modules.values()} - COLUMNS - ROWS - {COPIES} | {*of_parameters.values()}
    if unknown or not COLUMNS & {*of_modules.values()}:
        yield f"transformers' tensor-parallel plan of {name} has {', '.join(sorted(unknown)) or 'no layers'};"
    config = backbone.config.get_text_config()
    sizes = [(part, getattr(config, part, None)) for part in ("num_attention_heads", "num_key_value_heads")]
    for layer, style in of_modules.items():
        if style != COPIES:
            linear: Any = backbone.get_submodule(layer)
            sizes.append((layer, linear.out_features if style in COLUMNS else linear.in_features))
    for part, size in sizes:
        if isinstance(size, int) and size % ranks:  # Ranks with parts of unequal size would wait for each other.
            yield f"tensor_parallel_size={ranks} does not divide {part}={size} of {name}; give another, or"
    layer, embedding = output_layer(backbone), backbone.get_input_embeddings()
    if not isinstance(layer, nn.Linear) or not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        kinds = f"{type(embedding).__name__} and {type(layer).__name__}"
        yield f"tensor parallelism divides an nn.Embedding and an nn.Linear; {name} has {kinds};"
    settings = [(n, v) for n, v in vars(config).items() if "drop" in n and not n.startswith("classifier")]
    settings += [(f"{n}.p", m.p) for n, m in backbone.named_modules() if isinstance(m, nn.Dropout)]
    dropout = [f"{n}={v}" for n, v in settings if isinstance(v, float) and v > 0]
    if training and dropout:
        yield (
            f"{name} has {dropout[0]}, and ranks that compute a token together would drop different numbers of it; set "
            "it to 0 in the model's configuration, or"
        )


def is_distributed(model: LanguageModel) -> bool:
    return any(isinstance(p, DTensor) for p in model.parameters())


def planned_styles(backbone: PreTrainedModel) -> tuple[dict[str, str], dict[str, str]]:
    """Return the plan's styles by names of modules, and its styles by names of single parameters."""
    plan = backbone.tp_plan or {}
    own = (output_layer(backbone), backbone.get_input_embeddings())
    modules = [name for name, module in backbone.named_modules() if module not in own]
    parameters = [name for name, _ in backbone.named_parameters()]

    def planned(names: list[str]) -> dict[str, str]:
        generic = {name: re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names}
        return {name: plan[generic[name]] for name in names if generic[name] in plan}

    return planned(modules), planned(parameters)


def divide(model: LanguageModel, mesh: DeviceMesh, device: torch.device) -> None:
    """Divide a model that :func:`check_plan` has passed over a mesh of one dimension, in place, on ``device``.

    UserError if the divided model, or of one without weights its small twin, is not the whole one.
    """
    backbone: Any = model.transformers_model
    name, is_late = type(backbone).__name__, is_deferred(backbone)
    tried: Any = small_twin(backbone, 2, device) if is_late else backbone
    if is_late:
        tried.tp_plan = backbone.tp_plan  # The user may have changed the plan.
    else:
        send_weights(model, device)
    compared = _copied(tried)
    what = f"{name} cannot be compared with its parts: it does not run with eight tokens on {device}"
    with explained(what, f"load it with attn_implementation='sdpa', or {_OTHERWISE}"):
        expected = _answers(tried, compared)
    _divide_layers(tried, mesh)
    tried.to(device)
    what = f"transformers' tensor-parallel plan does not fit {name}: divided over ranks, it does not run"
    with explained(what, _OTHERWISE):  # where the model's code needs what the plan divides
        shares = _is_exact_with_shared_inputs(name, tried, compared, expected, mesh)
    if is_late:
        _divide_layers(backbone, mesh)
        if shares:
            _share_inputs(backbone, mesh)


def _is_exact_with_shared_inputs(
    name: str, divided: PreTrainedModel, compared: list[str], expected: dict[str, Tensor], mesh: DeviceMesh
) -> bool:
    """Raise UserError unless a divided model has the whole one's answers; return whether its layers share inputs."""
    hooks = _share_inputs(divided, mesh)
    try:
        _compare(name, _answers(divided, compared), expected, divided.dtype)
        return True
    except Exception:
        # A layer that uses its input for more than its matrices mixes plain and distributed tensors, and torch's errors
        # for that are of many kinds. Whatever is wrong without shared inputs as well is raised below.
        for hook in hooks:
            hook.remove()
    _compare(name, _answers(divided, compared), expected, divided.dtype)
    return False


def _copied(backbone: PreTrainedModel) -> list[str]:
    """Return the names of the parameters that every rank has whole."""
    embedding, layer = backbone.get_input_embeddings(), output_layer(backbone)
    divided = {f"{name}.weight" for name, style in planned_styles(backbone)[0].items() if style != COPIES}
    divided |= {n for n, p in backbone.named_parameters() if p is embedding.weight or p is layer.weight}
    return [n for n, _ in backbone.named_parameters() if n not in divided]


def _divide_layers(backbone: PreTrainedModel, mesh: DeviceMesh) -> None:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES  # type: ignore[attr-defined]

    embedding: Any = backbone.get_input_embeddings()
    output: Any = output_layer(backbone)
    tied = output.weight is embedding.weight
    for name, style in planned_styles(backbone)[0].items():
        layer = backbone.get_submodule(name)
        if style == COPIES:
            _sum_gradients(layer, mesh.get_group())
            continue
        for parameter, _ in list(layer.named_parameters(recurse=False)):
            ALL_PARALLEL_STYLES[style].shard_param(layer, parameter, mesh)
        ALL_PARALLEL_STYLES[style].install_forward(layer, mesh)
    _divide_embedding(embedding, mesh)
    divide_output_layer(output, mesh, embedding.weight if tied else None)


def _share_inputs(backbone: PreTrainedModel, mesh: DeviceMesh) -> list[RemovableHandle]:
    """Give attention and feed-forward layers their input as a distributed tensor, which their divided matrices take as
    it is: its gradient is summed over the ranks once, and not once for each matrix; under autocast in the dtype that
    the matrices take it in, which is half as much to send as float32."""

    def share(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        given = args[0] if args else kwargs.get("hidden_states")
        if torch.is_grad_enabled() and isinstance(given, Tensor) and not isinstance(given, DTensor):
            device = given.device.type
            if given.dtype == torch.float32 and torch.is_autocast_enabled(device):
                given = given.to(torch.get_autocast_dtype(device))
            same = DTensor.from_local(given, mesh, [Replicate()], run_check=False)
            return ((same, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": same})
        return args, kwargs

    styles = planned_styles(backbone)[0]
    matrices = Counter(name.rpartition(".")[0] for name, style in styles.items() if style in COLUMNS)
    layers = [backbone.get_submodule(name) for name, number in matrices.items() if number > 1]
    return [layer.register_forward_pre_hook(share, with_kwargs=True) for layer in layers]


def _sum_gradients(layer: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradients of a layer that every rank has a copy of and applies to a part of the hidden states.

    The sum is of each backward's gradient, not of the accumulated one. FSDP replaces parameters, so each forward looks
    them up.
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
    """Let each rank look up its own entries, and sum the results over ranks."""
    own_forward: Callable[[Tensor], Tensor] = embedding.forward

    def forward(input_ids: Tensor) -> Tensor:
        shard = VocabularyShard.of(embedding.weight)
        embedded = shard.look_up(embedding, own_forward, embedding.weight.to_local(), input_ids)
        # The gradient is the same on every rank and passes unchanged.
        summed = DTensor.from_local(embedded, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
        return summed.to_local()

    divide_parameter(embedding, "weight", mesh)
    embedding.forward = forward


def divide_output_layer(layer: Any, mesh: DeviceMesh, tied_weight: nn.Parameter | None) -> None:
    """Divide an output layer, whose forward still returns whole logits; a fused loss takes its input and parameters."""

    def forward(hidden_states: Tensor) -> Tensor:
        # They are the same on every rank, and of their gradient each rank has a part: it is summed.
        same = DTensor.from_local(hidden_states, mesh, [Replicate()], run_check=False)
        return F.linear(same, layer.weight, layer.bias).full_tensor()  # type: ignore[attr-defined]

    if tied_weight is None:
        divide_parameter(layer, "weight", mesh)
    else:
        layer.weight = tied_weight
    if layer.bias is not None:
        divide_parameter(layer, "bias", mesh)
    layer.forward = forward


def divide_parameter(layer: nn.Module, name: str, mesh: DeviceMesh) -> None:
    whole = layer.get_parameter(name)
    parts = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
    layer.register_parameter(name, nn.Parameter(parts, requires_grad=whole.requires_grad))


def _answers(backbone: PreTrainedModel, parameters: list[str]) -> dict[str, Tensor]:
    """Run the model on tokens from all over the vocabulary; return on the CPU their embeddings, their logits, and the
    gradients of a weighted sum of the logits with respect to the named parameters and to the first layer's input."""
    embedding: Any = backbone.get_input_embeddings()
    embedded: list[Tensor] = []

    def scaled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        # Embeddings get a size of one: those of a fresh model are small, and their gradients would outweigh all others.
        embedded.extend((output, (output / output.float().square().mean().sqrt()).detach().requires_grad_()))
        return embedded[1]

    tokens = torch.linspace(0, embedding.weight.shape[0] - 1, 8, device=backbone.device).long()[None]
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
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().float().cpu() for n, t in found.items()}


def _compare(name: str, found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Raise UserError on all ranks if answers differ on one from those of the whole model."""
    limit, noise = (0.02, 1e-6) if dtype.itemsize >= 4 else (0.2, 0.02)  # a wrong gradient lacks whole terms
    gradients = [t for part, t in expected.items() if part not in ("the embedding", "the output")]
    floor = noise * max(t.norm().item() for t in gradients)  # some gradients are zero but for rounding

    def difference(part: str) -> float:
        truth = expected[part]
        return ((found[part] - truth).norm() / truth.norm().clamp(min=floor)).nan_to_num(nan=math.inf).item()

    worst = max((difference(part), part) for part in expected)
    value, part = max(objects_of_ranks(worst))
    if value > limit:
        raise UserError(
            f"transformers' tensor-parallel plan changes {name}: divided over ranks, {part} or its gradient differs by "
            f"{value:.1%} from that of the whole model; {_OTHERWISE}"
        )
