"""Cases of tools/audit.py: models that do something else than the formula, in loss, weights, forward or state."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from audit import Case, same, worst
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import lit_fused

V, D = 97, 32
SIZES: dict[str, Any] = {"vocab_size": V, "hidden_size": D, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": None}
IDS = torch.randint(3, V, (3, 18), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS}
Change = Callable[[Any, int], Any]
LONG = 101  # steps, by which what begins later has to be found


def nothing(model: Any, step: int) -> None: ...


def llama(kind: Any = LlamaForCausalLM, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(LlamaConfig(**SIZES | options)).train()


def gradients(model: nn.Module) -> Tensor:
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return torch.cat([g.flatten() for g in grads])


def trained(
    build: Callable[[], Any],
    change: Change = nothing,
    steps: int = 1,
    batch: Callable[[int], dict[str, Any]] = lambda _: BATCH,
    read: Callable[[Any, Any], Any] | None = None,
    rounding: float = 1e-4,
) -> str:
    """Train a model and its fused twin on the same batches, side by side. ``change`` acts on both before each step,
    ``read`` takes a number to compare from model and output. The last step decides; ``rounding`` is relative."""
    plain, fused = build(), lit_fused.fuse(build())
    outcome = "exact"
    for step in range(steps):
        results = []
        for model in (plain, fused):
            model.zero_grad()
            change(model, step)
            torch.manual_seed(step)
            output = model(**copy.copy(batch(step)))
            output.loss.backward()
            further = [] if read is None else [torch.as_tensor(read(model, output)).detach().double().flatten()]
            results.append((output.loss, gradients(model), *further))
        outcome = worst(same(ours, theirs, rounding) for theirs, ours in zip(*results, strict=True))
    return outcome


def with_loss(loss: Callable[..., Tensor]) -> Callable[[], Any]:
    """Return what builds a Llama whose own loss is ``loss(model, logits (N, V), targets (N,), arguments)``."""

    class Own(LlamaForCausalLM):
        def forward(  # type: ignore[override]
            self, input_ids: Any = None, labels: Any = None, loss_weights: Any = None, **kwargs: Any
        ) -> Any:
            given = {"loss_weights": loss_weights, "num_items_in_batch": kwargs.pop("num_items_in_batch", None)}
            output: Any = super().forward(input_ids=input_ids, **kwargs)
            if labels is not None:
                output["loss"] = loss(self, output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), given)
            return output

    return lambda: llama(Own)


def nll(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x, y, reduction="none")


def z(x: Tensor) -> Tensor:
    return x.logsumexp(-1).square()


def focal(x: Tensor, y: Tensor, gamma: float) -> Tensor:
    return ((1 - (-nll(x, y)).exp()) ** gamma * nll(x, y)).mean()


def margin(x: Tensor, y: Tensor, by: float) -> Tensor:
    return F.cross_entropy(x - by * F.one_hot(y, V), y)


def sampled(x: Tensor, y: Tensor) -> Tensor:
    drawn = torch.arange(0, V, 3)
    chosen = torch.cat([x.gather(1, y[:, None]), x[:, drawn].masked_fill(drawn == y[:, None], -1e9)], 1)
    return F.cross_entropy(chosen, torch.zeros_like(y))


def weighted(m: Any, x: Tensor, y: Tensor, given: dict[str, Any]) -> Tensor:
    weights = given["loss_weights"]
    return (nll(x, y) * (1 if weights is None else weights[:, 1:].flatten())).mean()


def counted(m: Any, x: Tensor, y: Tensor, given: dict[str, Any]) -> Tensor:
    return (nll(x, y) + (0 if given["num_items_in_batch"] is None else 0.1 * z(x))).mean()


LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross entropy, written by hand": lambda m, x, y, _: nll(x, y).mean(),
    "cross entropy in float64": lambda m, x, y, _: nll(x.double(), y).mean().float(),
    "a z-loss": lambda m, x, y, _: (nll(x, y) + 0.1 * z(x)).mean(),
    "label smoothing": lambda m, x, y, _: F.cross_entropy(x, y, label_smoothing=0.1),
    "a focal loss": lambda m, x, y, _: focal(x, y, 2.0),
    "a large margin": lambda m, x, y, _: margin(x, y, 2.0),
    "a large margin in training": lambda m, x, y, _: margin(x, y, 2.0 * m.training),
    "a sampled softmax": lambda m, x, y, _: sampled(x, y),
    "a bonus for entropy": lambda m, x, y, _: nll(x, y).mean() - 0.1 * _entropy(x),
    "weights of classes": lambda m, x, y, _: F.cross_entropy(x, y, weight=torch.linspace(0.5, 1.5, V)),
    "weights by position": lambda m, x, y, _: (nll(x, y) * torch.linspace(0.1, 1.9, len(y))).mean(),
    "a sum in place of a mean": lambda m, x, y, _: nll(x, y).sum(),
    "half of the mean": lambda m, x, y, _: 0.5 * nll(x, y).mean(),
    "a mean of the ten hardest tokens": lambda m, x, y, _: nll(x, y).topk(10).values.mean(),
    "the token after the next": lambda m, x, y, _: nll(x[:-1], y[1:]).mean(),
    "labels of another vocabulary": lambda m, x, y, _: nll(x, (y + 1) % V).mean(),
    "a term of the weights": lambda m, x, y, _: nll(x, y).mean() + 0.1 * m.lm_head.weight.square().mean(),
    "a term of the embeddings": lambda m, x, y, _: nll(x, y).mean() + m.model.embed_tokens.weight.square().mean(),
    "a temperature of 2 in the loss": lambda m, x, y, _: nll(x / 2, y).mean(),
    "logits capped in the loss": lambda m, x, y, _: nll(5 * torch.tanh(x / 5), y).mean(),
    "logits clamped in the loss": lambda m, x, y, _: nll(x.clamp(-2, 2), y).mean(),
    "a detached part": lambda m, x, y, _: (0.5 * nll(x, y) + 0.5 * nll(x.detach(), y)).mean(),
    "unlikelihood of the token before": lambda m, x, y, _: (
        nll(x, y).mean() - torch.log1p(-x[1:].softmax(-1).gather(1, y[:-1, None]) + 1e-6).mean()
    ),
}
# A loss that reads ``m.now``, and that number at each step
LATER: dict[str, tuple[Callable[..., Tensor], Callable[[int], float]]] = {
    "a z-loss that begins": (lambda m, x, y, _: (nll(x, y) + m.now * z(x)).mean(), lambda step: 0.1 * (step > 0)),
    "a z-loss that warms up": (lambda m, x, y, _: (nll(x, y) + m.now * z(x)).mean(), lambda step: 1e-3 * step),
    "a focal term that is annealed": (lambda m, x, y, _: focal(x, y, m.now), lambda step: 0.02 * step),
    "a margin that begins": (lambda m, x, y, _: margin(x, y, m.now), lambda step: 2.0 * (step > 5)),
    "a clamp that begins": (
        lambda m, x, y, _: nll(x.clamp(-m.now, m.now), y).mean(),
        lambda step: 1.0 if step else 1e9,
    ),
    "smoothing that begins": (
        lambda m, x, y, _: F.cross_entropy(x, y, label_smoothing=m.now),
        lambda step: 0.1 * (step > 50),
    ),
}


def later(loss: Callable[..., Tensor], number: Callable[[int], float]) -> str:
    return trained(with_loss(loss), lambda m, step: setattr(m, "now", number(step)), LONG)


def fake_quantised(weight: Tensor) -> Tensor:
    step = weight.detach().abs().max() / 7
    return weight + ((weight / step).round() * step - weight).detach()


class Quantised(nn.Module):
    """A parametrisation with 4 bits and a straight-through gradient."""

    def forward(self, weight: Tensor) -> Tensor:
        return fake_quantised(weight)


def quantised(model: Any) -> None:
    parametrize.register_parametrization(model.lm_head, "weight", Quantised())


def quantised_by_hooks(model: Any) -> None:
    layer = model.lm_head
    kept: list[Tensor] = []

    def before(*_: Any) -> None:
        kept.append(layer.weight.data)
        layer.weight.data = fake_quantised(layer.weight.data)

    def after(*_: Any) -> None:
        layer.weight.data = kept.pop()

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


def after_building(change: Callable[[Any], Any], **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        model = llama(**options)
        change(model)
        return model

    return build


def _output(model: Any, logits: Tensor, labels: Any) -> CausalLMOutputWithPast:
    loss = None if labels is None else model.loss_function(logits=logits, labels=labels, vocab_size=V)
    return CausalLMOutputWithPast(loss=loss, logits=logits)  # type: ignore[arg-type]


class Functional(LlamaForCausalLM):
    """Calls its output layer with another weight in training."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        hidden = self.model(input_ids=input_ids).last_hidden_state
        weight = {"weight": 0.5 * self.lm_head.weight if self.training else self.lm_head.weight}
        return _output(self, torch.func.functional_call(self.lm_head, weight, (hidden,)), labels)


