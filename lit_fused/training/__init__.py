"""LightningModules."""

from lit_fused.training.frozen import FrozenModel
from lit_fused.training.module import FusedCausalLMModule, FusedLMModule, FusedMaskedLMModule, FusedSeq2SeqLMModule
from lit_fused.training.muon import MuonWithAdamW
from lit_fused.training.objectives import FusedDistillationModule, FusedPolicyModule, FusedPreferenceModule
from lit_fused.training.optimizers import (
    constant_with_warmup,
    cosine_with_warmup,
    linear_with_warmup,
    warmup_stable_decay,
)
from lit_fused.training.recommender_module import FusedRecommenderModule, pretrained_items
