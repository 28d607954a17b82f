"""Imports of the library do not load the application, and public names are loaded on first use."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import lit_fused

HEAVY = (
    *("torch", "triton", "lightning", "transformers", "torchmetrics", "hydra", "omegaconf", "datasets", "pyarrow"),
    *("matplotlib", "tokenizers", "cut_cross_entropy", "liger_kernel", "peft", "rich", "lm_eval"),
)


def loaded_by(*steps: str) -> list[set[str]]:
    """Those of ``HEAVY`` that a fresh Python has loaded after each of the steps, which it runs one after another."""
    report = f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    program = "\n".join(["import json, sys", *(f"{step}\n{report}" for step in steps)])
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


def test_each_import_loads_what_it_is_made_of_and_never_the_application():
    """Lightning loads torchmetrics, which loads matplotlib; transformers' tokenizers load another."""
    nothing, primitive, loss, theirs, ours = loaded_by(
        "import lit_fused",
        "from lit_fused.ops import linear_cross_entropy",
        "from lit_fused import LanguageModel, LinearCrossEntropyLoss",
        "import lightning, rich; from transformers import AutoTokenizer",
        "from lit_fused import FusedCausalLMModule, PeakMemoryMonitor, from_config",
    )
    assert nothing == set()
    assert primitive <= {"torch", "triton"}
    assert not loss & {"lightning", "hydra", "omegaconf", "datasets", "pyarrow", "matplotlib", "cut_cross_entropy"}
    assert ours == theirs
    assert not ours & {"hydra", "omegaconf", "datasets", "pyarrow", "cut_cross_entropy"}


def test_every_public_name_is_loaded_on_first_use_and_known_to_editors():
    source = ast.parse(Path(lit_fused.__file__).read_text())
    ifs = [node for node in source.body if isinstance(node, ast.If)]
    [for_editors] = [node for node in ifs if ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for node in for_editors.body if isinstance(node, ast.ImportFrom)]
    assert sorted(alias.name for node in imports for alias in node.names) == sorted(lit_fused.__all__)
    assert set(lit_fused.__all__) <= set(dir(lit_fused))
    for node in imports:
        for alias in node.names:
            assert getattr(lit_fused, alias.name) is getattr(importlib.import_module(str(node.module)), alias.name)
    assert lit_fused.metrics.__name__ == "lit_fused.metrics", "a room is loaded on first use as well"
    with pytest.raises(AttributeError, match="module 'lit_fused' has no attribute 'FusedLModule'"):
        _ = lit_fused.FusedLModule
    with pytest.raises(ImportError, match="cannot import name 'FusedLModule'"):
        exec("from lit_fused import FusedLModule")
