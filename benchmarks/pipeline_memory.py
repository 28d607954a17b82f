"""Peak memory of every stage of a pipeline, with one loss and with another: measure with train.py, draw with this.

    for loss in standard chunked; do
        python train.py experiment=pipeline_memory loss=$loss hydra.run.dir=outputs/pipeline_memory/$loss
    done
    python benchmarks/pipeline_memory.py outputs/pipeline_memory docs/evidence/pipeline_memory.png

Prints the table as Markdown and draws one bar for each stage and loss, and the line that the project holds itself to:
what the leanest stage in the middle needs, the output layer's own weight, gradient and optimiser state, and one GiB.
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from lit_fused.app.reporting.page import PALETTE

GIB = 2**30


def peaks(run: Path) -> list[float]:
    """GiB of each rank."""
    metrics = json.loads((run / "summary.json").read_text())["metrics"]
    found = {name: value for name, value in metrics.items() if name.startswith("memory/rank_")}
    if not found:
        raise SystemExit(f"{run} has no peak of each rank; run it with callbacks.peak_memory.per_rank=true")
    return [found[f"memory/rank_{rank}_gib"] for rank in range(len(found))]


def head_gib(run: Path) -> float:
    """The output layer's weight, gradient and AdamW's two moments, in float32."""
    model = json.loads((run / "run.json").read_text())["config"]["model"]["config"]
    return model["vocab_size"] * model["hidden_size"] * 4 * 4 / GIB


def main(folder: Path, picture: Path) -> None:
    runs = sorted((path.parent for path in folder.glob("*/summary.json")), reverse=True)
    if not runs:
        raise SystemExit(f"no finished runs in {folder}")
    figures = {run.name: peaks(run) for run in runs}
    stages = len(next(iter(figures.values())))
    if stages < 3 or "chunked" not in figures:
        raise SystemExit("the line needs a run with loss=chunked, and a stage between the first and the last")
    limit = min(figures["chunked"][1:-1]) + head_gib(runs[0]) + 1

    print("| loss | " + " | ".join(f"stage {stage}" for stage in range(stages)) + " |")
    print("|---|" + "---:|" * stages)
    for loss, values in figures.items():
        print(f"| `{loss}` | " + " | ".join(f"{value:.1f}" for value in values) + " |")
    print(f"\nThe leanest middle stage, the head's own state ({head_gib(runs[0]):.2f} GiB) and 1 GiB: {limit:.1f} GiB.")

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    width = 0.8 / len(figures)
    for place, (loss, values) in enumerate(figures.items()):
        positions = [stage + (place - (len(figures) - 1) / 2) * width for stage in range(stages)]
        bars = axes.bar(positions, values, width * 0.95, label=f"loss={loss}", color=PALETTE[place])
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=9)
    axes.axhline(limit, color="black", linewidth=1, linestyle=(0, (5, 3)))
    axes.annotate(
        "a middle stage + the head's weight, gradient\nand optimiser state + 1 GiB",
        (0.5, limit),
        xytext=(0, 4),
        textcoords="offset points",
        fontsize=9,
    )
    axes.set_xticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.set_ylabel("peak memory (GiB)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
