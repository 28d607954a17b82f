"""LightningModules."""

from lit_fused.modules.causal_lm import FusedCausalLMModule
from lit_fused.modules.fused_lm import FusedLMModule
from lit_fused.modules.optimization import cosine_with_warmup
from lit_fused.modules.seq2seq_lm import FusedSeq2SeqLMModule

__all__ = ["FusedCausalLMModule", "FusedLMModule", "FusedSeq2SeqLMModule", "cosine_with_warmup"]
