"""The command gives some answers before it imports torch."""

import inspect
import json
import re
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest

from lit_fused.app.signatures import ANY, Keyword, Signature, read_signature, signature_of

ROOT = Path(__file__).parents[2]
NEEDS_NONE = ("torch", "lightning", "transformers", "datasets", "pyarrow", "matplotlib", "numpy", "rich")

# Run train.py for each of several lists of words, as a person does but with Hydra imported once for all of them: each
# runs in a process that is forked, and says at the end which of the packages were loaded.
PROGRAM = f"""
import json, os, runpy, sys
import lit_fused.app.cli
for number, words in enumerate(json.loads(sys.argv[1])):
    if not os.fork():
        for stream in (1, 2):
            os.dup2(os.open(f"{{number}}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        sys.argv = [{str(ROOT / "train.py")!r}, *words]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            print(end.code)
        finally:
            print("loaded:", *[name for name in {NEEDS_NONE} if name in sys.modules])
            sys.stdout.flush()
            os._exit(0)
    os.wait()
"""
ANSWERS = [
    (["--help"], "== Choices: group=option =="),
    (["--cfg", "job"], "_target_: lit_fused.FusedCausalLMModule"),
    (["--version"], "lit-fused .*, torch "),
    (["los=cce"], "los: unknown (did you mean loss?)"),
    (["experimnt=reverse"], "experimnt: unknown (did you mean experiment?)"),
    (["loss=ccee"], "loss=ccee: no such choice (did you mean cce?); there are cce, chunked, "),
    (["scheduler=null"], "scheduler=null: expected the name of a choice; there are constant, "),
    (["strategy=fsdp"], "strategy=fsdp: no such choice (did you mean fsdp2?); there are auto, ddp, fsdp2, "),
    (["logger=[csv,wandbb]"], "logger=wandbb: no such choice (did you mean wandb?); there are csv, mlflow, "),
    (["hydra/launchr=slurm"], "hydra/launchr: unknown (did you mean hydra/launcher?)"),
    (["loss.chunk_sz=1"], "loss.chunk_sz: unknown (did you mean chunk_size?); loss has impl, "),
    (["model.confg.hidden_size=8"], "model.confg.hidden_size: unknown (did you mean config?); model has seed, "),
    (["~callbacks.sampletext"], "callbacks.sampletext: unknown (did you mean sample_text?)"),
    (["-m", "los=cce,liger"], "los: unknown (did you mean loss?)"),
    (["+loss=cce"], "loss is chosen already; choose another one without the +: loss=..."),
    (["loss"], "loss: cannot be read (missing EQUAL at '<EOF>'); write NAME=VALUE"),
    (["data.pth=x"], "data.pth: unknown"),
    (["trainer.max_step=3"], "trainer.max_step: unknown (did you mean max_steps?)"),
    (["mode=fitt"], "got 'fitt' (did you mean fit?)"),
    (
        ["+loss.chunk_sz=1"],
        "- loss.chunk_sz: unknown (did you mean chunk_size?); lit_fused.Linear",
    ),
    (
        ["+trainer.max_step=3"],
        "- trainer.max_step: unknown (did you mean max_steps?); lightning.pytorch.Trainer ",
    ),
    (["+optimizer.rate=3"], "- optimizer.rate: unknown; torch.optim.AdamW takes amsgrad"),
    (["data=text"], "- data.path: has no value; give one with data.path=..."),
    (["mode=generate"], "- prompt: mode=generate needs a text to continue"),
]
SEVERAL = ["+loss.chunk_sz=1", "+trainer.max_step=3", "+data.pth=x", "+foo=1"]


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> list[str]:
    """The output of the command for each of ``ANSWERS`` and for ``SEVERAL``; its last line names what was loaded."""
    folder = tmp_path_factory.mktemp("answers")
    words = [*(words for words, _ in ANSWERS), SEVERAL]
    subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(words)], cwd=folder, timeout=120, check=True)
    return [(folder / f"{number}.txt").read_text() for number in range(len(words))]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ANSWERS)), ids=[words[0] for words, _ in ANSWERS])
