"""docs/evidence/models.md: transformers' language models, what turns hidden states into logits, and the verdict.

    python tools/models_table.py

Everything in the table is found by running the tiny models of ``architectures.py``; tests compare each row, and the
whole, with the file. Models with the same row share it.
"""

import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from architectures import (
    ENTRIES,
    Entry,
    Variant,
    Verdict,
    check,
    cross_entropy,
    sharpen,
    tiny_batch,
    tiny_model,
    variants_of,
)
from logits_changes import CASES
from torch import Tensor, nn

from lit_fused.heads import OutputHead, output_layer

DOCUMENT = Path(__file__).parent.parent / "docs" / "evidence" / "models.md"
HEADER = ["task", "input of the output layer", "logits", "active", "own loss", "status"]
MODEL = "models"

_INTRODUCTION = """\
# The language models of transformers

```bash
make models
```

The {entries} causal, masked and sequence-to-sequence language models of transformers {version} by \
`config.model_type`, built tiny and run on a CPU in four variants: by default; with every attribute active that acts \
on the logits; with embeddings tied or untied; in bfloat16. {tally}. [Models](../models.md) says what that means.

*logits*, *active*: what the model does to the output layer's product, by default and with every attribute active. \
*own loss* at position t: *shifted* takes label t + 1, *as given* label t.

Of {cases} changes to a model's logits that `tests/heads/test_spot_check.py` makes, {outcomes}.

"""


def document(rows: list[dict[str, str]]) -> str:
    """Return the whole page, of one row for each entry."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in HEADER), []).append(row[MODEL])
    statuses = Counter(row["status"].split(":")[0] for row in rows)
    outcomes = Counter(case.outcome for case in CASES)
    introduction = _INTRODUCTION.format(
        entries=len(ENTRIES),
        version=transformers.__version__,
        tally=", ".join(f"{n} are {status.replace(';', ' but')}" for status, n in _largest_first(statuses)),
        cases=len(CASES),
        outcomes=" and ".join(f"{n} are {name}" for name, n in _largest_first(outcomes)),
    )
    lines = [[*group, ", ".join(sorted(names))] for group, names in groups.items()]
    lines.sort(key=lambda line: (line[0], -line[-1].count(","), line))
    header = [*HEADER, MODEL]
    return introduction + "".join(f"|{'|'.join(line)}|\n" for line in [header, ["---"] * len(header), *lines])


def _largest_first(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def rows_of(page: str) -> list[dict[str, str]]:
    """Return the rows that a page was made of, one for each model."""
    lines = page[page.index(f"|{HEADER[0]}|") :].splitlines()[2:]
    groups = [dict(zip([*HEADER, MODEL], line.strip("|\n").split("|"), strict=True)) for line in lines]
    return [group | {MODEL: name} for group in groups for name in group[MODEL].split(", ")]


def row_of(entry: Entry, verdicts: dict[Variant, Verdict]) -> dict[str, str]:
    """Return an entry's row, by the verdicts on its variants."""
    default, active = (verdicts[variant].head for variant in (Variant.DEFAULT, Variant.ACTIVE))
    formulas = [_formula(head) for head in (default, active)]
    model = tiny_model(entry)
    sharpen(model)
    return {
        MODEL: entry.model_type,
        "task": entry.task,
        "input of the output layer": _input_of_layer(model) if default else "",
        "logits": "; ".join(formulas[0]),
        "active": "; ".join(formulas[1]) if formulas[1] != formulas[0] else "",
        "own loss": _own_loss(model) if default else "",
        "status": _status(verdicts),
    }


def _formula(head: OutputHead | None) -> list[str]:
    """The steps from the layer's product to the logits, in their order."""
    if head is None:
        return []
    steps = ["bias"] if getattr(head.layer, "bias", None) is not None else []
    steps += [f"scale {head.scale:.4g}"] if head.scale != 1.0 else []
    steps += [f"buffer `{head.offset[1]}`"] if head.offset else []
    steps += [f"softcap {head.softcap:.4g}"] if head.softcap else []
    steps += [f"slice [:{head.n_out}]"] if head.n_out else []
    return steps or ["identity"]


@torch.no_grad()
def _input_of_layer(model: Any) -> str:
    """Compare the layer's input with what the model's body returned in the same forward pass."""
    seen: dict[str, Tensor] = {}

    def keep_last_hidden_state(_: nn.Module, __: Any, output: Any) -> None:
        if hasattr(output, "last_hidden_state"):
            seen["body"] = output.last_hidden_state

    # The outermost of nested bodies (a composite model, its language model, its decoder) returns last.
    hooks = [module.register_forward_hook(keep_last_hidden_state) for module in model.modules() if module is not model]
    hooks += [output_layer(model).register_forward_pre_hook(lambda _, inputs: seen.update(layer=inputs[0]))]
    cross_entropy(model, tiny_batch(model))
    for hook in hooks:
        hook.remove()

    body, layer = seen.get("body"), seen["layer"]
    vocabulary, _ = output_layer(model).get_parameter("weight").shape
    if body is None or body.shape[-1] == vocabulary:
        return "inside the body"  # its body returns logits
    if body.shape != layer.shape:
        return "transformed"
    factor = ((layer * body).sum() / (body * body).sum()).item()
    if not torch.allclose(layer, factor * body, rtol=1e-4, atol=1e-5):
        return "transformed"
    return "body" + (f" x {factor:.4g}" if abs(factor - 1) > 1e-4 else "")


@torch.no_grad()
def _own_loss(model: Any) -> str:
    """Compare the model's own loss with the cross entropy of its own logits."""
    batch = tiny_batch(model)
    try:
        output = model(**batch, use_cache=False)
    except ValueError:  # git expects the positions of an image before those of the labels
        return "fails without an image"
    own = getattr(output, "loss", None)
    if own is None:
        return "none"
    logits, labels = output.logits.float(), batch["labels"]
    for name, loss in {
        "shifted": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
        "as given": F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    }.items():
        if torch.allclose(own.float(), loss, rtol=1e-5):
            return name
    return "other"


def _status(verdicts: dict[Variant, Verdict]) -> str:
    refusals = {variant: verdict.refusal for variant, verdict in verdicts.items() if verdict.refusal is not None}
    if not refusals:
        return "exact"
    [reason] = {re.split("fused loss: |; choose", refusal)[1] for refusal in refusals.values()}
    if len(refusals) == len(verdicts):
        return f"refused: {reason}"
    assert refusals.keys() == {Variant.ACTIVE}, refusals
    return f"exact; refused when active: {reason}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = [row_of(entry, {variant: check(entry, variant) for variant in variants_of(entry)}) for entry in ENTRIES]
    DOCUMENT.write_text(document(found))
    print(f"wrote {DOCUMENT}")
