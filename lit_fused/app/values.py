"""Check the values of a configuration, before torch is imported: their types against the annotations of what takes
them, and their ranges against a table of what this project and Lightning's trainer take.

What neither tells is refused by the object that is built, and :mod:`lit_fused.app.faults` says it in a sentence.
"""

import ast
import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from lit_fused.app.signatures import Hint, definition

_BATCHES = "a whole number of batches, 1 or more, or a share up to 1.0"


def _is_whole(x: Any, least: float, most: float = math.inf) -> bool:
    return least <= x <= most and x == int(x)


def _are_batches(x: Any) -> bool:
    return x > 0 and (x == int(x) or (isinstance(x, float) and x < 1))


# Each range, in words, has a function and the settings in it, by patterns of their paths. The first that fits counts.
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "a whole number from 0 to 4294967295": (lambda x: _is_whole(x, 0, 2**32 - 1), "seed model*.seed"),
    "a whole number from 1 to 134217728": (lambda x: _is_whole(x, 1, 2**27), "data.b*_size data.num_*_batches"),
    "-1 for all, or 1 to 1024": (lambda x: x == -1 or 0 <= x <= 1024, "trainer.devices"),
    _BATCHES: (_are_batches, "trainer.val_check_interval trainer.limit_train_batches"),
    f"0 for none, {_BATCHES}": (lambda x: x == 0 or _are_batches(x), "trainer.limit_*_batches trainer.overfit_batches"),
    "one such as 8.0 or 9.0": (lambda x: 5 <= x < 20, "plan.compute_capability"),
    "above 0 and at most 1": (lambda x: 0 < x <= 1, "generate.top_p"),
    "from 0 to 1": (lambda x: 0 <= x <= 1, "scheduler.*_fraction scheduler.min_lr_ratio loss.label_smoothing"),
    "a whole number, 1 or more": (
        lambda x: _is_whole(x, 1),
        "trainer.num_nodes trainer.accumulate_grad_batches trainer.check_val_every_n_epoch "
        "trainer.strategy.*_parallel_size trainer.strategy.microbatches model*.config.vocab_size "
        "model*.config.num_*layers model*.config.num_*heads model*.config.*head_dim model*.config.hidden_size "
        "model*.config.intermediate_size model*.config.max_position_embeddings model*.config.sliding_window "
        "model*.config.d_* model*.peft_config.r model*.vocab_size model*.pad_to_multiple_of "
        "generate.max_new_tokens callbacks.*.max_new_tokens loss.chunk_size score.top_k recommend.k "
        "recommend.batch_size",
    ),
    "0 or more and below 1": (
        lambda x: 0 <= x < 1,
        "optimizer.betas optimizer.momentum model*.config.*dropout* model*.peft_config.lora_dropout "
        "loss.impl.filter_eps callbacks.*.decay",
    ),
    "above 0": (
        lambda x: x > 0,
        "plan.* model*.config.*softcapping model*.config.rope_* model*.peft_config.lora_alpha "
        "loss.logits_budget_mib score.temperature",
    ),
    "0 or more": (
        lambda x: x >= 0,
        "trainer.gradient_clip_val optimizer.lr optimizer.eps optimizer.weight_decay "
        "model*.config.*_eps model*.config.initializer_* loss.z_loss generate.temperature callbacks.*.temperature",
    ),
    "a whole number, 0 or more, or -1 for no limit": (
        lambda x: _is_whole(x, -1),
        "trainer.max_steps trainer.max_epochs trainer.num_sanity_val_steps callbacks.*.save_top_k",
    ),
    "a whole number, 0 or more": (
        lambda x: _is_whole(x, 0),
        "*.seed trainer.min_* trainer.log_every_n_steps trainer.reload_dataloaders_every_n_epochs scheduler.num_* "
        "model*.config.[be]os_token_id callbacks.*.every_n_* module.check_every_n_steps",
    ),
}


