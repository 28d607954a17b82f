"""docs/parallelism_matrix.md: every cell of the matrix of strategies, run and compared with one process.

python tools/parallel_table.py [compiled]  # only the table of compiled layers
"""

import sys
import tempfile
from pathlib import Path

import torch
from errors_of import relative_error
from parallel_cases import Case
from parallel_fits import COMPILED, MATRIX, judge, launch, precision_dtype, result_of, train_here

DOCUMENT = Path(__file__).parent.parent / "docs" / "parallelism_matrix.md"
START = "<!-- the matrix, written by make parallel -->\n"
START_OF_COMPILED = "\n<!-- compiled layers -->\n"
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


def errors(case: Case, folder: Path) -> list[str]:
    """Return the errors of a case and of one process: each of the gradients, then of the weights."""
    judge(case, folder)
    result, truth = torch.load(result_of(case, folder), weights_only=False), train_here(case, torch.float64)
    runs = (result, train_here(case, precision_dtype(case)))
    pairs = [[relative_error(run[key], truth[key]) for key in ("gradients", "weights")] for run in runs]
    return [", ".join(f"{error:.1e}".replace("e-0", "e-") for error in pair) for pair in pairs]


def tables(found: dict[Case, list[str]]) -> str:
    """Return a table for each model: a row for a strategy with a loss, a column for a precision."""
    lines = []
    for model in dict.fromkeys(case.model for case in found):
        rows: dict[str, dict[str, str]] = {}
        cells = [(case, pair) for case, pair in found.items() if case.model == model]
        for case, (_, one) in cells:
            rows.setdefault(f"one process, {case.layers} layers", {})[case.precision] = one
        for case, (ours, _) in cells:
            rows.setdefault(f"`{case.strategy}` `{case.loss}`", {})[case.precision] = ours
        compiled = ", layers compiled" if cells[0][0].compile != "none" else ""
        lines += [f"\n## {model}{compiled}\n", f"| | {' | '.join(PRECISIONS)} |", "|---" * (1 + len(PRECISIONS)) + "|"]
        lines += [f"| {name} | {' | '.join(row.get(p, '') for p in PRECISIONS)} |" for name, row in rows.items()]
    return "\n".join(lines) + "\n"


def compared(cases: list[Case]) -> str:
    """All strategies at once would outlast any reasonable time limit of a launch: one after the other."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for strategy in dict.fromkeys(case.strategy for case in cases):
            launch(folder, "run", [case for case in cases if case.strategy == strategy], timeout=900)
        return tables({case: errors(case, folder) for case in cases})


def main() -> None:
    text, _, old = DOCUMENT.read_text().partition(START)
    matrix = old.partition(START_OF_COMPILED)[0] if "compiled" in sys.argv else compared(MATRIX)
    DOCUMENT.write_text(text + START + matrix + START_OF_COMPILED + compared(COMPILED))
    print(f"wrote {DOCUMENT}")


if __name__ == "__main__":
    main()
