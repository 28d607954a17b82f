"""Check the values of a configuration, before torch is imported: their types against the annotations of what takes
them, and their ranges against a table of what this project and Lightning's trainer take.

What neither tells is refused by the object that is built, and :mod:`lit_fused.app.explaining` says it in a sentence.
"""

import ast
import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from lit_fused.app.signatures import Hint, definition

_Range = tuple[str, Callable[[Any], bool]]
_COUNT: _Range = ("a whole number, 1 or more", lambda x: x >= 1 and x == int(x))
_SIZE: _Range = ("a whole number from 1 to 134217728", lambda x: 1 <= x <= 2**27 and x == int(x))
_INDEX: _Range = ("a whole number, 0 or more", lambda x: x >= 0 and x == int(x))
_NOT_NEGATIVE: _Range = ("0 or more", lambda x: x >= 0)
_POSITIVE: _Range = ("above 0", lambda x: x > 0)
_SHARE: _Range = ("from 0 to 1", lambda x: 0 <= x <= 1)
_BELOW_1: _Range = ("0 or more and below 1", lambda x: 0 <= x < 1)
_SEED: _Range = ("a whole number from 0 to 4294967295", lambda x: 0 <= x < 2**32 and x == int(x))
_OR_ENDLESS: _Range = ("a whole number, 0 or more, or -1 for no limit", lambda x: x >= -1 and x == int(x))
_BATCHES: _Range = (
    "a whole number of batches, 1 or more, or a share up to 1.0",
    lambda x: x > 0 and (x == int(x) or (isinstance(x, float) and x < 1)),
)
_BATCHES_OR_NONE: _Range = (f"0 for none, {_BATCHES[0]}", lambda x: x == 0 or _BATCHES[1](x))

# The table has the numbers that a setting takes, by a pattern of its path; the first pattern that fits counts.
RANGES: dict[str, _Range] = {
    "seed": _SEED,
    "model*.seed": _SEED,
    "*.seed": _INDEX,
    "data.b*_size": _SIZE,
    "data.num_*_batches": _SIZE,
    "trainer.max_steps": _OR_ENDLESS,
    "trainer.max_epochs": _OR_ENDLESS,
    "trainer.min_*": _INDEX,
    "trainer.num_nodes": _COUNT,
    "trainer.devices": ("-1 for all, or 1 to 1024", lambda x: x == -1 or 0 <= x <= 1024),
    "trainer.accumulate_grad_batches": _COUNT,
    "trainer.gradient_clip_val": _NOT_NEGATIVE,
    "trainer.check_val_every_n_epoch": _COUNT,
    "trainer.val_check_interval": _BATCHES,
    "trainer.limit_train_batches": _BATCHES,
    "trainer.limit_*_batches": _BATCHES_OR_NONE,
    "trainer.overfit_batches": _BATCHES_OR_NONE,
    "trainer.num_sanity_val_steps": _OR_ENDLESS,
    "trainer.log_every_n_steps": _INDEX,
    "trainer.reload_dataloaders_every_n_epochs": _INDEX,
    "trainer.strategy.*_parallel_size": _COUNT,
    "trainer.strategy.microbatches": _COUNT,
    "optimizer.lr": _NOT_NEGATIVE,
    "optimizer.betas": _BELOW_1,
    "optimizer.eps": _NOT_NEGATIVE,
    "optimizer.weight_decay": _NOT_NEGATIVE,
    "optimizer.momentum": _NOT_NEGATIVE,
    "scheduler.warmup_fraction": _SHARE,
    "scheduler.num_*": _INDEX,
    "model*.config.[be]os_token_id": _INDEX,
    "model*.config.num_*layers": _COUNT,
    "model*.config.num_*heads": _COUNT,
    "model*.config.*head_dim": _COUNT,
    "model*.config.vocab_size": _COUNT,
    "model*.config.hidden_size": _COUNT,
    "model*.config.intermediate_size": _COUNT,
    "model*.config.max_position_embeddings": _COUNT,
    "model*.config.sliding_window": _COUNT,
    "model*.config.d_*": _COUNT,
    "model*.config.*softcapping": _POSITIVE,
    "model*.config.*dropout*": _BELOW_1,
    "model*.config.*_eps": _NOT_NEGATIVE,
    "model*.config.initializer_*": _NOT_NEGATIVE,
    "model*.config.rope_*": _POSITIVE,
    "model*.peft_config.r": _COUNT,
    "model*.peft_config.lora_alpha": _POSITIVE,
    "model*.peft_config.lora_dropout": _BELOW_1,
    "model*.vocab_size": _COUNT,
    "model*.pad_to_multiple_of": _COUNT,
    "loss.label_smoothing": _SHARE,
    "loss.z_loss": _NOT_NEGATIVE,
    "loss.logits_budget_mib": _POSITIVE,
    "loss.chunk_size": _COUNT,
    "loss.filter_eps": _BELOW_1,
    "plan.*": _POSITIVE,
    "fit_batch.*": _POSITIVE,
    "generate.max_new_tokens": _COUNT,
    "generate.temperature": _NOT_NEGATIVE,
    "generate.top_p": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "callbacks.*.max_new_tokens": _COUNT,
    "callbacks.*.temperature": _NOT_NEGATIVE,
    "callbacks.*.decay": _BELOW_1,
    "callbacks.*.every_n_*": _INDEX,
    "callbacks.*.save_top_k": _OR_ENDLESS,
}


