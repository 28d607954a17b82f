"""Sequential recommenders of torch's own layers: from the items of a user, in their order, to hidden states.

Items are numbered from 1, 0 is padding, on either side, and -1 the mask of a bidirectional model.
"""

import math

import torch
from torch import Tensor, nn

from lit_fused.errors import checked_options

MASK = -1  # an input that hides an item
# The deviation of new rows of a table. AdamW moves an entry by about its rate in a step: rows of D ** -0.5 would keep
# their random numbers for hundreds of steps.
INITIAL_STD = 0.02


class _ItemEncoder(nn.Module):
    is_bidirectional = False

    @checked_options(num_items=0, hidden_size=1, num_layers=0, num_heads=1, max_length=1)
    def __init__(
        self,
        num_items: int = 0,
        hidden_size: int = 64,
        num_layers: int = 2,
        num_heads: int = 2,
        max_length: int = 50,
        dropout: float = 0.2,
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        self.settings = {
            "hidden_size": hidden_size,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "max_length": max_length,
            "dropout": dropout,
            "activation": activation,
        }
        self.num_heads, self.max_length = num_heads, max_length
        self.item_embedding = nn.Embedding(num_items + 1, hidden_size, padding_idx=0)
        self.position_embedding = nn.Embedding(max_length, hidden_size)
        nn.init.normal_(self.position_embedding.weight, std=INITIAL_STD)
        with torch.no_grad():
            self.item_embedding.weight[1:].normal_(std=INITIAL_STD)
        self.mask_vector = nn.Parameter(torch.randn(hidden_size) * INITIAL_STD) if self.is_bidirectional else None
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(
            hidden_size, num_heads, 4 * hidden_size, dropout, activation, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, num_layers, nn.LayerNorm(hidden_size), enable_nested_tensor=False, mask_check=False
        )

    def get_input_embeddings(self) -> nn.Embedding:
        return self.item_embedding

    def get_output_embeddings(self) -> nn.Embedding:
        """Return the table of items, which is also the output layer."""
        return self.item_embedding

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return hidden states (B, T, hidden_size) of items (B, T), of which at most max_length are no padding."""
        is_masked = (input_ids == MASK) & self.is_bidirectional
        hidden = self.item_embedding(input_ids.masked_fill(is_masked, 0))  # It refuses other negative numbers.
        if self.mask_vector is not None:
            hidden = self.mask_vector.to(hidden.dtype).where(is_masked[..., None], hidden)
        is_item = input_ids != 0
        positions = (is_item.cumsum(1) - 1).clamp(min=0)  # The same for padding on the left and on the right.
        hidden = hidden * math.sqrt(hidden.shape[-1]) + self.position_embedding(positions)
        return self.layers(self.dropout(hidden), mask=self._hidden_from(is_item))

    def _hidden_from(self, is_item: Tensor) -> Tensor:
        """Return what a position must not attend to, (B * heads, T, T) bool: padding, and what is later."""
        length = is_item.shape[1]
        itself = torch.eye(length, dtype=torch.bool, device=is_item.device)
        seen = is_item[:, None, :] | itself  # A row of padding alone attends to itself, else its numbers were NaN.
        if not self.is_bidirectional:
            seen = seen & torch.ones_like(itself).tril()
        return (~seen).repeat_interleave(self.num_heads, 0)


class SASRec(_ItemEncoder):
    """A causal transformer over a user's items (Kang and McAuley, 2018, arXiv 1808.09781), with norms before layers.

    Args:
        num_items: items of the catalogue; the table has one row more, of the padding. 0: the data say how many.
        hidden_size: width D of the table and of the layers.
        num_layers: number of layers.
        num_heads: heads of attention in each layer.
        max_length: the most items of a sequence.
        dropout: of the embeddings and of each layer.
        activation: "gelu" or "relu".
    """


class BidirectionalItems(_ItemEncoder):
    """A transformer in which every position sees all items (BERT4Rec, Sun et al., 2019, arXiv 1904.06690): trained to
    find masked items. Its arguments are those of :class:`SASRec`."""

    is_bidirectional = True
