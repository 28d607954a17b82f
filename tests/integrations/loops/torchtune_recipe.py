"""Fine-tune by a recipe, in the style of torchtune."""

import torch
from torch import Tensor, nn


class TransformerDecoder(nn.Module):
    """Stands in for torchtune's: it returns hidden states if it is told to skip its output layer."""

    def __init__(self, vocab_size: int = 503, embed_dim: int = 32) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, embed_dim)
        self.layers = nn.GRU(embed_dim, embed_dim, batch_first=True)
        self.norm = nn.LayerNorm(embed_dim)
        self.output = nn.Linear(embed_dim, vocab_size, bias=False)
        self.skip_output_layer = False

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.norm(self.layers(self.tok_embeddings(tokens))[0])
        return h if self.skip_output_layer else self.output(h)


class FullFinetuneRecipe:
    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self._model = TransformerDecoder().to(dtype)
        self._loss_fn = nn.CrossEntropyLoss(ignore_index=-100)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-2)

    def _loss_step(self, batch: dict[str, Tensor]) -> Tensor:
        # Shape [b, s], needed for the loss not the model
        labels = batch.pop("labels")
        logits = self._model(**batch)
        # Shift labels to compute loss
        labels = torch.hstack((labels[..., 1:], torch.full_like(labels[..., :1], -100)))
        return self._loss_fn(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))

    def train(self) -> list[float]:
        losses = []
        for tokens in torch.randint(503, (6, 4, 24)):
            current_loss = self._loss_step({"tokens": tokens, "labels": tokens.clone()})
            current_loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            losses.append(current_loss.item())
        return losses


def main(dtype: torch.dtype = torch.float32) -> list[float]:
    return FullFinetuneRecipe(dtype).train()
