"""A masked language model: position t of a model that sees both sides predicts label t, where a token was masked.

Some 85 % of all positions have no label. Their hidden states are left out before the output layer's products.
"""

from typing import Any

import torch
from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.losses.loss import Batch
from lit_fused.models.label_alignment import look_once, sees_later_tokens
from lit_fused.models.seq2seq_language_model import Seq2SeqLanguageModel
from lit_fused.ops.label_checks import IGNORE_INDEX


class MaskedLanguageModel(Seq2SeqLanguageModel):
    """A masked language model that returns sums and counts: position t predicts label t, -100 where nothing.

    The backbone is one of transformers' ``AutoModelForMaskedLM``, or a module as in :class:`LanguageModel`. Encoder-
    decoders (BART) learn what transformers trains them on, with decoder inputs made of the labels.
    """

    few_targets = True
    _is_encoder_decoder = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._sees_both_sides = False
        self._knows_labels: set[bool] = set()  # in evaluation, in training

    def prepare(self, device: torch.device) -> None:
        super().prepare(device)
        self._check_sides()

    def targets(self, batch: Batch) -> Tensor:
        labels = super().targets(batch)
        look_once(self._knows_labels, self.training, batch, labels, _refuse_inputs)
        return labels

    @property
    def _has_encoder(self) -> bool:
        model = self.transformers_model
        return model is not None and model.config.is_encoder_decoder

    def _check_sides(self) -> None:
        """Refuse a model whose first position sees no later token. The first call runs it with a few tokens."""
        model = self.transformers_model
        if self._sees_both_sides or model is None:
            return
        if not self._has_encoder and sees_later_tokens(model) is False:
            raise UserError(
                f"{self._name} predicts masked tokens from those before them alone: its first position sees no later "
                "one; use a model that sees both sides (AutoModelForMaskedLM, is_decoder=False), or "
                "FusedCausalLMModule (module=causal_lm)"
            )
        self._sees_both_sides = True

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        for name, value in batch.items():
            if name.endswith("_labels") and name != "shift_labels" and value is not None:
                raise UserError(
                    f"a batch has {name}, for another loss than that of masked tokens, which would not be trained; "
                    "leave it out, or choose loss=model"
                )
        return super()._inputs(batch)


def _refuse_inputs(input_ids: Tensor, labels: Tensor) -> None:
    if (labels == input_ids)[labels != IGNORE_INDEX].all():
        raise UserError(
            "every label of this batch is the token that the model sees at the same position, so that it would learn "
            "to copy; mask tokens of input_ids, and set labels to -100 where nothing is to be predicted: "
            "transformers' DataCollatorForLanguageModeling does both, and so does data=text"
        )
