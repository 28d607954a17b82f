"""Decide what a run's own configuration may do: anyone can have written it, and Hydra would call whatever it names.

Classes are compared by name with a written list; nothing is imported. Arguments that could run code or write outside of
the run's folder are refused by theirs. What the command line says is the user's own and is not checked.
"""

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from lit_fused.errors import UserError

_NAMES = {
    "lit_fused": "[A-Z]\\w* from_config from_pretrained",
    "lit_fused.app": "[A-Z]\\w* command_line.command_line mlflow_logger tensorboard_logger wandb_logger",
    "lit_fused.callbacks": "[A-Z]\\w* progress_bar",
    "lit_fused.data": "[A-Z]\\w* compose_data load_records",
    "lit_fused.filtered": "Filtered linear_cross_entropy",
    "lit_fused.losses": "[A-Z]\\w*",
    "lit_fused.objectives": "[A-Z]\\w*",
    "lit_fused.training": "[A-Z]\\w* pretrained_items \\w*_with_warmup warmup_stable_decay",
    "lit_fused.parallel": "FSDP2Strategy ReplicatedStrategy model_parallel",
    "lit_fused.pipeline": "PipelineStrategy",
    "lit_fused.models.load": "from_config from_pretrained",
    "bitsandbytes.optim": "AdamW8bit",
    "datetime": "timedelta",
    "hydra.utils": "get_class get_method get_object",  # their path is compared, too
    "lightning.pytorch": "Trainer",
    "lightning.pytorch.callbacks": "DeviceStatsMonitor EarlyStopping GradientAccumulationScheduler LearningRateMonitor "
    "ModelCheckpoint ModelSummary RichModelSummary RichProgressBar StochasticWeightAveraging TQDMProgressBar Timer",
    "lightning.pytorch.loggers": "CSVLogger TensorBoardLogger",
    "lightning.pytorch.profilers": "SimpleProfiler AdvancedProfiler",
    "lightning.pytorch.strategies": "DDPStrategy ModelParallelStrategy SingleDeviceStrategy",
    "peft": "get_peft_model [A-Z]\\w*Config",
    "torch": "(b?float|int|uint)\\d+",
    "torch.nn": "[A-Z]\\w*",
    "torch.optim": "[A-Z]\\w*",
    "torch.optim.lr_scheduler": "[A-Z]\\w*",
    "transformers": "[A-Z]\\w*Config get_\\w*schedule\\w* AutoTokenizer\\.from_pretrained "
    "AutoModelFor(CausalLM|MaskedLM|Seq2SeqLM)\\.from_(config|pretrained) "
    "[A-Z]\\w*For(CausalLM|ConditionalGeneration|MaskedLM)(\\.from_pretrained)?",
}
_TRUSTED = re.compile(
    "|".join(f"{re.escape(package)}\\.({'|'.join(names.split())})" for package, names in _NAMES.items())
)
# Arguments, and the values that they may have; see also ``_WRITTEN``. An interpolation could become any value.
_NOTHING, _PLAIN_NAME, _NO_PATH = "None|False|", r"[\w-]*", r"(?s)(?!.*(\.\.|\$))[^/].*|"
_HARMLESS = {
    **dict.fromkeys(("trust_remote_code", "code_revision", "auto_map", "auto_mapping", "proxies", "_args_"), _NOTHING),
    **dict.fromkeys(("use_kernels", "kernel_config", "megatron_core", "megatron_config"), _NOTHING),
    **dict.fromkeys(("offload_folder", "token", "use_auth_token", "tracking_uri", "model_registry"), _NOTHING),
    **dict.fromkeys(("attn_implementation", "_attn_implementation"), _PLAIN_NAME),  # not a/b
    **dict.fromkeys(("experts_implementation", "_experts_implementation"), _PLAIN_NAME),
    **dict.fromkeys(("filename", "name", "version", "sub_dir", "adapter_name"), _NO_PATH),
    "weights_only": "True|None",
}
_SET_NAME = re.compile(r"data\.(val_)?path\.(?!_)[\w-]+")
_WRITTEN = {"dirpath", "save_dir", "folder", "default_root_dir", "root_dir", "log_dir"}
_RESOLVERS = {"oc.select", "oc.env", "oc.dict.values", "oc.dict.keys", "hydra", "now", "rate"}


def check_trusted(content: Any, run: Path, allowed: Collection[str], overridden: Collection[str] = ()) -> None:
    """Raise UserError if the configuration of the run in a folder names what is not on the list, or has a dangerous
    argument. ``content`` is not resolved, ``allowed`` are names that the user trusts besides, and ``overridden`` paths
    of entries that the command line replaces."""
    file = run / ".hydra" / "config.yaml"
    for path, node, key, value in _entries(content):
        if any(path == other or path.startswith(f"{other}.") for other in overridden):
            continue
        if _SET_NAME.fullmatch(path):  # the name of a data set is no argument, whatever it is
            key = ""
        is_name = key == "_target_" or (key == "path" and "hydra.utils." in str(node.get("_target_")))
        is_name |= (
            key == "impl" and isinstance(value, str) and bool(re.search(r"[.$]", value))
        )  # a loss of the user's own
        if is_name and value not in allowed and not (isinstance(value, str) and _TRUSTED.fullmatch(value)):
            raise UserError(
                f"{file} names {value} ({path}), which is not among the classes that a run's configuration may name, "
                f"because it could run any code; if you trust it, add trust={value} to the command line (of python -m "
                f"lit_fused.export: --trust {value})"
            )
        text, fault = str(value), ""
        if (key in _HARMLESS and not re.fullmatch(_HARMLESS[key], text)) or (isinstance(value, str) and _odd(value)):
            fault = "could run code or send data elsewhere"
        elif key in _WRITTEN and value and not _inside(text, run):
            fault = "would be written outside of the run's folder"
        if fault:
            shown = " ".join((text if len(text) < 80 else f"{text[:80]}...").split())
            raise UserError(f"{file} has {path}={shown}, which {fault}; if you trust it, give {path}=... yourself")


def _entries(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Yield every entry of the mappings in ``node``, as its path, the mapping, key and value."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(node, dict):
            yield here, node, str(key), value
        elif isinstance(value, str):
            yield here, {}, "", value
        yield from _entries(value, here)


def _odd(value: str) -> bool:
    """Return whether an interpolation could make a mapping, and with it a ``_target_`` that no list was asked for."""
    named = set(re.findall(r"\$\{\s*([\w.]+)\s*:", value))
    return "${" in value and (
        bool(named - _RESOLVERS) or "{" in value.replace("${", "") or bool(re.search(r"\$\{[^:}]*\$\{", value))
    )


def _inside(text: str, run: Path) -> bool:
    relative = text.removeprefix("${output_dir}")
    if relative != text:
        return "$" not in relative and ".." not in Path(relative).parts and relative[:1] in ("", "/")
    place = Path(os.path.normpath(text))
    return text == "mlruns" or ("$" not in text and place.is_absolute() and place.is_relative_to(run.absolute()))
