"""The rooms of the package: imports point downwards, and each room imports what stands in the table and no more."""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lit_fused"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "conf" not in path.relative_to(PACKAGE).parts)

# Each room, from the lowest to the highest: the rooms that it may import, and the packages.
ROOMS = {
    "ops": ("", "torch triton cut_cross_entropy liger_kernel"),  # alone, with relative imports: a folder of its own
    "filtered": ("ops", "torch triton"),
    "heads": ("ops", "torch transformers numpy bitsandbytes"),
    "losses": ("ops heads", "torch"),
    "objectives": ("ops heads losses", "torch"),
    "metrics": ("losses", "torch torchmetrics"),
    "models": ("ops heads losses", "torch transformers lightning liger_kernel huggingface_hub peft"),
    "memory": ("ops heads models", "torch transformers lightning"),
    "integrations": ("ops heads losses models memory", "torch transformers lightning"),
    "evaluation": ("ops heads losses models", "torch transformers accelerate lm_eval tqdm"),
    "parallel": ("ops heads losses metrics models", "torch transformers lightning lightning_utilities"),
    "export": ("heads models", "torch transformers"),
    "training": (
        "ops heads losses objectives metrics models memory parallel export",
        "torch transformers lightning safetensors",
    ),
    "callbacks": ("ops losses models parallel training export", "torch transformers lightning rich"),
    "pipeline": ("ops heads losses metrics models parallel", "torch transformers lightning"),
    "context": ("ops heads losses models parallel", "torch transformers"),
    "planning": (
        "ops heads losses objectives models memory integrations parallel training context",
        "torch transformers lightning lightning_utilities",
    ),
    "data": (
        "ops models",
        "torch transformers lightning numpy datasets pyarrow fsspec tokenizers",
    ),
    "app": (
        "ops heads losses objectives models evaluation parallel training callbacks data",
        "torch transformers lightning rich numpy hydra omegaconf yaml matplotlib PIL filelock wandb mlflow requests "
        "jinja2",
    ),
}
FENCED = {"filtered", "pipeline", "planning"}  # They are reached from outside: no other room imports them.
LONGEST = 400  # lines
LONGEST_KERNELS = 700
KERNELS = {"hopper_kernels.py", "filtered_kernels.py", "rows_triton.py"}


def room_of(path: Path) -> str:
    """The folder of a file in the package. A ``__main__.py`` is a program: it stands above all of them."""
    return "app" if path.name == "__main__.py" else path.relative_to(PACKAGE).parts[0]


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports anywhere, also in functions, but not for type checkers only."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            folder = path.relative_to(PACKAGE.parent).parts[: -node.level]
            assert folder[:2] == ("lit_fused", "ops"), f"{path}: an import relative to its folder, or out of ops"
            yield ".".join([*folder, *([node.module] if node.module else [])])
        elif isinstance(node, ast.ImportFrom) and [alias.name for alias in node.names] != ["__version__"]:
            yield node.module or ""
        skipped = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        nodes += node.orelse if skipped and isinstance(node, ast.If) else ast.iter_child_nodes(node)


def test_the_table_has_every_room_and_points_downwards():
    assert {room_of(path) for path in FILES if path.parent != PACKAGE} == set(ROOMS)
    order = list(ROOMS)
    for room, (below, _) in ROOMS.items():
        assert all(order.index(other) < order.index(room) for other in below.split()), room
        assert not FENCED & set(below.split()), room
    assert [room for room, (_, packages) in ROOMS.items() if {"hydra", "omegaconf"} & set(packages.split())] == ["app"]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_stands_in_the_table(room):
    rooms, packages = (set(words.split()) for words in ROOMS[room])
    wrong = []
    for path in FILES:
        if path.parent == PACKAGE or room_of(path) != room:
            continue
        for module in imports(path):
            package, _, rest = module.partition(".")
            if package == "lit_fused":
                other = rest.partition(".")[0]
                by_public_name = not other and (room == "app" or path.name == "__init__.py")
                shared = set() if room == "ops" else {"errors", "atomic", "strategy_names"}
                fits = other in rooms | shared | {room} or by_public_name
            else:
                fits = package in packages | sys.stdlib_module_names
            if not fits:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_package_itself_has_public_names_and_errors_alone():
    assert sorted(path.name for path in PACKAGE.glob("*.py")) == [
        "__init__.py",
        "__main__.py",
        "atomic.py",
        "errors.py",
        "strategy_names.py",
    ]
    for name in ("__init__.py", "errors.py", "atomic.py", "strategy_names.py"):
        others = {
            module for module in imports(PACKAGE / name) if module.partition(".")[0] not in sys.stdlib_module_names
        }
        assert others <= {"lit_fused.errors", "lit_fused.ops.user_error"}, name


def test_a_file_name_means_one_thing():
    names = Counter(path.name for path in FILES if path.name not in ("__init__.py", "__main__.py"))
    assert not {name for name, count in names.items() if count > 1}


def test_no_file_is_long():
    long = {}
    for path in FILES:
        lines = len(path.read_text().splitlines())
        if lines > (LONGEST_KERNELS if path.name in KERNELS else LONGEST):
            long[str(path.relative_to(ROOT))] = lines
    assert not long
