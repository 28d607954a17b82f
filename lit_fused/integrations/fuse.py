"""``model = lit_fused.fuse(model)``: in any training loop, ``model(..., labels=...)`` computes its loss without logits.

The instance's ``forward`` is replaced by an object with a reference to the model, which can be pickled: a subclass made
at run time and a bound method cannot. A forward hook would run outside of the autocast that Accelerate puts around
``forward``. Hooks of the model itself, as FSDP2's, run around it as before.
"""

import dataclasses
import functools
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.integrations.fsdp import is_fsdp_enabled

from lit_fused.errors import UserError, check_choice, check_number
from lit_fused.heads import OutputHead, transformers_model
from lit_fused.integrations.fused_pass import FusedPass, FusedSeq2SeqPass
from lit_fused.integrations.not_computed import NotComputed
from lit_fused.integrations.trl_head import can_score, trl_settings
from lit_fused.losses import CrossEntropyLoss, LinearCrossEntropyLoss, Loss, ModelInternalLoss, as_loss
from lit_fused.ops.operators import one_graph_break

_Model = TypeVar("_Model", bound=nn.Module)
_ATTRIBUTE = "fused_forward"  # of a fused model, for unfuse: other libraries wrap its forward
_COPIED = "_replicate_for_data_parallel"  # what nn.DataParallel calls if it has several devices
_COMPILED_ON = ("cuda",)  # types of devices


def fuse(
    model: _Model,
    loss: str | Loss | Callable[[Tensor, Tensor], Tensor] = "chunked",
    compile: str = "auto",
    check_every_n_steps: int = 100,
    *,
    own_loss_differs: bool = False,
) -> _Model:
    """Make ``model(..., labels=...)`` compute its loss without logits, in place, and return the model.

    The loss and its gradients are the model's own: it shifts the labels or not, divides by ``num_items_in_batch`` if
    that is given, and adds its router's loss. Without a valid label it is NaN, and its gradients are zero.
    ``outputs.logits``, and what else the model makes of logits or labels, is an object that any use of raises an error
    which says so. Calls without labels, ``generate``, parameters, configuration and class stay as they are.

    Args:
        model: a transformers model, or PEFT's, ``torch.compile``'s or DDP's wrapper around one.
        loss: "chunked"; the name or the dotted path of another backend of :class:`lit_fused.LinearCrossEntropyLoss`;
            such a loss with options of its own; or a callable of (hidden_states, labels) that returns the mean.
        compile: "auto": the first training step on a GPU compiles each layer, where nothing is against it, and says so.
            Calls without labels and without gradients, as those of ``generate``, run uncompiled. "none": never.
        check_every_n_steps: compare a slice of the batch with the model's own loss in the first call of training and of
            each evaluation, in the first with an argument that none had before, and in every n-th of training; 0:
            never.
        own_loss_differs: the model's own loss is another one, and ``loss`` is to take its place: only logits are
            compared, and no labels given to the model.

    Raises:
        UserError: no transformers model, a loss that builds logits, or a model whose logits or whose own loss no fused
            loss reproduces. A model whose weights are sharded or on the meta device is asked in its first step.
    """
    inner = _inner(model)
    if inner is None:
        raise UserError(
            f"fuse takes a transformers model, got {type(model).__name__}; fuse it before another library wraps it, "
            "and for a module of your own call lit_fused.ops.linear_cross_entropy in its forward"
        )
    if "labels" not in inspect.signature(inner.forward).parameters:
        raise UserError(
            f"{type(inner).__name__} computes no loss of its own: its forward takes no labels. Call "
            "lit_fused.ops.linear_cross_entropy with its hidden states"
        )
    check_choice("compile", compile, ("auto", "none"))
    strategy = _loss_of(loss)  # A wrong one leaves a fused model as it is.
    unfuse(model)
    check_number("check_every_n_steps", check_every_n_steps, "be at least 0", lambda x: x >= 0, whole=True)
    forward = FusedForward(inner, strategy, compile, check_every_n_steps, own_loss_differs)
    if not is_fsdp_enabled() and not any(p.is_meta or isinstance(p, DTensor) for p in inner.parameters()):
        forward.prepare()
    inner.forward, inner.__dict__[_ATTRIBUTE] = forward, forward
    inner.__dict__[_COPIED] = _refuse_copies
    return model


def unfuse(model: _Model) -> _Model:
    """Give a model that :func:`fuse` has changed its own forward again, in place, and return it."""
    inner = _inner(model)
    forward = None if inner is None else inner.__dict__.pop(_ATTRIBUTE, None)
    if inner is not None and forward is not None:
        del inner.__dict__[_COPIED]
        if inner.__dict__["forward"] is forward:
            forward.restore()
        forward.is_on = False  # Another library has a reference to it.
        if forward.layers is not None:
            forward.layers.take_back()
    return model


def _inner(model: nn.Module) -> PreTrainedModel | None:
    return transformers_model(model.module if isinstance(model, DistributedDataParallel | nn.DataParallel) else model)


def _refuse_copies() -> None:
    raise UserError(
        "nn.DataParallel runs copies of a model, and those of a fused model would all run the first one: start one "
        "process for each GPU (torchrun or accelerate launch), or show the process one GPU (CUDA_VISIBLE_DEVICES=0)"
    )


def _loss_of(given: Any) -> Loss:
    loss = LinearCrossEntropyLoss(given) if isinstance(given, str) else as_loss(given)
    if isinstance(loss, CrossEntropyLoss | ModelInternalLoss):
        raise UserError(f"fuse takes a loss without logits, got {type(loss).__name__}; leave the model as it is")
    return loss


