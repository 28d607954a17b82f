"""Read transformers' tensor-parallel plan for a model, and refuse models that it does not divide exactly.

The plan gives each layer a style: its outputs or its inputs are divided, or it is copied and its gradient summed.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.heads import output_layer, peft_model
from lit_fused.models.language_model import LanguageModel
from lit_fused.weights import comes_late, is_deferred

COLUMNS = {"colwise", "colwise_gather_output", "colwise_rep"}
ROWS = {"rowwise", "rowwise_rep", "rowwise_split_input"}
COPIES = "replicated_with_grad_allreduce"


def check_plan(model: LanguageModel, ranks: int, *, training: bool) -> None:
    """Refuse a model that cannot be divided over ``ranks`` exactly, or whose division was never compared.

    Raises:
        UserError: names the class, and what to choose instead.
    """
    if is_distributed(model):
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
    of_modules, of_parameters = planned_styles(backbone)
    unknown = {*of_modules.values()} - COLUMNS - ROWS - {COPIES} | {*of_parameters.values()}
    if unknown:
        raise UserError(
            f"the tensor-parallel plan of {name} has {', '.join(sorted(unknown))}, which was never compared; "
            f"{otherwise}"
        )
    if not any(style in COLUMNS for style in of_modules.values()):
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
    """Compare the batches of ranks that compute every token together. Waits for the batch and for the other ranks.

    Raises:
        UserError: the batches differ.
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
    """Let ranks that compute a token together draw the same random numbers; restore each rank's own afterwards."""
    seed = torch.randint(2**62, (), device="cpu").to(device)
    dist.broadcast(seed, group=mesh.get_group(), group_src=0)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        yield


def is_distributed(model: LanguageModel) -> bool:
    """Return whether a parameter is a DTensor."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def _tensor_parallel_size(p: DTensor) -> int | None:
    mesh = p.device_mesh
    return mesh["tensor_parallel"].size() if "tensor_parallel" in (mesh.mesh_dim_names or ()) else None


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


def _check_sizes(backbone: PreTrainedModel, ranks: int) -> None:
    config, name = backbone.config.get_text_config(), type(backbone).__name__
    for attribute, what in (("num_attention_heads", "attention heads"), ("num_key_value_heads", "key/value heads")):
        heads = getattr(config, attribute, None)
        if isinstance(heads, int) and heads % ranks:
            raise UserError(
                f"{name} has {heads} {what}, which tensor_parallel_size={ranks} does not divide; choose one that does"
            )
    for layer, style in planned_styles(backbone)[0].items():
        if style == COPIES:
            continue
        linear: Any = backbone.get_submodule(layer)
        size, what = (linear.out_features, "outputs") if style in COLUMNS else (linear.in_features, "inputs")
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
    """Return the name and value of a probability of dropout that is not zero; None if all are."""
    settings = vars(backbone.config.get_text_config()).items()
    of_model = [(n, v) for n, v in settings if "drop" in n and not n.startswith("classifier")]
    found = [f"{n}={v}" for n, v in of_model if isinstance(v, float) and v > 0]
    found += [f"{n}.p={m.p}" for n, m in backbone.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
    return found[0] if found else None
