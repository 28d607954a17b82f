"""An encoder-decoder language model: an encoder reads the input, and position t of a decoder predicts label t."""

from typing import Any

from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.heads.with_labels import decoder_inputs, makes_decoder_inputs
from lit_fused.losses.loss import Batch, has_shifted_labels, labels_of
from lit_fused.models.documents_apart import is_packed
from lit_fused.models.language_model import LanguageModel


class Seq2SeqLanguageModel(LanguageModel):
    """An encoder-decoder that returns sums and counts: position t of the decoder predicts label t. A transformers model
    gets the "decoder_input_ids" that it would make from the labels, if a batch has none."""

    shifts_labels = False
    _is_encoder_decoder = True
    _wrong_backbone = (
        "is no encoder-decoder; use FusedCausalLMModule (module=causal_lm), or a sequence-to-sequence model "
        "(AutoModelForSeq2SeqLM)"
    )
    _wrong_loss = "shifts the labels; choose loss=standard or loss=chunked"

    @property
    def _has_encoder(self) -> bool:
        return True

    def check_packing(self, batch: Batch) -> None:
        if not self._has_encoder:
            super().check_packing(batch)
        elif is_packed(batch):
            raise UserError(
                f"{self.name} is an encoder-decoder, whose encoder would read all documents of a row at once; give "
                "each a row of its own"
            )

    def targets(self, batch: Batch) -> Tensor:
        if has_shifted_labels(batch):
            raise UserError(f"{self.name} has labels that are never shifted; name them 'labels', not 'shift_labels'")
        return labels_of(batch)

    def inputs_of(self, batch: Batch) -> dict[str, Any]:
        inputs = super().inputs_of(batch)
        model = self.transformers_model
        needed = all(inputs.get(name) is None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
        if model is not None and self._has_encoder and needed:
            inputs |= decoder_inputs(model, labels_of(batch))
        return inputs

    def own_inputs_of(self, batch: Batch) -> dict[str, Any]:
        inputs, model = self.inputs_of(batch), self.transformers_model
        if model is None or not self._has_encoder or makes_decoder_inputs(model):
            return inputs
        ours = decoder_inputs(model, labels_of(batch))  # Without them the model has to make the same of the labels.
        return {name: value for name, value in inputs.items() if name not in ours or batch.get(name) is not None}
