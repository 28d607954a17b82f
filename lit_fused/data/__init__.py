"""The data room: data modules whose batches have "input_ids" and "labels", int64 tensors.

For causal models both are (batch_size, block_size) and aligned; where rows hold whole documents "position_ids" begin
anew with each, and where they hold one each, "attention_mask" tells padding and rows are as long as the longest. For
encoder-decoders labels are the answer to the input. Labels are unshifted, and -100 wherever no loss is wanted. Batches
are on the CPU: Lightning moves them to the device.
"""

from lit_fused.data.chat import ChatDataModule
from lit_fused.data.documents import read_documents
from lit_fused.data.hub import HubDataModule
from lit_fused.data.instruction import InstructionDataModule
from lit_fused.data.packing import IGNORE_INDEX
from lit_fused.data.pairs import LinePairsDataModule, reverse_words
from lit_fused.data.store import Encoded, TokenStore
from lit_fused.data.synthetic import SyntheticDataModule
from lit_fused.data.text import TextDataModule
from lit_fused.data.tokenizer import train_tokenizer
from lit_fused.data.tokens import TokensDataModule

__all__ = [
    "IGNORE_INDEX",
    "ChatDataModule",
    "Encoded",
    "HubDataModule",
    "InstructionDataModule",
    "LinePairsDataModule",
    "SyntheticDataModule",
    "TextDataModule",
    "TokenStore",
    "TokensDataModule",
    "read_documents",
    "reverse_words",
    "train_tokenizer",
]
