"""The output head, between hidden states and logits: identified once by experiment, then used by the losses."""

from lit_fused.heads.adapters import (
    is_compiled,
    peft_model,
    transformers_model,
    uses_prompt_learning,
    without_compilation,
)
from lit_fused.heads.capture import InputCapture, extract_hidden_states, sample_output
from lit_fused.heads.decoder_inputs import check_decoder_inputs, decoder_inputs
from lit_fused.heads.probe import identify_head, labels_are_shifted_by, output_layer, supported_layer
from lit_fused.heads.router import check_router_loss, router_loss
from lit_fused.heads.spec import OutputHead

__all__ = [
    "InputCapture",
    "OutputHead",
    "check_decoder_inputs",
    "check_router_loss",
    "decoder_inputs",
    "extract_hidden_states",
    "identify_head",
    "is_compiled",
    "labels_are_shifted_by",
    "output_layer",
    "peft_model",
    "router_loss",
    "sample_output",
    "supported_layer",
    "transformers_model",
    "uses_prompt_learning",
    "without_compilation",
]
