"""The folders of a sweep's runs, as its report finds them."""

import json
from pathlib import Path

METRICS = {
    "val/loss": 6.123456789,
    "val/perplexity": 1456.789,
    "throughput/tokens_per_sec": 2100.25,
    "memory/peak_allocated_gib": 1.25,
}


def write_run(
    sweep: Path,
    name: int | str,
    overrides: list[str],
    metrics: dict[str, float] | None = METRICS,
    curve: tuple[float, ...] = (9.0, 7.0, 6.5),
) -> None:
    """A run's folder as Hydra, Lightning's CSVLogger and train.py leave it; ``metrics=None`` is a run that failed."""
    folder = sweep / str(name)
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"overrides": [*overrides]}))
    lines = ["epoch,step,train/loss,val/loss"]
    for step, loss in enumerate(curve):
        lines += [f"0,{10 * step},{loss},", f"0,{10 * step},,8.5"]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    if metrics is not None:
        summary = {"status": "completed", "overrides": overrides, "steps": 30, "metrics": metrics}
        (folder / "summary.json").write_text(json.dumps(summary))
