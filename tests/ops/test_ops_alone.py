"""The folder ``ops`` runs alone, as a copy and as the wheel lit-fused-ops: it needs torch, and nothing around it."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import build_ops_wheel
import pytest
import torch

import lit_fused.ops

PROGRAM = """
import importlib
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

_, folder, name = sys.argv
sys.path.insert(0, folder)

class OnlyTorch(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = {"lit_fused", "transformers", "lightning", "cut_cross_entropy", "liger_kernel", "triton"}
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

sys.meta_path[:] = [BuiltinImporter, FrozenImporter, OnlyTorch]
import torch

ops, backends = importlib.import_module(name), importlib.import_module(name + ".backends")
assert ops.__file__.startswith(folder)
exact = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((6, 4), (9, 4))]
targets = torch.randint(9, (6,))
truth = torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, targets)
expected = [truth, *torch.autograd.grad(truth, exact)]

hidden, weight = (x.detach().float().requires_grad_() for x in exact)
loss, _ = ops.linear_cross_entropy(hidden, weight, targets)
for ours, true in zip([loss, *torch.autograd.grad(loss, (hidden, weight))], expected, strict=True):
    torch.testing.assert_close(ours, true.float())
assert ops.token_scores(hidden, weight, targets).log_prob.shape == (6,)
assert ops.linear_distillation and ops.top_items
assert backends.backend_by_name("liger").requirement(torch.device("cpu"))
assert not {"lit_fused", "triton"} & sys.modules.keys()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_ops_wheel.build(tmp_path_factory.mktemp("dist"), "--no-build-isolation")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that has the wheel alone."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", folder, wheel], check=True)
    return folder


def check_alone(folder: Path, name: str) -> None:
    command = [sys.executable, "-I", "-c", PROGRAM, str(folder), name]
    done = subprocess.run(command, cwd=folder, env={"PATH": ""}, text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_a_copy_of_the_folder_computes_a_loss_and_its_gradients_with_torch_alone(tmp_path: Path) -> None:
    folder = Path(lit_fused.ops.__path__[0])
    shutil.copytree(folder, tmp_path / "ops", ignore=shutil.ignore_patterns("__pycache__"))
    check_alone(tmp_path, "ops")


def test_the_wheel_of_the_operators_is_small_and_computes_a_loss_with_torch_alone(wheel: Path, installed: Path) -> None:
    assert wheel.stat().st_size < 500_000
    check_alone(installed, "lit_fused_ops")


def test_both_distributions_compute_in_one_process(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(installed)
    alone = importlib.import_module("lit_fused_ops")
    hidden, weight = torch.randn(6, 4), torch.randn(9, 4)
    targets = torch.randint(9, (6,))
    expected, _ = lit_fused.ops.linear_cross_entropy(hidden, weight, targets)
    for ops in (alone, lit_fused.ops):
        compiled = torch.compile(ops.linear_cross_entropy, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(hidden, weight, targets)[0], expected, rtol=0, atol=0)
    for namespace in (torch.ops.lit_fused, torch.ops.lit_fused_ops):
        assert namespace.linear_cross_entropy.default
