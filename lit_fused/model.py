"""``LanguageModel``: a backbone and a loss in one forward pass, a batch in and a :class:`LossOutput` out.

It is the one ``nn.Module`` that a strategy wraps: everything, the loss included, happens inside its forward, where
sharded parameters are whole. The backbone is a Hugging Face model, whose output layer is asked for its input only
(``heads/``), or any module that returns hidden states and offers ``get_output_embeddings()``.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lit_fused.errors import UserError
from lit_fused.heads import (
    InputCapture,
    OutputHead,
    check_decoder_inputs,
    check_router_loss,
    decoder_inputs,
    extract_hidden_states,
    identify_head,
    is_compiled,
    labels_are_shifted_by,
    output_layer,
    peft_model,
    router_loss,
    sample_output,
    transformers_model,
    uses_prompt_learning,
    without_compilation,
)
from lit_fused.heads.probe import evaluation_mode
from lit_fused.losses.base import Batch, Loss, LossOutput, as_loss, check_batch, labels_of, shift_labels
from lit_fused.ops.linear_cross_entropy.checks import check_one_per_position
from lit_fused.packing import Form, arguments, experiment, first_exact, is_packed, may_be_packed
from lit_fused.weights import Origin, grow_vocabulary, is_deferred, origin_of


class LanguageModel(nn.Module):
    """A causal language model that returns sums and counts: position t predicts label t + 1.

    Args:
        backbone: a transformers causal language model, or PEFT's or ``torch.compile``'s wrapper around one; or a module
            whose forward takes the batch's entries (except "labels") by name and returns hidden states (B, T, D), with
            a method ``get_output_embeddings()`` that returns its output layer.
        loss: a loss strategy, or a callable of (hidden_states, labels) that returns the mean loss.
    """

    backbone: nn.Module

    def __init__(self, backbone: nn.Module, loss: Loss | Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._check_backbone(backbone)
        if uses_prompt_learning(backbone):
            raise UserError(
                "PEFT's prompt learning (prompt tuning, P-tuning, prefix tuning) puts virtual tokens before the input, "
                "which labels and counts know nothing of; choose another adapter, LoRA for instance"
            )
        if peft_model(backbone) is not None and is_deferred(backbone):
            raise UserError(
                f"the adapters are around a {type(transformers_model(backbone)).__name__} without weights; build it "
                "with at_once=True, or call lit_fused.materialize(model) before get_peft_model"
            )
        # A compiled model is called as such, but its parameters keep the names that they have without it.
        self._compiled = (backbone,) if is_compiled(backbone) else None
        self.backbone = without_compilation(backbone)
        self.loss = as_loss(loss)
        self._head: OutputHead | None = None
        self._capture: InputCapture | None = None
        self.packing: Form | UserError | None = None  # how documents in one row are told apart, or why not; see below
        self.division: Any = None  # of a model that a pipeline has divided over ranks: what is left of it, and where

    def prepare(self, device: torch.device) -> None:
        """Find out, before training, all that would fail in it: the head, and what the loss needs on ``device``."""
        self.loss.prepare(self, device)

    def forward(self, batch: Batch) -> LossOutput:
        """One forward pass over ``batch``: "input_ids" and "labels" (B, T) and whatever else the backbone takes."""
        self._check_inputs(batch)
        if self.needs_packing_check(batch):
            self.check_packing(batch)
        return self.loss.compute(self, batch)

    def token_losses(self, batch: Batch) -> Tensor:
        """(B, T) float32 negative log-likelihood of what each position predicts, 0 where ignored."""
        return self.loss.token_losses(self, batch)

    @torch.no_grad()
    def check_parity(self, batch: Batch) -> None:
        """Compare the loss of a few tokens with that of the model's own logits, in the precision of the run.

        One forward pass; no random number is used up.

        Raises:
            UserError: they differ by more than the precision explains; the message has both numbers.
        """
        self._check_inputs(batch)
        devices = [p.device for p in self.parameters() if p.device.type == "cuda"][:1]
        with torch.random.fork_rng(devices):
            self.loss.check_parity(self, batch)

    def needs_packing_check(self, batch: Batch) -> bool:
        """Whether :meth:`check_packing` has something to say of ``batch``: its rows may hold several documents, which
        the model is not known to keep apart."""
        return may_be_packed(batch) and (self.packing is None or isinstance(self.packing, UserError))

    def check_packing(self, batch: Batch) -> None:
        """With the first batch whose "position_ids" may begin anew within a row, find out how the model keeps the
        documents of a row apart. Two forward passes, of four rows and of one; no random number is used up.

        Raises:
            UserError: a row holds several documents, and the model does not keep them apart.
        """
        if self.packing is None:
            self.packing = self._find_packing(batch)
        if isinstance(self.packing, UserError) and is_packed(batch):
            raise self.packing

    @torch.no_grad()
    def _find_packing(self, batch: Batch) -> Form | UserError:
        positions = batch["position_ids"]
        packed, alone = experiment(positions.shape[1], self.vocabulary, positions.device)

        def run(form: Form) -> tuple[Tensor, Tensor]:
            self.packing = form
            return self._seen_by_loss(packed), self._seen_by_loss(alone)

        kind = positions.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else next(self.backbone.parameters()).dtype
        devices = [positions.device] if kind == "cuda" else []
        eager = torch.compiler.set_stance("force_eager")
        try:
            with torch.random.fork_rng(devices), evaluation_mode(self.backbone), eager:
                return first_exact(run, dtype, self._name)
        except UserError as refusal:
            return refusal

    def _seen_by_loss(self, batch: Batch) -> Tensor:
        """Hidden states, or logits where the loss builds them."""
        return self.logits(batch)[0] if self.loss.builds_logits else self.hidden_states(batch)[0]

    def generate(self, **arguments: Any) -> Any:
        """The backbone's own ``generate``."""
        return self.backbone.generate(**arguments)  # type: ignore[operator]

    @property
    def transformers_model(self) -> PreTrainedModel | None:
        """The Hugging Face model inside the backbone, if it is one."""
        return transformers_model(self.backbone)

    @property
    def head(self) -> OutputHead | None:
        """The output head; None before a loss has needed it."""
        return self._head

    def replace_head(self, head: OutputHead) -> None:
        """Another description of the head, for a model whose output layer has been taken out."""
        self._head, self._capture = head, None

    @property
    def is_compiled(self) -> bool:
        """Whether ``torch.compile`` has been at the backbone or a part of it."""
        return self._compiled is not None or any(m._compiled_call_impl is not None for m in self.modules())

    @property
    def vocabulary(self) -> int:
        """Number of logits per token."""
        return (self._head or OutputHead(output_layer(self.backbone))).vocabulary

    def fit_vocabulary(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Let the vocabulary of a pretrained model grow to that of ``tokenizer``, and look at whether it is its own.

        Nothing happens to any other model, nor to one that has been divided over ranks.

        Raises:
            UserError: adapters are around the model, whose new rows nobody would train.
        """
        model = self.transformers_model
        origin = origin_of(model)
        if model is None or origin is None or self.division is not None:
            return
        _compare_with_own(tokenizer, origin, self._name)
        entries = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
        before = self.vocabulary
        if entries > before and not any(isinstance(p, DTensor) for p in self.parameters()):
            if peft_model(self.backbone) is not None:
                raise UserError(
                    f"the tokenizer has {entries} entries but the pretrained {self._name} only {before}, and its new "
                    f"rows would stay frozen below the adapters: set vocab_size={entries} where the model is loaded "
                    "(model.model.vocab_size), and train them (model.peft_config.modules_to_save or "
                    "trainable_token_indices)"
                )
            rows = grow_vocabulary(model, entries, origin.pad_to_multiple_of)
            self._head = self._capture = None
            rank_zero_info(
                f"The tokenizer has {entries} entries, {self._name} has {before}: its vocabulary grows to {rows}, each "
                "new row the mean of the old ones."
            )

    # What a loss can ask for (losses.base.ForwardPass).

    def targets(self, batch: Batch) -> Tensor:
        return shift_labels(labels_of(batch))

    def prepare_hidden_states(self) -> OutputHead | None:
        """The head; None if the model needs more than token ids to run, and is asked with the first batch."""
        if self._head is None:
            layer = output_layer(self.backbone)
            if self.transformers_model is None:
                self._head = OutputHead(layer)
            else:
                self.prepare_logits()
                try:
                    self._head = identify_head(self.transformers_model)
                except UserError:
                    raise
                except Exception:  # the model's own: it is raised again with the first batch, if that does not fit
                    return None
        return self._head

    def prepare_logits(self) -> None:
        if self.transformers_model is not None:
            check_router_loss(self.transformers_model)

    def hidden_states(self, batch: Batch) -> tuple[Tensor, OutputHead, Tensor | None]:
        head = self._head_for(batch)
        if self.transformers_model is None:
            return self._returned_hidden_states(batch), head, None
        if self._capture is None or self._capture.layer is not head.layer:
            self._capture = InputCapture(head.layer)
        if "adapter_names" in batch:
            raise UserError(
                "a batch has adapter_names, PEFT's choice of an adapter for each row, that a fused loss cannot follow; "
                "activate one adapter for all rows, or choose loss=standard"
            )
        arguments = self._inputs(batch)
        with self._capture as inputs:
            output = self._run(arguments)
        return self._only(inputs), head, self._router_loss(output)

    def hidden_states_and_logits(self, batch: Batch, positions: Tensor) -> tuple[Tensor, Tensor, OutputHead]:
        head = self._head_for(batch)
        if self.transformers_model is None:
            hidden_states = self._returned_hidden_states(batch)
            check_one_per_position(self.targets(batch), hidden_states, "hidden states")
            hidden_states = hidden_states.flatten(0, -2)[positions]
            return hidden_states, head.logits(hidden_states), head
        arguments = self._inputs(batch)
        eager = torch.compiler.set_stance("force_eager")
        sample = sample_output(head.layer, positions, self.targets(batch))
        with evaluation_mode(head.layer), sample as inputs, eager:
            logits = self._run(arguments).logits
        return self._only(inputs), logits.flatten(0, -2), head

    def logits(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        if self.transformers_model is None:
            return self._head_for(batch).logits(self._returned_hidden_states(batch)), None
        output = self._run(self._inputs(batch))
        return output.logits, self._router_loss(output)

    def prepare_own_loss(self) -> None:
        model = self.transformers_model
        if model is None:
            raise UserError(
                f"loss=model needs a transformers model, and {self._name} is none; choose loss=standard or loss=chunked"
            )
        self._check_own_loss(model)

    def own_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        output = self._run(self._inputs(batch) | {"labels": labels_of(batch)})
        return output.loss, output.logits, self._router_loss(output)

    @property
    def _name(self) -> str:
        return type(self.transformers_model or self.backbone).__name__

    def _check_backbone(self, backbone: nn.Module) -> None:
        model = transformers_model(backbone)
        if model is not None and model.config.is_encoder_decoder:
            raise UserError(
                f"{type(model).__name__} is an encoder-decoder, whose encoder would see the very labels that are "
                "predicted; use FusedSeq2SeqLMModule (module=seq2seq_lm), or a causal language model "
                "(AutoModelForCausalLM)"
            )

    def _check_own_loss(self, model: PreTrainedModel) -> None:
        if not labels_are_shifted_by(model):
            raise UserError(
                f"the own loss of {self._name} does not shift the labels: trained on labels that equal the inputs it "
                "would learn to copy; choose loss=standard or loss=chunked, which shift them"
            )

    def _run(self, arguments: dict[str, Any]) -> Any:
        backbone = self._compiled[0] if self._compiled else self.backbone
        return backbone(**arguments)

    def _head_for(self, batch: Batch) -> OutputHead:
        head = self.prepare_hidden_states()
        if head is None:
            assert self.transformers_model is not None
            head = self._head = identify_head(self.transformers_model, self._inputs(batch))
        return head

    def _returned_hidden_states(self, batch: Batch) -> Tensor:
        """What a backbone returns that is no transformers model."""
        layer = output_layer(self.backbone)
        # an embedding as output layer is also the input layer, which has to run
        capture = InputCapture(layer) if isinstance(layer, nn.Linear) else nullcontext([])
        with capture as inputs:
            output = self._run(self._inputs(batch))
        if inputs:
            raise UserError(
                f"{self._name} runs its output layer in its own forward; return the hidden states instead, the layer's "
                "input: the loss applies the layer itself"
            )
        return extract_hidden_states(output, self._name)

    def _router_loss(self, output: Any) -> Tensor | None:
        return None if self.transformers_model is None else router_loss(self.transformers_model, output)

    def _only(self, inputs: list[Tensor]) -> Tensor:
        if len(inputs) != 1:
            raise UserError(f"the output layer of {self._name} ran {len(inputs)} times in one forward pass, not once")
        return inputs[0]

    def _check_inputs(self, batch: Batch) -> None:
        """Refuse inputs that the model cannot take, or takes without a word though they do not fit.

        Ids outside of the embedding stop a run on a GPU by the embedding's own assertion.
        """
        check_batch(batch)
        ids, model = batch.get("input_ids"), self.transformers_model
        if model is None:
            return
        embeds = batch.get("inputs_embeds")
        if isinstance(embeds, Tensor) and embeds.dtype != model.dtype:
            autocast = torch.is_autocast_enabled(embeds.device.type) and embeds.dtype != torch.float64
            if not autocast:  # which leaves float64 alone
                raise UserError(
                    f"inputs_embeds are {embeds.dtype} but the model is {model.dtype}; convert them where the batch is "
                    f"made: inputs_embeds.to({model.dtype})"
                )
        if not isinstance(ids, Tensor):
            return
        if ids.dtype.is_floating_point or ids.ndim < 2:
            raise UserError(
                f"input_ids must be integers (B, T), got {ids.dtype} of shape {tuple(ids.shape)}; make them so in the "
                "dataset or its collate function: torch.stack the sequences, .long() their values"
            )
        table = getattr(model.get_input_embeddings(), "weight", None)
        if not isinstance(table, Tensor):  # several tables, one for each codebook
            return
        mask = batch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape != ids.shape:
            raise UserError(
                f"attention_mask of shape {tuple(mask.shape)} does not fit input_ids of shape {tuple(ids.shape)}; make "
                "both in the same place, the tokenizer or the collate function"
            )
        if ids.device != table.device:
            raise UserError(
                f"input_ids are on {ids.device} but the model is on {table.device}; Lightning moves a batch and its "
                "module by itself, outside of it call .to(device) on the batch and the model"
            )
        if ids.device.type != "cpu":
            return
        rows = len(table)
        if ids.numel() and (ids.min() < 0 or ids.max() >= rows):
            raise UserError(
                f"input_ids must lie in [0, {rows}), the entries of the model's embedding, got values from "
                f"{ids.min().item()} to {ids.max().item()}; does the tokenizer have more entries than the model?"
            )

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        if self.transformers_model is None:
            return inputs
        if "output_router_logits" in inputs:
            raise UserError(
                "a batch has output_router_logits; set it in the model's configuration instead, where the router's "
                "loss is checked before training"
            )
        if may_be_packed(batch) and isinstance(self.packing, str):
            inputs |= arguments(self.transformers_model, batch, self.packing)
        return inputs | {"use_cache": False}


@rank_zero_only
def _compare_with_own(tokenizer: PreTrainedTokenizerBase, origin: Origin, name: str) -> None:
    """Warn if the numbers of tokens are not those that a pretrained model has learned."""
    try:
        own = AutoTokenizer.from_pretrained(origin.path, revision=origin.revision or "main").get_vocab()
    except Exception:  # it has none, or one that cannot be read: there is nothing to compare with
        return
    given = tokenizer.get_vocab()
    other = sum(given.get(token) != number for token, number in own.items())
    if other:
        rank_zero_warn(
            f"the data's tokenizer is not that of the pretrained {name}: {other} of its {len(own)} entries have "
            f"another number or none, so that what it has learned of them belongs to others now; choose "
            f"data.tokenizer={origin.path} unless you mean to train a new vocabulary"
        )


class Seq2SeqLanguageModel(LanguageModel):
    """An encoder-decoder language model that returns sums and counts: position t of the decoder predicts label t.

    The decoder's inputs are made from the labels as the model makes them itself, unless the batch has
    "decoder_input_ids".

    Args:
        backbone: a transformers encoder-decoder, or PEFT's or ``torch.compile``'s wrapper around one; or a module as
            :class:`LanguageModel` takes it, whose batches have all that its forward needs.
        loss: a loss strategy, or a callable of (hidden_states, labels) that returns the mean loss.
    """

    _makes_decoder_inputs = False  # known once the first batch needs them

    def check_packing(self, batch: Batch) -> None:
        if is_packed(batch):
            raise UserError(
                f"{self._name} is an encoder-decoder, whose encoder would read all documents of a row at once; give "
                "each a row of its own"
            )

    def targets(self, batch: Batch) -> Tensor:
        return labels_of(batch).long()

    def _check_own_loss(self, model: PreTrainedModel) -> None:
        if labels_are_shifted_by(model):
            raise UserError(f"the own loss of {self._name} shifts the labels; choose loss=standard or loss=chunked")

    def _check_backbone(self, backbone: nn.Module) -> None:
        model = transformers_model(backbone)
        if model is not None and not model.config.is_encoder_decoder:
            raise UserError(
                f"{type(model).__name__} is no encoder-decoder; use FusedCausalLMModule (module=causal_lm), or a "
                "sequence-to-sequence model (AutoModelForSeq2SeqLM)"
            )

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        inputs = super()._inputs(batch)
        model = self.transformers_model
        if model is not None and inputs.keys().isdisjoint(("decoder_input_ids", "decoder_inputs_embeds")):
            if not self._makes_decoder_inputs:
                check_decoder_inputs(model)
                self._makes_decoder_inputs = True
            inputs |= decoder_inputs(model, labels_of(batch))
        return inputs