class FusedForward:
    """Runs as the ``forward`` of a fused model."""

    def __init__(
        self, model: PreTrainedModel, loss: Loss, compile: str, check_every_n_steps: int, own_loss_differs: bool
    ) -> None:
        self.model, self.loss, self.compile = model, loss, compile
        self.check_every_n_steps, self.own_loss_differs = check_every_n_steps, own_loss_differs
        self.is_on = True
        self.layers: Any = None  # CompiledLayers, from the first training step on a GPU on
        self._wrapped = model.__dict__.get("forward")  # None unless another tool has wrapped the instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.model:  # Accelerate makes a method of it when it unwraps a model
            args = args[1:]
        if not self.is_on:
            return self.own(*args, **kwargs)
        arguments = dict(zip(self.__signature__.parameters, args, strict=False)) | kwargs if args else kwargs
        if arguments.get("fused_lm_head"):
            settings = trl_settings(self.own)
            if settings is None:
                return self.own(*args, **kwargs)
            return _with_scores(self, arguments, settings, torch.compiler.is_compiling())
        if arguments.get("labels") is None:
            return self.own(*args, **kwargs)
        return _with_labels(self, arguments, torch.compiler.is_compiling())

    @property
    def own(self) -> Callable[..., Any]:
        """The model's own forward."""
        return self._wrapped or type(self.model).forward.__get__(self.model)

    def run_own(self, **arguments: Any) -> Any:
        return self.own(**arguments)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.own)

    @functools.cached_property
    def language(self) -> FusedPass:
        """The machinery of losses and heads around the model."""
        kind = FusedSeq2SeqPass if self.model.config.is_encoder_decoder else FusedPass
        language = kind(self.model, self.loss)
        language.own = self.run_own
        language.check_every_n_steps, language.own_loss_differs = self.check_every_n_steps, self.own_loss_differs
        return language

    def __getstate__(self) -> dict[str, Any]:
        # A copy identifies its own head, and compiles its own layers.
        return {name: value for name, value in self.__dict__.items() if name not in ("language", "layers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, layers=None)

    def restore(self) -> None:
        """Give the model its own forward again."""
        del self.model.forward
        if self._wrapped is not None:
            self.model.forward = self._wrapped

    def prepare(self) -> None:
        """Identify the model's head, and refuse what no fused loss reproduces."""
        with _in_words_of_fuse(), self.as_it_was():
            self.language.prepare(self.model.device)

    def captured(self, head: OutputHead, run: Callable[..., Any], *, is_traced: bool) -> tuple[list[Tensor], Any]:
        """Run the model's forward for a loss. The first training step on a GPU compiles its layers, unless a compiler
        traces the caller's code, and the model with it."""
        is_step = self.model.training and torch.is_grad_enabled() and self.model.device.type in _COMPILED_ON
        if self.compile == "auto" and self.layers is None and is_step and not is_traced:
            self.layers = _compiled(self.language)
        with nullcontext() if self.layers is None else self.layers.in_use():
            return self.language.captured(head, run)

    captured = one_graph_break(captured, recursive=False)

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Give the model its own forward in a block, and take its hooks away: what FSDP2's do they have done."""
        own: dict[str, Any] = {"_forward_hooks": OrderedDict(), "_forward_pre_hooks": OrderedDict()}
        own |= {} if self._wrapped is None else {"forward": self._wrapped}
        attributes = self.model.__dict__
        saved = {name: attributes.pop(name) for name in ("forward", *own) if name in attributes}
        attributes |= own
        try:
            yield
        finally:
            attributes.pop("forward", None)
            attributes |= saved


@one_graph_break
def _compiled(language: FusedPass) -> Any:
    from lit_fused.integrations.fused_layers import CompiledLayers  # It loads Lightning, which takes seconds.

    return CompiledLayers(language)


def _with_labels(forward: FusedForward, batch: dict[str, Any], is_traced: bool) -> Any:
    language = forward.language
    with _in_words_of_fuse():
        with forward.as_it_was():
            head, inputs = language.begin(batch)
        language.check(batch)
        inputs, output = forward.captured(head, functools.partial(forward.own, **inputs), is_traced=is_traced)
        loss = language.finish(batch, inputs, head, output)
    return _answer(loss, output, language.not_computed, batch.get("return_dict"))


def _with_scores(forward: FusedForward, arguments: dict[str, Any], settings: dict[str, Any], is_traced: bool) -> Any:
    language = forward.language
    batch = arguments | {"fused_lm_head": None}
    with _in_words_of_fuse():
        with forward.as_it_was():
            head, inputs = language.begin(batch)
        if batch.get("labels") is not None:
            language.check(batch)
        if not can_score(head, settings):
            return forward.own(**arguments)
        del inputs["fused_lm_head"]
        run = functools.partial(settings["original_forward"], **inputs)
        inputs, output = forward.captured(head, run, is_traced=is_traced)
        return language.finish_for_trl(batch, inputs, head, output, settings)


# Compiled code ends here, and begins again in the model's own forward.
_with_labels = one_graph_break(_with_labels, recursive=False)
_with_scores = one_graph_break(_with_scores, recursive=False)


@contextmanager
def _in_words_of_fuse() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        text = re.sub(r"choose loss=(standard|model)", "train this model unfused", str(error))
        raise UserError(text) from error


@one_graph_break
def _answer(loss: Tensor, output: Any, not_computed: Iterable[str], return_dict: bool | None) -> Any:
    """Return the model's output with the loss, and without what would be made of logits."""
    entries = {name: value for name, value in output.items() if name != "loss"}
    entries |= {name: NotComputed(name) for name in not_computed}
    fields = {each.name: entries.pop(each.name) for each in dataclasses.fields(output) if each.name in entries}
    answer = type(output)(loss=loss, **fields)
    for name, value in entries.items():  # A model may add keys of its own.
        answer[name] = value
    if return_dict is False:
        return answer.to_tuple()
    return answer
