"""The data modules that conf/data composes, as functions of flat options."""

from functools import partial
from typing import Any

from lit_fused.data import (
    ChatEncoding,
    FileSource,
    HubSource,
    InstructionEncoding,
    PairEncoding,
    PreferenceEncoding,
    TextEncoding,
    TokenArrays,
    compose_data,
)

FORMATS = {"text": TextEncoding, "chat": ChatEncoding, "instruction": InstructionEncoding}
FORMATS |= {"pairs": PairEncoding, "preference": PreferenceEncoding}
text_data = partial(compose_data, FileSource, TextEncoding)
chat_data = partial(compose_data, FileSource, ChatEncoding)
instruction_data = partial(compose_data, FileSource, InstructionEncoding)
preference_data = partial(compose_data, FileSource, PreferenceEncoding)
pairs_data = partial(compose_data, FileSource, PairEncoding)
hub_data = partial(compose_data, HubSource, FORMATS)
tokens_data = partial(compose_data, TokenArrays)


def ready(data: Any) -> Any:
    """Return a data module after what a trainer does first with it."""
    data.prepare_data()
    data.setup()
    return data
