"""docs/evidence/packing.md: which causal models of transformers keep packed documents apart.

python tools/packing_table.py
"""

from pathlib import Path

import torch
import transformers
from architectures import ENTRIES, language_model, tiny_model

from lit_fused import UserError

DOCUMENT = Path(__file__).parents[1] / "docs" / "evidence" / "packing.md"
_INTRODUCTION = f"""\
# Models that keep packed documents apart

```bash
make packing
```

The answers of tiny models of all causal architectures of transformers {transformers.__version__} with their default \
settings, which may change the answer; [Packing](../packing.md) has how a run asks its own model.

"""
_KINDS = {
    "positions": "Exact, by positions",
    "masks": "Exact, by finished masks",
    "refused": "Refused",
}


def verdict(entry: object) -> str:
    """ "positions", "masks" or "refused", for a tiny model of that architecture."""
    ids = torch.arange(64).remainder(50)[None] + 5
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(32).repeat(2)[None]}
    model = language_model(tiny_model(entry))  # type: ignore[arg-type]
    try:
        model.check_packing(batch)
    except UserError:
        return "refused"
    assert isinstance(model.packing, str)
    return model.packing


def packing_page() -> str:
    """Return the page, of all causal architectures."""
    found: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for entry in ENTRIES:
        if str(entry).endswith("-causal"):
            found[verdict(entry)].append(str(entry).removesuffix("-causal"))
    lists = [f"{title} ({len(found[kind])}): {', '.join(found[kind])}.\n" for kind, title in _KINDS.items()]
    return _INTRODUCTION + "\n".join(lists)


if __name__ == "__main__":
    DOCUMENT.write_text(packing_page())
    print(f"wrote {DOCUMENT}")
