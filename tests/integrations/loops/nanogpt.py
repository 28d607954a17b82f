"""Train a small GPT whose forward takes targets, in the style of nanoGPT."""

import torch
import torch.nn as nn
from torch.nn import functional as F


class GPT(nn.Module):
    def __init__(self, vocab_size: int = 503, n_embd: int = 32) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.block = nn.TransformerEncoderLayer(n_embd, 4, 4 * n_embd, dropout=0.0, batch_first=True, norm_first=True)
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # tied

    def forward(self, idx, targets=None):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1], dtype=self.wte.weight.dtype)
        x = self.ln_f(self.block(self.wte(idx), src_mask=mask, is_causal=True))

        if targets is not None:
            # if we are given some desired targets also calculate the loss
            logits = self.lm_head(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        else:
            # inference-time mini-optimization: only forward the lm_head on the very last position
            logits = self.lm_head(x[:, [-1], :])
            loss = None

        return logits, loss


def main(dtype: torch.dtype = torch.float32) -> list[float]:
    torch.manual_seed(0)
    model = GPT().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gradient_accumulation_steps = 2
    losses = []
    for step in torch.randint(503, (5, gradient_accumulation_steps, 4, 25)):
        for data in step:
            x, y = data[:, :-1].contiguous(), data[:, 1:].contiguous()
            y[0, :6] = -1
            _, loss = model(x, y)
            loss = loss / gradient_accumulation_steps
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses
