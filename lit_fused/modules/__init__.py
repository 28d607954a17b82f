"""LightningModules."""

from lit_fused.modules.fused_lm import FusedCausalLMModule, FusedLMModule, FusedSeq2SeqLMModule
from lit_fused.modules.muon import MuonWithAdamW
from lit_fused.modules.optimization import (
    constant_with_warmup,
    cosine_with_warmup,
    linear_with_warmup,
    warmup_stable_decay,
)

__all__ = [
    "FusedCausalLMModule",
    "FusedLMModule",
    "FusedSeq2SeqLMModule",
    "MuonWithAdamW",
    "constant_with_warmup",
    "cosine_with_warmup",
    "linear_with_warmup",
    "warmup_stable_decay",
]
