"""Build lit_fused/ops as a kernel of the Hub, which the package kernels loads by name without an installation.

    python tools/build_kernel.py  # writes dist/kernel, which docs/hub_kernel.md publishes

The kernel is Python and Triton, so that one variant, build/torch-universal, serves every version of torch and device.
"""

import base64
import hashlib
import json
import shutil
from pathlib import Path

from build_ops_wheel import PROJECT, ROOT, card, copy_ops

VERSION = 1  # a branch of the repository, v1; the next one begins with an interface that is incompatible
HEADER = """\
---
library_name: kernels
license: apache-2.0
tags:
- kernels
---
"""
LOAD = f"""\
from kernels import get_kernel

ops = get_kernel("YOUR_NAME/lit-fused-ops", version={VERSION}, trust_remote_code=["YOUR_NAME/lit-fused-ops"])
"""


def build(folder: Path) -> Path:
    """Write the repository of the kernel to a folder, in place of an earlier one, and return it."""
    shutil.rmtree(folder, ignore_errors=True)
    variant = folder / "build" / "torch-universal"
    copy_ops(variant)
    digests = {
        file.relative_to(variant).as_posix(): hashlib.sha256(file.read_bytes()).digest()
        for file in sorted(variant.rglob("*.py"))
    }
    whole = hashlib.sha256(b"".join(name.encode() + digest for name, digest in digests.items())).hexdigest()
    metadata = {
        "name": "lit-fused-ops",
        # It names the module and its torch operators: two builds can be loaded in one process.
        "id": f"lit_fused_ops_{whole[:8]}",
        "version": VERSION,
        "license": PROJECT["license"],
        "python-depends": [],
        "backend": {"type": "cpu"},  # no type says "any"; this one asks for no list of architectures
        "digest": {
            "algorithm": "sha256",
            "files": {name: base64.b64encode(digest).decode() for name, digest in digests.items()},
        },
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    (folder / "README.md").write_text(HEADER + card(LOAD))
    shutil.copy(ROOT / "LICENSE", folder)
    return folder


if __name__ == "__main__":
    print(build(ROOT / "dist" / "kernel"))
