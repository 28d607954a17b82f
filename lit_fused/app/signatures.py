"""Read the signatures that a configuration's ``_target_`` names, from source files and without importing them.

A mistyped option can then be refused before torch is loaded. The source is followed through ``from ... import``, also
below ``if TYPE_CHECKING``, and from a class to the base that defines ``__init__``. A target that this cannot follow
(compiled code, names made at run time) has to be imported.
"""

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any, NamedTuple


class Hint(NamedTuple):
    """The annotation of a parameter, the module whose names it is written in, and whether the default is None."""

    annotation: ast.expr
    module: str
    optional: bool


@dataclass(frozen=True)
class Keyword:
    """A keyword that a callable takes, and what the source says of it."""

    required: bool
    hint: Hint | None = field(default=None, compare=False)


ANY = "**"  # It stands for **kwargs in a signature.
Signature = dict[str, Keyword]


def signature_of(target: Callable[..., Any]) -> Signature:
    """Return the signature of an imported object. Raises ``ValueError`` for some that are written in C."""
    parameters = [p for p in inspect.signature(target).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    named = {p.name: Keyword(p.default is p.empty) for p in parameters if p.kind is not p.VAR_KEYWORD}
    return named if len(named) == len(parameters) else {**named, ANY: Keyword(False)}


@cache
def read_signature(name: str) -> Signature | None:
    """Return the signature of a dotted name, read from source files; None where they do not tell."""
    package, *rest = name.split(".")
    while len(rest) > 1 and _source(f"{package}.{rest[0]}") is not None:
        package, rest = f"{package}.{rest[0]}", rest[1:]
    found = definition(package, rest[0]) if len(rest) == 1 else None
    if found is None or isinstance(found, str):
        return None
    module, node = found
    return _of_class(module, node) if isinstance(node, ast.ClassDef) else _of_function(module, node)


class _Source(NamedTuple):
    package: str  # Relative imports of the module begin with it.
    statements: list[ast.stmt]
    folders: list[str] | None  # A package's modules are here.


@cache
def _source(module: str) -> _Source | None:
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
    folders = spec.submodule_search_locations
    return _Source(parent if folders is None else module, list(_statements(tree.body)), folders)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def definition(module: str, name: str) -> tuple[str, ast.ClassDef | ast.FunctionDef] | str | None:
    """Return what a module binds to a name: a definition and the module it stands in, or the name of a module."""
    source = _source(module)
    for node in [] if source is None else reversed(source.statements):  # the last one counts, as with @overload
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        imported = node.names if isinstance(node, ast.ImportFrom | ast.Import) else []
        alias = next((alias for alias in imported if (alias.asname or alias.name) == name), None)
        if alias is not None and isinstance(node, ast.Import):
            return alias.name
        if alias is not None and isinstance(node, ast.ImportFrom) and source is not None:
            found_in = resolve_name("." * node.level + (node.module or ""), source.package)
            return definition(found_in, alias.name) or f"{found_in}.{alias.name}"
    return None


def _of_function(module: str, node: ast.FunctionDef, bound: int = 0) -> Signature:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = [None] * (len(positional) - len(arguments.defaults))
    pairs = [*zip(positional, [*missing, *arguments.defaults], strict=True)][bound:]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    named = {argument.arg: _keyword(module, argument.annotation, default) for argument, default in pairs}
    return named if arguments.kwarg is None else {**named, ANY: Keyword(False)}


def _keyword(module: str, annotation: ast.expr | None, default: ast.expr | None) -> Keyword:
    optional = isinstance(default, ast.Constant) and default.value is None
    return Keyword(default is None, annotation and Hint(annotation, module, optional))


def _of_class(module: str, node: ast.ClassDef) -> Signature | None:
    """Return the signature of a class by its own or its only base's ``__init__``, or by the fields of a dataclass."""
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    decorators = {ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in node.decorator_list}
    if node.keywords or "__new__" in methods or decorators - {"dataclass"}:
        return None
    if "__init__" in methods:
        return _of_function(module, methods["__init__"], bound=1)
    if len(node.bases) > 1:  # their order depends on their own bases
        return None
    inherited: Signature | None = {}
    if node.bases:
        *package, name = ast.unparse(node.bases[0]).split(".")
        found = definition(module, package[0] if package else name)
        if package:
            found = definition(".".join([found, *package[1:]]), name) if isinstance(found, str) else None
        found_in, base = found if isinstance(found, tuple) else (module, None)
        inherited = _of_class(found_in, base) if isinstance(base, ast.ClassDef) else None
    annotated = [item for item in node.body if isinstance(item, ast.AnnAssign)] if decorators else []
    fields = [field for field in annotated if "ClassVar" not in ast.unparse(field.annotation)]
    if inherited is None or any(isinstance(field.value, ast.Call) for field in fields):  # such as field(init=False)
        return None
    return inherited | {ast.unparse(field.target): _keyword(module, field.annotation, field.value) for field in fields}
