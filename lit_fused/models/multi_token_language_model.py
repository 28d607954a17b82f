"""A causal language model that also learns to predict tokens further ahead, with one output layer for all of them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import MtpModel

from lit_fused.errors import UserError, check_number
from lit_fused.heads import output_layer
from lit_fused.losses import CrossEntropyLoss, LinearCrossEntropyLoss, Loss, LossOutput
from lit_fused.losses.loss import Batch, ForwardPass, GivenForwardPass
from lit_fused.models.documents_apart import may_be_packed
from lit_fused.models.language_model import LanguageModel
from lit_fused.ops.label_checks import IGNORE_INDEX


class MultiTokenLanguageModel(LanguageModel):
    """A :class:`LanguageModel` whose position t also predicts labels t + 2 to t + 1 + K, by K heads.

    A head makes other hidden states of the backbone's, for the same output layer: h + silu(W h), with W zero at first
    (arXiv:2401.10774); the heads are independent of each other (arXiv:2404.19737). Or they are the architecture's own,
    one after the other (DeepSeek-V3, arXiv:2412.19437, equations 21 to 25). Their losses are added as there,

        loss = (S_1 + weight / K * (S_2 + ... + S_K+1)) / N_1

    with the sum S_j over the targets j positions ahead, and the count N_1 of the next tokens for all. Documents that
    share a row, told by their "position_ids", have no target in another. In evaluation the loss is S_1 / N_1.

    Args:
        backbone, loss: those of :class:`LanguageModel`; a loss without ``filter_eps``, whose schedule is of one head.
        heads: K, or transformers' ``MtpModel`` around this backbone, whose rows have no padding on the left.
        weight: > 0.
    """

    def __init__(
        self,
        backbone: nn.Module,
        loss: Loss | Callable[[Tensor, Tensor], Tensor],
        *,
        heads: int | MtpModel = 1,
        weight: float = 0.3,
    ) -> None:
        super().__init__(backbone, loss)
        if not isinstance(self.loss, LinearCrossEntropyLoss | CrossEntropyLoss) or self._is_filtered:
            raise UserError(
                "several tokens ahead are learned with an exact cross entropy of given hidden states; choose "
                "loss=chunked or loss=standard"
            )
        usual = "0.1 and 0.3 are usual"
        check_number("weight", weight, "be a positive number", lambda x: 0 < x < math.inf, usual)
        self.weight = weight
        if isinstance(heads, MtpModel):
            self.ahead = _OwnLayers(heads, self)
        elif type(heads) is int and heads > 0:
            self.ahead = _Residuals(cast(Tensor, output_layer(backbone).weight), heads)
        else:
            raise UserError(f"heads must be a number of further tokens of at least 1, or an MtpModel, got {heads!r}")
        self._count: int = self.ahead.count  # also on the ranks of a pipeline that do not have them

    @property
    def _is_filtered(self) -> bool:
        return isinstance(self.loss, LinearCrossEntropyLoss) and "filter_eps" in self.loss.options

    @property
    def statistics(self) -> tuple[str, ...]:
        places = range(2, self._count + 2)
        return (*super().statistics, *(name for place in places for name in _sums_of_token(place)))

    def prepare(self, device: torch.device) -> None:
        super().prepare(device)
        self.prepare_hidden_states()

    def compute(self, forward_pass: ForwardPass, batch: Batch) -> LossOutput:
        states, head, aux_loss = forward_pass.hidden_states(batch)
        targets, weights = forward_pass.targets(batch), forward_pass.token_weights(batch)
        output = self._sums(batch, states, head, aux_loss, targets, weights)
        loss_sum, stats = output.loss_sum, dict(output.stats)
        for place, further in enumerate(self.ahead(states, batch), 1):
            found = self._sums(batch, further, head, None, *self._further(batch, targets, weights, place))
            if self.training:
                loss_sum = loss_sum + self.weight / self._count * found.loss_sum
            nll = found.stats.get("nll", found.loss_sum.detach())
            stats |= dict(zip(_sums_of_token(place + 1), (nll, found.num_tokens), strict=True))
        return replace(output, loss_sum=loss_sum, stats=stats)

    def _sums(self, batch: Batch, *given: Any) -> LossOutput:
        return super().compute(cast(ForwardPass, GivenForwardPass(*given)), batch)

    def _further(
        self, batch: Batch, targets: Tensor, weights: Tensor | None, places: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the targets, and their weights, so many places further ahead."""
        further, positions = F.pad(targets[..., places:], (0, places), value=IGNORE_INDEX), batch.get("position_ids")
        if positions is not None and positions.ndim == 2:
            same = F.pad(positions[..., places:], (0, places), value=-1) == positions + places
            further = further.where(same, IGNORE_INDEX)
        return further, None if weights is None else F.pad(weights[..., places:], (0, places))


def _sums_of_token(place: int) -> tuple[str, str]:
    return f"loss_of_token_{place}/tokens_{place}", f"tokens_{place}"


class _Residuals(nn.Module):
    """K heads that each add silu(W h) to the hidden states."""

    needs_model = False

    def __init__(self, weight_VD: Tensor, count: int) -> None:
        super().__init__()
        self.count = count
        size, device = weight_VD.shape[1], None if weight_VD.is_meta else weight_VD.device
        options: Any = {"bias": False, "dtype": weight_VD.dtype, "device": device}
        self.layers = nn.ModuleList(nn.Linear(size, size, **options) for _ in range(count))
        for layer in self.layers:
            nn.init.zeros_(cast(Tensor, layer.weight))

    def forward(self, states: Tensor, batch: Batch) -> Iterator[Tensor]:
        for layer in self.layers:
            yield states + F.silu(layer(states))


class _OwnLayers(nn.Module):
    """The architecture's own layers, each of which gets what the one before made, and the next token's embedding."""

    needs_model = True  # on the rank of the last layer, and whole

    def __init__(self, own: MtpModel, model: LanguageModel) -> None:
        super().__init__()
        backbone = model.transformers_model
        if not hasattr(own, "forward_layer"):
            raise UserError(
                f"the MtpModel of transformers {version('transformers')} cannot run one of its layers alone "
                "(forward_layer); install a newer one (5.23), or give a number of heads"
            )
        if backbone is None or own.embed_tokens is not backbone.get_input_embeddings():
            raise UserError("the MtpModel is around another model than this one; build it with MtpModel(model, layers)")
        if getattr(own.config, "logits_mup_width_multiplier", None) is not None:
            raise UserError(
                f"{type(backbone).__name__} scales hidden states for its logits only; give a number of heads"
            )
        self.count, self.layers = len(own.layers), own.layers
        self.norm = own.shared_post_norm if own.use_shared_post_norm else None  # it is trained, too; the model calls it
        self._own = (own,)  # in a tuple, as embeddings and output layer are the backbone's

    def forward(self, states: Tensor, batch: Batch) -> Iterator[Tensor]:
        if may_be_packed(batch):
            raise UserError(
                "a batch has position_ids, and an architecture's own layers for further tokens do not keep documents "
                "of one row apart; leave them out (data.packing=none or stream), or give a number of heads"
            )
        ids = batch["input_ids"]
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        for place in range(self.count):
            ids, positions = F.pad(ids[:, 1:], (0, 1)), positions + 1
            states = self._own[0].forward_layer(place, states, positions, None, input_ids=ids)
            yield states
