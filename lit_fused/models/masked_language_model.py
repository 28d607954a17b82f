"""A masked language model: position t of a model that sees both sides predicts label t, where a token was masked.

Some 85 % of all positions have no label. Their hidden states are left out before the output layer's products.
"""

from typing import Any

from lit_fused.errors import UserError
from lit_fused.losses.loss import Batch
from lit_fused.models.batch_checks import refuse_seen
from lit_fused.models.seq2seq_language_model import Seq2SeqLanguageModel


class MaskedLanguageModel(Seq2SeqLanguageModel):
    """A masked language model that returns sums and counts: position t predicts label t, -100 where nothing.

    The backbone is one of transformers' ``AutoModelForMaskedLM``, or a module as in :class:`LanguageModel`. Encoder-
    decoders (BART) learn what transformers trains them on, with decoder inputs made of the labels.
    """

    few_targets = True
    _is_encoder_decoder = None

    def look_at(self, batch: Batch) -> None:
        super().look_at(batch)
        refuse_seen(batch)

    @property
    def _has_encoder(self) -> bool:
        model = self.transformers_model
        return model is not None and model.config.is_encoder_decoder

    def inputs_of(self, batch: Batch) -> dict[str, Any]:
        for name, value in batch.items():
            if name.endswith("_labels") and name != "shift_labels" and value is not None:
                raise UserError(
                    f"a batch has {name}, for another loss than that of masked tokens, which would not be trained; "
                    "leave it out, or choose loss=model"
                )
        return super().inputs_of(batch)
