"""LightningModules."""

from lit_fused.modules.fused_lm import FusedCausalLMModule, FusedLMModule, FusedSeq2SeqLMModule
from lit_fused.modules.optimization import cosine_with_warmup

__all__ = ["FusedCausalLMModule", "FusedLMModule", "FusedSeq2SeqLMModule", "cosine_with_warmup"]
