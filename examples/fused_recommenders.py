"""The full softmax without logits in the transformers of RecTools and RePlay: base classes to put before theirs.

Nothing of these libraries is imported, and of lit_fused only what needs torch alone (pip install --no-deps).
"""

from typing import Any

from torch import Tensor

from lit_fused.ops import linear_cross_entropy


class FusedRecTools:
    """Computes loss="fused" of RecTools' SASRecModel and BERT4RecModel: their "softmax" without its logits.

    class Fused(FusedRecTools, TransformerLightningModule): ...

    SASRecModel(loss="fused", lightning_module_type=Fused)
    """

    torch_model: Any
    logits_t: float

    def _calc_custom_loss(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        items, targets = self.torch_model.item_model.get_all_embeddings(), batch["y"]
        hidden = self.torch_model.encode_sessions(batch, items)[:, -targets.shape[1] :]
        options: Any = {"token_weights": batch["yw"], "ignore_index": 0, "scale": 1 / self.logits_t, "reduction": "sum"}
        return linear_cross_entropy(hidden, items, targets, **options)[0] / (targets != 0).sum()

    def _calc_custom_loss_outputs(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"loss": self._calc_custom_loss(batch, batch_idx)}


class FusedRePlay:
    """Computes RePlay's loss CE, of SasRec, without its logits.

    class Fused(FusedRePlay, CE): ...

    SasRec(body, Fused())
    """

    logits_callback: Any

    def forward(
        self, model_embeddings: Tensor, positive_labels: Tensor, target_padding_mask: Tensor, **_: Any
    ) -> Tensor:
        items = self.logits_callback.__self__.body.embedder.get_item_weights()
        targets = positive_labels.masked_fill(~target_padding_mask, -100).squeeze(-1)
        return linear_cross_entropy(model_embeddings, items, targets)[0]
