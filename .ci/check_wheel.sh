#!/usr/bin/env bash
# The wheels as a user gets them: whole, installed into an environment that has what each requires and nothing else,
# and run from an empty folder; the library's then again with the extra `train`. What they require comes from the
# environment of PYTHON (.venv), without a second download.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(realpath --no-symlinks "${PYTHON:-.venv/bin/python}")
source=$PWD
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/source" # building writes into the source, where another installation may run
git ls-files -z | xargs -0 cp --parents --no-dereference --target-directory "$folder/source"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" "$folder/source"
"$python" "$folder/source/tools/build_ops_wheel.py"

"$python" -m venv "$folder/torch"
"$python" .ci/link_requirements.py "$folder"/source/dist/lit_fused_ops-*.whl "$folder"/torch/lib/python*/site-packages
"$folder/torch/bin/pip" install --quiet --no-compile --no-index "$folder"/source/dist/lit_fused_ops-*.whl
"$folder/torch/bin/pip" check
(cd "$folder/torch" && bin/python -I -) <<'PYTHON'
from importlib.util import find_spec

import torch
from lit_fused_ops import linear_cross_entropy, linear_distillation, token_scores, top_items

assert not any(map(find_spec, ("lit_fused", "transformers", "lightning")))
hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4)
loss, _ = linear_cross_entropy(hidden, weight, torch.randint(9, (6,)))
loss.backward()
assert hidden.grad.isfinite().all()
print(f"lit-fused-ops: a loss of {loss:.2f} with torch alone")
PYTHON

# The extra `dev` lacks kernels: transformers would offer to replace layers by kernels of the Hub.
"$python" -m pip install --quiet --no-compile --no-deps --constraint constraints.txt --target "$folder/kernels" kernels
PYTHONPATH="$folder/kernels" OMP_NUM_THREADS=1 "$python" -m pytest --quiet tests/ops/test_hub_kernel.py

"$python" - "$folder"/lit_fused-*.whl <<'PYTHON'
import subprocess
import sys
import zipfile
from pathlib import Path

packed = set(zipfile.ZipFile(sys.argv[1]).namelist())
tracked = subprocess.check_output(["git", "ls-files", "lit_fused/*", "conf"], text=True).splitlines()
tracked += [str(file) for name in tracked if name.startswith("conf/") and Path(name).is_dir() for file in Path(name).iterdir()]
tracked = [name for name in tracked if not Path(name).is_dir()]  # a link to a folder has the folder's files
expected = {f"lit_fused/{name}" if name.startswith("conf/") else name for name in tracked} - {"lit_fused/conf"}
missing = sorted(expected - packed)
assert not missing, f"the wheel lacks {missing}"
print(f"the wheel holds all of the {len(expected)} files")
PYTHON

"$python" -m venv "$folder/venv"
"$python" .ci/link_requirements.py "$folder"/lit_fused-*.whl "$folder"/venv/lib/python*/site-packages
"$folder/venv/bin/pip" install --quiet --no-compile --no-index "$folder"/lit_fused-*.whl # refused if one is missing
"$folder/venv/bin/pip" check

mkdir "$folder/empty"
cd "$folder/empty"
export PATH="$folder/venv/bin:$PATH"
unset PYTHONPATH
tiny=(data=synthetic data.vocab_size=300 data.block_size=32 data.batch_size=4 data.num_train_batches=8 data.num_val_batches=2
    model.config.hidden_size=16 model.config.intermediate_size=24 model.config.num_hidden_layers=1)
lit-fused --version
python - <<'PYTHON'
from importlib.util import find_spec

import lit_fused

assert not find_spec("datasets") and not find_spec("pyarrow")
assert all(getattr(lit_fused, name) for name in lit_fused.__all__)
PYTHON
lit-fused hydra.run.dir=refused 2>&1 | tee said && exit 1 # the data need the extra
grep --quiet "pip install 'lit-fused\[train\]'" said

"$python" "$source/.ci/link_requirements.py" "$folder"/lit_fused-*.whl "$folder"/venv/lib/python*/site-packages train
pip check
python -c "import datasets; from lit_fused.data import TokenDataModule, load_records"
lit-fused "${tiny[@]}" trainer.max_steps=3 hydra.run.dir=run
lit-fused "${tiny[@]}" mode=validate ckpt_path=run/checkpoints/last.ckpt hydra.run.dir=validated
python - <<'PYTHON'
import json

fit, validated = (json.load(open(f"{run}/summary.json"))["metrics"]["val/loss"] for run in ("run", "validated"))
assert abs(fit - validated) < 1e-6, (fit, validated)
print(f"lit-fused: val/loss {fit:.4f}, and the same from the checkpoint")
PYTHON
