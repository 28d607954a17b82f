"""``LanguageModel``: a backbone and a loss in one forward pass, a batch in and a :class:`LossOutput` out.

It is the one ``nn.Module`` that a strategy wraps: everything, the loss included, happens inside its forward, where
sharded parameters are whole. The backbone is a Hugging Face causal language model, whose output layer is asked for its
input only (``heads/``), or any module that returns hidden states and offers ``get_output_embeddings()``.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.heads import (
    OutputHead,
    capture_input,
    extract_hidden_states,
    identify_head,
    labels_are_shifted_by,
    output_layer,
)
from lit_fused.losses.base import Batch, Loss, LossOutput, as_loss


class LanguageModel(nn.Module):
    """A causal language model that returns sums and counts.

    Args:
        backbone: a transformers causal language model, or a module whose forward takes the batch's entries (except
            "labels") by name and returns hidden states (B, T, D), with a method ``get_output_embeddings()`` that
            returns its output layer.
        loss: a loss strategy, or a callable of (hidden_states, labels) that returns the mean loss.
    """

    def __init__(self, backbone: nn.Module, loss: Loss | Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        if isinstance(backbone, PreTrainedModel) and backbone.config.is_encoder_decoder:
            raise UserError(
                f"{type(backbone).__name__} is an encoder-decoder, whose encoder would see the very labels that are "
                "predicted; a causal language model is needed here (AutoModelForCausalLM)"
            )
        self.backbone = backbone
        self.loss = as_loss(loss)
        self._identified: OutputHead | None = None

    def prepare(self, device: torch.device) -> None:
        """Find out, before training, all that would fail in it: the head, and what the loss needs on ``device``."""
        self.loss.prepare(self, device)

    def forward(self, batch: Batch) -> LossOutput:
        """One forward pass over ``batch``: "input_ids" and "labels" (B, T) and whatever else the backbone takes."""
        self._check_tokens(batch)
        return self.loss.compute(self, batch)

    def token_losses(self, batch: Batch) -> Tensor:
        """(B, T) float32 negative log-likelihood of each label's successor, 0 where ignored."""
        return self.loss.token_losses(self, batch)

    @property
    def vocabulary(self) -> int:
        """Number of logits per token."""
        if self._identified is not None:
            return self._identified.vocabulary
        return output_layer(self.backbone).weight.shape[0]

    # The three forms of forward pass that a loss can ask for (losses.base.ForwardPass).

    def prepare_hidden_states(self) -> OutputHead:
        if self._identified is None:
            if isinstance(self.backbone, PreTrainedModel):
                self._identified = identify_head(self.backbone)
            else:
                self._identified = OutputHead(output_layer(self.backbone))
        return self._identified

    def hidden_states(self, batch: Batch) -> tuple[Tensor, OutputHead, Tensor | None]:
        head = self.prepare_hidden_states()
        name = type(self.backbone).__name__
        # an embedding as output layer is also the input layer, which has to run
        capture = capture_input(head.layer) if isinstance(head.layer, nn.Linear) else nullcontext([])
        with capture as inputs:
            output = self.backbone(**self._inputs(batch))
        if isinstance(self.backbone, PreTrainedModel):
            if len(inputs) != 1:
                raise UserError(f"the output layer of {name} ran {len(inputs)} times in one forward pass, not once")
            return inputs[0], head, self._aux_loss(output)
        if inputs:
            raise UserError(
                f"{name} runs its output layer in its own forward; return the hidden states instead, the layer's "
                "input: the loss applies the layer itself"
            )
        return extract_hidden_states(output, name), head, None

    def logits(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        output = self.backbone(**self._inputs(batch))
        if isinstance(self.backbone, PreTrainedModel):
            return output.logits, self._aux_loss(output)
        hidden_states = extract_hidden_states(output, type(self.backbone).__name__)
        return self.prepare_hidden_states().logits(hidden_states), None

    def prepare_own_loss(self) -> None:
        name = type(self.backbone).__name__
        if not isinstance(self.backbone, PreTrainedModel):
            raise UserError(
                f"loss=model needs a transformers model, and {name} is none; choose loss=standard or loss=chunked"
            )
        if not labels_are_shifted_by(self.backbone):
            raise UserError(
                f"the own loss of {name} does not shift the labels: trained on labels that equal the inputs it would "
                "learn to copy; choose loss=standard or loss=chunked, which shift them"
            )

    def own_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        output = self.backbone(**self._inputs(batch), labels=batch["labels"])
        return output.loss, output.logits, self._aux_loss(output)

    def _check_tokens(self, batch: Batch) -> None:
        """Token ids outside the input embedding. On a GPU, the embedding's own assertion stops the run."""
        ids = batch.get("input_ids")
        if not isinstance(self.backbone, PreTrainedModel) or not isinstance(ids, Tensor) or ids.device.type != "cpu":
            return
        rows = self.backbone.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr]
        if ids.numel() and (ids.min() < 0 or ids.max() >= rows):
            raise UserError(
                f"input_ids must lie in [0, {rows}), the entries of the model's embedding, got values from "
                f"{ids.min().item()} to {ids.max().item()}; does the tokenizer have more entries than the model?"
            )

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return inputs | {"use_cache": False} if isinstance(self.backbone, PreTrainedModel) else inputs

    def _aux_loss(self, output: Any) -> Tensor | None:
        """A mixture of experts' router loss, weighted as the model's own loss weights it."""
        aux_loss = getattr(output, "aux_loss", None)
        if not isinstance(aux_loss, Tensor):
            return None
        assert isinstance(self.backbone, PreTrainedModel)
        weight = getattr(self.backbone, "router_aux_loss_coef", None)
        if weight is None:
            raise UserError(
                f"{type(self.backbone).__name__} returns an auxiliary loss without router_aux_loss_coef, so that its "
                "weight is unknown; switch it off (output_router_logits=False) or choose loss=model"
            )
        return weight * aux_loss
