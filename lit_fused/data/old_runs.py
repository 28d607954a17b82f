"""Read the data of runs that were made when each kind of data was a class of its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_fused.errors import UserError

_PARTS: dict[str, tuple[str, Any]] = {
    "TextDataModule": ("FileSource", "TextEncoding"),
    "ChatDataModule": ("FileSource", "ChatEncoding"),
    "InstructionDataModule": ("FileSource", "InstructionEncoding"),
    "HubDataModule": (
        "HubSource",
        {"text": "TextEncoding", "chat": "ChatEncoding", "instruction": "InstructionEncoding"},
    ),
    "TokensDataModule": ("TokenArrays", None),
}

_LINE_PAIRS = "LinePairsDataModule"


def translate(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``data`` node of a run's configuration as it is written now; its options have kept their names.

    Texts, conversations, prompts and arrays are still found in the cache, and give the same tokens.

    Raises:
        UserError: The node is of pairs of lines, whose tokenizer depended on how they were prepared then.
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
    new = {**node, "_target_": "lit_fused.data.compose_data", "read": _partial(read)}
    if isinstance(encode, str):
        new["encode"] = _partial(encode)
    elif encode:
        new["encode"] = {form: _partial(part) for form, part in encode.items()}
    return new


def old_state(checkpoint: Mapping[str, Any], tokenizer: str | Path | None) -> Any:
    """Return the state of the data in a checkpoint of such a run; None for a later one.

    Lightning stores a data module's state under the name of its class.

    Args:
        checkpoint: Lightning's.
        tokenizer: The tokenizer that the data are given; None if one is trained.

    Raises:
        UserError: The run was on pairs of lines, and another tokenizer would be trained for its model.
    """
    if _LINE_PAIRS in checkpoint and tokenizer is None:
        raise UserError(
            "this checkpoint's pairs were prepared by an earlier version, and its tokenizer cannot be trained again; "
            "give the run's own, data.tokenizer=RUN/exported"
        )
    return next((checkpoint[name] for name in (*_PARTS, _LINE_PAIRS) if name in checkpoint), None)


def _partial(name: str) -> dict[str, Any]:
    return {"_target_": f"lit_fused.data.{name}", "_partial_": True}
