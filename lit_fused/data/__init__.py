"""Make batches with "input_ids" and "labels", int64 tensors: records -> tokens -> rows -> batches.

For causal models both are (batch_size, block_size) and aligned. Where rows hold several whole documents, "position_ids"
begin anew with each; where a row holds one, "attention_mask" tells padding and rows are as long as the longest. For
encoder-decoders labels are the answer to the input. Labels are unshifted, and -100 wherever no loss is wanted. Batches
are on the CPU: Lightning moves them to the device. The names below are loaded on first use.
"""

from typing import TYPE_CHECKING

from lit_fused import on_first_use

if TYPE_CHECKING:
    from lit_fused.data.chat_encoding import ChatEncoding
    from lit_fused.data.encoding import TextEncoding
    from lit_fused.data.instruction_encoding import InstructionEncoding
    from lit_fused.data.interaction_data import InteractionDataModule
    from lit_fused.data.pair_encoding import PairEncoding
    from lit_fused.data.preference_encoding import PreferenceEncoding
    from lit_fused.data.records import load_records
    from lit_fused.data.rollouts import RolloutDataModule
    from lit_fused.data.synthetic import SyntheticDataModule
    from lit_fused.data.token_data_module import TokenDataModule, compose_data
    from lit_fused.data.tokenizer import train_tokenizer
    from lit_fused.data.tokens import TokenArrays
    from lit_fused.ops.label_checks import IGNORE_INDEX

__getattr__ = on_first_use(__name__)[1]
