"""Mask tokens of rows for masked language models: other ones in each epoch, and of validation always the same.

BERT (Devlin et al. 2019, section 3.1) chooses 15 % of the tokens. Of these, 80 % become the mask token, 10 % a random
one, and 10 % stay; each is to be predicted. Special tokens are never chosen.

Masked diffusion (Sahoo et al. 2024, arXiv:2406.07524) masks each token of a row with a probability t that is uniform
from 0 to 1, and weighs the masked ones with 1 / t. Its expectation is that of k masks among the row's n tokens, with k
uniform from 1 to n, and weights n / k (Nie et al. 2025, arXiv:2502.09992, equation 6). The latter are chosen here:
the weights of a row add up to n, so that sums divided by sums of weights are exact means over tokens.

The masks of a row depend on the seed, on the number of its draw and on the row alone: they are the same after a run was
resumed, and for any number of ranks and worker processes. N rows, T tokens.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from lit_fused.data.encoding import TextEncoding
from lit_fused.data.packing import Rows
from lit_fused.data.tokens import Integers
from lit_fused.ops.label_checks import IGNORE_INDEX


class MaskedRows(Rows):
    """The samples of other rows with masked "input_ids", and "labels" that are -100 where nothing is to be predicted.

    An index is the number of a row plus that of its draw times N: a row that comes again has other masks. Rows that are
    not drawn, as in validation, are those of draw 0.
    """

    def __init__(self, rows: Rows, tokenizer: PreTrainedTokenizerBase, encoding: TextEncoding, seed: int) -> None:
        self.rows, self.seed, self.num_rows, self.share_of_tokens = rows, seed, len(rows), rows.share_of_tokens
        share = encoding.mask_probability
        self.probability = None if isinstance(share, str) or share is None else share  # None: that of diffusion
        self._special = torch.tensor(tokenizer.all_special_ids)
        self._mask: Any = tokenizer.mask_token_id
        self._collator = DataCollatorForLanguageModeling(
            tokenizer,
            mlm_probability=1.0 if self.probability is None else self.probability,
            mask_replace_prob=encoding.mask_replaced,
            random_replace_prob=encoding.mask_random,
        )

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(self._row, range(self.num_rows))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._row(index)

    def draw(self, seed: int, epoch: int) -> Integers:
        """Return the order of an epoch, (N,), as indices."""
        own = getattr(self.rows, "draw", None)
        order = np.random.default_rng([seed, epoch]).permutation(self.num_rows) if own is None else own(seed, epoch)
        return order + self.num_rows * (epoch * len(order) + np.arange(len(order)))

    def _row(self, index: int) -> dict[str, Tensor]:
        draw, number = divmod(index, self.num_rows)
        row = self.rows[number]
        inputs, is_token = row["input_ids"].long(), row["labels"] != IGNORE_INDEX
        generator = np.random.default_rng([self.seed, draw, number])
        self._collator.generator = torch.Generator().manual_seed(int(generator.integers(2**63)))
        stays = torch.isin(inputs, self._special)
        if self.probability is None:
            return self._with_attention(row | self._of_diffusion(inputs, row, ~stays, generator), is_token)
        masked, labels = self._collator.torch_mask_tokens(inputs.clone()[None], stays[None])
        return self._with_attention(row | {"input_ids": masked[0], "labels": labels[0]}, is_token)

    def _of_diffusion(
        self, inputs: Tensor, row: dict[str, Tensor], candidates: Tensor, generator: np.random.Generator
    ) -> dict[str, Tensor]:
        places = candidates.nonzero()[:, 0]
        number = int(generator.integers(len(places))) + 1 if len(places) else 0
        chosen = torch.zeros_like(candidates)
        chosen[places[torch.from_numpy(generator.permutation(len(places))[:number])]] = True
        weights = row["token_weights"] if "token_weights" in row else torch.ones(len(inputs))
        return {
            "input_ids": inputs.masked_fill(chosen, self._mask),
            "labels": inputs.masked_fill(~chosen, IGNORE_INDEX),
            "token_weights": weights * (len(places) / max(number, 1)),
        }

    def _with_attention(self, row: dict[str, Tensor], is_token: Tensor) -> dict[str, Tensor]:
        if self.share_of_tokens is not None and "position_ids" not in row:
            row["attention_mask"] = is_token.long()  # A model that sees both sides would see a block's padding, too.
        return row
