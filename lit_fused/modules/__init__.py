"""LightningModules."""

from lit_fused.modules.base import FusedLMModule
from lit_fused.modules.causal_lm import FusedCausalLMModule

__all__ = ["FusedCausalLMModule", "FusedLMModule"]
