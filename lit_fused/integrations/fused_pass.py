"""A forward pass of a fused model: what its labels mean is what they mean to the model itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lit_fused.heads import OutputHead, output_layer
from lit_fused.heads.capture import router_loss
from lit_fused.heads.probe import without_cache
from lit_fused.heads.with_labels import ignored_by_own_loss, labels_are_shifted_by, makes_no_decoder_inputs
from lit_fused.integrations.trl_head import scored
from lit_fused.losses.loss import SHIFTED_OR_COUNTED, Batch, has_shifted_labels, labels_of, names_of, shift_labels
from lit_fused.models.language_model import LanguageModel
from lit_fused.models.seq2seq_language_model import Seq2SeqLanguageModel
from lit_fused.ops.label_checks import IGNORE_INDEX, check_integers
from lit_fused.ops.operators import one_graph_break

_OF_THE_LOSS = ("labels", "return_dict", *SHIFTED_OR_COUNTED)


class FusedPass(LanguageModel):
    """A causal or masked language model, whose forward pass the caller runs.

    In contrast to a :class:`LanguageModel`, labels are shifted if the model's own loss shifts them, documents in one
    row are the caller's matter, and arguments are passed on as they are.
    """

    _ignored: frozenset[str] = frozenset()  # arguments that the model takes and its own loss does not use
    own: Callable[..., Any]  # the model's own forward
    divides_as_own_loss = True
    check_every_n_steps = 100
    not_computed: frozenset[str] = frozenset({"logits"})  # entries of the output that are made of logits or labels
    _mode: bool | None = None  # of the last call: True in training
    _calls = 0  # in training
    _names: frozenset[str] = frozenset()  # of arguments that a check has seen
    _captured: tuple[Tensor, OutputHead, Tensor | None] | None = None

    captured = one_graph_break(LanguageModel.captured, recursive=False)  # The model's forward runs in it.

    def prepare(self, device: torch.device) -> None:
        self.loss.prepare(self, device)
        model = self.transformers_model
        assert model is not None
        try:
            self.shifts_labels = labels_are_shifted_by(model)
        except Exception:  # The model has no loss of its own, or needs more than token ids: images, for example.
            self.shifts_labels = True
        with suppress(Exception):  # So too, or it takes no such arguments.
            self._ignored = frozenset(ignored_by_own_loss(model))

    @one_graph_break
    def begin(self, batch: Batch) -> tuple[OutputHead, dict[str, Any]]:
        """Return the head, identified if need be, and the arguments of the model's forward."""
        if self._head is None or self._layer != self._named_layer():
            _stay_gathered(output_layer(self.backbone))
            self.prepare(self.backbone.device)  # type: ignore[arg-type]
        head = self.head_for(batch)
        _stay_gathered(head.layer)
        return head, self.inputs_of(batch)

    @one_graph_break
    def check(self, batch: Batch) -> None:
        """Run the spot check in the first call of training and of each evaluation, in the first with an argument that
        none had before, and in every n-th of training."""
        if not self.check_every_n_steps:
            return
        is_first = self._mode is not self.backbone.training
        self._mode = self.backbone.training
        if self._mode:
            is_due, self._calls = self._calls % self.check_every_n_steps == 0, self._calls + 1
        else:
            is_due = is_first
        names = names_of(batch)
        if is_due or not names <= self._names:
            self.not_computed = frozenset({"logits", *self.spot_check(batch)})
            self._names |= names

    def read(self, batch: Batch) -> dict[str, Any]:
        """Return a batch as the model's own loss reads it."""
        batch = {name: value for name, value in batch.items() if name not in self._ignored}
        ignore_index = batch.get("ignore_index")
        for name in ("labels", "shift_labels") if ignore_index is not None else ():
            if batch.get(name) is not None:
                labels = check_integers(batch[name])
                batch[name] = labels.masked_fill(labels == ignore_index, IGNORE_INDEX)
        return batch

    @contextmanager
    def after(
        self, batch: Batch, inputs: list[Tensor], head: OutputHead, output: Any
    ) -> Iterator[tuple[Tensor, Batch]]:
        """Yield the hidden states (..., D) that the model's forward has given, and the batch as its own loss reads it.
        A loss can ask for both in the block. The first batch's is compared with logits in float64."""
        model = self.transformers_model
        assert model is not None
        batch, hidden_states = self.read(batch), self.only(inputs)
        self._captured = hidden_states, head, router_loss(model, output)
        try:
            yield hidden_states, batch
        finally:
            self._captured = None

    @one_graph_break
    def finish(self, batch: Batch, inputs: list[Tensor], head: OutputHead, output: Any) -> Tensor:
        """Return the loss (). Without a label it is not a number, as the model's own, and its gradients are zero."""
        with self.after(batch, inputs, head, output) as (_, read):
            found = self.loss.compute(self, read)
        num_items = read.get("num_items_in_batch")
        count = found.num_tokens if num_items is None else torch.as_tensor(num_items, device=found.loss_sum.device)
        mean = found.loss_sum / count
        return mean if found.aux_loss is None else mean + found.aux_loss

    @one_graph_break
    def finish_for_trl(
        self, batch: Batch, inputs: list[Tensor], head: OutputHead, output: Any, settings: dict[str, Any]
    ) -> Any:
        """Return what TRL's own head would."""
        with self.after(batch, inputs, head, output) as (hidden_states, _):
            return scored(hidden_states, head, batch, getattr(output, "aux_loss", None), settings)

    def _call(self, **arguments: Any) -> Any:
        return self.own(**arguments)

    def look_at(self, batch: Batch) -> None:
        self.loss.check(self, batch)

    def needs_packing_check(self, batch: Batch) -> bool:
        return False

    def targets(self, batch: Batch) -> Tensor:
        batch = self.read(batch)
        if self.shifts_labels and has_shifted_labels(batch):
            targets = check_integers(batch["shift_labels"])
        else:
            targets = shift_labels(labels_of(batch)) if self.shifts_labels else labels_of(batch)
        # The head of a model on several devices is on the last.
        return targets if self._captured is None else targets.to(self._captured[0].device)

    def hidden_states(self, batch: Batch) -> tuple[Tensor, OutputHead, Tensor | None]:
        assert self._captured is not None, "a loss asks for hidden states in after() alone"
        return self._captured

    def inputs_of(self, batch: Batch) -> dict[str, Any]:
        inputs = {name: value for name, value in batch.items() if name not in _OF_THE_LOSS}
        if inputs.get("use_cache") is None and inputs.get("past_key_values") is None:
            # A loss needs no cache, and beside one transformers does not see that positions mark packed documents.
            inputs |= without_cache(self.transformers_model)  # type: ignore[arg-type]
        return inputs if batch.get("return_dict") is None else inputs | {"return_dict": True}


def _stay_gathered(layer: nn.Module) -> None:
    """Keep the weight of a layer that is a unit of FSDP2 gathered from its forward until backward has passed."""
    if isinstance(layer, FSDPModule):
        layer.set_reshard_after_forward(False, recurse=False)


class FusedSeq2SeqPass(Seq2SeqLanguageModel, FusedPass):
    """The same of an encoder-decoder, whose decoder's inputs are made of the labels if the model itself does so."""

    _needs_decoder_inputs = True

    def prepare(self, device: torch.device) -> None:
        super().prepare(device)
        assert self.transformers_model is not None
        self._needs_decoder_inputs = not makes_no_decoder_inputs(self.transformers_model)

    def targets(self, batch: Batch) -> Tensor:
        return super().targets(self.read(batch))

    def inputs_of(self, batch: Batch) -> dict[str, Any]:
        return super().inputs_of(batch) if self._needs_decoder_inputs else FusedPass.inputs_of(self, batch)
