"""Read the data of runs that were made when each kind of data was a class of its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_fused.errors import UserError

_PARTS: dict[str, tuple[str, Any]] = {
    "TextDataModule": ("FileSource", "TextEncoding"),
    "ChatDataModule": ("FileSource", "ChatEncoding"),
    "InstructionDataModule": ("FileSource", "InstructionEncoding"),
    "HubDataModule": ("HubSource", {form: f"{form.title()}Encoding" for form in ("text", "chat", "instruction")}),
    "TokensDataModule": ("TokenArrays", None),
}
_LINE_PAIRS = "LinePairsDataModule"


def translate(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``data`` node of a run's configuration as it is written now; its options have kept their names.

    Texts, conversations, prompts and arrays are still found in the cache, and give the same tokens. Pairs of lines are
    refused: their tokenizer depended on how they were prepared then.
    """
    name = str(node.get("_target_", "")).removeprefix("lit_fused.data.")
    if name == _LINE_PAIRS:
        raise UserError(
            "this run's pairs were prepared by an earlier version, and its tokenizer cannot be made again: it is in "
            "the run's folder exported, if there is one; or export the model without it (--no-tokenizer)"
        )
    if name not in _PARTS:
        return dict(node)
    read, encode = _PARTS[name]
    parts = {"read": _partial(read)} | ({"encode": _partial(encode)} if encode else {})
    return {**node, "_target_": "lit_fused.data.compose_data", **parts}


def old_state(checkpoint: Mapping[str, Any], tokenizer: str | Path | None) -> Any:
    """Return the state of the data in a checkpoint of such a run; None for a later one.

    Lightning stores a data module's state under the name of its class. Pairs of lines without a given ``tokenizer`` are
    refused: another one would be trained for the model.
    """
    if _LINE_PAIRS in checkpoint and tokenizer is None:
        raise UserError(
            "this checkpoint's pairs were prepared by an earlier version, and its tokenizer cannot be trained again; "
            "give the run's own, data.tokenizer=RUN/exported"
        )
    return next((checkpoint[name] for name in (*_PARTS, _LINE_PAIRS) if name in checkpoint), None)


def _partial(name: str | dict[str, str]) -> dict[str, Any]:
    if isinstance(name, dict):
        return {form: _partial(part) for form, part in name.items()}
    return {"_target_": f"lit_fused.data.{name}", "_partial_": True}
