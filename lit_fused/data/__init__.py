"""The data room: data modules whose batches are ``{"input_ids", "labels"}``, int64 ``(batch_size, block_size)``.

Labels are unshifted, and -100 wherever no loss is wanted. Batches are on the CPU: Lightning moves them to the device.
"""

from lit_fused.data.documents import read_documents, split_documents
from lit_fused.data.packing import IGNORE_INDEX, pack_tokens
from lit_fused.data.synthetic import SyntheticDataModule
from lit_fused.data.text import TextDataModule
from lit_fused.data.tokenizer import train_tokenizer

__all__ = [
    "IGNORE_INDEX",
    "SyntheticDataModule",
    "TextDataModule",
    "pack_tokens",
    "read_documents",
    "split_documents",
    "train_tokenizer",
]
