"""A byte-level BPE tokenizer, trained on the corpus in seconds.

Byte-level means that every text can be written in it and ``decode(encode(text)) == text`` exactly: there is no unknown
token, no normalisation and no clean-up of spaces.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

EOS_TOKEN, EOS_TOKEN_ID = "<|endoftext|>", 0  # ends each document and sequence; begins a generation without prompt
PAD_TOKEN, PAD_TOKEN_ID = "<|pad|>", 1
MIN_VOCAB_SIZE = 258  # the 256 bytes and the two special tokens


def train_tokenizer(
    documents: Sequence[str], vocab_size: int, *, whole_sequences: bool = False
) -> PreTrainedTokenizerFast:
    """Train on ``documents``; the result has at most ``vocab_size`` (at least ``MIN_VOCAB_SIZE``) entries.

    A small corpus has fewer pairs that repeat and yields fewer entries. The end-of-text token is also the beginning.

    Args:
        documents: The text.
        vocab_size: The most entries.
        whole_sequences: What is encoded is complete, as what an encoder-decoder reads and says: the end-of-text token
            is appended, and its first word is encoded as it would be in the middle (behind a space, which decoding
            takes away).
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=whole_sequences)
    tokenizer.decoder = decoders.ByteLevel()
    if whole_sequences:
        tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", left=1)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a pair seen once is a memory of the text, not a unit of its language
        special_tokens=[EOS_TOKEN, PAD_TOKEN],  # numbered first, in this order
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer, length=len(documents))
    if whole_sequences:
        tokenizer.post_processor = processors.TemplateProcessing(
            f"$A {EOS_TOKEN}", special_tokens=[(EOS_TOKEN, EOS_TOKEN_ID)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        model_input_names=["input_ids", "attention_mask"],
    )
