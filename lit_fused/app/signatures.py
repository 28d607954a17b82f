"""Read the signatures that a configuration's ``_target_`` names, from source files and without importing them.

A mistyped option can then be refused before torch is loaded. The source is followed as Python would: through
``from ... import``, also below ``if TYPE_CHECKING``, and from a class to the base that defines ``__init__``. A target
that this cannot follow (compiled code, names made at run time) has no signature here and has to be imported.
"""

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Signature:
    """The keywords that a callable takes; ``takes_any`` if it has ``**kwargs``."""

    names: frozenset[str]
    required: frozenset[str]
    takes_any: bool = False


def signature_of(target: Callable[..., Any]) -> Signature:
    """Return the signature of an imported object. Raises ``ValueError`` for some that are written in C."""
    parameters = inspect.signature(target).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return Signature(
        frozenset(p.name for p in named),
        frozenset(p.name for p in named if p.default is p.empty),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def read_signature(name: str) -> Signature | None:
    """Return the signature of a dotted name, read from source files; None where they do not tell."""
    package, *rest = name.split(".")
    while len(rest) > 1 and _source(f"{package}.{rest[0]}") is not None:
        package, rest = f"{package}.{rest[0]}", rest[1:]
    found = _definition(package, rest[0]) if len(rest) == 1 else None
    if found is None or isinstance(found, str):
        return None
    module, node = found
    return _of_class(module, node) if isinstance(node, ast.ClassDef) else _of_function(node)


def imported(name: str) -> Any:
    """Return the object at a dotted path, as Hydra finds it: modules as far as they go, then attributes."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:index]))
        found = getattr(found, part)
    return found


class _Source(NamedTuple):
    statements: list[ast.stmt]
    folders: list[str] | None  # of a package: where its modules are


@cache
def _source(module: str) -> _Source | None:
    """Parse a module; None if it has no source file. Nothing is imported: not even the packages above it."""
    parent = module.rpartition(".")[0]
    above = _source(parent) if parent else None
    try:
        if parent:
            spec = PathFinder.find_spec(module, above.folders) if above is not None and above.folders else None
        else:
            spec = find_spec(module)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return None
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    except (ImportError, ValueError, SyntaxError):  # importing it will say what is wrong
        return None
    return _Source(list(_statements(tree.body)), spec.submodule_search_locations)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, with those inside its ``if`` and ``try``."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _definition(module: str, name: str) -> tuple[str, ast.ClassDef | ast.FunctionDef] | str | None:
    """Return what a module binds to a name: a definition and the module it stands in, or the name of a module."""
    source = _source(module)
    for node in [] if source is None else reversed(source.statements):  # the last one counts, as with @overload
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                if (alias.asname or alias.name) != name:
                    continue
                if isinstance(node, ast.Import):
                    return alias.name
                assert source is not None
                found_in = _absolute(module, source, node)
                return _definition(found_in, alias.name) or f"{found_in}.{alias.name}"
    return None


def _absolute(module: str, source: _Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    above = parts[: len(parts) - node.level + (source.folders is not None)]
    return ".".join([*above, node.module] if node.module else above)


def _of_function(node: ast.FunctionDef, bound: int = 0) -> Signature:
    """Return a function's signature without the first ``bound`` parameters."""
    arguments = node.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    required = positional[bound : len(positional) - len(arguments.defaults)]
    keyword = [a.arg for a in arguments.kwonlyargs]
    required += [name for name, default in zip(keyword, arguments.kw_defaults, strict=True) if default is None]
    return Signature(frozenset([*positional[bound:], *keyword]), frozenset(required), arguments.kwarg is not None)


def _of_class(module: str, node: ast.ClassDef) -> Signature | None:
    """Return the signature of a class by its own or its bases' ``__init__``, or by the fields of a dataclass."""
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    decorators = {ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in node.decorator_list}
    if node.keywords or "__new__" in methods or decorators - {"dataclass"}:
        return None
    if "__init__" in methods:
        return _of_function(methods["__init__"], bound=1)
    inherited = Signature(frozenset(), frozenset()) if not node.bases else _of_bases(module, node.bases)
    return _with_fields(node, inherited) if decorators and inherited is not None else inherited


def _of_bases(module: str, bases: list[ast.expr]) -> Signature | None:
    """Return the signature of a single base class, written ``Name`` or ``package.Name``."""
    base = bases[0]
    if len(bases) > 1:  # the order of several depends on their own bases
        return None
    if isinstance(base, ast.Name):
        found = _definition(module, base.id)
        if isinstance(found, tuple) and isinstance(found[1], ast.ClassDef):
            return _of_class(found[0], found[1])
    elif isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
        package = _definition(module, base.value.id)
        return read_signature(f"{package}.{base.attr}") if isinstance(package, str) else None
    return None


def _with_fields(node: ast.ClassDef, inherited: Signature) -> Signature:
    """Add a dataclass's own fields."""
    names, required = set(inherited.names), set(inherited.required)
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or "ClassVar" in ast.unparse(item.annotation):
            continue
        name, given = ast.unparse(item.target), item.value
        options = {}
        if isinstance(given, ast.Call) and ast.unparse(given.func).endswith("field"):
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in given.keywords}
            given = options.get("default") or options.get("default_factory")
        if options.get("init") == "False":
            continue
        names.add(name)
        (required.discard if given else required.add)(name)
    return Signature(frozenset(names), frozenset(required))
