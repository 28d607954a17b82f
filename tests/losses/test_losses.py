"""The loss strategies: the standalone protocol, agreement with each other, statistics and refusals."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors_of import assert_close_gradients, gradients_after
from head_cases import grad_of
from tiny_models import VOCABULARY, WIDTH, sharpen, tiny_backbone, tiny_batch, tiny_model
from torch import Tensor, nn

from lit_fused import LanguageModel
from lit_fused.errors import UserError
from lit_fused.filtered import Filtered
from lit_fused.heads import OutputHead, identify_head
from lit_fused.losses import CrossEntropyLoss, LinearCrossEntropyLoss, ModelInternalLoss, shift_labels
from lit_fused.ops import linear_cross_entropy_reference

CPU = torch.device("cpu")


def shifted_cross_entropy(logits: Tensor, labels: Tensor, **options) -> Tensor:
    """The definition, written with slices: position t predicts label t + 1."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options)


def hidden_and_layer(dtype: torch.dtype = torch.float32, *, bias: bool = False) -> tuple[Tensor, nn.Linear]:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return torch.randn(3, 20, WIDTH, generator=generator).to(dtype).requires_grad_(), layer


# On its own: hidden states and labels in, a mean out


@pytest.mark.parametrize("backend", ["chunked", "torch_native"])
def test_on_its_own_the_loss_is_the_mean_cross_entropy_of_labels_shifted_by_one(backend):
    hidden, layer = hidden_and_layer(bias=True)
    labels = tiny_batch()["labels"]
    loss = LinearCrossEntropyLoss(backend, layer)
    expected = shifted_cross_entropy(layer(hidden), labels)
    torch.testing.assert_close(loss(hidden, labels), expected)
    torch.testing.assert_close(loss.forward_logits(hidden), layer(hidden))


def test_an_output_head_and_a_tied_embedding_are_accepted_as_output_embeddings():
    hidden, _ = hidden_and_layer()
    labels = tiny_batch()["labels"]
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    logits = hidden @ embedding.weight.T
    torch.testing.assert_close(
        LinearCrossEntropyLoss(output_embeddings=embedding)(hidden, labels), shifted_cross_entropy(logits, labels)
    )
    head = OutputHead(embedding, scale=0.5, softcap=3.0)
    capped = 3 * torch.tanh(0.5 * logits / 3)
    loss = LinearCrossEntropyLoss(output_embeddings=head)
    torch.testing.assert_close(loss(hidden, labels), shifted_cross_entropy(capped, labels))
    torch.testing.assert_close(loss.forward_logits(hidden), capped)


def test_the_identified_head_of_a_model_gives_its_own_loss_and_its_own_logits():
    model: Any = sharpen(tiny_model("gemma2")).eval()
    batch = tiny_batch()
    loss = LinearCrossEntropyLoss(output_embeddings=model)
    assert loss.head == identify_head(model)
    hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state
    own = model(**batch)
    torch.testing.assert_close(loss(hidden, batch["labels"]), own.loss)
    torch.testing.assert_close(loss.forward_logits(hidden), own.logits)


HIDDEN, LAYER = hidden_and_layer()
LABELS = tiny_batch()["labels"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_labels_that_are_no_integers_are_refused_also_on_their_own(dtype):
    with pytest.raises(UserError, match=rf"labels must be integer class indices.*got {dtype}.*labels.long\(\)"):
        LinearCrossEntropyLoss(output_embeddings=LAYER)(HIDDEN, LABELS.to(dtype))


# Agreement with each other


@pytest.mark.parametrize("name", ["llama_tied", "gemma2", "granite", "phi", "mixtral"])
@pytest.mark.parametrize("loss", [CrossEntropyLoss(), ModelInternalLoss(), LinearCrossEntropyLoss("torch_native")])
def test_every_loss_gives_the_sums_and_gradients_of_chunked(name, loss):
    if isinstance(loss, LinearCrossEntropyLoss) and name == "gemma2":
        loss = LinearCrossEntropyLoss("chunked", recompute=True)  # torch's own has no softcap
    backbone = sharpen(tiny_model(name)).double()
    batch = tiny_batch()
    chunked = LanguageModel(backbone, LinearCrossEntropyLoss())
    other = LanguageModel(backbone, loss)
    expected, found = chunked(batch), other(batch)
    assert found.num_tokens == expected.num_tokens == (batch["labels"][:, 1:] != -100).sum()
    assert found.num_tokens.dtype == torch.int64
    assert (found.aux_loss is None) == (expected.aux_loss is None)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0.0, check_dtype=False)
    torch.testing.assert_close(found.loss_sum, expected.loss_sum, rtol=1e-6, atol=0.0, check_dtype=False)
    epsilon = torch.finfo(torch.float32).eps  # sums and norms of these models are float32 whatever their weights are
    assert_close_gradients(gradients_after(found.loss, other), gradients_after(expected.loss, chunked), 4 * epsilon)


