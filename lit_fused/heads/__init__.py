"""The output head, between hidden states and logits: identified by experiment, and compared now and then."""

from lit_fused.heads.adapters import peft_model, transformers_model
from lit_fused.heads.model_state import evaluation_mode
from lit_fused.heads.probe import identify_head, output_layer
from lit_fused.heads.spec import OutputHead

__all__ = ["OutputHead", "evaluation_mode", "identify_head", "output_layer", "peft_model", "transformers_model"]
