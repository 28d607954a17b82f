"""Private names and patches of other packages, each with its reason: they break with those packages' next release.

Tried with torch 2.13, lightning 2.6.6 and transformers 5.24, and on GPUs with torch 2.11 and transformers 5.17. A name
that is not in the list fails the test, and so does one that is listed and gone: take its line out.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lit_fused"
OTHERS = ("torch.", "torchmetrics.", "lightning.", "transformers.", "lm_eval.")
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
PUBLIC = {"_asdict", "_fields", "_replace", "_exit", "_target_"}  # documented, of named tuples, os and Hydra

# A name, and why no public one serves.
LISTED = {
    # heads, integrations and models
    "_attn_implementation": "transformers shows a model's attention by no other name",
    "_compiled_call_impl": "nn.Module.compile cannot be taken back, nor asked for, by a public name",
    "_orig_mod": "the module inside torch.compile's wrapper",
    "_dynamo": "optimize_ddp, and the error of a compiler that fails",
    # callbacks
    "_broadcast_sigterm_tensor": "Lightning's question to all ranks before each batch, which every device waits for",
    # evaluation
    "_loglikelihood_tokens": "where lm_eval's TemplateLM wants a model to score tokens: the method is abstract",
    # ops
    "_C": "where torch keeps the question below",
    "_are_functorch_transforms_active": "torch.func runs a backward as if for a second derivative, and says so nowhere",
    "_assert_async": "a check of numbers on a GPU that no host waits for",
    # planning
    "_engine_run_backward": "backward with a mode for torch's functions on, which loss.backward() takes away",
    "_python_dispatch": "where torch documents TorchDispatchMode",
    "_subclasses": "FakeTensor: tensors without bytes",
    # parallel, pipeline and training
    "_backward_hooks": "whether a project has hooks on parameters, which see sums over tokens",
    "_post_accumulate_grad_hooks": "the same",
    "_data_fetcher": "the iterator of training batches, which a resumed run makes anew after its random numbers",
    "_foreach_mul_": "one launch for all gradients",
    "_init_group": "between it and Adam's update, parameters become the parts that a rank has; no hook is there",
    "_modules": "a stage leaves out children of its model",
}


@cache
def private_names_of(kind: type) -> frozenset[str]:
    """Return the private methods of a class, and the private names that its methods use."""
    functions = {name: getattr(value, "fget", getattr(value, "__func__", value)) for name, value in vars(kind).items()}
    used = {name for f in functions.values() if inspect.isfunction(f) for name in f.__code__.co_names}
    return frozenset(name for name in used | functions.keys() if PRIVATE.fullmatch(name))


def inherited_by(path: Path) -> dict[str, set[str]]:
    """Return the private names that each class of a file gets from bases in other packages."""
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    return {
        kind.__name__: set().union(*(private_names_of(b) for b in kind.__mro__ if b.__module__.startswith(OTHERS)))
        for kind in vars(importlib.import_module(name)).values()
        if inspect.isclass(kind) and kind.__module__ == name
    }


def names_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the names in a file that may be private, each "defined" in it, "used", or "inherited" from others."""
    inherited_names = inherited_by(path)

    def walk(node: ast.AST, inherited: set[str]) -> Iterator[tuple[str, str]]:
        match node:
            case ast.ClassDef(name=name):
                inherited = inherited_names.get(name, set())
                yield name, "defined"
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, "inherited" if name in inherited else "defined"
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name, "defined"
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=context):
                kind = "defined" if isinstance(context, ast.Store) else "used"
                yield name, "inherited" if name in inherited else kind
            case ast.Attribute(attr=name):
                yield name, "used"
            case ast.ImportFrom(module=str(module), names=names) if not module.startswith("lit_fused"):
                yield from ((part, "inherited") for part in (*module.split("."), *(alias.name for alias in names)))
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                yield name, "used"
            case ast.Subscript(value=ast.Call(func=ast.Name(id="vars")), slice=ast.Constant(value=str(name))):
                yield name, "used"
            case _:
                pass
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inherited)

    yield from walk(ast.parse(path.read_text()), set())


def private_names_of_others() -> dict[str, set[str]]:
    """Return each private name of another package, with the files that use it."""
    places: dict[tuple[str, str], set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name, kind in names_of(path) if path.name != "__main__.py" else ():
            if PRIVATE.fullmatch(name) and name not in PUBLIC:
                places.setdefault((name, kind), set()).add(str(path.relative_to(PACKAGE)))
    found: dict[str, set[str]] = {}
    for (name, kind), files in places.items():
        if kind == "inherited" or (kind == "used" and (name, "defined") not in places):
            found[name] = found.get(name, set()) | files
    return found


def test_each_private_name_of_another_package_is_listed_with_its_reason():
    found = private_names_of_others()
    new = {name: sorted(files) for name, files in found.items() if name not in LISTED}
    assert not new, f"use a public name, or list the reason: {new}"
    gone = sorted(LISTED.keys() - found.keys())
    assert not gone, f"take these out of LISTED, they are gone: {gone}"
