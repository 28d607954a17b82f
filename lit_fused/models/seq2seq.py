"""``Seq2SeqLanguageModel``: an encoder-decoder and a loss in one forward pass."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.heads import check_decoder_inputs, decoder_inputs, labels_are_shifted_by, transformers_model
from lit_fused.losses.loss import Batch, labels_of
from lit_fused.models.documents_apart import is_packed
from lit_fused.models.language_model import LanguageModel


class Seq2SeqLanguageModel(LanguageModel):
    """An encoder-decoder language model that returns sums and counts: position t of the decoder predicts label t.

    A batch without "decoder_input_ids" gets those that the model itself would make from the labels.

    Args:
        backbone: a transformers encoder-decoder, or PEFT's or ``torch.compile``'s wrapper around one; or a module as
            :class:`LanguageModel` takes it, whose batches contain everything that its forward needs.
        loss: a loss strategy, or a callable of (hidden_states, labels) that returns the mean loss.
    """

    _makes_decoder_inputs = False  # The first batch without decoder inputs sets it.

    def check_packing(self, batch: Batch) -> None:
        if is_packed(batch):
            raise UserError(
                f"{self._name} is an encoder-decoder, whose encoder would read all documents of a row at once; give "
                "each a row of its own"
            )

    def targets(self, batch: Batch) -> Tensor:
        return labels_of(batch).long()

    def _check_own_loss(self, model: PreTrainedModel) -> None:
        if labels_are_shifted_by(model):
            raise UserError(f"the own loss of {self._name} shifts the labels; choose loss=standard or loss=chunked")

    def _check_backbone(self, backbone: nn.Module) -> None:
        model = transformers_model(backbone)
        if model is not None and not model.config.is_encoder_decoder:
            raise UserError(
                f"{type(model).__name__} is no encoder-decoder; use FusedCausalLMModule (module=causal_lm), or a "
                "sequence-to-sequence model (AutoModelForSeq2SeqLM)"
            )

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        inputs = super()._inputs(batch)
        model = self.transformers_model
        if model is not None and inputs.keys().isdisjoint(("decoder_input_ids", "decoder_inputs_embeds")):
            if not self._makes_decoder_inputs:
                check_decoder_inputs(model)
                self._makes_decoder_inputs = True
            inputs |= decoder_inputs(model, labels_of(batch))
        return inputs
