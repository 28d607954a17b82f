import math
from functools import partial

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lit_fused.callbacks import (
    FiniteWatch,
    PeakMemoryMonitor,
    SampleText,
    WeightAverage,
)
from lit_fused.data import InteractionDataModule, RolloutDataModule, TextEncoding
from lit_fused.errors import UserError
from lit_fused.filtered import Filtered
from lit_fused.losses import LinearCrossEntropyLoss
from lit_fused.models.item_encoders import SASRec
from lit_fused.models.load import from_config
from lit_fused.objectives import DistillationLoss, PolicyLoss, PreferenceLoss
from lit_fused.ops import linear_cross_entropy, token_scores, top_items
from lit_fused.parallel import FSDP2Strategy
from lit_fused.pipeline import PipelineStrategy
from lit_fused.training import FusedCausalLMModule, FusedRecommenderModule
from lit_fused.training.optimizers import warmup_stable_decay

HIDDEN, WEIGHT, TARGETS = torch.randn(5, 8), torch.randn(11, 8), torch.arange(5)
CONFIG = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32)
PARAMETERS = [torch.nn.Parameter(torch.ones(2, 2))]
OF_HEAD = "scale softcap label_smoothing z_loss ignore_index logits_budget_mib chunk_size"
CASES = {
    "head": (lambda **of: linear_cross_entropy(HIDDEN, WEIGHT, TARGETS, **of), OF_HEAD),
    "top_items": (lambda **of: top_items(HIDDEN, WEIGHT, 3, **of), "scale padding_item logits_budget_mib"),
    "loss": (LinearCrossEntropyLoss, "label_smoothing z_loss logits_budget_mib chunk_size"),
    "filter": (Filtered, "filter_eps"),
    "policy": (PolicyLoss, "clip_low clip_high length kl_weight entropy_weight temperature"),
    "simpo": (lambda **of: PreferenceLoss("simpo", **of), "beta margin nll_weight"),
    "robust": (lambda **of: PreferenceLoss("robust", **of), "beta label_smoothing nll_weight"),
    "jsd": (lambda **of: DistillationLoss("jsd", **of), "beta temperature divergence_weight cross_entropy_weight"),
    "module": (lambda **of: FusedCausalLMModule(LlamaForCausalLM(CONFIG), **of), "check_every_n_steps"),
    "recommender": (
        lambda **of: FusedRecommenderModule(SASRec(5, hidden_size=8), **of),
        "popularity_correction mask_fraction top_k",
    ),
    "schedule": (
        lambda **of: warmup_stable_decay(torch.optim.SGD(PARAMETERS), 10, **of),
        "warmup_fraction decay_fraction min_lr_ratio",
    ),
    "finite": (FiniteWatch, "patience"),
    "average": (WeightAverage, "decay"),
    "items": (SASRec, "num_items hidden_size num_layers num_heads max_length"),
    "fsdp2": (FSDP2Strategy, "data_parallel_size tensor_parallel_size"),
    "pipeline": (partial(PipelineStrategy, 2), "data_parallel_size microbatches"),
    "random": (partial(from_config, CONFIG), "seed"),
    "masks": (TextEncoding, "mask_probability mask_replaced mask_random"),
    "rollouts": (partial(RolloutDataModule, "rollouts.jsonl"), "block_size vocab_size"),
}
OF_LOSS = "drop_ignored float32_accumulation"
SWITCHES = {
    "head": (CASES["head"][0], f"statistics recompute invariant {OF_LOSS}"),
    "scores": (partial(token_scores, HIDDEN, WEIGHT, TARGETS), f"entropy invariant {OF_LOSS}"),
    "loss": (LinearCrossEntropyLoss, f"recompute {OF_LOSS}"),
    "policy": (PolicyLoss, f"invariant {OF_LOSS}"),
    "preference": (PreferenceLoss, f"average {OF_LOSS}"),
    "distillation": (DistillationLoss, f"recompute {OF_LOSS}"),
    "peaks": (PeakMemoryMonitor, "summary per_rank"),
    "sample": (SampleText, "chat"),
    "fsdp2": (FSDP2Strategy, "reduce_every_micro_batch reshard_after_forward mixed_precision_policy"),
    "pipeline": (partial(PipelineStrategy, 2), "fully_shard"),
    "random": (partial(from_config, CONFIG), "at_once"),
    "interactions": (partial(InteractionDataModule, "table.csv"), "exclude_seen"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_number_in_its_range_is_refused_by_a_sentence(case):
    make, names = CASES[case]
    for name in names.split():
        for value in (math.nan, -math.inf, -1.0, True, "0.5", [0.5], np.float64(-2), torch.tensor(math.nan)):
            if name == "scale" and value in (-1.0, -2):
                continue
            with pytest.raises(UserError, match=name):
                make(**{name: value})


@pytest.mark.parametrize("case", SWITCHES)
def test_a_switch_takes_true_and_false_and_no_text_that_counts_as_true(case):
    make, names = SWITCHES[case]
    for name in names.split():
        for value in ("false", 0.5, [False]):
            with pytest.raises(UserError, match=f"{name} must be True or False, got "):
                make(**{name: value})
        make(**{name: np.bool_(False)})


def test_a_number_of_numpy_or_a_scalar_tensor_is_a_number():
    plain, _ = linear_cross_entropy(HIDDEN, WEIGHT, TARGETS, z_loss=0.5, scale=2, chunk_size=3)
    options = {"z_loss": np.float32(0.5), "scale": torch.tensor(2.0), "chunk_size": np.int64(3)}
    assert torch.equal(linear_cross_entropy(HIDDEN, WEIGHT, TARGETS, **options)[0], plain)
