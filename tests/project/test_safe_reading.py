"""Show that no call of the package runs what it finds in a file: whatever is read may be a stranger's.

The source is walked, so that a call that is written tomorrow cannot forget what those of today say.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

PACKAGE = Path(__file__).parents[2] / "lit_fused"
# Classes whose from_pretrained reads JSON alone, and the package's own, which passes trust_remote_code=False on.
PLAIN = {"PreTrainedTokenizerFast", "GenerationConfig", "lit_fused"}
# Readers of formats that may hold a program, and what executes text: none is called.
PROGRAMS = {
    "pickle": "load loads Unpickler",
    "yaml": "load load_all safe_load safe_load_all full_load full_load_all unsafe_load unsafe_load_all",
    "OmegaConf": "load",
    "joblib": "load",
    "marshal": "load loads",
    "shelve": "open",
    "shutil": "unpack_archive",
    "tarfile": "open TarFile",
    "zipfile": "ZipFile Path",
    "pd": "read_pickle",
    "hub": "load",
    "jit": "load",
    "runpy": "run_path run_module",
    "builtins": "eval exec",
}
FORBIDDEN = {(module, name) for module, names in PROGRAMS.items() for name in names.split()}
# These import a name that somebody typed (a loss by its dotted path, a configuration's targets), or the package's own.
IMPORTS = {"__init__.py", "strategy_names.py", "ops/__init__.py", "ops/backends.py"}
IMPORTS |= {"app/config.py", "app/commands/__init__.py"}


def calls(tree: ast.AST) -> Iterator[tuple[str, str, ast.Call]]:
    """Yield each call as the name of what it is called on, its own name, and its node; a function that is given to
    ``partial`` counts as called with what ``partial`` has."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            functions = [node.func, *(node.args[:1] if ast.unparse(node.func) == "partial" else [])]
            for function in functions:
                if isinstance(function, ast.Attribute):
                    yield ast.unparse(function.value).split("(")[0].rpartition(".")[2], function.attr, node
                elif isinstance(function, ast.Name):
                    yield "builtins", function.id, node


def faults(source: str, file: str = "new.py") -> list[str]:
    """Return the calls of a source that could run what they read."""
    tree, found = ast.parse(source), []
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for owner, name, node in calls(tree):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in ("from_pretrained", "from_config") and owner not in PLAIN | {"builtins"}:
            is_safe = given.get("trust_remote_code") == "False"
        elif (owner, name) == ("torch", "load"):  # "weights_only" may be in the options that the function passes on.
            around = [ast.unparse(f) for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
            is_safe = given.get("weights_only", "") != "False" and any("weights_only" in text for text in around)
        elif (owner, name) == ("np", "load"):
            is_safe = "allow_pickle" not in given
        elif name in ("import_module", "resolve_name", "__import__"):
            is_safe = file in IMPORTS
        else:
            is_safe = (owner, name) not in FORBIDDEN and given.get("trust_remote_code", "False") == "False"
        if not is_safe:
            found.append(f"{file}:{node.lineno}: {owner}.{name}")
    return found


def test_no_call_of_the_package_runs_what_it_reads():
    found = [fault for path in sorted(PACKAGE.rglob("*.py")) for fault in faults(path.read_text(), _name(path))]
    assert not found, f"say trust_remote_code=False, weights_only=True, or read another format: {found}"


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize(
    "line",
    [
        "AutoModel.from_pretrained(folder)",
        "AutoConfig.from_pretrained(folder, trust_remote_code=True)",
        "partial(auto_class(config).from_config, config)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.safe_load(path.read_text())",
        "OmegaConf.load(path)",
        "tarfile.open(path)",
        "import_module(name)",
        "load_dataset(path, trust_remote_code=True)",
        "eval(text)",
    ],
)
def test_the_walk_finds_a_call_that_forgets(line):
    assert len(faults(f"def read(path):\n    return {line}\n")) == 1


def test_no_choice_of_the_configuration_trusts_code():
    for path in (PACKAGE / "conf").rglob("*.yaml"):
        content = yaml.safe_load(path.read_text()) or {}
        assert "trust_remote_code: true" not in path.read_text().lower(), path
        for node in _nodes(content):
            if str(node.get("_target_")).startswith("transformers.Auto"):
                assert node.get("trust_remote_code") is False, path


def _nodes(content: object) -> Iterator[dict[str, object]]:
    if isinstance(content, dict):
        yield content
    for value in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from _nodes(value)
