"""Our module on an encoder-decoder of one's own: an embedding, torch.nn.Transformer and a linear head.

python examples/plain_transformer.py
"""

from functools import partial

import lightning as L
import torch
import torch.nn.functional as F
import transformers
from project import MAX_LENGTH, VOCAB_SIZE, collate, fit
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW

from lit_fused import FusedSeq2SeqLMModule

START = 0  # what the decoder reads at its first position


class EncoderDecoder(nn.Module):
    """A small Transformer. Its forward leaves the output layer to the loss."""

    def __init__(self, vocab_size: int = VOCAB_SIZE, hidden_size: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        shape = {"d_model": hidden_size, "nhead": 4, "dim_feedforward": 4 * hidden_size, "dropout": 0.0}
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(MAX_LENGTH, hidden_size)
        layer = nn.TransformerEncoderLayer(**shape, batch_first=True, norm_first=True)
        encoder = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(hidden_size), enable_nested_tensor=False)
        self.transformer = nn.Transformer(
            **shape, num_decoder_layers=num_layers, custom_encoder=encoder, batch_first=True, norm_first=True
        )
        self.lm_head = nn.Linear(hidden_size, vocab_size)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        """(B, S) tokens read, (B, T) tokens said before -> (B, T, D). The arguments are the batch's, by name."""
        padding = attention_mask == 0
        future = nn.Transformer.generate_square_subsequent_mask(
            decoder_input_ids.shape[1], decoder_input_ids.device, torch.bool
        )
        return self.transformer(
            self.embed(input_ids),
            self.embed(decoder_input_ids),
            tgt_mask=future,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )

    def embed(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]


def collate_reversed(documents: list[Tensor]) -> dict[str, Tensor]:
    """The encoder reads a document, the decoder is to say it backwards: at each position the next token."""
    labels = pad_sequence([d.flip(0) for d in documents], batch_first=True, padding_value=-100)
    decoder_input_ids = F.pad(labels[:, :-1], (1, 0), value=START)
    return collate(documents) | {"decoder_input_ids": decoder_input_ids.clamp(min=0), "labels": labels}


def main() -> None:
    print("an encoder-decoder around nn.Transformer: ten steps", flush=True)
    L.seed_everything(0)
    optimizer = partial(AdamW, lr=1e-2, weight_decay=0.1)
    scheduler = partial(transformers.get_cosine_schedule_with_warmup, num_warmup_steps=2)
    fit(FusedSeq2SeqLMModule(EncoderDecoder(), optimizer=optimizer, scheduler=scheduler), collate=collate_reversed)


if __name__ == "__main__":
    main()
