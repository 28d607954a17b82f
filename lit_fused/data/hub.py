"""A data set of the datasets library as a source: a name on the Hugging Face Hub, a folder or a file.

Not streamed, the library downloads all of the split first and keeps it, memory-mapped, in its own cache; several
processes read it. Streamed, nothing is kept but the tokens: one process reads the split from its beginning, and stops
after ``max_documents``.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import datasets
from huggingface_hub import HfApi, is_offline_mode
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError
from transformers import PreTrainedTokenizerBase

from lit_fused.data.chat import ChatEncoding
from lit_fused.data.checks import check_int
from lit_fused.data.encoding import DocumentError, Encoder, TextEncoder, UntrainedEncoder, UntrainedTextEncoder
from lit_fused.data.instruction import InstructionEncoding
from lit_fused.data.module import TokenDataModule
from lit_fused.data.packing import Packing
from lit_fused.data.sources import Document, Piece
from lit_fused.data.truncation import TooLong
from lit_fused.errors import UserError

_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow"}
_MIN_ROWS, _PIECES = 10_000, 1024  # rows of a piece, and how many pieces there are at most
_COMMIT = re.compile("[0-9a-f]{40}")
_SECONDS = 10  # that the Hub has for its first answer


class HubDataModule(TokenDataModule):
    """A data set of the datasets library: text, conversations, or prompts and completions.

    Args:
        path, name, split, revision, streaming, max_documents: See :class:`HubSource`.
        format: "text": the column ``text_column``. "chat": conversations, see :class:`~lit_fused.data.ChatDataModule`.
            "instruction": prompts and completions, see :class:`~lit_fused.data.InstructionDataModule`.
        text_column: For "text".
        messages_column, chat_template, template_kwargs: For "chat".
        prompt, completion: For "instruction".
        too_long: For the last two.
        packing: None: "documents" for "chat" and "instruction", "stream" for "text".

    The other arguments are :class:`~lit_fused.data.module.TokenDataModule`'s.

    Raises:
        UserError: A value is out of range, or is not for this format, at construction; ``prepare_data`` and ``setup``
            raise it for a data set that cannot be read.
    """

    kind = "hf"

    def __init__(
        self,
        path: str | Path,
        name: str | None = None,
        split: str = "train",
        revision: str | None = None,
        streaming: bool = False,
        max_documents: int | None = None,
        format: Literal["text", "chat", "instruction"] = "text",
        text_column: str = "text",
        messages_column: str | None = None,
        chat_template: str | Path | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        prompt: str = "prompt",
        completion: str | None = None,
        too_long: TooLong = "cut",
        block_size: int = 1024,
        batch_size: int = 8,
        val_fraction: float = 0.05,
        tokenizer: str | Path | None = None,
        vocab_size: int = 16384,
        max_bad_documents: int = 0,
        cache_dir: str | Path | None = None,
        num_workers: int = 0,
        prepare_workers: int | None = None,
        packing: Packing | None = None,
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
            packing=packing or ("stream" if format == "text" else "documents"),
            seed=seed,
        )
        if max_documents is not None:
            check_int("data.max_documents", max_documents, 1)
        if format not in ("text", "chat", "instruction"):
            raise UserError(f"data.format must be text, chat or instruction; got {format!r}")
        chat = {"messages_column": messages_column, "chat_template": chat_template, "template_kwargs": template_kwargs}
        self._refuse_foreign(format, "text", {"text_column": text_column != "text"})
        if format == "text" and too_long != "cut":
            raise UserError("data.too_long is for data.format=chat and instruction, but data.format is text")
        self._refuse_foreign(format, "chat", {option: bool(value) for option, value in chat.items()})
        self._refuse_foreign(format, "instruction", {"prompt": prompt != "prompt", "completion": bool(completion)})
        self.encoding = {
            "text": lambda: None,
            "chat": lambda: ChatEncoding(**chat, too_long=too_long),
            "instruction": lambda: InstructionEncoding(prompt, completion, too_long),
        }[format]()
        columns = None if self.encoding is None else self.encoding.columns
        column = text_column if self.encoding is None else None
        self.source = HubSource(path, name, split, revision, column, columns, streaming, max_documents)

    @staticmethod
    def _refuse_foreign(format: str, owner: str, given: Mapping[str, bool]) -> None:
        """An option that would be without effect."""
        for option, is_given in given.items():
            if is_given and format != owner:
                raise UserError(f"data.{option} is for data.format={owner}, but data.format is {format}")

    def make_source(self) -> "HubSource":
        return self.source

    def make_encoder(self, tokenizer: PreTrainedTokenizerBase | None) -> Encoder | UntrainedEncoder:
        if self.encoding is not None:
            return self.encoding.encoder(tokenizer, self.block_size, self.max_vocab_size)
        return UntrainedTextEncoder(self.max_vocab_size) if tokenizer is None else TextEncoder(tokenizer)


class HubSource:
    """One split of a data set: its text column, or whole records.

    Args:
        path: A name on the Hub; a folder that ``save_to_disk`` has written, or with Parquet, JSON or CSV files; or such
            a file.
        name: The configuration ("subset"), where the data set has several.
        split: "train", or, where it is not streamed, a part such as "train[:10%]".
        revision: A branch, tag or commit on the Hub.
        column: The one with the text. None: documents are records.
        columns: Of records, those that are read, where the data set has them. None: all.
        streaming: Read without downloading all of it first.
        max_documents: Read only the first so many. None: all.

    Raises:
        UserError: ``pieces`` raises it where there is no such data set, split or column, or no way to it.
    """

    def __init__(
        self,
        path: str | Path,
        name: str | None = None,
        split: str = "train",
        revision: str | None = None,
        column: str | None = "text",
        columns: Sequence[str] | None = None,
        streaming: bool = False,
        max_documents: int | None = None,
    ) -> None:
        local = Path(path).expanduser()
        self.path: str | Path = local.absolute() if local.exists() else str(path)
        self.config_name = name
        self.split = split
        self.revision = revision
        self.column = column
        self.columns = None if columns is None else list(columns)
        self.streaming = streaming
        self.max_documents = max_documents
        self._data: tuple[Any, Any] | None = None  # see _loaded; a Dataset pickles as the names of its files

    @property
    def name(self) -> str:
        return str(self.path)

    def identity(self) -> Any:
        return [
            "datasets",
            *(str(self.path), self.config_name, self.split, self.revision),
            *(self.column, self.columns, self.streaming, self.max_documents),
        ]

    def pieces(self) -> list[Piece]:
        if self.streaming:
            # A commit says all there is to know, also without a way to the Hub.
            is_commit = not isinstance(self.path, Path) and _COMMIT.fullmatch(self.revision or "")
            version = self.revision if is_commit else self._loaded()[1]
            return [Piece(self.max_documents or 1, version, None)]
        data, version = self._loaded()
        rows = len(data) if self.max_documents is None else min(len(data), self.max_documents)
        step = max(_MIN_ROWS, -(-rows // _PIECES))
        ranges = [(start, min(start + step, rows)) for start in range(0, rows, step)]
        return [Piece(stop - start, [version, start, stop], (start, stop)) for start, stop in ranges]

    def read(self, piece: Piece) -> Iterator[Document]:
        if piece.payload is None:
            start, rows = 0, islice(self._loaded()[0], self.max_documents)
        else:
            start, rows = piece.payload[0], self._loaded()[0].select(range(*piece.payload))
        for row, record in enumerate(self._records(rows), start=start + 1):
            yield Document(self._content(record), lambda row=row: f"{self.name}, {self.split}, row {row}")

    def _records(self, rows: Any) -> Iterator[dict[str, Any]]:
        try:
            yield from rows
        except Exception as error:  # of the network, of any file format, of decoding
            raise self._cannot_be_read(error) from error

    def _content(self, record: dict[str, Any]) -> str | dict[str, Any] | DocumentError:
        if self.column is None:
            return record
        if self.column not in record:
            return DocumentError(self._no_column(record))
        text = record[self.column]
        if text is None:  # a missing value is an empty text
            return ""
        if not isinstance(text, str):
            return DocumentError(f"expected text in {self.column!r}, got {type(text).__name__}")
        return text

    def _loaded(self) -> tuple[Any, Any]:
        """The Dataset or IterableDataset, of the columns that are read, and JSON that changes with its content."""
        if self._data is None:
            data, version = self._load()
            self._data = self._with_columns(data), version
        return self._data

    def _with_columns(self, data: Any) -> Any:
        names = data.column_names
        if names is None:  # of a stream, whose columns show only when it is read
            return data
        if self.column is None:
            read = [name for name in self.columns or () if name in names]
        elif self.column in names:
            read = [self.column]
        else:
            raise UserError(f"{self.name}: {self._no_column(names)}")
        return data.select_columns(read) if read else data

    def _no_column(self, names: Any) -> str:
        there = ", ".join(map(repr, names)) or "none"
        return f"there is no column {self.column!r}; those that are there: {there}. Set data.text_column to one of them"

    def _load(self) -> tuple[Any, Any]:
        """The data, and JSON that changes with its content."""
        try:
            if isinstance(self.path, Path) and (saved := _saved_folder(self.path, self.split)):
                data = datasets.load_from_disk(str(saved))
                assert isinstance(data, datasets.Dataset)
                return data.to_iterable_dataset() if self.streaming else data, _versions(saved.iterdir())
            builder = self._builder()
            version = [builder.config_id, builder.hash]
            if isinstance(self.path, Path) and self.path.is_file():
                version += _versions([self.path])
            if self.streaming:
                return builder.as_streaming_dataset(self.split), version
            builder.download_and_prepare()
            return builder.as_dataset(self.split), version
        except UserError:
            raise
        except Exception as error:  # the library raises what it likes: ValueError, OSError, RuntimeError, ...
            raise self._cannot_be_read(error) from error

    def _builder(self) -> Any:
        if not isinstance(self.path, Path):
            self._ask_hub()
            return datasets.load_dataset_builder(self.path, self.config_name, revision=self.revision)
        if self.path.is_dir():
            return datasets.load_dataset_builder(str(self.path), self.config_name)
        reader = _READERS.get(self.path.suffix)
        if reader is None:
            raise UserError(f"data.path must end in one of {', '.join(_READERS)}, got {self.path}")
        return datasets.load_dataset_builder(reader, data_files=str(self.path))

    def _ask_hub(self) -> None:
        """Find out in one request whether the Hub has the data set; the library tries for half a minute."""
        assert isinstance(self.path, str)
        try:
            HfApi().dataset_info(self.path, revision=self.revision, timeout=_SECONDS)
        except OfflineModeIsEnabled:
            return  # the library has it in its cache, or says that it has not
        except GatedRepoError as error:
            raise UserError(
                f"the data set {self.path} is gated: ask for access on its page, and log in with `hf auth login`"
            ) from error
        except RevisionNotFoundError as error:
            raise UserError(f"the data set {self.path} has no revision {self.revision}; set data.revision") from error
        except RepositoryNotFoundError as error:
            raise UserError(
                f"there is neither a file or folder nor a data set on the Hugging Face Hub named {self.path} (or it is "
                "private: log in with `hf auth login`)"
            ) from error
        except Exception as error:
            raise UserError(
                f"there is no file or folder {self.path}, and the Hugging Face Hub cannot be asked for a data set of "
                f"that name: {_one_line(error)}; a copy in the library's cache is used with HF_HUB_OFFLINE=1"
            ) from error

    def _cannot_be_read(self, error: Exception) -> UserError:
        if is_offline_mode() and not isinstance(self.path, Path):
            hint = "; HF_HUB_OFFLINE is set, and the library's cache does not have it"
        else:
            hint = ""
        return UserError(
            f"the data set {self.name} (data.name={self.config_name}, data.split={self.split}) cannot be read: "
            f"{_one_line(error)}{hint}"
        )


def _saved_folder(path: Path, split: str) -> Path | None:
    """The folder of a split that ``save_to_disk`` has written at ``path``; None if that is none."""
    if (path / "state.json").is_file():
        if split != "train":
            raise UserError(f"{path} holds one data set without splits; leave data.split at train, got {split}")
        return path
    if not (path / "dataset_dict.json").is_file():
        return None
    if not (path / split / "state.json").is_file():
        there = ", ".join(sorted(folder.parent.name for folder in path.glob("*/state.json")))
        raise UserError(f"{path} has no split {split}; those that are there: {there or 'none'}. Set data.split")
    return path / split


def _versions(files: Any) -> list[Any]:
    stats: Sequence[tuple[Path, Any]] = sorted((file, file.stat()) for file in files)
    return [[file.name, stat.st_size, stat.st_mtime_ns] for file, stat in stats]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