def number_faults(path: str, value: Any) -> Iterator[str]:
    """Yield what is wrong with the numbers in a value: one that is not finite, has no place in 64 bits, or is out of
    the range of its setting."""
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
        words, fits = next((rule for pattern, rule in RANGES.items() if fnmatchcase(path, pattern)), ("", None))
        if fits is not None and not fits(value):
            yield f"{path}: must be {words}, got {value}"


def type_fault(path: str, value: Any, hint: Hint) -> str | None:
    """Return what is wrong with the type of a value, as far as the annotation tells; None if nothing is."""
    if (value is None and hint.optional) or _fits(value, hint.annotation, hint.module):
        return None
    words = dict.fromkeys([*_words(hint.annotation), *["null"] * hint.optional])
    return f"{path}: must be {' or '.join(words) or 'built by a _target_'}, got {shown(value)}"


_PLAIN = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,), "Path": (str,), "_PATH": (str,)}
_LISTS = ("list", "List", "tuple", "Tuple", "Sequence", "Iterable", "set", "Set")
_MAPPINGS = ("dict", "Dict", "Mapping")


def _fits(value: Any, annotation: ast.expr, module: str) -> bool:
    """Return whether a plain value fits; True for what cannot be told, such as an object that is yet to be built."""
    if isinstance(value, dict) and "_target_" in value:
        return True
    match annotation:
        case ast.Constant(value=str() as text):
            return _fits(value, ast.parse(text, mode="eval").body, module)
        case ast.Constant(value=None):
            return value is None
        case ast.BinOp(left=left, right=right):
            return _fits(value, left, module) or _fits(value, right, module)
        case ast.Subscript(value=ast.Name(id=name), slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if name in ("Optional", "Union"):
                return (name == "Optional" and value is None) or any(_fits(value, part, module) for part in parts)
            if name == "Literal":
                return any(isinstance(part, ast.Constant) and part.value == value for part in parts)
            if name in _LISTS:
                fixed = name in ("tuple", "Tuple") and not isinstance(parts[-1], ast.Constant)
                kinds = parts if fixed else parts[:1] * len(value if isinstance(value, list) else [])
                return (
                    isinstance(value, list)
                    and len(kinds) == len(value)
                    and all(_fits(item, kind, module) for item, kind in zip(value, kinds, strict=True))
                )
            return isinstance(value, dict) if name in _MAPPINGS else True
        case ast.Name(id=name) if name in _PLAIN:
            if name == "int" and isinstance(value, float):
                return value.is_integer()
            return isinstance(value, _PLAIN[name]) and (name == "bool" or not isinstance(value, bool))
        case ast.Name(id=name) if name in (*_LISTS, *_MAPPINGS):
            return isinstance(value, list if name in _LISTS else dict)
        case ast.Name(id=name):  # a class, of which a plain value is no object; or a name for something else
            found = definition(module, name)
            return not (isinstance(found, tuple) and isinstance(found[1], ast.ClassDef))
    return True


_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "Path": "a path",
    "_PATH": "a path",
}
_WORDS |= dict.fromkeys(_LISTS, "a list") | dict.fromkeys(_MAPPINGS, "a mapping")


def _words(annotation: ast.expr) -> list[str]:
    match annotation:
        case ast.Constant(value=str() as text):
            return _words(ast.parse(text, mode="eval").body)
        case ast.Constant(value=None):
            return ["null"]
        case ast.BinOp(left=left, right=right):
            return [*_words(left), *_words(right)]
        case ast.Subscript(value=ast.Name(id="Optional" | "Union" as name), slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return [word for part in parts for word in _words(part)] + ["null"] * (name == "Optional")
        case ast.Subscript(value=ast.Name(id="tuple" | "Tuple"), slice=ast.Tuple(elts=parts)):
            return [f"a list of {len(parts)}"]
        case ast.Subscript(value=ast.Name(id=name)) | ast.Name(id=name) if name in _WORDS:
            return [_WORDS[name]]
        case ast.Name(id="Literal") | ast.Subscript(value=ast.Name(id="Literal")):
            return [ast.unparse(annotation).removeprefix("Literal")]
    return []


def shown(value: Any) -> str:
    """Return a value as a sentence quotes it: shortened where it is long."""
    if isinstance(value, int) and abs(value) >= 10**40:  # longer ones Python does not write
        return "one of more than 40 digits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
