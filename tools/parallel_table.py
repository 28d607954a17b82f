"""docs/parallelism_matrix.md: every cell of the matrix of strategies, run and compared with one process.

python tools/parallel_table.py
"""

import tempfile
from pathlib import Path

import torch
from errors_of import relative_error
from parallel_cases import Case
from parallel_fits import MATRIX, judge, launch, precision_dtype, result_of, train_here

DOCUMENT = Path(__file__).parent.parent / "docs" / "parallelism_matrix.md"
START = "<!-- the matrix, written by make parallel -->\n"


def row(case: Case, folder: Path) -> str:
    judge(case, folder)
    result, truth = torch.load(result_of(case, folder), weights_only=False), train_here(case, torch.float64)
    usual = train_here(case, precision_dtype(case))
    errors = [relative_error(run[key], truth[key]) for run in (result, usual) for key in ("gradients", "weights")]
    names = f"`{case.strategy}` | {case.model} | `{case.loss}` | {case.precision}"
    return f"| {names} | " + " | ".join(f"{error:.1e}" for error in errors) + " |"


def main() -> None:
    """All strategies at once would outlast any reasonable time limit of a launch: one after the other."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for strategy in dict.fromkeys(case.strategy for case in MATRIX):
            launch(folder, "run", [case for case in MATRIX if case.strategy == strategy], timeout=900)
        rows = [row(case, folder) for case in MATRIX]
    head = [
        "| strategy | model | loss | precision | gradients | weights | one process: gradients | weights |",
        "|---|---|---|---|---|---|---|---|",
    ]
    text, _, _ = DOCUMENT.read_text().partition(START)
    DOCUMENT.write_text(text + START + "\n" + "\n".join([*head, *rows]) + "\n")
    print(f"wrote {DOCUMENT}")


if __name__ == "__main__":
    main()
