"""Our module on a model of one's own: any nn.Module that returns hidden states and names its output layer.

python examples/plain_module.py
"""

from functools import partial

import lightning as L
import torch
import transformers
from project import MAX_LENGTH, VOCAB_SIZE, fit
from torch import Tensor, nn
from torch.optim import AdamW

from lit_fused import FusedCausalLMModule


class Decoder(nn.Module):
    """A small causal Transformer. Its forward leaves the output layer to the loss."""

    def __init__(self, vocab_size: int = VOCAB_SIZE, hidden_size: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(MAX_LENGTH, hidden_size)
        layer = nn.TransformerEncoderLayer(
            hidden_size, nhead=4, dim_feedforward=4 * hidden_size, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(hidden_size), enable_nested_tensor=False)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T) tokens -> (B, T, D) hidden states. The arguments are the batch's entries, by name."""
        length = input_ids.shape[1]
        hidden_states = self.tokens(input_ids) + self.positions.weight[:length]
        future = nn.Transformer.generate_square_subsequent_mask(length, input_ids.device, torch.bool)
        return self.layers(hidden_states, mask=future, src_key_padding_mask=attention_mask == 0, is_causal=True)


def main() -> None:
    print("a decoder that is a plain nn.Module: ten steps", flush=True)
    L.seed_everything(0)
    optimizer = partial(AdamW, lr=1e-2, weight_decay=0.1)
    scheduler = partial(transformers.get_cosine_schedule_with_warmup, num_warmup_steps=2)
    fit(FusedCausalLMModule(Decoder(), optimizer=optimizer, scheduler=scheduler))


if __name__ == "__main__":
    main()