@pytest.mark.parametrize("loss", [CrossEntropyLoss(), LinearCrossEntropyLoss(), ModelInternalLoss()])
def test_the_loss_per_token_adds_up_to_the_loss_and_is_zero_where_ignored(loss):
    model = LanguageModel(sharpen(tiny_model("gemma2")).eval(), loss)
    batch = tiny_batch()
    with torch.no_grad():
        losses, output = model.token_losses(batch), model(batch)
        logits = model.backbone(input_ids=batch["input_ids"]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), shift_labels(batch["labels"]).flatten(), reduction="none")
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected.view(3, 20), rtol=1e-4, atol=1e-5)
    assert torch.equal(losses == 0, shift_labels(batch["labels"]) == -100)
    torch.testing.assert_close(losses.sum(), output.loss_sum)


def only_a_sum(hidden, weight, targets, *, bias, label_smoothing=0.0, z_loss=0.0):
    options = {"bias": bias, "label_smoothing": label_smoothing, "z_loss": z_loss, "reduction": "sum"}
    return linear_cross_entropy_reference(hidden, weight, targets, **options)[0]


SMOOTHED_LOSSES = {
    "chunked": LinearCrossEntropyLoss,
    "recomputed": functools.partial(LinearCrossEntropyLoss, recompute=True),
    "function": functools.partial(LinearCrossEntropyLoss, only_a_sum),
    "standard": CrossEntropyLoss,
}


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.2}, {"z_loss": 1e-2}, {"label_smoothing": 0.1, "z_loss": 1e-3}], ids=str
)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", SMOOTHED_LOSSES)
def test_evaluation_measures_the_cross_entropy_beside_what_training_adds_to_it(name, options, weighted):
    if name == "function" and weighted:
        return  # It takes no weights.
    backbone: Any = tiny_backbone(dtype=torch.float64)
    batch = tiny_batch()
    targets = shift_labels(batch["labels"])
    weights = torch.rand(targets.shape, generator=torch.Generator().manual_seed(5)) if weighted else None
    of_targets = {} if weights is None else {"token_weights": F.pad(weights[:, 1:], (0, 1)).double()}

    def truth(**added: float) -> Tensor:
        of_loss: Any = {"bias": backbone.head.bias, "reduction": "sum"} | of_targets | added
        return linear_cross_entropy_reference(backbone(batch["input_ids"]), backbone.head.weight, targets, **of_loss)[0]

    model = LanguageModel(backbone, SMOOTHED_LOSSES[name](**options)).eval()
    batch |= {} if weights is None else {"token_weights": weights}
    torch.testing.assert_close(model(batch).loss_sum.double(), truth(**options))  # it can be trained in this mode
    with torch.no_grad():
        found = model(batch)
        torch.testing.assert_close(found.loss_sum.double(), truth())
        added = {"smoothed_loss": truth(label_smoothing=options.get("label_smoothing", 0.0))}
        added["z_loss"] = truth(z_loss=options.get("z_loss", 0.0)) - truth()
    one_sum = name == "function" or (weighted and name != "standard")
    names = {"label_smoothing": "smoothed_loss", "z_loss": "z_loss"}
    asked = set() if one_sum else {names[option] for option in options}
    assert found.stats.keys() & added.keys() == asked
    for statistic in asked:
        torch.testing.assert_close(found.stats[statistic].double(), added[statistic])
    if not weighted:
        torch.testing.assert_close(found.stats["nll"].double(), truth())


# Statistics