in_bfloat16 = after_building(lambda m: m.lm_head.bfloat16().register_forward_pre_hook(lambda _, x: (x[0].bfloat16(),)))
WEIGHTS: dict[str, Callable[[], Any]] = {
    "tied to the embedding": lambda: llama(tie_word_embeddings=True),
    "frozen": after_building(lambda m: m.lm_head.weight.requires_grad_(False)),
    "spectral norm": after_building(lambda m: parametrizations.spectral_norm(m.lm_head)),
    "weight norm": after_building(lambda m: parametrizations.weight_norm(m.lm_head)),
    "orthogonal": after_building(lambda m: parametrizations.orthogonal(m.lm_head)),
    "a parametrisation with 4 bits": after_building(quantised),
    "4 bits by hooks": after_building(quantised_by_hooks),
    "half of it is pruned": after_building(lambda m: prune.random_unstructured(m.lm_head, "weight", amount=0.5)),
    "another weight for a call": lambda: llama(Functional),
}
WEIGHTS_LATER: dict[str, Change] = {
    "4 bits by hooks from the second step on": lambda m, step: quantised_by_hooks(m) if step == 1 else None,
    "a parametrisation from the second step on": lambda m, step: quantised(m) if step == 1 else None,
    "scaled in place": lambda m, step: m.lm_head.weight.data.mul_(1.01),
}


