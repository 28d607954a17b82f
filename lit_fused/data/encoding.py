"""From a document to its tokens: what an encoder is, the one for plain text, and the tokenizer it gets.

Every document becomes what the model will see of it: text ends with the tokenizer's end-of-text token, and begins with
its beginning-of-text token where the tokenizer itself puts one in front of a text (Llama 3, Gemma).
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lit_fused.data.store import Encoded
from lit_fused.data.tokenizer import train_tokenizer
from lit_fused.errors import UserError
from lit_fused.weights.location import why_the_hub_is_silent

_SLICE = 2**20  # characters that are encoded at once: a token costs the tokenizer some hundred bytes meanwhile


class DocumentError(UserError):
    """One document is no good. The preparation names it, and counts it against ``data.max_bad_documents``."""


class Encoder(Protocol):
    """A picklable function of documents (strings, or records such as ``{"messages": [...]}``).

    Called with a list, it returns one :class:`Encoded` for each. It raises :class:`DocumentError` where one cannot be
    encoded; it is then called again with each alone.
    """

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    def fingerprint(self) -> dict[str, Any]:
        """Whatever changes the result, as JSON."""
        ...

    def __call__(self, documents: list[Any]) -> list[Encoded]: ...


@runtime_checkable
class UntrainedEncoder(Protocol):
    """An encoder whose tokenizer is to be trained first, on a bounded sample of the training documents."""

    def fingerprint(self) -> dict[str, Any]: ...

    def train(self, documents: list[Any]) -> PreTrainedTokenizerBase: ...

    def build(self, tokenizer: PreTrainedTokenizerBase) -> Encoder: ...


class TextEncoder:
    """Text, whole, between the tokenizer's own beginning-of-text token, if it sets one, and its end-of-text token.

    Special tokens that a document spells out are encoded as ordinary text. A document of more than a million
    characters is encoded in slices that end with a line.

    Raises:
        UserError: The tokenizer has no end-of-text token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        eos = tokenizer.eos_token_id
        if not isinstance(eos, int):
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} has no end-of-text token, which every document ends with; "
                "give it one: tokenizer.eos_token = '...', and tokenizer.save_pretrained(FOLDER)"
            )
        framed = tokenizer("a")["input_ids"]
        bos = tokenizer.bos_token_id
        self.prefix = [bos] if isinstance(bos, int) and framed[:1] == [bos] and len(framed) > 1 else []
        self.suffix = [eos]

    def fingerprint(self) -> dict[str, Any]:
        return {"encoder": "text", "tokenizer": tokenizer_digest(self.tokenizer)}

    def __call__(self, documents: list[str]) -> list[Encoded]:
        slices = [list(_slices(document)) for document in documents]
        flat = [part for parts in slices for part in parts]
        encoded = self.tokenizer(
            flat, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
        )
        remaining = iter(encoded["input_ids"])
        results = []
        for parts in slices:
            tokens = [self.prefix, *(next(remaining) for _ in parts), self.suffix]
            results.append(Encoded(np.concatenate([np.asarray(part, np.int64) for part in tokens])))
        return results


class UntrainedTextEncoder:
    """A :class:`TextEncoder` whose byte-level BPE tokenizer of at most ``vocab_size`` entries is yet to be trained."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def fingerprint(self) -> dict[str, Any]:
        return {"encoder": "text", "train": self.vocab_size}

    def train(self, documents: list[str]) -> PreTrainedTokenizerBase:
        return train_tokenizer(documents, self.vocab_size)

    def build(self, tokenizer: PreTrainedTokenizerBase) -> TextEncoder:
        return TextEncoder(tokenizer)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a name or a folder, as ``AutoTokenizer`` finds it; of a hub that does not answer, what was
    downloaded earlier.

    Raises:
        UserError: There is none.
    """
    folder = Path(name).expanduser()
    silence = None if folder.exists() else why_the_hub_is_silent()  # its client tries for half a minute a file
    try:
        source = str(folder if folder.exists() else name)
        return AutoTokenizer.from_pretrained(source, local_files_only=silence is not None)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = silence or str(error).strip().split("\n")[0]
        raise UserError(
            f"no tokenizer could be loaded from data.tokenizer={name}: {reason}; give a folder with tokenizer.json, "
            "a name on the Hugging Face Hub, or data.tokenizer=null to train one on the text"
        ) from error


def vocab_size_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest number of an entry: some tokenizers leave holes."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of everything that decides how text is encoded."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
    for transient in ("truncation", "padding"):  # of the last call
        state.pop(transient, None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    state = [type(tokenizer).__name__, state, special, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _slices(document: str) -> Sequence[str]:
    """``document`` in slices of at most ``_SLICE`` characters, each, where it can be, ending with a line."""
    slices, start = [], 0
    while len(document) - start > _SLICE:
        end = document.rfind("\n", start, start + _SLICE) + 1 or start + _SLICE
        slices.append(document[start:end])
        start = end
    return [*slices, document[start:]] if start < len(document) else slices
