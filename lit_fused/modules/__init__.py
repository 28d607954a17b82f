"""LightningModules."""

from lit_fused.modules.base import FusedLMModule, cosine_with_warmup
from lit_fused.modules.causal_lm import FusedCausalLMModule

__all__ = ["FusedCausalLMModule", "FusedLMModule", "cosine_with_warmup"]
