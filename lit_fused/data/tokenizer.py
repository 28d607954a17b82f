"""Train a byte-level BPE tokenizer in seconds, or load one.

Byte-level means that the tokenizer can encode every text and ``decode(encode(text)) == text`` exactly: it has no
unknown token, no normalisation and no clean-up of spaces.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lit_fused.errors import UserError

EOS_TOKEN, EOS_TOKEN_ID = "<|endoftext|>", 0  # ends each document and sequence; begins a generation without prompt
PAD_TOKEN, PAD_TOKEN_ID = "<|pad|>", 1
MASK_TOKEN = "<|mask|>"  # number 2 of a tokenizer that is trained for masked language models
_LONGEST_WORD = 1024  # bytes; training takes a time that grows with a word's length times the number of merges
MIN_VOCAB_SIZE = 258  # the 256 bytes and the two special tokens


def train_tokenizer(
    documents: Sequence[str], vocab_size: int, *, whole_sequences: bool = False, mask_token: bool = False
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most ``vocab_size`` entries; a small text, in which fewer pairs repeat, yields fewer.

    Args:
        vocab_size: At least ``MIN_VOCAB_SIZE``.
        whole_sequences: For encoder-decoders, whose texts are complete: encoding appends the end-of-text token, and
            encodes the first word as in the middle of a text (after a space, which decoding removes).
        mask_token: For masked language models.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=whole_sequences)
    tokenizer.decoder = decoders.ByteLevel()
    if whole_sequences:
        tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", left=1)])
        ends = [(EOS_TOKEN, EOS_TOKEN_ID)]
        tokenizer.post_processor = processors.TemplateProcessing(f"$A {EOS_TOKEN}", special_tokens=ends)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a pair that occurs once says nothing about the language
        special_tokens=[EOS_TOKEN, PAD_TOKEN, MASK_TOKEN][: 3 if mask_token else 2],  # numbered first, in this order
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = tokenizer.pre_tokenizer
    parts = pre_tokenizers.Split(Regex(f".{{1,{_LONGEST_WORD}}}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, parts])  # Shorter words stay whole.
    tokenizer.train_from_iterator(documents, trainer, length=len(documents))
    tokenizer.pre_tokenizer = words
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        **({"mask_token": MASK_TOKEN} if mask_token else {}),
        model_input_names=["input_ids", "attention_mask"],
    )


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a name or folder as ``AutoTokenizer`` does."""
    from transformers import AutoTokenizer  # It loads torch, which preparing a text without a given one does not need.

    folder = Path(name).expanduser()
    try:
        source = str(folder if folder.exists() else name)
        return AutoTokenizer.from_pretrained(source, local_files_only=folder.exists(), trust_remote_code=False)
    except Exception as error:  # tokenizers raises Exception itself for a damaged file
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"no tokenizer could be loaded from data.tokenizer={name}: {reason}; give a folder with tokenizer.json, "
            "a name on the Hugging Face Hub, or data.tokenizer=null to train one on the text"
        ) from error


def vocab_size_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return one more than the largest number of an entry; some tokenizers leave holes."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of everything that decides how text is encoded."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
    for transient in ("truncation", "padding"):  # leftovers of the last call
        state.pop(transient, None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    state = [type(tokenizer).__name__, state, special, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
