"""A forward pass of a batch whose rows are divided over ranks: what a loss asks of a model, for this rank's tokens."""

from typing import Any

import torch
from torch import Tensor, nn

from lit_fused.context.beside_attention import told_of_whole_rows
from lit_fused.context.exchange import Ranks
from lit_fused.context.undivided_rows import check_undivided
from lit_fused.context.whole_attention import attending
from lit_fused.errors import UserError
from lit_fused.losses.fused import token_losses
from lit_fused.losses.loss import PREVIOUS, SHIFTED_OR_COUNTED, Batch, Head, labels_of
from lit_fused.losses.standard import token_losses_of_logits
from lit_fused.models.documents_apart import may_be_packed
from lit_fused.models.language_model import OF_SOME_LOSSES, LanguageModel
from lit_fused.ops.label_checks import IGNORE_INDEX


class DividedForward:
    """The :class:`~lit_fused.losses.loss.Forward` of this rank's positions, t of the T of each row.

    Targets are those of the whole rows, so that a rank's last token predicts the next rank's first one.
    """

    def __init__(self, model: LanguageModel, ranks: Ranks) -> None:
        self.model, self.ranks = model, ranks
        self.few_targets = model.few_targets
        self._is_checked = False

    def targets(self, batch: Batch) -> Tensor:
        return self.ranks.targets(self.model.targets(batch), IGNORE_INDEX)

    def token_weights(self, batch: Batch) -> Tensor | None:
        weights = self.model.token_weights(batch)
        return None if weights is None else self.ranks.part(weights)

    def hidden_states(self, batch: Batch) -> tuple[Tensor, Head, Tensor | None]:
        return self._run(self.model.hidden_states, batch)

    def logits(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        return self._run(self.model.logits, batch)

    def token_losses(self, batch: Batch) -> Tensor:
        """Return the negative log-likelihood of each position's target, (B, T) float32, 0 where ignored."""
        if self.model.loss.builds_logits:
            found = token_losses_of_logits(self.logits(batch)[0], self.targets(batch))
        else:
            found = token_losses(self, batch)
        return self.whole_rows(found, batch)

    def whole_rows(self, numbers: Tensor, batch: Batch) -> Tensor:
        return self.ranks.whole(numbers, labels_of(batch).shape[1])

    def own_positions(self, numbers: Tensor) -> Tensor:
        return self.ranks.part(numbers)

    @property
    def backbone(self) -> nn.Module:
        return self.model.backbone

    def _run(self, run: Any, batch: Batch) -> Any:
        model = self.model
        if not self._is_checked:  # The first batch finds it out, on the device and in the precision of all.
            self._is_checked = True
            check_undivided(self)
        if may_be_packed(batch) and model.needs_packing_check(batch):
            model.check_packing(batch)
        inner, length = model.transformers_model, labels_of(batch).shape[1]
        assert inner is not None
        inputs = self._inputs(batch)
        with attending(inner, self.ranks, batch, length, model.packing), told_of_whole_rows(inner, self.ranks, batch):
            return run(inputs)

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        """Return a batch with this rank's positions of what the backbone reads, and the whole mask."""
        rows, length = labels_of(batch).shape
        not_read = {"labels", *SHIFTED_OR_COUNTED, *OF_SOME_LOSSES, *self.model.loss.inputs}
        found: dict[str, Any] = {}
        for name, value in batch.items():
            if value is None or name in not_read:
                found[name] = value
            elif (
                isinstance(value, Tensor)
                and value.shape[:2] in ((rows, length), (1, length))
                and (value.ndim == 2 or name in ("inputs_embeds", PREVIOUS))
            ):
                found[name] = value if name == "attention_mask" else self.ranks.part(value)
            else:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise UserError(
                    f"strategy=context divides the tokens of a batch, and {name} is not one number for each of them "
                    f"({rows}, {length}), but {shape}; leave it out of the batch, or choose strategy=fsdp2"
                )
        device = labels_of(batch).device
        if found.get("position_ids") is None:
            found["position_ids"] = self.ranks.part(torch.arange(length, device=device)[None]).expand(rows, -1)
        if found.get("attention_mask") is None:
            found["attention_mask"] = torch.ones(rows, length, dtype=torch.int64, device=device)
        return found
