"""What stands between a model's hidden states and its logits: found once by experiment, used in their place."""

from lit_fused.heads.adapters import is_compiled, transformers_model, uses_prompt_learning, without_compilation
from lit_fused.heads.capture import InputCapture, extract_hidden_states, sample_output
from lit_fused.heads.decoder_inputs import check_decoder_inputs, decoder_inputs
from lit_fused.heads.probe import identify_head, labels_are_shifted_by, output_layer
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
    "router_loss",
    "sample_output",
    "transformers_model",
    "uses_prompt_learning",
    "without_compilation",
]
