"""An encoder-decoder language model: an encoder reads the input, and position t of a decoder predicts label t."""

from typing import Any

from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.heads.with_labels import check_decoder_inputs, decoder_inputs
from lit_fused.losses.loss import Batch, has_shifted_labels, labels_of
from lit_fused.models.documents_apart import is_packed
from lit_fused.models.language_model import LanguageModel


class Seq2SeqLanguageModel(LanguageModel):
    """An encoder-decoder that returns sums and counts: position t of the decoder predicts label t. A transformers model
    gets the "decoder_input_ids" that it would make from the labels, if a batch has none."""

    _shifts_labels = False
    _is_encoder_decoder = True
    _wrong_backbone = (
        "is no encoder-decoder; use FusedCausalLMModule (module=causal_lm), or a sequence-to-sequence model "
        "(AutoModelForSeq2SeqLM)"
    )
    _wrong_loss = "shifts the labels; choose loss=standard or loss=chunked"
    _makes_decoder_inputs = False  # The first batch without decoder inputs sets it.

    @property
    def _has_encoder(self) -> bool:
        return True

    def check_packing(self, batch: Batch) -> None:
        if not self._has_encoder:
            super().check_packing(batch)
        elif is_packed(batch):
            raise UserError(
                f"{self._name} is an encoder-decoder, whose encoder would read all documents of a row at once; give "
                "each a row of its own"
            )

    def targets(self, batch: Batch) -> Tensor:
        if has_shifted_labels(batch):
            raise UserError(f"{self._name} has labels that are never shifted; name them 'labels', not 'shift_labels'")
        return labels_of(batch)

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        inputs = super()._inputs(batch)
        model = self.transformers_model
        needed = all(inputs.get(name) is None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
        if model is not None and self._has_encoder and needed:
            if not self._makes_decoder_inputs:
                rows = len(labels_of(batch))
                with self._lengths.watched(self, inputs):
                    check_decoder_inputs(model, inputs, rows)
                self._makes_decoder_inputs = True
            inputs |= decoder_inputs(model, labels_of(batch))
        return inputs
