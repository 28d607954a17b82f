"""The kernel of the Hub, as the package kernels loads it from a folder, computes what lit_fused.ops does."""

import ast
import importlib
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import build_kernel
import pytest
import torch
from torch import Tensor

import lit_fused.ops


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_kernel.build(tmp_path_factory.mktemp("kernel") / "repository")


def results(ops: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    """Return the values and gradients of each operator."""
    loss, _ = ops.linear_cross_entropy(hidden, weight, targets)
    scores = ops.token_scores(hidden, weight, targets)
    distilled, _ = ops.linear_distillation(
        hidden, weight, targets, ops.TeacherHead(hidden.detach() + 1, weight.detach())
    )
    whole = loss + distilled + scores.entropy.sum()
    items = ops.top_items(hidden, weight, 3)
    return [loss, distilled, scores.log_prob, items.items, items.scores, *torch.autograd.grad(whole, (hidden, weight))]


@pytest.mark.skipif(
    find_spec("kernels") is None, reason="needs kernels (pip install kernels); .ci/check_wheel.sh has it"
)
def test_the_kernel_of_the_hub_computes_what_the_library_does(repository: Path) -> None:
    kernels = importlib.import_module("kernels")
    kernel = kernels.get_local_kernel(repository)
    assert Path(kernel.__file__) == repository / "build" / "torch-universal" / "__init__.py"
    operands = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True), torch.randint(9, (6,))
    for found, expected in zip(results(kernel, *operands), results(lit_fused.ops, *operands), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert getattr(torch.ops, kernel.__name__).linear_cross_entropy.default


def test_the_files_of_the_kernel_load_with_torch_and_triton_alone(repository: Path) -> None:
    for file in (repository / "build").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:  # not in functions: other backends import what they need there
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert {name.partition(".")[0] for name in modules} <= sys.stdlib_module_names | {"torch", "triton"}, file


def test_the_card_has_the_licence_and_its_example_runs(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (repository / "README.md").read_text()
    assert "\nlicense: apache-2.0\n" in text
    metadata = json.loads((repository / "build" / "torch-universal" / "metadata.json").read_text())
    assert metadata["license"] == "Apache-2.0"
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    code = code.replace(build_kernel.LOAD, "import lit_fused.ops as ops\n")
    assert "kernel" not in code
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    assert namespace["weight"].grad.isfinite().all()
    assert namespace["items"].items.shape == (8, 10)