def with_forward(change: Callable[..., Any], **options: Any) -> Callable[[], Any]:
    """Return what builds a Llama whose forward is ``change(model, its own forward, arguments)``."""

    class Other(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
            forward = super().forward
            return change(self, forward, {"input_ids": input_ids, "labels": labels, **kwargs})

    return lambda: llama(Other, **options)


def masked_inputs(m: Any, forward: Any, given: dict[str, Any]) -> Any:
    if given["labels"] is not None and m.training:
        given["input_ids"] = torch.where(torch.arange(given["input_ids"].shape[1]) % 4 == 1, 1, given["input_ids"])
    return forward(**given)


def noisy_embeddings(m: Any, forward: Any, given: dict[str, Any]) -> Any:
    embedded = m.model.embed_tokens(given.pop("input_ids"))
    return forward(inputs_embeds=embedded + 0.1 * torch.rand_like(embedded) * m.training, **given)


def dropped_states(p: float) -> Callable[[Any], Any]:
    return lambda m: m.lm_head.register_forward_pre_hook(lambda layer, x: (F.dropout(x[0], p, layer.training),))


def mixtral() -> Any:
    torch.manual_seed(0)
    experts: dict[str, Any] = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}
    options: dict[str, Any] = SIZES | experts | {"experts_implementation": "eager"}
    return MixtralForCausalLM(MixtralConfig(**options)).train()


def added_key(m: Any, forward: Any, given: dict[str, Any]) -> Any:
    output = forward(**given)
    output["pooled"] = output.logits.new_ones(3)
    return output


FORWARDS: dict[str, Callable[[], Any]] = {
    "inputs masked in training": with_forward(masked_inputs),
    "noise on the embeddings": with_forward(noisy_embeddings),
    "dropout before the output layer": after_building(dropped_states(0.3)),
    "dropout in attention": lambda: llama(attention_dropout=0.3),
    "gradient checkpointing": after_building(lambda m: m.gradient_checkpointing_enable()),
    "a mixture of experts with its router's loss": mixtral,
    "an output with a key of its own": with_forward(added_key),
    "frozen layers": after_building(lambda m: m.model.requires_grad_(False)),
}


def _entropy(x: Tensor) -> Tensor:
    return -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean()


