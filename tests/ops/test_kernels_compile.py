"""The Triton kernels compile for GPUs that are not here. Triton's interpreter would run what no GPU takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

HELPERS = Path(__file__).parents[1] / "helpers"
# Bytes of shared memory that one program can have: NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability".
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


@pytest.mark.slow
@pytest.mark.timeout(620)
@pytest.mark.parametrize(
    ("capability", "ways"),
    [
        (90, ["hopper", "narrow", "logits", "invariant"]),
        *((capability, ["logits"]) for capability in (80, 89, 100, 120)),
    ],
    ids=str,
)
def test_every_kernel_compiles_fits_the_card_and_never_computes_in_float64(capability, ways, tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(HELPERS)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(HELPERS / "compile_kernels.py"), str(capability), *ways]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout)
    assert set(found["launched"]) <= set(found["compiled"])
    for name, kernels in found["compiled"].items():
        for kernel in kernels:
            assert kernel["shared"] <= SHARED_MEMORY[capability], name
            assert not kernel["float64"], name