def number_faults(path: str, value: Any) -> Iterator[str]:
    """Yield the faults of the numbers in a value: not finite, beyond 64 bits, or outside of their setting's range."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from number_faults(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, list):
        for inner in value:
            yield from number_faults(path, inner)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{path}: must be a finite number, got {value}"
    elif isinstance(value, int) and abs(value) >= 2**63:
        yield f"{path}: must be a number of at most 64 bits, got {shown(value)}"
    elif isinstance(value, int | float) and not isinstance(value, bool):
        fitting = (words for words, (_, paths) in RANGES.items() if any(fnmatchcase(path, p) for p in paths.split()))
        words = next(fitting, None)
        if words is not None and not RANGES[words][0](value):
            yield f"{path}: must be {words}, got {value}"


def type_fault(path: str, value: Any, hint: Hint) -> str | None:
    """Return what is wrong with the type of a value, as far as the annotation tells; None if nothing is."""
    kinds = [*_kinds(hint.annotation, hint.module), *[_PLAIN["None"]] * hint.optional]
    if _fits(value, kinds):
        return None
    words = dict.fromkeys(words for words, _ in kinds if words)
    return f"{path}: must be {' or '.join(words) or 'built by a _target_'}, got {shown(value)}"


_Kind = tuple[str, Callable[[Any], bool]]  # words, and whether what Python makes of YAML is of this kind
_ANY: _Kind = ("", lambda x: True)
_LISTS = ("list", "List", "tuple", "Tuple", "Sequence", "Iterable", "set", "Set")
_PLAIN: dict[str, _Kind] = {
    "Any": _ANY,
    "None": ("null", lambda x: x is None),
    "int": ("a whole number", lambda x: x.is_integer() if isinstance(x, float) else type(x) is int),
    "float": ("a number", lambda x: type(x) in (int, float)),
    "str": ("a text", lambda x: isinstance(x, str)),
    "bool": ("true or false", lambda x: isinstance(x, bool)),
    **dict.fromkeys(("Path", "_PATH"), ("a path", lambda x: isinstance(x, str))),
    **dict.fromkeys(_LISTS, ("a list", lambda x: isinstance(x, list))),
    **dict.fromkeys(("dict", "Dict", "Mapping"), ("a mapping", lambda x: isinstance(x, dict))),
}


def _fits(value: Any, kinds: list[_Kind]) -> bool:
    return (isinstance(value, dict) and "_target_" in value) or any(is_of_kind(value) for _, is_of_kind in kinds)


def _kinds(annotation: ast.expr, module: str) -> list[_Kind]:
    """Return the alternatives of an annotation. Any value is of a kind that cannot be told."""
    match annotation:
        case ast.Constant(value=str() as text):
            return _kinds(ast.parse(text, mode="eval").body, module)
        case ast.BinOp(left=left, right=right):
            return [*_kinds(left, module), *_kinds(right, module)]
        case ast.Subscript(value=ast.Name(id=name), slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if name == "Literal":
                known = [part.value for part in parts if isinstance(part, ast.Constant)]
                return [(ast.unparse(annotation).removeprefix("Literal"), lambda x: x in known)]
            of_parts = [_kinds(part, module) for part in parts]
            if name in ("Optional", "Union"):
                return [kind for kinds in of_parts for kind in kinds] + [_PLAIN["None"]] * (name == "Optional")
            if name not in _LISTS:
                return [_PLAIN.get(name, _ANY)]
            if name in ("tuple", "Tuple") and not isinstance(parts[-1], ast.Constant):
                size = len(parts)
                return [
                    (f"a list of {size}", lambda x: type(x) is list and len(x) == size and all(map(_fits, x, of_parts)))
                ]
            return [("a list", lambda x: isinstance(x, list) and all(_fits(item, of_parts[0]) for item in x))]
        case ast.Constant() | ast.Name():
            name = ast.unparse(annotation)
            found = None if name in _PLAIN else definition(module, name)
            is_class = isinstance(found, tuple) and isinstance(found[1], ast.ClassDef)  # no plain value is its object
            return [_PLAIN.get(name, ("", lambda x: not is_class))]
    return [_ANY]


def shown(value: Any) -> str:
    """Return a value as a sentence quotes it: shortened where it is long."""
    if isinstance(value, int) and abs(value) >= 10**40:  # longer ones Python does not write
        return "one of more than 40 digits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