def made(of: Callable[[Any, Any, Tensor], Any]) -> Callable[[], Any]:
    """Return what builds a Llama that makes something of its logits on the way."""

    def change(m: Any, forward: Any, given: dict[str, Any]) -> Any:
        output = forward(**given)
        of(m, output, output.logits)
        return output

    def build() -> Any:
        model = with_forward(change)()
        model.register_buffer("seen", torch.zeros(()))
        return model

    return build


def added_aux(m: Any, output: Any, x: Tensor) -> None:
    output["aux_loss"] = z(x).mean()
    output["loss"] = None if output.loss is None else output.loss + 0.05 * output["aux_loss"]


MADE: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any]]] = {
    "an entropy beside the loss": (
        made(lambda m, o, x: o.__setitem__("entropy", _entropy(x))),
        lambda m, o: o["entropy"],
    ),
    "a mean of their largest beside the loss": (
        made(lambda m, o, x: o.__setitem__("top", x.amax(-1).mean())),
        lambda m, o: o["top"],
    ),
    "the likeliest tokens beside the loss": (
        made(lambda m, o, x: o.__setitem__("tokens", x.argmax(-1))),
        lambda m, o: o["tokens"],
    ),
    "an auxiliary loss, added": (made(added_aux), lambda m, o: o["aux_loss"]),
    "an attribute of the model": (
        made(lambda m, o, x: vars(m).update(last=x.detach().mean())),
        lambda m, o: m.last,
    ),
    "a buffer that follows their mean": (
        made(lambda m, o, x: m.seen.copy_(x.detach().mean())),
        lambda m, o: m.seen,
    ),
}


class Normed(LlamaForCausalLM):
    """Has batch norm before its output layer, and counts its calls."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm = nn.BatchNorm1d(D)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        self.calls += 1
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = self.lm_head(self.norm(hidden.flatten(0, 1)).view_as(hidden))
        return _output(self, logits, labels)


def normed() -> Any:
    return llama(Normed)


STATE: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any]]] = {
    "batch norm's mean": (normed, lambda m, o: m.norm.running_mean),
    "batch norm's count": (normed, lambda m, o: m.norm.num_batches_tracked),
    "a counter of calls": (normed, lambda m, o: m.calls),
    "spectral norm's vector": (
        after_building(lambda m: parametrizations.spectral_norm(m.model.layers[0].mlp.up_proj)),
        lambda m, o: next(value for name, value in m.named_buffers() if name.endswith("_u")),
    ),
    "the random numbers that follow": (lambda: llama(attention_dropout=0.3), lambda m, o: torch.rand(4)),
}


def _with_count(step: int) -> dict[str, Any]:
    return BATCH | {"num_items_in_batch": torch.tensor(IDS[:, 1:].numel())}


def _weights_later(step: int) -> dict[str, Any]:
    return BATCH | ({"loss_weights": torch.linspace(0, 2, 18).expand(3, 18)} if step else {})


CASES = [
    *(Case("another loss", name, lambda f=f: trained(with_loss(f))) for name, f in LOSSES.items()),
    Case(
        "another loss", "a z-loss with num_items_in_batch alone", lambda: trained(with_loss(counted), batch=_with_count)
    ),
    *(Case("another loss later", name, lambda f=f, n=n: later(f, n)) for name, (f, n) in LATER.items()),
    Case(
        "another loss later", "weights of tokens", lambda: trained(with_loss(weighted), nothing, LONG, _weights_later)
    ),
    *(Case("another weight", name, lambda b=build: trained(b, steps=3)) for name, build in WEIGHTS.items()),
    Case("another weight", "a layer in bfloat16", lambda: trained(in_bfloat16, steps=3, rounding=2e-2)),
    *(Case("another weight", name, lambda c=change: trained(llama, c, LONG)) for name, change in WEIGHTS_LATER.items()),
    *(Case("another forward", name, lambda b=build: trained(b, steps=3)) for name, build in FORWARDS.items()),
    *(Case("made of logits", name, lambda b=b, r=r: trained(b, steps=2, read=r)) for name, (b, r) in MADE.items()),
    *(Case("state", name, lambda b=b, r=r: trained(b, steps=3, read=r)) for name, (b, r) in STATE.items()),
]
