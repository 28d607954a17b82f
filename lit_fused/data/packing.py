"""Pack a stream of tokens into blocks of one length, losing none.

The documents, each followed by the end-of-text token, form one stream; block ``b`` is its tokens
``[b * block_size, (b + 1) * block_size)``. The last block is padded, and only there are labels -100: by position, not
by the padding token's number, so that labels are right whatever the text contains.

B blocks, N tokens.
"""

import numpy as np
import numpy.typing as npt

IGNORE_INDEX = -100


def pack_tokens(
    tokens: npt.NDArray[np.int32], block_size: int, pad_token_id: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Pack ``tokens`` ``(N,)`` into ``input_ids`` and ``labels``, both int32 ``(B, block_size)``.

    ``B = ceil(N / block_size)``. Labels are unshifted: equal to ``input_ids``, except -100 on the last block's padding.
    """
    num_blocks = -(-len(tokens) // block_size)
    input_ids = np.full(num_blocks * block_size, pad_token_id, dtype=np.int32)
    labels = np.full(num_blocks * block_size, IGNORE_INDEX, dtype=np.int32)
    input_ids[: len(tokens)] = tokens
    labels[: len(tokens)] = tokens
    return input_ids.reshape(num_blocks, block_size), labels.reshape(num_blocks, block_size)
