"""What stands between a model's hidden states and its logits: found once by experiment, used in their place."""

from lit_fused.heads.capture import capture_input, extract_hidden_states
from lit_fused.heads.probe import identify_head, labels_are_shifted_by, output_layer
from lit_fused.heads.spec import OutputHead

__all__ = [
    "OutputHead",
    "capture_input",
    "extract_hidden_states",
    "identify_head",
    "labels_are_shifted_by",
    "output_layer",
]
