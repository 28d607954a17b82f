"""The lists of docs/packing.md: which causal models of transformers keep packed documents apart. ``python
tools/packing_table.py`` writes them anew."""

from pathlib import Path

import torch
from architectures import ENTRIES, language_model, tiny_model

from lit_fused import UserError

DOCUMENT = Path(__file__).parents[1] / "docs" / "packing.md"
BEGIN, END = "<!-- models: python tools/packing_table.py -->\n", "<!-- end of models -->\n"
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


def packing_table() -> str:
    found: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for entry in ENTRIES:
        if str(entry).endswith("-causal"):
            found[verdict(entry)].append(str(entry).removesuffix("-causal"))
    return "\n".join(f"{title} ({len(found[kind])}): {', '.join(found[kind])}.\n" for kind, title in _KINDS.items())


def written() -> str:
    """Return what the document has."""
    return DOCUMENT.read_text().split(BEGIN)[1].split(END)[0].strip("\n") + "\n"


if __name__ == "__main__":
    before, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{packing_table()}\n{END}{rest.split(END)[1]}")
