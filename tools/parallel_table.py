"""docs/evidence/strategies.json and .md: every cell of the matrix of strategies, run and compared with one process.

python tools/parallel_table.py [compiled]  # only the cells of compiled layers
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from errors_of import relative_error
from parallel_cases import Case
from parallel_fits import COMPILED, MATRIX, fit, judge, launch, precision_dtype, train_here

STORED = Path(__file__).parent.parent / "docs" / "evidence" / "strategies.json"
DOCUMENT = STORED.with_suffix(".md")
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
_INTRODUCTION = """\
# The strategies compared with one process

```bash
make parallel
```

Each of {cells} cells trains a tiny model ({models}) for three steps of AdamW with clipping, on two processes of a CPU \
(four for `fsdp2_tp`, `pp_ddp`, `pp_fsdp2`), four micro-batches a step with ragged labels, some without a label. \
`fsdp2_policy` is `fsdp2` with `trainer.strategy.mixed_precision_policy=true`. \
[strategies.json](strategies.json) has every cell.

Each field shows the largest relative errors against float64 among the cells of a strategy: of the first step's \
gradients, and of the weights after three steps. The last figure is the largest ratio of a cell's error to that of one \
process, which trains with one large batch and the model's own logits. Empty: not compared.

"""


def errors(case: Case, result: Any, folder: Path) -> dict[str, list[float]]:
    """Return the errors of a case and of one process: each of the gradients, then of the weights."""
    judge(case, result, folder)
    truth = train_here(case, torch.float64)
    runs = {"errors": result, "one_process": train_here(case, precision_dtype(case))}
    keys = ("gradients", "weights")
    return {name: [float(f"{relative_error(run[k], truth[k]):.1e}") for k in keys] for name, run in runs.items()}


def compared(cases: list[Case]) -> list[dict[str, Any]]:
    """All strategies at once would outlast any reasonable time limit of a launch: one after the other."""
    names = ("strategy", "model", "loss", "precision", "compile")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found: dict[Case, Any] = {}
        for strategy in dict.fromkeys(case.strategy for case in cases):
            found |= launch(fit, [case for case in cases if case.strategy == strategy], folder, timeout=900)
        return [{key: getattr(case, key) for key in names} | errors(case, found[case], folder) for case in cases]


def document(cells: list[dict[str, Any]]) -> str:
    """Return the page: of each strategy and precision the largest errors."""

    def field(some: list[dict[str, Any]]) -> str:
        largest = [max(cell["errors"][i] for cell in some) for i in (0, 1)]
        ratio = max(ours / one for cell in some for ours, one in zip(cell["errors"], cell["one_process"], strict=True))
        return f"{', '.join(f'{error:.1e}'.replace('e-0', 'e-') for error in largest)}; {ratio:.2g} x"

    def row(name: str, of_strategy: list[dict[str, Any]]) -> str:
        by_precision = [[cell for cell in of_strategy if cell["precision"] == precision] for precision in PRECISIONS]
        return f"|{name}|{len(of_strategy)}|{'|'.join(field(some) if some else '' for some in by_precision)}|"

    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        compiled = ", layers compiled" if cell["compile"] != "none" else ""
        groups.setdefault(f"`{cell['strategy']}`{compiled}", []).append(cell)
    introduction = _INTRODUCTION.format(cells=len(cells), models=", ".join(sorted({cell["model"] for cell in cells})))
    header = [f"|strategy|cells|{'|'.join(PRECISIONS)}|", "|---|---:|" + "---|" * len(PRECISIONS)]
    return introduction + "\n".join([*header, *(row(name, some) for name, some in groups.items())]) + "\n"


def main() -> None:
    old = json.loads(STORED.read_text()) if "compiled" in sys.argv else []
    kept = [cell for cell in old if cell["compile"] == "none"]
    cells = (kept or compared(MATRIX)) + compared(COMPILED)
    STORED.write_text("[\n" + ",\n".join(json.dumps(cell) for cell in cells) + "\n]\n")
    DOCUMENT.write_text(document(cells))
    print(f"wrote {STORED} and {DOCUMENT}")


if __name__ == "__main__":
    main()
