"""docs/evidence/audit.json and .md: unusual models, batches and loops, trained with lit_fused and without.

    PYTHONPATH=tests/helpers python tools/audit.py           # writes both
    PYTHONPATH=tests/helpers python tools/audit.py entropy   # prints the cases whose kind or name has a word

Every case compares a run that uses lit_fused with the plain model in plain PyTorch, on a CPU in float32. It is *exact*
if losses, gradients and results are the same up to rounding, *refused* if a UserError came, or NaN stands where a
number would be wrong, and *silent* if the two differ without a word. Where something changes after the first step,
"refused" means by the 101st. The cases of ``tests/helpers/logits_changes.py`` are tried too, with a check in each step.
"""

import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lit_fused import UserError

FOLDER = Path(__file__).parents[1] / "docs" / "evidence"
STORED, DOCUMENT = FOLDER / "audit.json", FOLDER / "audit.md"
KINDS = {
    "a head's formula": "logits that are changed after a step, by state, hook, entry, position or gradient",
    "another loss": "a term, a margin, weights or other labels in the model's own loss, from the first batch",
    "another loss later": "the same from some step on",
    "another weight": "quantisation-aware training, parametrisations, pruning, a weight of one call",
    "another forward": "noise, masks and dropout in training alone; other outputs; a mixture of experts",
    "made of logits": "an entropy, an auxiliary loss, a buffer or an attribute that the model makes of its logits",
    "state": "batch norm's counts, spectral norm's iterations, counters and random numbers after some steps",
    "batches": "labels, masks, weights and packed rows of unusual forms",
    "loops": "accumulation, clipping, manual steps and changed losses in Lightning",
    "objectives": "preferences, distillation, masked tokens, encoder-decoders and recommenders, two batches a step",
    "evaluation": "validation without labels, of ragged batches, with a smoothed loss",
    "the operator": "`linear_cross_entropy` and `token_scores`, against float64",
}


@dataclass(frozen=True)
class Case:
    """A case: its kind, its name, and a function that returns "exact" or "silent", or raises UserError."""

    kind: str
    what: str
    run: Callable[[], str]


def verdict(case: Case) -> str:
    """Return "exact", "refused" or "silent"."""
    torch.manual_seed(0)
    try:
        return case.run()
    except UserError:
        return "refused"


def same(found: Any, expected: Any, rounding: float = 1e-4) -> str:
    """Return "exact" if numbers are the same up to rounding, "refused" if NaN shows that they are not, or "silent"."""
    found, expected = (torch.as_tensor(x).detach().double().flatten() for x in (found, expected))
    if found.shape != expected.shape:
        return "silent"
    if found.isnan().any() and not expected.isnan().any():
        return "refused"
    both = found.isnan() & expected.isnan()
    difference = torch.where(both, 0, found - expected).norm()
    return "exact" if difference <= rounding * torch.where(both, 0, expected).norm() + 1e-7 else "silent"


def worst(outcomes: Iterator[str] | list[str]) -> str:
    """Return the worst of several outcomes of one case."""
    found = set(outcomes)
    return next(outcome for outcome in ("silent", "refused", "exact") if outcome in found)


def all_cases() -> list[Case]:
    from audit_batches import CASES as BATCHES
    from audit_loops import CASES as LOOPS
    from audit_models import CASES as MODELS
    from audit_objectives import CASES as OBJECTIVES
    from logits_changes import CASES as CHANGES
    from logits_changes import outcome

    changes = [Case("a head's formula", case.what, lambda case=case: outcome(case)) for case in CHANGES]
    return [*changes, *MODELS, *BATCHES, *LOOPS, *OBJECTIVES]


def document(found: list[dict[str, str]]) -> str:
    """Return the page of stored outcomes."""
    lines = [
        "# An audit of unusual models, batches and loops\n",
        "```bash\nmake audit\n```\n",
        f"{len(found)} cases, each trained with lit_fused and as the plain model on a CPU in float32 (torch 2.13, "
        "transformers 5.23). *Exact*: losses, gradients and results are the same. *Refused*: a sentence, at the latest "
        "in the 101st step where something changes later, or NaN in place of a wrong number. *Silent*: they differ "
        "without a word. [audit.json](audit.json) has every case.\n",
        "|kind|tried|exact|refused|silent|\n|---|---:|---:|---:|---:|",
    ]
    for kind, says in KINDS.items():
        counts = Counter(row["outcome"] for row in found if row["kind"] == kind)
        cells = [str(counts[name]) for name in ("exact", "refused", "silent")]
        lines.append("|".join(["", f"{kind}: {says}", str(sum(counts.values())), *cells, ""]))
    totals = Counter(row["outcome"] for row in found)
    cells = [str(totals[name]) for name in ("exact", "refused", "silent")]
    lines.append("|".join(["", "all", str(len(found)), *cells, ""]))
    if silent := [row for row in found if row["outcome"] == "silent"]:
        lines += ["\nSilent:\n", *(f"- {row['kind']}: {row['what']}" for row in silent)]
    return "\n".join(lines) + "\n"


def quiet() -> None:
    """Keep what libraries print out of the way."""
    import lightning as L  # noqa: F401 - it sets its logger's level
    from transformers.utils.logging import set_verbosity_error

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    set_verbosity_error()


def main(words: list[str]) -> None:
    quiet()
    found = []
    for case in all_cases():
        if not words or any(word in f"{case.kind} | {case.what}" for word in words):
            found.append({"kind": case.kind, "what": case.what, "outcome": verdict(case)})
            print(*found[-1].values(), sep=" | ", flush=True)
    if not words:
        STORED.write_text("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in found) + "\n]\n")
        DOCUMENT.write_text(document(found))
        print(f"wrote {STORED} and {DOCUMENT}")


if __name__ == "__main__":
    sys.modules["audit"] = sys.modules["__main__"]  # The files of cases import this one by its name.
    main(sys.argv[1:])
