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
HEADER = ["model type", "task", "class", "output layer", "its input", "logits", "active", "own loss", "status"]

_INTRODUCTION = """\
# Models

Look up whether the fused losses are exact for your model: find its `config.model_type` in [the table](#all-models).
For a model of your own, ask the code; it refuses by name what it cannot identify:

```python
print(lit_fused.identify_head(model))
```

The table has every entry of transformers' mappings of model types to causal and to sequence-to-sequence language
models, as of transformers {version}: {entries} entries. Each is built tiny and run on a CPU in four variants: as
configured by default; with every attribute active that acts on the logits; with input and output embeddings tied where
they are not, and the other way round; and freshly initialised in bfloat16.

*Exact* means, in all of them: the fused loss and the gradient of every parameter are those of the cross entropy of the
model's own logits, within 1e-5 (in bfloat16: with at most twice the error of the standard loss). *Refused* means:
before training, with a message that names the class and the reason.

This file is written by `make models`, and a test compares it with what the code does.

| column | says |
|---|---|
| output layer | the module whose weight turns hidden states into logits; *tied*: it is the input embedding's |
| its input | the last hidden state of the model's body, a multiple of it, or that *transformed* by further layers; \
*inside the body*: the body runs the output layer itself |
| logits | the layer's bias and what the model does to the layer's output, by default |
| active | the same, with every attribute active that acts on the logits; empty where that changes nothing |
| own loss | what the model's own loss compares position t with: *shifted* is label t + 1, *as given* is label t |

The numbers are those of the tiny models. lit_fused compares position t of a decoder-only model with label t + 1 and
position t of an encoder-decoder with label t, whatever the model's own loss does.

Refused whatever their configuration are musicgen, which has an output layer for each codebook, of 2,048 entries each:
there are no large logits to be spared, and `loss=standard` trains it; and prophetnet, whose output layer gives the
logits of several streams, of which the model returns the first and trains on all. It trains with `loss=model`.
"""

_GUARD = """\
## What a model does to its logits is watched

The formula in the columns *logits* and *active* is found by experiment, and watched as long as the model is used.

| what | when | how |
|---|---|---|
| the formula is identified | before the first step; after weights were loaded; when a buffer or frozen parameter that \
the model uses behind its output layer has other numbers, or the layer another forward | three forward passes of \
eight tokens, compared with the model's own logits |
| every forward pass is watched | training, validation, test, prediction | in place of its logits the model gets one \
known number for each position, others at every call, in the shape of its logits; what it makes of them must be the \
formula's: for all entries of the vocabulary alike, in value, in order and, in training, in gradient |
| faults are read | in the first step, every `log_every_n_steps`, before a checkpoint is written, and at the end of \
training or evaluation; on one CPU in every step, before the optimizer uses its gradients | all ranks stop with the \
same sentence, and no device waits in between |

A `LanguageModel` without a Lightning module reads what was found by itself: on a CPU in the same pass, on a GPU one
pass later, which waits for nothing. The numbers are noise of every size up to 200, made without a random generator.
Noise shows more than a column of the real logits, whose values lie close together, and needs neither a product with the
weight nor a collective for one that is sharded. It costs some forty operations on (B, T) float32 numbers, whatever the
width and the vocabulary, and is compared to a relative 1e-4, as the formula is when it is identified. On an NVIDIA
H200 (torch 2.11.0) a step of a 0.6B model with 16,384 tokens takes 206.6 ms with it and 206.7 without: 0.04 ms of the
device, 2.0 ms of the host, which waits for nothing.

The numbers are a tensor of shape (B, T, V) in the memory of (B, T). What a model does to all entries alike is computed
once for each position. What tells entries apart, by a mask or gain of vocabulary size, an index, a slice that is
written into, an order or a threshold, is found in the same step. A hook that only looks at the logits is no fault.

A backbone that is compiled together with its output layer (`compile=whole`) shows neither gradients nor what is done to
some entries of the vocabulary. So each pass ends with a second one, not compiled, in which zeros take the place of what
the model's body returns: only what the model does behind it runs again. All cases below have the same outcome there.
Not watched at all: under `strategy=pp`, a model whose forward does not run behind the last stage's hidden states; a
plain `nn.Module`, which returns hidden states and leaves the logits to the loss; and `loss=standard`, `loss=model` and
generation, which use the model's own logits.

The cases below train three steps with the fused loss and with the standard loss, on models that do something to their
logits at once, or from the second step on. *Exact* is a case with the same weights, *refused* one with a sentence,
*silent* one with other weights and no sentence. Tests run every case.
"""


def document(rows: list[dict[str, str]]) -> str:
    """Return the whole page, of one row for each entry."""
    outcomes = Counter(case.outcome for case in CASES)
    parts = [
        _INTRODUCTION.format(version=transformers.__version__, entries=len(ENTRIES)),
        _GUARD,
        _markdown(["cases tried", *_OUTCOMES], [[str(len(CASES)), *(str(outcomes[name]) for name in _OUTCOMES)]]),
        _markdown(["case", "outcome"], [[case.what, case.outcome] for case in CASES]),
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


def row_of(entry: Entry, verdicts: dict[Variant, Verdict]) -> dict[str, str]:
    """Return an entry's row, by the verdicts on its variants."""
    default, active = (verdicts[variant].head for variant in (Variant.DEFAULT, Variant.ACTIVE))
    formulas = [_formula(head) for head in (default, active)]
    model = tiny_model(entry)
    sharpen(model)
    return {
        "model type": f"`{entry.model_type}`",
        "task": entry.task,
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
    return "last hidden state" + (f" x {factor:.4g}" if abs(factor - 1) > 1e-4 else "")


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