def test_help_and_a_mistyped_option_are_answered_without_torch(number, answers):
    output, said = answers[number], ANSWERS[number][1]
    assert re.search(re.escape(said).replace(r"\.\*", ".*"), output), output
    assert output.splitlines()[-1] == "loaded:"
    assert not re.search("HYDRA_FULL_ERROR|Traceback|Error executing job", output)


def test_all_faults_stand_in_one_list_whoever_made_the_class(answers):
    for fault in ("foo: unknown", "loss.chunk_sz: unknown", "trainer.max_step: unknown", "data.pth: unknown"):
        assert f"  - {fault}" in answers[-1]
    assert answers[-1].splitlines()[-1] == "loaded:"


TARGETS = sorted(
    {name for file in (ROOT / "conf").rglob("*.yaml") for name in re.findall(r"_target_: ([\w.]+)", file.read_text())}
)


@pytest.mark.parametrize("name", [name for name in TARGETS if name.startswith("lit_fused.")])
def test_the_signature_of_each_of_our_targets_is_read_as_python_sees_it(name):
    read = read_signature(name)
    assert read is None or read == signature_of(resolve_name(name))
    assert read is not None or name == "lit_fused.ModelInternalLoss"


@pytest.mark.parametrize(
    "module",
    [
        *("torch.optim", "torch.optim.lr_scheduler", "lightning.pytorch", "lightning.pytorch.callbacks"),
        *("lightning.pytorch.loggers", "lightning.pytorch.profilers", "lightning.pytorch.strategies"),
    ],
)
def test_signatures_of_torch_and_lightning_are_read_as_python_sees_them(module):
    known = import_module(module)
    read = 0
    for name, target in vars(known).items():
        if not name.startswith("_") and (inspect.isclass(target) or inspect.isfunction(target)):
            signature = read_signature(f"{module}.{name}")
            assert signature is None or signature == signature_of(target), name
            read += signature is not None
    assert read >= 5


def test_what_a_source_does_not_tell_is_left_to_an_import(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass, field\nfrom typing import overload\nimport unknown\n"
        "@dataclass(frozen=True)\nclass Base:\n    a: int\n    b: int = 1\n"
        "@dataclass\nclass Options(Base):\n    a: int = 2\n    c: int = 3\n"
        "@dataclass\nclass Fields:\n    c: int = field(init=False)\n"
        "@overload\ndef work(x): ...\n@overload\ndef work(x, y): ...\ndef work(x, /, y=1, *more, z, w=2, **rest): ...\n"
        "class Child(unknown.Parent): pass\nclass Two(Base, Options): pass\n@unknown\nclass Changed(Base): pass\n"
        "class Own:\n    def __init__(self, e, f=1): pass\nclass Inherits(Own): pass\nclass Nothing: pass\n"
    )
    (tmp_path / "broken.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)

    def takes(*names: str, required: str = "", takes_any: bool = False) -> Signature:
        return {name: Keyword(name in required.split()) for name in (*names, *[ANY] * takes_any)}

    assert read_signature("mine.Base") == takes("a", "b", required="a")
    assert read_signature("mine.Options") == takes("a", "b", "c")
    assert read_signature("mine.work") == takes("x", "y", "z", "w", required="x z", takes_any=True)
    assert read_signature("mine.Own") == read_signature("mine.Inherits") == takes("e", "f", required="e")
    assert read_signature("mine.Nothing") == takes()
    for name in ("Child", "Fields", "Two", "Changed", "absent", "Own.more"):
        assert read_signature(f"mine.{name}") is None, name
    assert read_signature("mine") is read_signature("broken.f") is read_signature("no.f") is None
    assert "unknown" not in sys.modules
    assert runpy.run_path(str(ROOT / "train.py"))["main"].__module__ == "lit_fused.app.cli"


def test_a_signal_while_torch_is_loaded_ends_without_what_torch_logs_at_the_end_of_a_process(tmp_path):
    program = """
import runpy, signal, sys

class Interrupt:  # Ctrl-C, as soon as torch has registered what it does at the end
    def find_spec(self, name, *_):
        if name == "torch._subclasses.functional_tensor":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = [sys.argv[1], "mode=plan", "data=synthetic", "hydra.run.dir=out"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    command = [sys.executable, "-c", program, str(ROOT / "train.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert not (tmp_path / "out" / "train.log").exists()
