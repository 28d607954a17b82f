"""Put small faults into a copy of the package, one at a time, and see whether the quick tests notice.

    python tools/mutants.py --count 200 --seed 1
    python tools/mutants.py --count 20 --rooms data parallel --report mutants.jsonl

A seed chooses the faults among all places of the rooms' code where one can be: a comparison flipped, ``not`` dropped,
``and`` made ``or``, arithmetic swapped, a constant moved, a call dropped, a return value replaced by None. The quick
tests of the fault's room run in a forked process until the first failure. Kernels are left out: their tests are slow
ones or need a GPU.
"""

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = {  # room -> what belongs to it, and the folders or files of the tests that are to notice
    "ops": ("ops/**/*.py", "tests/ops tests/losses"),
    "heads": ("heads/*.py", "tests/heads tests/models/test_language_model.py tests/losses"),
    "losses": (
        "losses/*.py",
        "tests/losses tests/training tests/heads tests/models/test_packing.py",
    ),
    "models": ("models/*.py", "tests/models tests/training/test_seq2seq.py tests/project/test_examples.py"),
    "training": ("training/*.py", "tests/training tests/parallel tests/checkpoints/test_checkpoints.py"),
    "packing": ("data/packing.py", "tests/data tests/models/test_packing.py"),
    "loader": ("data/loader.py", "tests/checkpoints/test_resume.py tests/data"),
    "parallel": ("parallel/**/*.py", "tests/parallel tests/training tests/checkpoints/test_checkpoints.py"),
    "memory": ("callbacks/peak_memory.py", "tests/callbacks/test_peak_memory.py tests/callbacks/test_callbacks.py"),
}
KERNELS = ("*_kernels.py", "hopper_path.py", "filtered_hopper.py", "rows_triton.py")
PRELOADED = ("pytest", "torch", "torch._dynamo", "lightning.pytorch", "transformers.models.llama.modeling_llama")
PRELOADED += ("transformers.generation.utils", "hydra.main", "datasets", "torch.distributed.checkpoint")
PRELOADED += ("torch.distributed.fsdp", "torch.distributed.pipelining", "peft", "torchmetrics")
SWAPPED: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.FloorDiv},
}


@dataclass(frozen=True)
class Mutant:
    """A part of a file's text and what is put in its place."""

    room: str
    path: str
    line: int
    start: int  # in bytes of the file
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"


def mutants(room: str, file: Path) -> Iterator[Mutant]:
    """Yield every fault that this file can have."""
    source = file.read_bytes()
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        annotations = [getattr(node, name, None) for name in ("annotation", "returns")]
        if not isinstance(node, ast.JoinedStr | ast.Raise):  # what an error says is no behaviour
            waiting += [child for child in ast.iter_child_nodes(node) if child not in annotations]
        if isinstance(node, ast.expr | ast.stmt) and (after := changed(node)) is not None:
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start, end = begins[node.lineno - 1] + node.col_offset, begins[node.end_lineno - 1] + node.end_col_offset
            before = source[start:end].decode()
            yield Mutant(room, str(file.relative_to(ROOT)), node.lineno, start, end, before, after)


def changed(node: ast.AST) -> str | None:
    """Return the code in place of ``node``, or None if it stays as it is."""
    if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        return "return None"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return "pass"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return repr(not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return f"({node.value + 1})"
    swapped = deepcopy(node)
    if isinstance(swapped, ast.Compare) and type(swapped.ops[0]) in SWAPPED:
        swapped.ops[0] = SWAPPED[type(swapped.ops[0])]()
    elif isinstance(swapped, ast.BoolOp | ast.BinOp | ast.AugAssign) and type(swapped.op) in SWAPPED:
        swapped.op = SWAPPED[type(swapped.op)]()
    else:
        return None
    return ast.unparse(swapped) if isinstance(node, ast.stmt) else f"({ast.unparse(swapped)})"


def chosen(rooms: list[str], count: int, seed: int) -> list[Mutant]:
    """Return as many faults as asked for, of any of the rooms, in the order of the rooms' tests."""
    found = []
    for room in rooms:
        for file in sorted((ROOT / "lit_fused").glob(ROOMS[room][0])):
            if not any(file.match(pattern) for pattern in KERNELS):
                found += mutants(room, file)
    return random.Random(seed).sample(found, min(count, len(found)))


def tests_of(mutant: Mutant, copy: Path) -> list[str]:
    """Return the files of tests, those first that name the fault's module."""
    roots = [copy / name for name in ROOMS[mutant.room][1].split()]
    files = [file for root in roots for file in (sorted(root.rglob("test_*.py")) if root.is_dir() else [root])]
    files.sort(key=lambda file: -file.read_text().count(Path(mutant.path).stem))
    return [str(file.relative_to(copy)) for file in files]


def outcome(copy: Path, tests: list[str], limit_s: float) -> str:
    """Run quick tests in a forked process: "passed", "failed: ..." or "too long"."""
    output = copy / "output.txt"
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        os.environ["PYTHONPATH"] = str(copy)
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(written, 1)
        os.dup2(written, 2)
        import pytest

        options = ["-x", "-q", "-n", "0", "--timeout", str(int(limit_s)), "-m", "not slow and not gpu", "-W", "ignore"]
        os._exit(int(pytest.main([*options, "-p", "no:cacheprovider", *tests])))
    end, status = time.monotonic() + limit_s, None
    while status is None and time.monotonic() < end:
        ended, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
        return "too long"
    if status == 0:
        return "passed"
    said = [line for line in output.read_text().splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
    return f"failed: {said[0] if said else f'exit status {status}'}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Put small faults into a copy of the package; run its quick tests.")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--limit-s", type=float, default=600, help="for the tests of one fault")
    parser.add_argument("--report", type=Path, help="a line of JSON for each fault")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        os.environ |= {"XDG_CACHE_HOME": folder, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
        for module in PRELOADED:
            importlib.import_module(module)
        found: Counter[str] = Counter()
        sound: set[str] = set()  # rooms whose tests pass without a fault
        for number, mutant in enumerate(chosen(options.rooms, options.count, options.seed)):
            tests = tests_of(mutant, copy)
            if mutant.room not in sound and (result := outcome(copy, tests, options.limit_s)) != "passed":
                sys.exit(f"without a fault, the tests of {mutant.room} end with {result}")
            sound.add(mutant.room)
            file, begun = copy / mutant.path, time.monotonic()
            content, stat = file.read_bytes(), file.stat()
            file.write_bytes(content[: mutant.start] + mutant.after.encode() + content[mutant.end :])
            os.utime(file, (stat.st_atime, stat.st_mtime + 10 + number))  # compiled files are compared by seconds
            result = outcome(copy, tests, options.limit_s)
            file.write_bytes(content)
            os.utime(file, (stat.st_atime, stat.st_mtime))
            found["survived" if result == "passed" else "noticed"] += 1
            print(f"{'SURVIVED' if result == 'passed' else 'noticed '} {mutant}  [{result}]", flush=True)
            if options.report:
                with options.report.open("a") as report:
                    row = asdict(mutant) | {"result": result, "seconds": round(time.monotonic() - begun, 1)}
                    report.write(json.dumps(row) + "\n")
    print(f"\nseed {options.seed}: {found['noticed']} of {found.total()} faults noticed, {found['survived']} survived")


if __name__ == "__main__":
    main()
