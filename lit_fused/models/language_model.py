"""A backbone and a loss in one forward pass, from a batch to a :class:`LossOutput`.

Strategies wrap this one ``nn.Module``. The loss runs inside its forward, where sharded parameters are whole.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lit_fused.errors import UserError
from lit_fused.heads import OutputHead, identify_head, output_layer, peft_model, transformers_model
from lit_fused.heads.adapters import without_compilation
from lit_fused.heads.behind_body import watch_eagerly
from lit_fused.heads.capture import (
    InputCapture,
    extract_hidden_states,
    outputs_by_name,
    probing,
    uses_of_square,
    weights_here,
)
from lit_fused.heads.probe import explained_after_layer, without_cache
from lit_fused.heads.spot_check import FusedResult, OwnResult, SpotCheck, copied, slice_of
from lit_fused.heads.watch import Basis, HeadWatch, refuse
from lit_fused.heads.with_labels import check_own_loss, labels_are_shifted_by, router_loss
from lit_fused.losses.loss import (
    OF_SOME_LOSSES,
    SHIFTED_OR_COUNTED,
    WEIGHTS,
    Batch,
    ForwardPass,
    Loss,
    LossOutput,
    as_loss,
    has_shifted_labels,
    labels_of,
    shift_labels,
)
from lit_fused.models import documents_apart, documents_attention
from lit_fused.models.batch_checks import check_inputs_of
from lit_fused.models.documents_apart import Form, is_packed, may_be_packed
from lit_fused.models.label_alignment import LabelAlignment
from lit_fused.models.load import is_deferred
from lit_fused.models.row_lengths import RowLengths
from lit_fused.ops.label_checks import check_one_per_position


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
    _shifts_labels = True  # and so has the model's own loss to
    _is_encoder_decoder: bool | None = False  # None: either
    _is_own_reading = False  # shifted labels and counts mean to this model what they mean to its own loss
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
        self.loss = as_loss(loss)
        self.watch = HeadWatch()
        self.replace_head(None)
        self.packing: Form | UserError | None = None  # how documents in a row stay apart; the first such batch sets it
        self._alignment = LabelAlignment()
        self.own_positions, self._lengths = documents_apart.OwnPositions(), RowLengths()
        self._packed_batches = 0
        self.register_load_state_dict_post_hook(_look_again)

    def prepare(self, device: torch.device) -> None:
        """Identify the head, and refuse before training what the loss cannot run with on ``device``."""
        self.loss.prepare(self, device)
        if self._shifts_labels:
            self._alignment.look_at(self.transformers_model)

    def forward(self, batch: Batch) -> LossOutput:
        """Return the sums of ``batch``: "input_ids" and "labels", integers (B, T), and other inputs of the backbone;
        perhaps "token_weights" (B, T), a factor on the loss of each label, by whose sum the mean is divided."""
        return replace(self._asked_by(self.compute, batch), num_items=batch.get("num_items_in_batch"))

    def compute(self, forward_pass: ForwardPass, batch: Batch) -> LossOutput:
        """Return the sums of a batch, given a forward pass: this model, or the last stage of a pipeline."""
        trains = self.training or torch.is_grad_enabled()
        return (self.loss.compute if trains else self.loss.measure)(forward_pass, batch)

    def token_losses(self, batch: Batch) -> Tensor:
        """Return the negative log-likelihood of each position's target, (B, T) float32, 0 where ignored."""
        return self._asked_by(self.loss.token_losses, batch)

    def _watching(self, function: Callable[[Any, Batch], Any], batch: Batch) -> Any:
        """Return ``function(self, batch)`` for inputs that are checked; refuse what the watch of the head has found."""
        check_inputs_of(self.transformers_model, batch)
        result = function(self, batch)
        self.watch.read_in_passing(self._name, self._head)
        return result

    run_with = _watching  # FSDP2 gathers the root's parameters around it.
    _asked_by = _watching  # It runs the methods of the loss; a subclass may prepare them.

    def spot_check(self, batch: Batch, *, thorough: bool = True) -> None:
        """Compare a slice of a batch's own loss and logits, and their gradients where they are enabled, with those of
        the loss that is trained (heads/spot_check.py). It changes nothing, and draws no random number of the run.

        Args:
            batch: as of :meth:`forward`, with labels (B, T). A slice without targets is run and not compared.
            thorough: run the whole model for either loss; else the fused loss gets what its layer got in the own pass.

        Raises:
            UserError: with what differs and what to choose. A loss function of one's own and the model's own loss have
                nothing that they could be compared with.
        """
        check_inputs_of(self.transformers_model, batch)
        if thorough:
            with torch.no_grad(), self.spared_random_numbers():
                self.loss.check(self, batch)
        if labels_of(batch).ndim != 2 or not (self.loss.replaces_own or hasattr(self.loss, "cross_entropy")):
            return
        batch = {**batch, "labels": labels_of(batch)}
        head = self._head_for(batch) if hasattr(self.loss, "cross_entropy") else None
        part = slice_of(batch, self.targets(batch), self.vocabulary if head is None else head.vocabulary)
        fault = self.difference(part, head, thorough=thorough)
        if fault is not None:
            raise UserError(fault)

    def difference(self, part: Batch, head: OutputHead | None, *, thorough: bool) -> str | None:
        """Return what the spot check of a part of a batch finds, or None."""
        model, targets, inputs = self.transformers_model, self.targets(part), self._inputs(part)
        check = SpotCheck(
            self.backbone, self._name, targets, self._read(part).get("num_items_in_batch"), **self._own_targets(part)
        )
        if head is not None and isinstance(head.layer, nn.Embedding):  # It is called with hidden states here.
            table, layer = head.layer.weight, nn.Linear(1, 1, bias=False, device="meta")
            layer.weight = table
            head = replace(head, layer=layer)

        def run(**labels: Any) -> Any:
            return self._run(copied(inputs | labels))

        def own() -> OwnResult:
            if model is None:
                assert head is not None
                return OwnResult(None, head.layer(self._returned_hidden_states(part)))
            try:
                output = run(**self._for_own_loss(part))
            except (UserError, torch.OutOfMemoryError):
                raise
            except Exception:  # The model's own loss takes no such labels, as of images before the text.
                output = run()
            compares = self.loss.replaces_own and (self._is_own_reading or not has_shifted_labels(part))
            loss = getattr(output, "loss", None) if compares else None
            return OwnResult(loss, output.logits, router_loss(model, output))

        def fused(call_layer: Callable[[], Any] | None) -> FusedResult:
            assert head is not None
            with InputCapture(head) as seen, explained_after_layer(self.backbone, seen), head.one_entry(0):
                if call_layer is not None:
                    call_layer()
                elif model is None:
                    head.layer(self._returned_hidden_states(part))
                else:
                    run()
            hidden_states = self._only(seen)
            with weights_here(head.layer, hidden_states):
                summed = self.loss.cross_entropy(hidden_states, targets.to(hidden_states.device), head)  # type: ignore[attr-defined]
            return FusedResult(summed, hidden_states)

        if head is None:
            return None if model is None else check.of_own_loss(own)
        return check.of_head(head, own, fused, thorough=thorough)

    def _read(self, batch: Batch) -> Batch:
        """Return a batch as its loss reads it."""
        return batch

    def _for_own_loss(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments that make a model compute its own loss of a batch, if its forward takes labels."""
        model = self.transformers_model
        if model is None or "labels" not in inspect.signature(model.forward).parameters:
            return {}
        names = ("labels", *SHIFTED_OR_COUNTED)
        return {name: batch[name] for name in names if batch.get(name) is not None}

    def _own_targets(self, batch: Batch) -> dict[str, Any]:
        """Return what a model's own loss may predict instead, and whether that is no fault."""
        if has_shifted_labels(batch) or self.transformers_model is None:
            return {}
        labels = labels_of(batch)
        kinds = {kind.__name__ for kind in type(self.transformers_model).__mro__}
        may_be = self._shifts_labels and bool(kinds & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()})
        return {"other_targets": labels if self._shifts_labels else shift_labels(labels), "may_be_other": may_be}

    def spared_random_numbers(self) -> AbstractContextManager[None]:
        """Return a context whose random draws change none of a run's."""
        return torch.random.fork_rng([p.device for p in self.parameters() if p.device.type == "cuda"][:1])

    def needs_packing_check(self, batch: Batch) -> bool:
        """Return whether rows may contain several documents that the model is not known to keep apart, as after a
        thousand batches of training, which are counted here. All ranks return the same."""
        if not may_be_packed(batch):
            return False
        if self.backbone.training:  # It is not during the experiment.
            self._packed_batches += 1
            if self._packed_batches == documents_apart.TRAINED_BATCHES:
                self.packing = None
        return not isinstance(self.packing, str)

    def check_packing(self, batch: Batch) -> None:
        """Find out, with the first batch that may be packed, how the model keeps the documents of a row apart; refuse
        a batch that is packed if it does not. The first call takes three forward passes and draws no random number."""
        if self.packing is None:
            self.packing = self._find_packing(batch)
        if isinstance(self.packing, UserError) and is_packed(batch):
            raise self.packing

    @torch.no_grad()
    def _find_packing(self, batch: Batch) -> Form | UserError:
        positions = batch["position_ids"]
        packed, alone = documents_apart.experiment(positions.shape[1], self.vocabulary, positions.device)
        seen_by_loss = self.logits if self.loss.builds_logits else self.hidden_states
        eager = torch.compiler.set_stance("force_eager")
        faults: dict[Form, str] = {}
        with self.spared_random_numbers(), probing(self.backbone), eager:
            for form in documents_attention.forms(self.transformers_model, positions.device):
                self.packing = form
                try:
                    with documents_apart.WithNoise():
                        with_noise = seen_by_loss(packed)[0]
                    seen = seen_by_loss(packed)[0], seen_by_loss(alone)[0]
                    fault = documents_apart.difference(*seen, self.backbone, with_noise)
                except UserError as error:
                    return error
                except Exception as error:  # The model raised it because of the arguments of this form.
                    fault = f"it cannot be given them ({type(error).__name__}: {error})"
                if fault is None:
                    return form
                faults[form] = fault
        return documents_apart.refusal(self._name, faults["positions"])

    def generate(self, **arguments: Any) -> Any:
        """Call the backbone's own ``generate``. FSDP2 gathers the root's parameters around it."""
        return self.backbone.generate(**arguments)  # type: ignore[operator]

    def call_backbone(self, *arguments: Any, **named: Any) -> Any:
        """Run the backbone as it is called outside of a loss. FSDP2 gathers the root's parameters around it."""
        return self.backbone(*arguments, **named)

    @property
    def transformers_model(self) -> PreTrainedModel | None:
        """The Hugging Face model inside the backbone, or None."""
        return transformers_model(self.backbone)

    @property
    def head(self) -> OutputHead | None:
        """The output head, or None before a loss has needed it."""
        return self._head

    def replace_head(self, head: OutputHead | None) -> None:
        """Describe the head anew, after its output layer has changed; None: identify it when a loss needs it."""
        self._head: OutputHead | None = head
        self._basis = None if head is None else Basis(head)
        self._loaded = False  # weights, since the head was identified
        self._capture: InputCapture | None = None

    @property
    def head_is_outdated(self) -> bool:
        """True if weights were loaded since the head was identified, or what is behind it has changed."""
        return self._basis is not None and (self._loaded or self._basis.has_changed())

    @property
    def is_compiled(self) -> bool:
        """True if ``torch.compile`` has compiled the backbone or a part of it."""
        return self.is_compiled_whole or any(m._compiled_call_impl is not None for m in self.modules())

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

    # The forward passes that a loss can ask for: see losses.loss.ForwardPass.

    def targets(self, batch: Batch) -> Tensor:
        return self._alignment.targets(batch, self.transformers_model, training=self.training)

    def token_weights(self, batch: Batch) -> Tensor | None:
        weights = batch.get(WEIGHTS)
        if weights is None:
            return None
        check_one_per_position(weights, labels_of(batch)[..., None], "labels", WEIGHTS)
        if weights.device.type == "cpu" and not bool((weights.isfinite() & (weights >= 0)).all()):
            raise UserError(f"{WEIGHTS} must be finite and not negative; look for NaN in the data's weights")
        if self._shifts_labels and not has_shifted_labels(batch):
            weights = F.pad(weights[..., 1:], (0, 1))
        return weights.to(torch.promote_types(weights.dtype, torch.float32))  # The mean is divided by their sum.

    def prepare_hidden_states(self) -> OutputHead | None:
        """Return the head, or None if the model cannot run on token ids alone: its first batch identifies the head."""
        layer = output_layer(self.backbone)  # another one after PEFT or a new vocabulary has put it there
        if self.head_is_outdated or (self._head is not None and self._head.layer is not layer):
            self.replace_head(None)
        if self._head is None and self.transformers_model is not None:
            try:
                with self.own_positions.spared(()):
                    self.replace_head(identify_head(self.transformers_model))
            except UserError:
                raise
            except Exception:  # The model raised it; the first batch raises it again if it does not fit either.
                pass
            self.prepare_logits()
        elif self._head is None:
            self.replace_head(OutputHead(layer))
        return self._head

    def prepare_logits(self) -> None:
        check_own_loss(self.transformers_model)

    def hidden_states(self, batch: Batch) -> tuple[Tensor, OutputHead, Tensor | None]:
        head, model = self._head_for(batch), self.transformers_model
        if model is None:
            return self._returned_hidden_states(batch), head, None
        if batch.get("adapter_names") is not None:
            raise UserError(
                "a batch has adapter_names, PEFT's choice of an adapter for each row, that a fused loss cannot follow; "
                "activate one adapter for all rows, or choose loss=standard"
            )
        arguments = self._inputs(batch)
        inputs, output = self.watched(head, lambda: self._run(arguments))
        return self._only(inputs), head, router_loss(model, output)

    def watched(self, head: OutputHead, run: Callable[[], Any]) -> tuple[list[Tensor], Any]:
        """Run a transformers model's forward pass without its output layer, and watch what it does to the logits.
        Return the layer's inputs, (..., D) for each of its calls, and what ``run`` returned."""
        if self._capture is None or self._capture.layer is not head.layer:
            self._capture = InputCapture(head)
        capture = self._capture
        eager: Any = torch.compiler.disable(watch_eagerly)
        with capture as inputs, explained_after_layer(self.backbone, inputs), head.one_entry(capture.calls):
            try:
                with outputs_by_name(self.backbone):
                    output = run()
            except Exception:  # Compiled code does not tell where.
                if not inputs and self.is_compiled:
                    eager(self.watch, head, self.transformers_model, None, run)
                    refuse(int(self.watch.bits(torch.device("cpu"))), self._name, head)
                raise
            self.watch.compare(head, capture, output.logits)
            was_compiled = any(type(numbers) is Tensor for numbers in capture.numbers)
        if was_compiled:
            eager(self.watch, head, self.transformers_model, inputs[0].shape, run)
        return inputs, output

    def logits(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        if self.transformers_model is None:
            return self._head_for(batch).logits(self._returned_hidden_states(batch)), None
        output = self._run(self._inputs(batch))
        return output.logits, router_loss(self.transformers_model, output)

    def prepare_own_loss(self) -> None:
        model = self.transformers_model
        if model is None:
            raise UserError(f"loss=model needs a transformers model, and {self._name} is none; choose loss=standard")
        if labels_are_shifted_by(model) != self._shifts_labels:
            raise UserError(f"the own loss of {self._name} {self._wrong_loss}")

    def own_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        if has_shifted_labels(batch):
            raise UserError(
                f"a batch has shift_labels, and loss=model leaves the labels to {self._name}, which would shift them; "
                "choose loss=chunked or loss=standard"
            )
        output = self._labelled(batch)
        assert self.transformers_model is not None
        return output.loss, output.logits, router_loss(self.transformers_model, output)

    def _labelled(self, batch: Batch) -> Any:
        return self._run(self._inputs(batch) | {"labels": labels_of(batch)})

    @property
    def _name(self) -> str:
        return type(self.transformers_model or self.backbone).__name__

    def _run(self, arguments: dict[str, Any]) -> Any:
        in_blocks = documents_attention.in_blocks(self.packing == "blocks" and may_be_packed(arguments))
        lengths = self._lengths.watched(self, arguments)
        with outputs_by_name(self.backbone), self.own_positions.spared(arguments), in_blocks, lengths:
            return self._call(**arguments)

    def _call(self, **arguments: Any) -> Any:
        return (self._compiled[0] if self._compiled else self.backbone)(**arguments)

    def _head_for(self, batch: Batch) -> OutputHead:
        head = self.prepare_hidden_states()
        if head is None:
            assert self.transformers_model is not None
            head = identify_head(self.transformers_model, self._inputs(batch))
            self.replace_head(head)
        return head

    def _returned_hidden_states(self, batch: Batch) -> Tensor:
        """Run a backbone that is no transformers model."""
        layer = output_layer(self.backbone) if self._head is None else self._head.layer
        # An embedding as output layer is also the input layer, so it has to run.
        capture = InputCapture(OutputHead(layer)) if isinstance(layer, nn.Linear) else nullcontext([])
        with capture as inputs, uses_of_square(layer.weight) as uses:  # type: ignore[arg-type]
            output = self._run(self._inputs(batch))
        if inputs or uses:
            raise UserError(
                f"{self._name} runs its output layer in its own forward; return the hidden states instead, the layer's "
                "input: the loss applies the layer itself"
            )
        return extract_hidden_states(output, self._name)

    def _only(self, inputs: list[Tensor]) -> Tensor:
        if len(inputs) != 1:
            raise UserError(f"the output layer of {self._name} ran {len(inputs)} times in one forward pass, not once")
        return inputs[0]

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the backbone's arguments for ``batch``. Every forward pass calls it."""
        if self.needs_packing_check(batch):
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
        if may_be_packed(batch) and isinstance(self.packing, str):
            inputs |= documents_apart.arguments(self.transformers_model, batch, self.packing)
        return inputs | without_cache(self.transformers_model)


def _look_again(model: LanguageModel, _: Any) -> None:
    model._loaded, model.packing = True, None
