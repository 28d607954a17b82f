"""Measure the time and memory in which text becomes tokens: make a corpus of any size, and run ``mode=prepare`` on it.

python benchmarks/preparation.py --gigabytes 2 --workers 2

The corpus is JSON lines, each a stretch of the sources of Python's standard library, no two alike. Memory is that of
all processes together, pages that they share counted once, looked at once a second. Needs Linux.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from lit_fused.data import load_records

ROOT = Path(__file__).parents[1]


def write_corpus(file: Path, num_bytes: int) -> int:
    """Write about ``num_bytes``, and return the number of documents."""
    lines = [line for document in load_records(None)["text"] for line in document.splitlines(keepends=True)]
    random_numbers = random.Random(0)
    num_documents = 0
    with file.open("w") as stream:
        while stream.tell() < num_bytes:
            start = random_numbers.randrange(len(lines) - 200)
            text = "".join(lines[start : start + random_numbers.randrange(20, 200)])
            stream.write(json.dumps({"text": f"{text}# {num_documents}\n"}) + "\n")
            num_documents += 1
    return num_documents


def peak_memory_gib(process: psutil.Popen) -> float:
    """Return the most memory that ``process`` and its children take together until it ends."""
    peak = 0
    while process.poll() is None:
        total = 0
        for member in [process, *process.children(recursive=True)]:
            try:
                total += member.memory_full_info().pss
            except psutil.Error:  # it has just ended
                continue
        peak = max(peak, total)
        time.sleep(1)
    return peak / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_documents = write_corpus(folder / "corpus.jsonl", int(options.gigabytes * 1e9))
        print(f"{num_documents:,} documents, {options.gigabytes} GB", flush=True)
        overrides = ["mode=prepare", "data=text", f"data.path={folder / 'corpus.jsonl'}", "hydra.run.dir=out"]
        overrides += [f"data.prepare_workers={options.workers}", f"data.cache_dir={folder / 'cache'}"]
        start = time.perf_counter()
        process = psutil.Popen([sys.executable, str(ROOT / "train.py"), *overrides], cwd=folder)
        peak = peak_memory_gib(process)
        seconds = time.perf_counter() - start
        if process.returncode:
            raise SystemExit(process.returncode)
        speed = options.gigabytes * 1e3 / seconds
        print(
            f"{seconds:.0f} s with {options.workers} workers, {speed:.1f} MB/s; at most {peak:.2f} GiB in all processes"
        )
        again = time.perf_counter()
        subprocess.run([sys.executable, str(ROOT / "train.py"), *overrides], cwd=folder, check=True)
        print(f"the second time: {time.perf_counter() - again:.0f} s, the start of Python included")


if __name__ == "__main__":
    main()
