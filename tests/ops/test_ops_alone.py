"""The folder ``ops`` runs alone: it needs torch, and nothing of the package around it."""

import shutil
import subprocess
import sys
from pathlib import Path

import lit_fused.ops

PROGRAM = """
import sys
from importlib.machinery import PathFinder

import torch

class OnlyTorch(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = {"lit_fused", "transformers", "lightning", "cut_cross_entropy", "liger_kernel", "triton"}
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = OnlyTorch
import ops
from ops import backends

hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
targets = torch.randint(9, (6,))
loss, _ = ops.linear_cross_entropy(hidden, weight, targets)
truth = torch.nn.functional.cross_entropy(hidden @ weight.T, targets)
torch.testing.assert_close(loss, truth)
for found, expected in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (loss, truth)), strict=True):
    torch.testing.assert_close(found, expected)
assert ops.token_scores(hidden, weight, targets).log_prob.shape == (6,)
assert backends.backend_by_name("liger").requirement(torch.device("cpu"))
assert not {"lit_fused", "triton"} & sys.modules.keys()
"""


def test_a_copy_of_the_folder_computes_a_loss_and_its_gradients_with_torch_alone(tmp_path):
    folder = Path(lit_fused.ops.__path__[0])
    shutil.copytree(folder, tmp_path / "ops", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env={"PATH": ""}, text=True, capture_output=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
