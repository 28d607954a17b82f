"""A backbone and a loss in one forward pass, from a batch to a :class:`LossOutput`.

Strategies wrap this one ``nn.Module``. The loss runs inside its forward, where sharded parameters are whole.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.heads import OutputHead, identify_head, output_layer, peft_model, transformers_model
from lit_fused.heads.adapters import without_compilation
from lit_fused.heads.capture import (
    InputCapture,
    extract_hidden_states,
    router_loss,
)
from lit_fused.heads.probe import without_cache
from lit_fused.heads.with_labels import labels_are_shifted_by
from lit_fused.losses.fused import token_losses
from lit_fused.losses.loss import (
    SHIFTED_OR_COUNTED,
    WEIGHTS,
    Batch,
    Forward,
    Loss,
    LossOutput,
    has_shifted_labels,
    labels_of,
    shift_labels,
)
from lit_fused.losses.own_losses import as_loss
from lit_fused.losses.standard import token_losses_of_logits
from lit_fused.models import documents_apart, documents_attention
from lit_fused.models.batch_checks import (
    check_mask,
    refuse_shifted_twice,
    warn_of_unread,
    warn_of_zero_weights,
)
from lit_fused.models.blocks import part_to_compile
from lit_fused.models.checked_slice import spot_check
from lit_fused.models.documents_apart import Form, is_packed, may_be_packed
from lit_fused.models.load import is_deferred
from lit_fused.ops.label_checks import check_integers, check_one_per_position

# Each loss beside cross entropy trains on one of these; a loss that does not would train on something else.
OF_SOME_LOSSES = (WEIGHTS, "desirable", "reward", "advantages", "teacher_entries", "teacher_hidden_states")


class LanguageModel(nn.Module):
    """A causal language model that returns sums and counts: position t predicts label t + 1.

    Args:
        backbone: a transformers causal language model, or PEFT's or ``torch.compile``'s wrapper around one; or a module
            whose forward takes the batch's entries (except "labels") by name and returns hidden states (B, T, D), with
            a method ``get_output_embeddings()`` that returns its output layer.
        loss: a loss strategy, or a callable of (hidden_states, labels) that returns the mean loss.
    """

    backbone: nn.Module
    few_targets = False
    shifts_labels = True  # and so has the model's own loss to
    own_loss_differs = False  # on purpose, so that the spot check leaves it out
    divides_as_own_loss = False  # by "num_items_in_batch" where the model's own loss does so, and only there
    _is_encoder_decoder: bool | None = False  # None: either
    _wrong_backbone = (
        "is an encoder-decoder, whose encoder would see the very labels that are predicted; use FusedSeq2SeqLMModule "
        "(module=seq2seq_lm), or a causal language model (AutoModelForCausalLM)"
    )
    _wrong_loss = (
        "does not shift the labels: trained on labels that equal the inputs it would learn to copy; choose "
        "loss=standard or loss=chunked, which shift them"
    )

    def __init__(self, backbone: nn.Module, loss: Loss | Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        model, adapted = transformers_model(backbone), peft_model(backbone)
        if model is not None and self._is_encoder_decoder not in (None, model.config.is_encoder_decoder):
            raise UserError(f"{type(model).__name__} {self._wrong_backbone}")
        if adapted is not None and adapted.active_peft_config.is_prompt_learning:
            raise UserError(
                "PEFT's prompt learning (prompt tuning, P-tuning, prefix tuning) puts virtual tokens before the input, "
                "which labels and counts know nothing of; choose another adapter, LoRA for instance"
            )
        if adapted is not None and is_deferred(backbone):
            raise UserError(
                f"the adapters are around a {type(model).__name__} without weights; build it with at_once=True, or "
                "call lit_fused.materialize(model) before get_peft_model"
            )
        # Forward passes call the compiled backbone; the plain one gives parameters the names that they have without it.
        self.backbone = without_compilation(backbone)
        self._compiled = None if backbone is self.backbone else (backbone,)
        self._inner = (model,)  # in a tuple, as it is a part of the backbone
        self._without_cache: dict[str, bool] | None = None
        self.empty_cache: documents_attention.EmptyCache | None = None  # spares a wait for the GPU
        self.loss = as_loss(loss)
        self.replace_head(None)
        self.packing: Form | UserError | None = None  # how documents in a row stay apart; the first such batch sets it
        if self.is_compiled_whole:
            documents_attention.takes_its_place(model)

    def prepare(self, device: torch.device) -> None:
        """Identify the head, and refuse before training what the loss cannot run with on ``device``."""
        self.loss.prepare(self, device)
        self.empty_cache = documents_attention.empty_cache_for(self.transformers_model)

    def forward(self, batch: Batch) -> LossOutput:
        """Return the sums of ``batch``: "input_ids" and "labels", integers (B, T), and other inputs of the backbone;
        perhaps "token_weights" (B, T), a factor on the loss of each label, by whose sum the mean is divided."""
        return replace(self.compute(self, batch), num_items=batch.get("num_items_in_batch"))

    def compute(self, forward_pass: Forward, batch: Batch) -> LossOutput:
        """Return the sums of a batch, given a forward pass: this model, or the part of it that has the output layer."""
        trains = self.training or torch.is_grad_enabled()
        return (self.loss.compute if trains else self.loss.measure)(forward_pass, batch)

    def token_losses(self, batch: Batch) -> Tensor:
        """Return the negative log-likelihood of each position's target, (B, T) float32, 0 where ignored."""
        if self.loss.builds_logits:
            return token_losses_of_logits(self.logits(batch)[0], self.targets(batch))
        return token_losses(self, batch)

    def run_with(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Return ``function(self, *arguments, **named)``. FSDP2 gathers the root's parameters around it."""
        return function(self, *arguments, **named)

    def spot_check(self, batch: Batch) -> set[str]:
        """Compare a slice of a batch's own loss and logits, and their gradients where they are enabled, with those of
        the loss that is trained (heads/spot_check.py). It changes nothing, and draws no random number of the run.

        Args:
            batch: as of :meth:`forward`, with labels (B, T). A slice without targets is run and not compared.

        Returns:
            Names of the entries of a transformers model's output that are made of its logits or labels.

        Raises:
            UserError: with what differs and what to choose. A loss function of one's own and the model's own loss have
                nothing that they could be compared with.
        """
        self.look_at(batch)
        return spot_check(self, batch)

    def own_inputs_of(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments of the backbone's forward for its own loss, without labels."""
        return self.inputs_of(batch)

    def read(self, batch: Batch) -> Batch | None:
        """Return a batch as the backbone's own loss reads it; None if it pairs positions and labels otherwise."""
        return None if has_shifted_labels(batch) else batch

    @torch.no_grad()
    def look_at(self, batch: Batch) -> None:
        """Raise UserError for a batch with which something else would be learned without a word; warn of entries that
        nothing reads."""
        if self.transformers_model is not None:
            check_mask(batch)
        read = "labels", *SHIFTED_OR_COUNTED, *OF_SOME_LOSSES, *self.loss.inputs
        warn_of_unread(self.transformers_model, batch, read)
        weights = self.token_weights(batch) if WEIGHTS in self.loss.inputs else None
        if weights is not None:
            warn_of_zero_weights(weights, self.targets(batch))
        with self.spared_random_numbers():
            self.loss.check(self, batch)
        if self.shifts_labels:
            refuse_shifted_twice(batch)

    def spared_random_numbers(self) -> AbstractContextManager[None]:
        """Return a context whose random draws change none of a run's."""
        return torch.random.fork_rng([p.device for p in self.parameters() if p.device.type == "cuda"][:1])

    def needs_packing_check(self, batch: Batch) -> bool:
        """Return whether rows may contain several documents that the model is not known to keep apart: the same on all
        ranks."""
        return not isinstance(self.packing, str) and may_be_packed(batch)

    def check_packing(self, batch: Batch) -> None:
        """Find out, with the first batch that may be packed, how the model keeps the documents of a row apart; refuse
        a batch that is packed if it does not. The first call takes three forward passes and draws no random number."""
        if self.packing is None:
            positions = batch["position_ids"]
            forms = documents_attention.forms(self.transformers_model, positions.device)
            self.packing = documents_apart.find(self, positions, forms)
        if isinstance(self.packing, UserError) and is_packed(batch):
            raise self.packing

    @property
    def transformers_model(self) -> PreTrainedModel | None:
        """The Hugging Face model inside the backbone, or None."""
        return self._inner[0]

    @property
    def head(self) -> OutputHead | None:
        """The output head, or None before a loss has needed it."""
        return self._head

    def replace_head(self, head: OutputHead | None) -> None:
        """Describe the head anew, after its output layer has changed; None: identify it when a loss needs it."""
        self._head: OutputHead | None = head
        self._layer = self._named_layer()  # that the head was identified with
        self._capture: InputCapture | None = None
        self._returns_hidden_states = False  # of a plain module: its first pass has shown that it does

    @property
    def is_compiled(self) -> bool:
        """True if ``torch.compile`` has compiled the backbone or a part of it."""
        return self.is_compiled_whole or any(part_to_compile(m)._compiled_call_impl is not None for m in self.modules())

    @property
    def is_compiled_whole(self) -> bool:
        return self._compiled is not None or self.backbone._compiled_call_impl is not None

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the sums that cross entropy does not have: see :class:`~lit_fused.losses.Loss`."""
        return self.loss.statistics

    @property
    def vocabulary(self) -> int:
        """Number of logits per token."""
        return (self._head or OutputHead(output_layer(self.backbone))).vocabulary

    # The forward passes that a loss can ask for: see losses.loss.Forward.

    def targets(self, batch: Batch) -> Tensor:
        return check_integers(batch["shift_labels"]) if has_shifted_labels(batch) else shift_labels(labels_of(batch))

    def token_weights(self, batch: Batch) -> Tensor | None:
        weights = batch.get(WEIGHTS)
        if weights is None:
            return None
        check_one_per_position(weights, labels_of(batch)[..., None], "labels", WEIGHTS)
        if weights.device.type == "cpu" and not bool((weights.isfinite() & (weights >= 0)).all()):
            raise UserError(f"{WEIGHTS} must be finite and not negative; look for NaN in the data's weights")
        if self.shifts_labels and not has_shifted_labels(batch):
            weights = F.pad(weights[..., 1:], (0, 1))
        return weights.to(torch.promote_types(weights.dtype, torch.float32))  # The mean is divided by their sum.

    def prepare_hidden_states(self) -> OutputHead | None:
        """Return the head, or None if the model cannot run on token ids alone: its first batch identifies the head."""
        layer = output_layer(self.backbone)  # another one after PEFT or a new vocabulary has put it there
        if self._head is not None and self._head.layer is not layer:
            self.replace_head(None)
        if self._head is None and self.transformers_model is not None:
            try:
                self.replace_head(identify_head(self.transformers_model))
            except UserError:
                raise
            except Exception:  # The model raised it; the first batch raises it again if it does not fit either.
                pass
        elif self._head is None:
            self.replace_head(OutputHead(layer))
        return self._head

    def hidden_states(self, batch: Batch) -> tuple[Tensor, OutputHead, Tensor | None]:
        head, model = self.head_for(batch), self.transformers_model
        if model is None:
            return self.returned_hidden_states(batch), head, None
        inputs, output = self.captured(head, self.run_backbone, self.inputs_of(batch))
        return self.only(inputs), head, router_loss(model, output)

    def captured(self, head: OutputHead, run: Callable[..., Any], *arguments: Any) -> tuple[list[Tensor], Any]:
        """Run a transformers model's forward pass, ``run(*arguments)``, without its output layer. Return the layer's
        inputs, (..., D) for each of its calls, and what ``run`` returned."""
        if self._capture is None or self._capture.head is not head:
            self._capture = InputCapture(head, self.backbone)
        with self._capture as inputs:
            return inputs, run(*arguments)

    def logits(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        if self.transformers_model is None:
            return self.head_for(batch).logits(self.returned_hidden_states(batch)), None
        output = self.run_backbone(self.inputs_of(batch))
        return output.logits, router_loss(self.transformers_model, output)

    def whole_rows(self, numbers: Tensor, batch: Batch) -> Tensor:
        return numbers

    def own_positions(self, numbers: Tensor) -> Tensor:
        return numbers

    def prepare_own_loss(self) -> None:
        model = self.transformers_model
        if model is None:
            raise UserError(f"loss=model needs a transformers model, and {self.name} is none; choose loss=standard")
        if labels_are_shifted_by(model) != self.shifts_labels:
            raise UserError(f"the own loss of {self.name} {self._wrong_loss}")

    def own_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        if has_shifted_labels(batch):
            raise UserError(
                f"a batch has shift_labels, and loss=model leaves the labels to {self.name}, which would shift them; "
                "choose loss=chunked or loss=standard"
            )
        output = self._labelled(batch)
        assert self.transformers_model is not None
        return output.loss, output.logits, router_loss(self.transformers_model, output)

    def _labelled(self, batch: Batch) -> Any:
        return self.run_backbone(self.inputs_of(batch) | {"labels": labels_of(batch)})

    @property
    def name(self) -> str:
        return type(self.transformers_model or self.backbone).__name__

    def run_backbone(self, arguments: dict[str, Any]) -> Any:
        """Run the backbone, compiled or not."""
        with documents_attention.told(arguments, self.packing):
            return self._call(**arguments)

    def _call(self, **arguments: Any) -> Any:
        return (self._compiled[0] if self._compiled else self.backbone)(**arguments)

    def head_for(self, batch: Batch) -> OutputHead:
        head = self._head
        if head is None or self._layer != self._named_layer():  # after resize_token_embeddings, say
            head = self.prepare_hidden_states()
        if head is None:
            assert self.transformers_model is not None
            head = identify_head(self.transformers_model, self.inputs_of(batch))
            self.replace_head(head)
        return head

    def _named_layer(self) -> tuple[Any, ...]:
        """Return what the backbone calls its output layer, in a tuple: it is a part of the backbone."""
        name: Any = getattr(self._inner[0] or self.backbone, "get_output_embeddings", None)
        return () if name is None else (name(),)

    def returned_hidden_states(self, batch: Batch) -> Tensor:
        """Run a backbone that is no transformers model."""
        layer = output_layer(self.backbone) if self._head is None else self._head.layer
        if self._returns_hidden_states:
            return extract_hidden_states(self.run_backbone(self.inputs_of(batch)), self.name)
        # An embedding as output layer is also the input layer, so it has to run.
        capture = InputCapture(OutputHead(layer), self.backbone) if isinstance(layer, nn.Linear) else nullcontext([])
        with capture as inputs:
            output = self.run_backbone(self.inputs_of(batch))
        if inputs:
            raise UserError(
                f"{self.name} runs its output layer in its own forward; return the hidden states instead, the layer's "
                "input: the loss applies the layer itself"
            )
        self._returns_hidden_states = True
        return extract_hidden_states(output, self.name)

    def only(self, inputs: list[Tensor]) -> Tensor:
        """Return the input (..., D) of the output layer, which has to have run once."""
        if len(inputs) != 1:
            raise UserError(f"the output layer of {self.name} ran {len(inputs)} times in one forward pass, not once")
        return inputs[0]

    def inputs_of(self, batch: Batch) -> dict[str, Any]:
        """Return the backbone's arguments for ``batch``. Every forward pass calls it."""
        is_packed_batch = batch.get("position_ids") is not None and may_be_packed(batch)
        if is_packed_batch and self.needs_packing_check(batch):
            self.check_packing(batch)
        unread = [name for name in OF_SOME_LOSSES if batch.get(name) is not None and name not in self.loss.inputs]
        if unread:
            raise UserError(
                f"a batch has {' and '.join(unread)}, which {type(self.loss).__name__} does not read: it would train "
                "on something else; choose the module that does (module=preference, policy or distillation), or leave "
                "this out of the batches"
            )
        others = ("labels", "return_dict", *SHIFTED_OR_COUNTED, *self.loss.inputs)  # entries of a tuple have no names
        inputs = {name: value for name, value in batch.items() if name not in others}
        if self.transformers_model is None:
            return inputs
        if inputs.get("output_router_logits") is not None:
            raise UserError(
                "a batch has output_router_logits; set it in the model's configuration, where it is checked first"
            )
        if is_packed_batch and isinstance(self.packing, str):
            inputs |= documents_apart.arguments(self.transformers_model, batch, self.packing)
        if self._without_cache is None:
            self._without_cache = without_cache(self.transformers_model)
        if self.empty_cache is not None and not inputs.keys() & {"position_ids", "attention_mask", "past_key_values"}:
            inputs["past_key_values"] = self.empty_cache
        return inputs | self._without_cache
