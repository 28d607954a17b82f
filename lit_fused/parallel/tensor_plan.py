"""Read transformers' tensor-parallel plan for a model, and refuse models that it does not divide exactly.

The plan gives each layer a style: its outputs or its inputs are divided, or it is copied and its gradient summed.
"""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
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
    """Raise UserError for a model that cannot be divided over ``ranks`` exactly, or was never compared."""
    if is_distributed(model):
        meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
        sizes = {mesh["tensor_parallel"].size() for mesh in meshes if "tensor_parallel" in (mesh.mesh_dim_names or ())}
        if sizes != {ranks}:
            raise UserError("an earlier strategy divided the model over other ranks; build it, and the module, anew")
        return
    for reason in _refusals(model, ranks, training):
        raise UserError(f"{reason} choose strategy=fsdp2, which shards any model")
    model.loss.check_vocabulary_parallel()


def _refusals(model: LanguageModel, ranks: int, training: bool) -> Iterator[str]:
    """Yield why a model cannot be divided, up to another choice. What comes later expects that nothing came before."""
    backbone, name = model.transformers_model, type(model.transformers_model or model.backbone).__name__
    if backbone is None:
        yield f"tensor parallelism needs a plan of transformers, and {name} is none of its models;"
        return
    config = backbone.config.get_text_config()
    if backbone.config.is_encoder_decoder:
        yield f"{name} is an encoder-decoder, for which tensor parallelism was never compared;"
    if peft_model(model.backbone) is not None:
        yield f"PEFT's adapters are not divided by the tensor-parallel plan of {name};"
    if model.is_compiled:
        yield f"a compiled model cannot be divided; pass {name} without torch.compile, or"
    if is_deferred(backbone) and not comes_late(backbone):
        yield f"parameters of {name} are on the meta device; give them numbers before tensor parallelism, or"
    of_modules, of_parameters = planned_styles(backbone)
    unknown = {*of_modules.values()} - COLUMNS - ROWS - {COPIES} | {*of_parameters.values()}
    if unknown:
        yield f"the tensor-parallel plan of {name} has {', '.join(sorted(unknown))}, which was never compared;"
    if not any(style in COLUMNS for style in of_modules.values()):
        yield f"transformers has no tensor-parallel plan for the layers of {name};"
    heads = {"num_attention_heads": "attention heads", "num_key_value_heads": "key/value heads"}
    sizes = [(name, getattr(config, setting, None), what) for setting, what in heads.items()]
    for layer, style in of_modules.items():
        if style != COPIES:
            linear: Any = backbone.get_submodule(layer)
            size, what = (linear.out_features, "outputs") if style in COLUMNS else (linear.in_features, "inputs")
            sizes.append((f"{layer} of {name}", size, what))
    for owner, size, what in sizes:
        if isinstance(size, int) and size % ranks:
            yield f"{owner} has {size} {what}, which tensor_parallel_size={ranks} does not divide; give another, or"
    layer, embedding = output_layer(backbone), backbone.get_input_embeddings()
    if not isinstance(layer, nn.Linear) or not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        yield (
            f"tensor parallelism divides an nn.Embedding and an nn.Linear; {name} has {type(embedding).__name__} and "
            f"{type(layer).__name__};"
        )
    names_of: dict[nn.Parameter, list[str]] = {}
    for parameter_name, p in backbone.named_parameters(remove_duplicate=False):
        names_of.setdefault(p, []).append(parameter_name)
    tied = layer.weight is embedding.weight
    for p, names in names_of.items():
        if len(names) > (2 if tied and p is embedding.weight else 1):
            yield f"{name} shares a parameter between {' and '.join(names)}, which was never compared;"
    settings = [(n, v) for n, v in vars(config).items() if "drop" in n and not n.startswith("classifier")]
    settings += [(f"{n}.p", m.p) for n, m in backbone.named_modules() if isinstance(m, nn.Dropout)]
    dropout = [f"{n}={v}" for n, v in settings if isinstance(v, float) and v > 0]
    if training and dropout:
        yield (
            f"{name} has {dropout[0]}, and ranks that compute a token together would drop different numbers of it; set "
            "it to 0 in the model's configuration, or"
        )


def is_distributed(model: LanguageModel) -> bool:
    """Return whether a parameter is a DTensor."""
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
