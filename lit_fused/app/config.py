"""Reject a wrong configuration before anything heavy is built, with every fault in one list.

Hydra accepts ``+loss.chunk_sz=1`` and a mandatory value left at ``???``. So every node that names a ``_target_`` is
compared with the signature of that target: a typo must never become a default.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from lit_fused.app.fine_tuning import default_epochs
from lit_fused.app.run_length import open_values, stopping_faults
from lit_fused.app.signatures import ANY, Keyword, Signature, read_signature, signature_of
from lit_fused.app.values import number_faults, shown, type_fault
from lit_fused.atomic import whole_checkpoint
from lit_fused.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import lightning as L

_BUILT = (
    *("module", "model", "data", "loss", "optimizer", "scheduler", "trainer", "generate", "plan"),
    *("score", "recommend"),
)
_PLAIN = (
    *("mode", "ckpt_path", "trust", "test", "prompt", "tags", "seed", "compile", "precision", "output_dir"),
    *("metric", "mask_probability", "teacher"),
)
KEYS = (*_PLAIN, *_BUILT, "callbacks", "logger")  # conf/train.yaml describes each.
# In these packages a signature in the source is the one that Python sees; a test compares them.
_WELL_READ = ("lit_fused", "lightning", "torch")
_COMPOSING, _MODULE = "lit_fused.data.compose_data", "lit_fused.data.TokenDataModule"
_OF_PARTS = {"source", "val_source", "encoding"}  # compose_data gives them to the module.
# Without trust_remote_code these ask at the terminal whether the code in a folder may run.
_ASKING = re.compile(r"transformers\.(\w+\.)*Auto\w+\.from_(config|pretrained)")
_HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}


def check_config(cfg: DictConfig, modes: Iterable[str], before_imports: Callable[[], object] = lambda: None) -> None:
    """Raise one :class:`UserError` that lists every unknown, missing and ill-fitting entry by its path.

    Signatures are read from source files, so that a mistyped option is refused before torch is imported. Targets are
    imported if nothing is wrong so far, after a call of ``before_imports``, or if a signature of a package outside
    ``_WELL_READ`` seems not to fit. ``mode=prepare`` builds the data alone.
    """
    unknown = (key for key in cfg if key not in KEYS)
    faults = [f"{key}: unknown{did_you_mean(key, KEYS)}; the top level has {', '.join(KEYS)}" for key in unknown]
    faults += [f"{key}: missing; the run needs it, see conf/train.yaml" for key in KEYS if key not in cfg]
    missing = OmegaConf.missing_keys(cfg)  # it raises an error of OmegaConf, as the next line, if ${...} leads nowhere
    content: Any = OmegaConf.to_container(cfg, resolve=not missing)
    faults += [f"{path}: has no value; give one with {path}=..." for path in sorted(missing)]
    faults += _node_faults(content)
    if not missing:
        trainer = content.get("trainer")
        if isinstance(trainer, dict):
            trainer |= open_values(trainer, default_epochs(content))
        faults += [*number_faults("", content), *_token_faults(content), *stopping_faults(content)]
    others, doubtful = [], False
    for path, node in targets(content):
        signature = _composed_signature(node) if node["_target_"] == _COMPOSING else read_signature(node["_target_"])
        found = [] if signature is None else list(_binding_faults(path, node, signature))
        if signature is not None and not missing:
            typed = [(key, signature[key].hint) for key in node if key in signature]
            faults += filter(None, (type_fault(f"{path}.{key}", node[key], hint) for key, hint in typed if hint))
        package = node["_target_"].partition(".")[0]
        if found and package in _WELL_READ:
            faults += found
        elif signature is None or package != "lit_fused":
            others.append((path, node))
            doubtful |= bool(found)
    faults += _choice_faults(cfg, modes)
    if not faults:
        before_imports()
    for path, node in others if not faults or doubtful else ():
        if cfg.mode != "prepare" or path.partition(".")[0] == "data":
            faults += _imported_faults(path, node)
    if faults:
        raise UserError("the configuration does not fit:\n" + "\n".join(f"  - {fault}" for fault in faults))


def _node_faults(content: dict[str, Any]) -> Iterator[str]:
    for key in ("output_dir", "metric", "ckpt_path", "prompt"):
        if not isinstance(content.get(key), str if key == "output_dir" else str | None):
            yield f"{key}: must be a text, got {shown(content[key])}; quote it: '{key}=\"...\"'"
    if not isinstance(content.get("test"), bool):
        yield f"test: must be true or false, got {shown(content.get('test'))}"
    tags = content.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str | int | float) and tag != "" for tag in tags):
        yield f"tags: must be a list of words, got {shown(tags)}; write 'tags=[baseline,h200]'"
    if not isinstance(content.get("seed"), int):
        yield f"seed: must be a whole number, got {shown(content.get('seed'))}"
    optional = ("teacher",) if content.get("teacher") is not None else ()
    for key in (key for key in (*_BUILT, *optional) if key in content):
        if not _is_target(content[key]):
            yield f"{key}: must name a _target_, as the files in conf/ do, got {shown(content[key])}"
    for group in ("callbacks", "logger"):
        nodes = content.get(group)
        if not isinstance(nodes, dict):
            yield f"{group}: must be named nodes, each with a _target_, got {shown(nodes)}"
        else:
            for key in (key for key, node in nodes.items() if not _is_target(node)):
                yield f"{group}.{key}: must name a _target_, got {shown(nodes[key])}; take it out with '~{group}.{key}'"


def _is_target(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get("_target_"), str)


def _token_faults(content: dict[str, Any]) -> Iterator[str]:
    """Yield the tokens, such as eos_token_id, that lie beyond the vocabulary of the same node."""
    for path, node in targets(content):
        size: Any = node.get("vocab_size")
        for key, value in node.items() if type(size) is int else ():
            beyond = [token for token in (value if isinstance(value, list) else [value]) if type(token) is int]
            if key.endswith("token_id") and max(beyond, default=0) >= size:
                yield f"{path}.{key}: must be below vocab_size={size}, got {value}"


def _choice_faults(cfg: DictConfig, modes: Iterable[str]) -> Iterator[str]:
    if cfg.get("mode") not in modes:
        yield f"mode: must be one of {', '.join(modes)}, got {cfg.get('mode')!r}{did_you_mean(cfg.get('mode'), modes)}"
    elif cfg.mode in ("validate", "test") and cfg.get("ckpt_path") is None:
        yield f"ckpt_path: mode={cfg.mode} needs a checkpoint to evaluate; give one with ckpt_path=FILE"
    elif cfg.mode == "generate" and cfg.get("prompt") is None:
        yield "prompt: mode=generate needs a text to continue; give one with 'prompt=\"...\"'"
    if isinstance(cfg.get("ckpt_path"), str):
        try:
            whole_checkpoint(cfg.ckpt_path)
        except UserError as fault:
            yield f"ckpt_path: {fault}"


def check_one_device(cfg: DictConfig, otherwise: str) -> None:
    """Refuse several devices in a mode that runs on one; ``otherwise`` says what to do then."""
    chosen = cfg.trainer
    if chosen.strategy != "auto" or chosen.devices not in (1, "1", "auto") or chosen.num_nodes != 1:
        raise UserError(
            f"mode={cfg.mode} runs on one device: leave strategy, trainer.devices and trainer.num_nodes out. "
            + otherwise
        )


def check_precision(precision: str, trainer: "L.Trainer") -> None:
    """Refuse the one precision that Lightning replaces by another."""
    if precision == "16-mixed" and trainer.precision != precision:
        raise UserError(
            f"precision=16-mixed does not exist on this device: Lightning would run {trainer.precision} in its place; "
            f"choose precision={trainer.precision} if that is what you want, or precision=32-true"
        )


def leave_mps(cfg: DictConfig) -> None:
    """Choose the CPU, with one warning, where ``trainer.accelerator=auto`` would be MPS, which has no float64."""
    from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
    from lightning.pytorch.utilities import rank_zero_warn

    is_left_open = cfg.trainer.get("accelerator") == "auto" and not CUDAAccelerator.is_available()
    if is_left_open and MPSAccelerator.is_available():
        cfg.trainer.accelerator = "cpu"
        rank_zero_warn("MPS has no float64, which exact token counts need: this run uses the CPU")


def targets(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every mapping in ``node`` that names a ``_target_``, with its path."""
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield path, node
        for key, value in node.items():
            yield from targets(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from targets(value, f"{path}[{index}]")


def refuse_code_of_folders(cfg: DictConfig) -> None:
    """Give each of transformers' auto classes in a configuration ``trust_remote_code=False``, if it has no value."""
    for path, node in [*targets(OmegaConf.to_container(cfg, resolve=False))]:
        if _ASKING.fullmatch(node["_target_"]) and "trust_remote_code" not in node:
            OmegaConf.update(cfg, f"{path}.trust_remote_code", False, force_add=True)


def _binding_faults(path: str, node: dict[str, Any], signature: Signature) -> Iterator[str]:
    """Yield the keys of a node that its target does not take, and those that it needs."""
    name, given = node["_target_"], {key: None for key in node if key not in _HYDRA_KEYS}
    if ANY in signature:
        return
    if not node.get("_partial_") and not node.get("_args_"):
        missing = sorted(key for key, keyword in signature.items() if keyword.required and key not in given)
        yield from (f"{path}.{key}: missing; {name} needs it" for key in missing)
    for key in given:
        if key not in signature:
            meant, known = did_you_mean(key, signature), ", ".join(sorted(signature))
            yield f"{path}.{key}: unknown{meant}; {name} takes {known}"


def _composed_signature(node: dict[str, Any]) -> Signature | None:
    """Return the joint signature of the parts to which ``compose_data`` hands options; None if one is unreadable."""
    encode = node.get("encode") or {}
    parts = [node.get("read") or {}, *([encode] if "_target_" in encode else encode.values())]
    found = [read_signature(name) for name in (_MODULE, *(part.get("_target_", "") for part in parts))]
    module, *known = signatures = [signature for signature in found if signature is not None]
    if len(signatures) < len(found):
        return None
    of_module = {name: Keyword(False, keyword.hint) for name, keyword in module.items() if name not in _OF_PARTS}
    joint = of_module | {
        "read": Keyword(True),
        **dict.fromkeys(("encode", "format", "path", "val_path"), Keyword(False)),
    }
    for part in known:
        joint |= part
    if (hint := joint["path"].hint) and not joint["val_path"].hint:
        joint["val_path"] = Keyword(False, hint._replace(optional=True))
    several = [name for name in ("path", "val_path") if isinstance(node.get(name), dict)]  # by their names
    return joint | {name: Keyword(joint[name].required) for name in several}


def _imported_faults(path: str, node: dict[str, Any]) -> Iterator[str]:
    from transformers import PreTrainedConfig

    name = node["_target_"]
    try:
        target = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        missing = getattr(error, "name", None)
        extra = f"; pip install 'lit-fused[{missing}]'" if missing in ("peft", "bitsandbytes") else ""
        yield f"{path}._target_: cannot import {name} ({error}){extra}"
        return
    if inspect.isclass(target) and issubclass(target, PreTrainedConfig):
        fields = {field.name for field in dataclasses.fields(target)}  # its signature has **kwargs
        # Every encoder-decoder reads decoder_start_token_id, also where it is no field (T5).
        fields |= {"decoder_start_token_id"} if getattr(target, "is_encoder_decoder", False) else set()
        yield from _binding_faults(path, node, dict.fromkeys(fields, Keyword(False)))
    else:
        with suppress(ValueError):  # a target in C (datetime.timedelta) refuses unknown options itself
            yield from _binding_faults(path, node, signature_of(target))
