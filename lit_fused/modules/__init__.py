"""LightningModules."""

from lit_fused.modules.distillation_lm import FusedDistillationModule
from lit_fused.modules.frozen import FrozenModel
from lit_fused.modules.fused_lm import FusedCausalLMModule, FusedLMModule, FusedMaskedLMModule, FusedSeq2SeqLMModule
from lit_fused.modules.muon import MuonWithAdamW
from lit_fused.modules.optimization import (
    constant_with_warmup,
    cosine_with_warmup,
    linear_with_warmup,
    warmup_stable_decay,
)
from lit_fused.modules.policy_lm import FusedPolicyModule
from lit_fused.modules.preference_lm import FusedPreferenceModule
from lit_fused.modules.recommender_module import FusedRecommenderModule, pretrained_items
from lit_fused.modules.row_wise_adagrad import RowWiseAdagrad
