"""The modules that are built from a backbone and a loss: for causal language models and for encoder-decoders."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_fused.losses import LinearCrossEntropyLoss, Loss
from lit_fused.models.language_model import LanguageModel, Seq2SeqLanguageModel
from lit_fused.modules.fused_lm import FusedLMModule


class _FromBackbone(FusedLMModule):
    language_model: type[LanguageModel]

    def __init__(
        self,
        backbone: nn.Module,
        loss: Loss | Callable[[Tensor, Tensor], Tensor] | None = None,
        optimizer: Callable[..., Optimizer] | None = None,
        scheduler: Callable[..., LRScheduler] | None = None,
        *,
        parity_check: bool = True,
        compile: str = "none",
        kernels: str = "none",
    ) -> None:
        model = self.language_model(backbone, LinearCrossEntropyLoss() if loss is None else loss)
        super().__init__(model, optimizer, scheduler, parity_check=parity_check, compile=compile, kernels=kernels)


class FusedCausalLMModule(_FromBackbone):
    """A causal language model without logits.

        module = FusedCausalLMModule(AutoModelForCausalLM.from_pretrained(...), LinearCrossEntropyLoss())
        Trainer(precision="bf16-mixed", accumulate_grad_batches=8).fit(module, loader)

    Batches are dicts with "input_ids" and "labels", integers (B, T), aligned, labels -100 where ignored, and whatever
    else the backbone's forward takes ("attention_mask", "position_ids").

    Args:
        backbone: see :class:`LanguageModel`.
        loss: a loss strategy, or a callable of (hidden_states, labels); default ``LinearCrossEntropyLoss()``.
        optimizer, scheduler, parity_check, compile, kernels: see :class:`FusedLMModule`.
    """

    language_model = LanguageModel


class FusedSeq2SeqLMModule(_FromBackbone):
    """An encoder-decoder (T5, BART, Pegasus, Marian, LED ...) without logits, trained on input and answer.

        module = FusedSeq2SeqLMModule(AutoModelForSeq2SeqLM.from_pretrained(...), LinearCrossEntropyLoss())
        collate = DataCollatorForSeq2Seq(tokenizer)  # of transformers: pads inputs, and labels with -100
        Trainer().fit(module, DataLoader(examples, collate_fn=collate))

    Batches are dicts with "input_ids" (B, S), what the encoder reads, and "labels" (B, T), what the decoder is to say,
    -100 where ignored, and whatever else the backbone's forward takes ("attention_mask"). Position t of the decoder
    predicts label t; "decoder_input_ids" are made from the labels as the model makes them, unless the batch has them.

    Args:
        backbone: see :class:`Seq2SeqLanguageModel`.
        loss: a loss strategy, or a callable of (hidden_states, labels); default ``LinearCrossEntropyLoss()``.
        optimizer, scheduler, parity_check, compile, kernels: see :class:`FusedLMModule`.
    """

    language_model = Seq2SeqLanguageModel
