"""The data modules that conf/data composes, as functions of flat options."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from lit_fused.data import (
    ChatEncoding,
    InstructionEncoding,
    PairEncoding,
    PreferenceEncoding,
    TextEncoding,
    TokenArrays,
    compose_data,
    load_records,
)
from lit_fused.data.encoding import Encoded
from lit_fused.data.tokens import Tokens

FORMATS = {"text": TextEncoding, "chat": ChatEncoding, "instruction": InstructionEncoding}
FORMATS |= {"pairs": PairEncoding, "preference": PreferenceEncoding}
text_data = partial(compose_data, load_records, TextEncoding)
chat_data = partial(compose_data, load_records, ChatEncoding)
instruction_data = partial(compose_data, load_records, InstructionEncoding)
preference_data = partial(compose_data, load_records, PreferenceEncoding)
pairs_data = partial(compose_data, load_records, PairEncoding)
hub_data = partial(compose_data, load_records, FORMATS)
tokens_data = partial(compose_data, TokenArrays)


def tokens_of(documents: Sequence[Encoded], vocab_size: int) -> Tokens:
    """Return encoded documents as a data module reads them."""
    lengths = np.concatenate([np.diff([0, *(one.ends or [len(one.tokens)])]) for one in documents])
    masks = [one.loss_mask for one in documents if one.loss_mask is not None]
    loss_mask = [np.concatenate(masks)] if masks else None
    tokens = [np.concatenate([one.tokens for one in documents])]
    return Tokens(tokens, loss_mask, np.cumsum(lengths) - lengths, lengths, vocab_size)


def ready(data: Any) -> Any:
    """Return a data module after what a trainer does first with it."""
    data.prepare_data()
    data.setup()
    return data
