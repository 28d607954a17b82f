"""LightningModules."""

from lit_fused.modules.base import FusedLMModule, cosine_with_warmup
from lit_fused.modules.causal_lm import FusedCausalLMModule
from lit_fused.modules.seq2seq_lm import FusedSeq2SeqLMModule

__all__ = ["FusedCausalLMModule", "FusedLMModule", "FusedSeq2SeqLMModule", "cosine_with_warmup"]
