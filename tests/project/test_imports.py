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
    *("matplotlib", "tokenizers", "cut_cross_entropy", "liger_kernel", "peft", "rich"),
)


def loaded_by(*steps: str) -> list[set[str]]:
    """Those of ``HEAVY`` that a fresh Python has loaded after each of the steps, which it runs one after another."""
    report = f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    program = "\n".join(["import json, sys", *(f"{step}\n{report}" for step in steps)])
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


def test_each_import_loads_what_it_is_made_of_and_never_the_application():
    """Lightning loads torchmetrics, which loads matplotlib; transformers' tokenizers and schedules load two more."""
    nothing, primitive, loss, theirs, ours = loaded_by(
        "import lit_fused",
        "from lit_fused.ops import linear_cross_entropy",
        "from lit_fused import LanguageModel, LinearCrossEntropyLoss",
        "import lightning, rich; from transformers import AutoTokenizer, get_cosine_schedule_with_warmup",
        "from lit_fused import FusedCausalLMModule, PeakMemoryMonitor, from_config",
    )
    assert nothing == set()
    assert primitive <= {"torch", "triton"}
    assert not loss & {"lightning", "hydra", "omegaconf", "datasets", "pyarrow", "matplotlib", "cut_cross_entropy"}
    assert ours == theirs
    assert not ours & {"hydra", "omegaconf", "datasets", "pyarrow", "cut_cross_entropy"}


def test_every_public_name_is_loaded_on_first_use_and_known_to_editors():
    source = ast.parse(Path(lit_fused.__file__).read_text())
    [for_editors] = [node for node in source.body if isinstance(node, ast.If)]
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


# The program hides the packages that only the extra `train` brings; .ci/check_wheel.sh tries a real environment.
WITHOUT_EXTRA = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = {"datasets", "pyarrow", "pandas", "dill", "multiprocess", "xxhash"}
        return None if name.partition(".")[0] in absent else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
import lightning as L, torch, lit_fused
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
config = LlamaConfig(vocab_size=128, **sizes)
ids = torch.randint(128, (4, 12))
lit_fused.fuse(LlamaForCausalLM(config))(input_ids=ids, labels=ids).loss.backward()
hidden, weight = torch.randn(6, 16, requires_grad=True), torch.randn(128, 16, requires_grad=True)
lit_fused.token_scores(hidden, weight, torch.randint(128, (6,))).log_prob.sum().backward()
module = lit_fused.FusedCausalLMModule(LlamaForCausalLM(config))
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = L.Trainer(max_steps=2, accelerator="cpu", callbacks=[lit_fused.PeakMemoryMonitor()], **quiet)
trainer.fit(module, DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=2))
module.save_pretrained("exported")
loaded = lit_fused.load("exported")
assert all(torch.equal(a, b) for a, b in zip(module.parameters(), loaded.parameters(), strict=True))
assert all(getattr(lit_fused, name) for name in lit_fused.__all__)
print("the library works", file=sys.stderr)
try:
    from lit_fused.data import load_records
except lit_fused.UserError as error:
    print(error, file=sys.stderr)

from lit_fused.app.cli import main
sys.argv = ["lit-fused", "hydra.run.dir=run"]
main()
"""


@pytest.mark.slow
def test_the_library_needs_no_extra_and_the_command_says_in_one_sentence_which_one_it_needs(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_EXTRA]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=240)
    *_, library, reader, last = done.stderr.splitlines()
    assert library == "the library works", done.stderr
    said = "needs more than is installed (No module named 'pyarrow'). Install it with: pip install 'lit-fused[train]'"
    assert reader == f"lit_fused.data.load_records {said}"
    assert last == f"mode=fit {said}"
    assert done.returncode == 1
    assert not (tmp_path / "run" / "metrics.csv").exists()
