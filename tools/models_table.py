"""docs/models.md: all of transformers' language models, what turns their hidden states into logits, and the verdict.

    python tools/models_table.py

Everything in the table is found by running the tiny models of ``architectures.py``; tests compare each row, and the
whole, with the file.
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

from lit_fused.errors import UserError
from lit_fused.heads import OutputHead, output_layer

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"
_OUTCOMES = ["exact", "refused", "silent"]
HEADER = ["model type", "class", "output layer", "its input", "logits", "active", "own loss", "status"]

_INTRODUCTION = """\
# Models

Look up whether the fused losses are exact for your model: find its `config.model_type` in [the table](#all-models),
or ask the code:

```python
print(lit_fused.identify_head(model))
```

The table has the {entries} causal, masked and sequence-to-sequence language models of transformers {version}. Each is
built tiny and run on a CPU in four variants: by default; with every attribute active that acts on the logits; with
embeddings tied or untied; in bfloat16. `make models` writes this page.

| it says | that means |
|---|---|
| *exact* | loss and gradients are those of the cross entropy of the model's own logits, within 1e-5 (in bfloat16: \
within twice the error of the standard loss) |
| *refused* | before training, with the class and the reason; musicgen trains with `loss=standard`, prophetnet with \
`loss=model` |
| output layer | the module whose weight makes logits; *tied*: it is the input embedding's |
| its input | the *body*'s last hidden state, a multiple of it, or *transformed* by further layers; *inside the body*: \
the body runs the output layer itself |
| logits, active | the bias and what the model does to the layer's output, by default and with every attribute active |
| own loss | of the model itself at position t: *shifted* takes label t + 1, *as given* label t. lit_fused shifts for \
decoders, not for masked models and encoder-decoders |
"""

_GUARD = """\
## What a model computes is compared with its own loss

| what | when | how |
|---|---|---|
| the formula in the columns *logits* and *active* is identified | before the first step; after weights were loaded | \
three forward passes of eight tokens, compared with the model's own logits |
| the **spot check** | the first batch with labels of training, the first of each evaluation, and every 100th \
optimiser step (`check_every_n_steps`; 0: never); with `fuse` in the first call of either mode and every n-th of \
training | a slice of the batch as it came, with its labels and all arguments, at most 1,024 tokens: through the \
model's own forward and own loss, in the mode that it is in, and through the fused loss. \
Compared are the own loss with \
the cross entropy of the own logits, both losses with the formula in float64, and in training their gradients at the \
output layer's input and weight. The bound is what the formula loses in the run's precision |
| every other step | | the model gets one row of NaN in place of its logits. What it returns that is made of them is \
not a number |

All ranks stop together. The check draws no random number of the run and gives buffers and settings back. On an NVIDIA
H200 (torch 2.11.0, Qwen3-0.6B in bfloat16, layers compiled) the first takes 82 ms and a later one 67 ms, where a step
of 16,384 tokens takes 177 ms: 0.4 % of a run. The host waits for the device in no other step.

| found | kinds |
|---|---|
| before the first step | another formula, a custom or quantised output layer, logits of several calls |
| in the first batch of training or evaluation | a term, weight or argument of the model's own loss; labels that it \
shifts otherwise; what it does with labels, in training, to some entries, positions or rows; hooks, clamps and \
detached parts; other weights for one call; a backend that is wrong |
| within 100 steps | whatever begins later: a temperature or bias that changes (also one in a buffer), a hook that is \
put on, a quantisation that sets in, a term that warms up, an argument that later batches have |
| never | what begins and ends between two checks; what a model does with labels before its output layer, if it begins \
later; what is smaller than the precision's error; outputs of a model that are made of logits, other than its loss \
(they are NaN) |

Not compared: a batch whose slice has no label, which leaves the check to the next one; gradients under `strategy=pp`, \
of weights that Accelerate offloads, and of backends that approximate them (`filtered`, `cce`); `loss=model` and a \
loss function of one's own. A plain `nn.Module` has no loss or logits of its own: there the fused loss is compared \
with its layer.

The cases below train three steps with the fused loss, checked in each, and with the standard loss, on models that do
something to their logits at once or from the second step on. *Exact*: the same weights. *Refused*: a sentence.
*Silent*: other weights and no sentence.
"""


def document(rows: list[dict[str, str]]) -> str:
    """Return the whole page, of one row for each entry."""
    cases = {name: [case.what for case in CASES if case.outcome == name] for name in _OUTCOMES}
    parts = [
        _INTRODUCTION.format(version=transformers.__version__, entries=len(ENTRIES)),
        _GUARD,
        _markdown(["outcome", "of", "cases"], [[k, f"{len(v)}", "; ".join(v) or "none"] for k, v in cases.items()]),
        "## All models\n",
        _tally("Status", Counter(row["status"].split(":")[0] for row in rows)),
        _tally("Steps to the logits, by default or active", Counter(kind for row in rows for kind in _kinds(row))),
        _tally("Input of the output layer", Counter(row["its input"].split(" x ")[0] for row in rows)),
        _tally("Own loss", Counter(row["own loss"] for row in rows)),
        _markdown(HEADER, [list(row.values()) for row in rows]),
    ]
    return "\n".join(parts)


def rows_of(page: str) -> list[dict[str, str]]:
    """Return the rows that a page was made of."""
    table = page[page.index("| " + " | ".join(HEADER)) :].splitlines()[2:]
    return [dict(zip(HEADER, line.removeprefix("| ").removesuffix(" |").split(" | "), strict=True)) for line in table]


def model_type(entry: Entry) -> str:
    return f"`{entry.model_type}`" + ("" if entry.task == "causal" else f", {entry.task}")


def row_of(entry: Entry, verdicts: dict[Variant, Verdict]) -> dict[str, str]:
    """Return an entry's row, by the verdicts on its variants."""
    default, active = (verdicts[variant].head for variant in (Variant.DEFAULT, Variant.ACTIVE))
    formulas = [_formula(head) for head in (default, active)]
    model = tiny_model(entry)
    sharpen(model)
    return {
        "model type": model_type(entry),
        "class": f"`{entry.class_name}`",
        "output layer": _output_layer(model),
        "its input": _input_of_layer(model) if default else "",
        "logits": "; ".join(formulas[0]),
        "active": "; ".join(formulas[1]) if formulas[1] != formulas[0] else "",
        "own loss": _own_loss(model) if default else "",
        "status": _status(verdicts),
    }


def _kinds(row: dict[str, str]) -> set[str]:
    return {step.split()[0] for column in ("logits", "active") for step in row[column].split("; ") if step}


def _output_layer(model: Any) -> str:
    try:
        layer = output_layer(model)
    except UserError:
        layer = model.get_output_embeddings()
    if layer is None:
        return "none"
    path = next(path for path, module in model.named_modules() if module is layer)
    if not isinstance(layer, nn.Linear):
        return f"`{path}`, {type(layer).__name__}"
    return f"`{path}`" + (", tied" if layer.weight is model.get_input_embeddings().weight else "")


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


def _tally(title: str, counts: Counter[str]) -> str:
    return _markdown([title, "entries"], [[name or "(refused)", str(n)] for name, n in sorted(counts.items())])


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = [row_of(entry, {variant: check(entry, variant) for variant in variants_of(entry)}) for entry in ENTRIES]
    DOCUMENT.write_text(document(found))
    print(f"wrote {DOCUMENT}")
