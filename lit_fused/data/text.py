"""The data module of text: files and folders of it, or the sources of Python's standard library."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from lit_fused.data.checks import check_int
from lit_fused.data.encoding import Encoder, TextEncoder, UntrainedEncoder, UntrainedTextEncoder
from lit_fused.data.module import TokenDataModule
from lit_fused.data.packing import Packing
from lit_fused.data.sources import FileSource
from lit_fused.errors import UserError


class TextDataModule(TokenDataModule):
    """Packed blocks of text: batches of ``input_ids`` and ``labels``, int64 ``(batch_size, block_size)``, on the CPU.

    Args:
        path: A file; or a folder, of which every ``.txt``, ``.md``, ``.py``, ``.jsonl`` and ``.parquet`` file is read,
            recursively, compressed (``.gz``, ``.bz2``, ``.xz``, ``.zst``) or not: see
            :class:`lit_fused.data.sources.FileSource`. None: the sources of Python's standard library, found on the
            machine.
        text_column: The field of a JSON line, or the column of a Parquet file, that holds the text.
        encoding: Of text and JSON files.
        max_bytes: Read no more of the text than this.

    The other arguments are :class:`~lit_fused.data.module.TokenDataModule`'s.

    Raises:
        UserError: A value is out of range, at construction; ``prepare_data`` and ``setup`` raise it for a missing,
            empty, too short or undecodable text, and for a cache that cannot be written.
    """

    kind = "text"

    def __init__(
        self,
        path: str | Path | None = None,
        text_column: str = "text",
        encoding: str = "utf-8",
        block_size: int = 256,
        batch_size: int = 8,
        val_fraction: float = 0.05,
        tokenizer: str | Path | None = None,
        vocab_size: int = 16384,
        max_bytes: int | None = None,
        max_bad_documents: int = 0,
        cache_dir: str | Path | None = None,
        num_workers: int = 0,
        prepare_workers: int | None = None,
        packing: Packing = "stream",
        seed: int = 0,
    ) -> None:
        super().__init__(
            block_size=block_size,
            batch_size=batch_size,
            val_fraction=val_fraction,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_bad_documents=max_bad_documents,
            cache_dir=cache_dir,
            num_workers=num_workers,
            prepare_workers=prepare_workers,
            packing=packing,
            seed=seed,
        )
        if not isinstance(text_column, str):
            raise UserError(f"data.text_column must be the name of a field or column; got {text_column!r}")
        if max_bytes is not None:
            check_int("data.max_bytes", max_bytes, 1)
        self.source = FileSource(path, text_column, encoding, max_bytes)

    def make_source(self) -> FileSource:
        return self.source

    def make_encoder(self, tokenizer: PreTrainedTokenizerBase | None) -> Encoder | UntrainedEncoder:
        return UntrainedTextEncoder(self.max_vocab_size) if tokenizer is None else TextEncoder(tokenizer)