def statistics_of(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The definitions, from the logits of the valid targets."""
    targets = labels[:, 1:]
    valid = targets != -100
    logits, targets = logits[:, :-1][valid].double(), targets[valid]
    probabilities = logits.softmax(-1)
    return {
        "nll": -probabilities.gather(-1, targets[:, None]).log().sum(),
        "correct": (logits.argmax(-1) == targets).sum(),
        "entropy": -(probabilities * probabilities.log()).sum(),
        "lse_squared": (logits.exp().sum(-1).log() ** 2).sum(),
    }


@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (CrossEntropyLoss(), {"nll", "correct"}),
        (CrossEntropyLoss(z_loss=1e-4), {"correct", "lse_squared"}),
        (CrossEntropyLoss(label_smoothing=0.1), {"correct"}),
        (ModelInternalLoss(), {"nll"}),
        (LinearCrossEntropyLoss(), {"nll", "correct", "entropy", "lse_squared"}),
        (LinearCrossEntropyLoss(z_loss=1e-4, label_smoothing=0.1), {"nll", "correct", "entropy", "lse_squared"}),
        (LinearCrossEntropyLoss("torch_native"), {"nll"}),
        (lambda hidden, labels: hidden.mean(), set()),
    ],
)
def test_a_statistic_is_given_exactly_or_not_at_all(loss, given):
    backbone = tiny_model("llama")
    batch = tiny_batch()
    expected = statistics_of(backbone(input_ids=batch["input_ids"]).logits.detach(), batch["labels"])
    stats = LanguageModel(backbone, loss)(batch).stats
    assert stats.keys() == given
    for key in given:
        torch.testing.assert_close(stats[key].double(), expected[key].double(), rtol=1e-5, atol=0.0)


# Batches without a target, with a wrong one, or without labels

LOSSES = {
    "chunked": LinearCrossEntropyLoss(),
    "filtered": LinearCrossEntropyLoss(Filtered()),
    "torch_native": LinearCrossEntropyLoss("torch_native"),
    "standard": CrossEntropyLoss(label_smoothing=0.1, z_loss=1e-4),
}


@pytest.mark.parametrize("name", ["llama", "phi"])
@pytest.mark.parametrize("loss", [*LOSSES.values(), ModelInternalLoss()], ids=[*LOSSES, "model"])
def test_a_batch_without_a_valid_label_costs_zero_and_moves_nothing(loss, name):
    model = LanguageModel(tiny_model(name), loss)
    batch = tiny_batch()
    batch["labels"][:, 1:] = -100
    output = model(batch)
    assert output.num_tokens == 0
    assert output.loss_sum == 0
    assert output.loss.item() == 0
    assert all(value == 0 for value in output.stats.values())
    output.loss.backward()
    assert all(torch.equal(grad_of(p), torch.zeros_like(p)) for p in model.parameters())


@pytest.mark.parametrize("method", ["forward", "token_losses"])
@pytest.mark.parametrize("label", [VOCABULARY, -1])
@pytest.mark.parametrize("loss", [*LOSSES.values(), ModelInternalLoss()], ids=[*LOSSES, "model"])
def test_a_label_outside_the_vocabulary_is_named_with_the_vocabularys_size(loss, label, method):
    model = LanguageModel(tiny_model("llama"), loss)
    batch = tiny_batch()
    batch["labels"][1, 5] = label
    with pytest.raises(UserError, match=rf"labels must lie in \[0, 97\) or be -100 .*{label}"):
        getattr(model, method)(batch)


# The model's own loss


def test_the_models_own_loss_is_refused_where_it_does_not_shift_the_labels():
    model = LanguageModel(tiny_model("bart"), ModelInternalLoss())
    with pytest.raises(
        UserError, match="BartForCausalLM does not shift the labels.*choose loss=standard or loss=chunked"
    ):
        model.prepare(CPU)
    LanguageModel(model.backbone, CrossEntropyLoss()).prepare(CPU)
    LanguageModel(model.backbone, LinearCrossEntropyLoss()).prepare(CPU)


# A function of one's own


def test_a_users_function_of_hidden_states_and_labels_trains_the_same_model():
    backbone: Any = sharpen(tiny_model("llama"))
    batch = tiny_batch()

    def own(hidden_states: Tensor, labels: Tensor) -> Tensor:
        return shifted_cross_entropy(F.linear(hidden_states, backbone.lm_head.weight), labels)

    model, chunked = LanguageModel(backbone, own), LanguageModel(backbone, LinearCrossEntropyLoss())
    model.prepare(CPU)
    output, expected = model(batch), chunked(batch)
    torch.testing.assert_close(output.loss_sum, expected.loss_sum)
    assert output.num_tokens == expected.num_tokens
    assert model.loss.builds_logits is None
    assert_close_gradients(gradients_after(output.loss, model), gradients_after(expected.loss, chunked), 1e-5)
    torch.testing.assert_close(model.token_losses(batch), chunked.token_losses(batch))


# Checks
