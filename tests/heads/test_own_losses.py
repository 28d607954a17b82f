"""Models whose own loss, logits or state is not what the fused loss trains, beside those of the audit."""

import math
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning_helpers import quiet_trainer
from tiny_models import sharpen, tiny_batch, tiny_llama, tiny_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import EuroBertForMaskedLM, LlamaForCausalLM

from lit_fused import FusedCausalLMModule, LanguageModel, LinearCrossEntropyLoss, MaskedLanguageModel, UserError, fuse

Change = Callable[..., None]
OF_THE_LOSS = ("loss_weights", "num_items_in_batch")


def losses_of(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].float().mT, labels[:, 1:], **options)


def model_that(change: Change, **attributes: Any) -> Any:
    """A small Llama whose forward ends with ``change(model, output, labels, arguments of its loss)``."""

    class Changed(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
            of_loss = {name: kwargs.pop(name) for name in OF_THE_LOSS if name in kwargs}
            output: Any = super().forward(input_ids=input_ids, **kwargs)
            if labels is not None:
                count = of_loss.get("num_items_in_batch") or (labels[:, 1:] != -100).sum()
                output["loss"] = losses_of(output.logits, labels, reduction="sum") / count
            change(self, output, labels, of_loss)
            return output

    model = sharpen(tiny_llama(Changed), 5.0).train()
    for name, value in attributes.items():
        model.register_buffer(name, value) if isinstance(value, Tensor) else setattr(model, name, value)
    return model


def add_z_loss(output: Any, weight: float) -> None:
    output["loss"] = output.loss + weight * output.logits.logsumexp(-1).square().mean()


def entropy_of(logits: Tensor) -> Tensor:
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()


BATCH = tiny_batch() | {"labels": torch.cat([tiny_batch()["labels"][:2], tiny_batch()["labels"][2:] * 0 - 100])}
BATCH["labels"][2, 12:] = 5  # Rows have different numbers of labels.


# Own losses that differ with labels, from the first batch on.


def label_smoothing(model: Any, output: Any, labels: Any, of_loss: Any) -> None:
    if labels is not None:
        output["loss"] = losses_of(output.logits, labels, label_smoothing=0.1)


def mean_of_the_rows_means(model: Any, output: Any, labels: Any, of_loss: Any) -> None:
    if labels is not None:
        valid = labels[:, 1:] != -100
        output["loss"] = (losses_of(output.logits, labels, reduction="none").sum(1) / valid.sum(1)).mean()


def margin(model: Any, output: Any, labels: Any, of_loss: Any) -> None:
    if labels is not None and model.training:
        output["logits"] = output.logits - 2 * F.one_hot(F.pad(labels[:, 1:], (0, 1)).clamp(min=0), 97)
        output["loss"] = losses_of(output.logits, labels)


def logits_that_are_cut(model: Any, output: Any, labels: Any, of_loss: Any) -> None:
    if labels is not None:
        add_z_loss(output, 0.1)
        output["logits"] = output.logits[:, :-1]


def logits_in_one_row(model: Any, output: Any, labels: Any, of_loss: Any) -> None:
    if labels is not None:
        add_z_loss(output, 0.1)
        output["logits"] = output.logits.flatten(0, 1)


def no_logits(model: Any, output: Any, labels: Any, of_loss: Any) -> None:
    if labels is not None:
        add_z_loss(output, 0.1)
        output["logits"] = None


# State that is made of logits or labels: in a fused pass it would be no number, or would not go on.


def counts_labelled_calls(model: Any, output: Any, labels: Any, of_loss: Any) -> None:
    if labels is not None:
        model.state += 1
        add_z_loss(output, 0.1 * float(model.state > 3))


def lists_labelled_calls(model: Any, output: Any, labels: Any, of_loss: Any) -> None:
    if labels is not None:
        model.state.append(1)
        add_z_loss(output, 0.1 * (len(model.state) > 3))


def counts_in_its_configuration(model: Any, output: Any, labels: Any, of_loss: Any) -> None:
    if labels is not None:
        model.config.calls = getattr(model.config, "calls", 0) + 1
        add_z_loss(output, 0.1 * (model.config.calls > 3))


def averages_its_predictions(model: Any, output: Any, labels: Any, of_loss: Any) -> None:
    model.state.lerp_(output.logits.argmax(-1).float().mean(), 0.1)


def keeps_its_logits(model: Any, output: Any, labels: Any, of_loss: Any) -> None:
    model.last_logits = output.logits[:, -1]


def lists_its_entropy(model: Any, output: Any, labels: Any, of_loss: Any) -> None:
    model.state["entropy"] = [entropy_of(output.logits).item()]


OWN_LOSS, LOGITS, STATE = (
    "the own loss of Changed has",
    "its logits|logits if it gets labels",
    "Changed makes .* of its",
)
KINDS: list[tuple[Change, Any, str]] = [  # the change, the state it begins with, and what the message says
    (label_smoothing, None, OWN_LOSS),
    (mean_of_the_rows_means, None, OWN_LOSS),
    (margin, None, LOGITS),
    (logits_that_are_cut, None, LOGITS),
    (logits_in_one_row, None, LOGITS),
    (no_logits, None, LOGITS),
    (counts_labelled_calls, 0, STATE),
    (counts_labelled_calls, torch.zeros(()), STATE),
    (lists_labelled_calls, [], STATE),
    (counts_in_its_configuration, None, STATE),
    (averages_its_predictions, torch.zeros(()), STATE),
    (lists_its_entropy, {}, STATE),
    (keeps_its_logits, None, STATE),
]


def prepared(backbone: nn.Module) -> LanguageModel:
    model = LanguageModel(backbone, LinearCrossEntropyLoss())
    model.prepare(torch.device("cpu"))
    return model


@pytest.mark.parametrize(("change", "state", "message"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_a_model_makes_of_labels_or_logits_is_refused_in_the_first_batch(change, state, message):
    state = {} if state is None else {"state": state}
    with pytest.raises(UserError, match=message):
        prepared(model_that(change, **state)).spot_check(BATCH)
    with pytest.raises(UserError, match=message):
        fuse(model_that(change, **state))(**BATCH)


class Doubles(LlamaForCausalLM):
    """Names none of its arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, **kwargs)
        output["loss"] = None if output.loss is None else 2 * output.loss
        return output


def test_a_forward_that_names_no_arguments_is_asked_for_its_own_loss_as_well():
    with pytest.raises(UserError, match="own loss of Doubles"):
        prepared(tiny_llama(Doubles)).spot_check(tiny_batch())


# Changes that begin later.


def grows(model: Any, output: Any, labels: Any, of_loss: Any) -> None:
    """A z-loss that warms up; weights of tokens, and a term with a count of items, as arguments."""
    if labels is None:
        return
    if of_loss.get("loss_weights") is not None:
        losses = losses_of(output.logits, labels, reduction="none")
        output["loss"] = (losses * of_loss["loss_weights"][:, 1:]).sum() / (labels[:, 1:] != -100).sum()
    add_z_loss(output, model.z + 0.1 * (of_loss.get("num_items_in_batch") is not None))


def clamped(model: Any, output: Any, labels: Any, of_loss: Any) -> None:
    output["logits"] = output.logits.clamp(-model.z, model.z) if model.z else output.logits


WEIGHTS = {"loss_weights": torch.linspace(0, 2, 20).expand(3, 20)}


@pytest.mark.parametrize("more", [WEIGHTS, {"num_items_in_batch": 51}], ids=["weights", "items"])
def test_an_argument_of_the_own_loss_is_found_in_the_first_batch_that_has_it(more, tmp_path):
    fused = fuse(model_that(grows, z=0.0))
    fused(**BATCH)
    with pytest.raises(UserError, match="own loss of"):
        fused(**BATCH, **more)
    trainer = quiet_trainer(tmp_path, max_steps=9)
    batches: Any = DataLoader([BATCH, BATCH, BATCH | more, BATCH], batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="own loss of"):
        trainer.fit(FusedCausalLMModule(model_that(grows, z=0.0)), batches)
    assert trainer.global_step == 2


def test_a_fused_model_divides_by_the_count_that_its_own_loss_divides_by():
    def only_evaluated(model: Any, output: Any, labels: Any, of_loss: Any) -> None:
        if labels is not None and model.training:
            output["loss"] = losses_of(output.logits, labels)

    with pytest.raises(UserError, match="own loss of"):
        fuse(model_that(only_evaluated))(**BATCH, num_items_in_batch=100)


# Own losses that are meant to differ.


@pytest.mark.parametrize("change", [label_smoothing, margin, logits_in_one_row, no_logits])
def test_an_own_loss_that_is_to_be_replaced_is_told_apart_by_an_option(change, tmp_path):
    def nothing(*_: Any) -> None: ...

    plain = model_that(nothing)
    expected = plain(**BATCH).loss
    replaced = fuse(model_that(change), own_loss_differs=True)(**BATCH).loss
    torch.testing.assert_close(replaced, expected)
    module = FusedCausalLMModule(model_that(change), own_loss_differs=True)
    quiet_trainer(tmp_path, max_steps=1).fit(module, DataLoader([BATCH], batch_size=None))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="its logits"):  # The formula is compared all the same.
        fuse(model_that(clamped, z=1.0).train(), own_loss_differs=True)(**BATCH)


class DoesNotShift(LlamaForCausalLM):
    """Leaves shifting to its data, as a class that transformers does not know."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        output: Any = super().forward(input_ids=input_ids, **kwargs)
        if labels is not None:
            output["loss"] = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
        return output


def test_a_model_whose_own_loss_does_not_shift_labels_is_refused_unless_causal_models_do_so():
    model = prepared(tiny_llama(DoesNotShift))
    with pytest.warns(UserWarning, match="does not shift the labels"):
        model.spot_check(tiny_batch())  # It is a Llama, which transformers lists as causal.
    masked = MaskedLanguageModel(tiny_llama(), LinearCrossEntropyLoss())
    with pytest.raises(UserError, match="shifts the labels by a position"):
        masked.spot_check(tiny_batch() | {"labels": tiny_batch()["labels"].roll(3, 1)})


def test_an_own_loss_that_takes_whole_batches_alone_is_named_in_a_warning():
    def whole(model: Any, output: Any, labels: Any, of_loss: Any) -> None:
        if labels is not None:
            assert_whole(labels)

    def assert_whole(labels: Tensor) -> None:
        if len(labels) < 40:
            raise ValueError("40 rows are needed")

    with pytest.warns(UserWarning, match="own loss of Changed is not compared, .*40 rows are needed"):
        prepared(model_that(whole)).spot_check(BATCH)


@pytest.mark.filterwarnings("error:the own loss")
def test_the_own_loss_of_a_masked_model_is_compared_on_a_slice_of_a_long_batch():
    """Such a loss views its labels flat, which a slice of columns does not permit as it is."""

    class Halved(EuroBertForMaskedLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output: Any = super().forward(*args, **kwargs)
            if output.loss is not None:
                output.loss = output.loss / 2
            return output

    ids = torch.randint(4, 97, (2, 4096), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids.where(ids % 5 != 0, 3), "labels": ids.where(ids % 5 == 0, -100)}
    right: Any = tiny_model("masked_eurobert", max_position_embeddings=4096)
    model = MaskedLanguageModel(right, LinearCrossEntropyLoss())
    model.prepare(torch.device("cpu"))
    model.spot_check(batch)
    model = MaskedLanguageModel(Halved(right.config), LinearCrossEntropyLoss())
    model.prepare(torch.device("cpu"))
    with pytest.raises(UserError, match="own loss"):
        model.spot_check(batch)


# Entries of an output.


def adds_entries(model: Any, output: Any, labels: Any, of_loss: Any) -> None:
    output["entropy"] = entropy_of(output.logits)
    output["predictions"] = output.logits.argmax(-1)
    output["length"] = torch.tensor(output.logits.shape[1])
    output["pooled"] = output.hidden_states[-1].mean(1)
    if labels is not None:
        output["accuracy"] = (output.logits[:, :-1].argmax(-1) == labels[:, 1:]).float().mean()


@pytest.mark.parametrize("mode", [True, False])
def test_entries_that_are_made_of_logits_say_so_when_they_are_used_and_others_are_the_models_own(mode):
    batch = tiny_batch() | {"output_hidden_states": True}
    own, found = model_that(adds_entries).train(mode)(**batch), fuse(model_that(adds_entries).train(mode))(**batch)
    torch.testing.assert_close(found.pooled, own.pooled)
    for name in ("logits", "entropy", "predictions", "accuracy"):
        for use in (lambda x: x.mean(), lambda x: x[..., 0], lambda x: 2 * x, float, torch.exp, lambda x: x.detach()):
            with pytest.raises(UserError, match=f"its output has no {name}; call the model without labels"):
                use(found[name])


# State that a check leaves as it was.


class Stateful(LlamaForCausalLM):
    """Has numbers that each pass moves."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm = nn.BatchNorm1d(config.hidden_size)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(config.hidden_size, config.hidden_size))
        self.older = nn.utils.spectral_norm(nn.Linear(config.hidden_size, config.hidden_size))
        self.calls, self.lengths, self.seen = 0, [], set()
        self.by_length: dict[Any, Any] = {"all": [0]}
        self.average, self.generator = torch.zeros(()), torch.Generator().manual_seed(0)
        self.lm_head.register_forward_pre_hook(self.change)

    def change(self, _: Any, args: Any) -> Any:
        [hidden] = args
        self.calls += 1
        self.config.calls = self.calls
        self.lengths.append(hidden.shape[1])
        self.by_length["all"][0] += 1
        self.by_length[hidden.shape[1]] = self.calls
        self.seen.add(self.calls)
        self.average.add_(1)
        self.latest = torch.rand(1, generator=self.generator)
        self.time = time.perf_counter()
        noise = random.random() + np.random.rand() + torch.rand(1).item()  # noqa: NPY002
        changed = self.norm((self.older(self.spectral(hidden)) + noise * self.latest).mT).mT
        return (hidden + changed,)

    def state(self) -> list[Any]:
        of_generators = [self.generator.get_state(), torch.get_rng_state(), random.getstate()]
        of_numpy: Any = np.random.get_state()  # noqa: NPY002
        plain = [self.calls, [*self.lengths], {**self.by_length, "all": [*self.by_length["all"]]}, [*self.seen]]
        tensors = [self.average.clone(), *(value.clone() for value in self.state_dict().values())]
        tensors += [self.older.weight.clone(), getattr(self, "latest", torch.zeros(1)).clone()]
        return [of_generators, of_numpy[1].tolist(), of_numpy[2], plain, vars(self.config).get("calls"), tensors]


@pytest.mark.parametrize("mode", [True, False])
def test_a_check_moves_no_state_of_a_model(mode):
    torch.manual_seed(0)
    backbone: Any = tiny_llama(Stateful).train(mode)
    model = prepared(backbone)
    for _ in range(2):
        before = backbone.state()
        model.spot_check(tiny_batch())
        torch.testing.assert_close(backbone.state(), before, rtol=0, atol=0)
        model(tiny_batch())
    assert backbone.calls == 2
    assert math.isfinite(model(tiny_batch()).loss.item())


def test_a_model_with_state_of_its_own_trains_to_the_same_bits_with_checks_and_without(tmp_path):
    weights = []
    for every in (1, 0):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        module = FusedCausalLMModule(tiny_llama(Stateful), check_every_n_steps=every)
        batches: Any = DataLoader([tiny_batch()] * 3, batch_size=None)  # type: ignore[arg-type]
        quiet_trainer(tmp_path, max_steps=3).fit(module, batches)
        weights.append(torch.cat([value.flatten() for value in module.state_dict().values()]))
    assert torch.equal(*weights)
