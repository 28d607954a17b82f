"""lit_fused: train language models with large vocabularies on PyTorch Lightning without ever building the logits."""

from lit_fused.callbacks.peak_memory import PeakMemoryMonitor
from lit_fused.errors import UserError
from lit_fused.heads import identify_head
from lit_fused.losses import CrossEntropyLoss, LinearCrossEntropyLoss, LossOutput, ModelInternalLoss
from lit_fused.model import LanguageModel, Seq2SeqLanguageModel
from lit_fused.modules import FusedCausalLMModule, FusedSeq2SeqLMModule
from lit_fused.parallel import PipelineStrategy
from lit_fused.weights import from_config, from_pretrained, materialize

__all__ = [
    "CrossEntropyLoss",
    "FusedCausalLMModule",
    "FusedSeq2SeqLMModule",
    "LanguageModel",
    "LinearCrossEntropyLoss",
    "LossOutput",
    "ModelInternalLoss",
    "PeakMemoryMonitor",
    "PipelineStrategy",
    "Seq2SeqLanguageModel",
    "UserError",
    "from_config",
    "from_pretrained",
    "identify_head",
    "materialize",
]
