"""Models that do something to their logits, at once or after some steps, and what becomes of each.

Each case trains a few steps with the fused loss, checked in each, and with the standard one. It is *exact* if the
weights are the same, *refused* if there was a UserError, and *silent*, which no case may be, if the weights
differ without one.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tiny_models import VOCABULARY, sharpen, tiny_batch, tiny_llama, tiny_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from lit_fused import CrossEntropyLoss, LanguageModel, LinearCrossEntropyLoss, UserError

Change = Callable[[Any], Any]


def changed(f: Callable[..., Tensor], **state: Any) -> Any:
    """A small Llama that returns ``f(model, logits, its arguments)``. ``state``: attributes, buffers, parameters."""

    class Changed(LlamaForCausalLM):
        def forward(self, *args: Any, temperature: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            output: Any = super().forward(*args, **kwargs)
            output.logits = f(self, output.logits, kwargs | {"temperature": temperature})
            if labels is not None:
                output.loss = self.loss_function(output.logits, labels, output.logits.shape[-1])
            return output

    model: Any = tiny_llama(Changed)
    for name, value in state.items():
        if isinstance(value, nn.Parameter) or not isinstance(value, Tensor):
            setattr(model, name, copy.deepcopy(value))
        else:
            model.register_buffer(name, value.clone())
    return sharpen(model, 5.0)


def head_called(f: Callable[..., Tensor]) -> Any:
    """A small Llama whose own forward makes logits by ``f(lm_head, hidden_states, input_ids)``, and takes no cache."""

    class Called(LlamaForCausalLM):
        def forward(self, input_ids: Tensor) -> Any:  # type: ignore[override]
            output: Any = self.model(input_ids=input_ids, use_cache=False)
            output.logits = f(self.lm_head, output.last_hidden_state, input_ids)
            return output

    return sharpen(tiny_llama(Called), 5.0)


def set_to(**values: Any) -> Change:
    """Set attributes; fill buffers and parameters in place."""

    def change(model: Any) -> None:
        for name, value in values.items():
            own = getattr(model, name, None)
            if isinstance(own, Tensor):
                own.data.copy_(torch.as_tensor(value))
            else:
                setattr(model, name, value)

    return torch.no_grad()(change)


def hook(f: Callable[[Tensor], Any]) -> Change:
    """Put a forward hook on the head that returns ``f(logits)``."""
    return lambda model: model.lm_head.register_forward_hook(lambda _, __, x: f(x))


def hooked(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    if logits.requires_grad:
        logits.register_hook(f)
    return logits


def cap(c: float, logits: Tensor) -> Tensor:
    return c * torch.tanh(logits / c)


def some_entries(x: Tensor, f: Callable[[Tensor], Any], copy: bool = True) -> Tensor:
    """Return logits of which ``f`` has changed the entries 40 to 60 in place."""
    x = x.clone() if copy else x
    f(x[..., 40:60])
    return x


def sorted_by_first_token(head: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
    order = ids[:, 0].argsort(descending=True)
    return head(hidden[order])[order.argsort()]


def without_gradient(head: nn.Module, hidden: Tensor, _: Tensor) -> Tensor:
    with torch.no_grad():
        return head(hidden)


def nothing(model: Any) -> None: ...


def _row(length: int, factor: float) -> Tensor:
    return torch.cat([torch.ones(length), torch.full((20 - length,), factor)])[:, None]


def _seen(x: Tensor) -> None:
    """Look at logits, as a log does, and change nothing."""
    assert x.shape[-1] == VOCABULARY
    _ = x.argmax(-1), x.mean().item(), x[..., 40:60].amax(), x.detach().softmax(-1), f"{x.std():.3g}", repr(x)
    _ = x.detach()[..., 3].cpu().numpy(), x.detach().float().topk(5).values.tolist(), torch.cat([x, x], -1)


@dataclass(frozen=True)
class Case:
    what: str
    outcome: str
    build: Callable[[], Any]
    change: Change = nothing  # after the first step
    batch: dict[str, Any] | None = None  # added to the batches after the first step


def llama(f: Callable[..., Tensor], **state: Any) -> Callable[[], Any]:
    return lambda: changed(f, **state)


def switched(f: Callable[..., Tensor]) -> tuple[Callable[[], Any], Change]:
    """A model that begins to return ``f(logits)`` after the first step."""
    return llama(lambda m, x, _: f(x) if m.on else x, on=False), set_to(on=True)


def calls(f: Callable[..., Tensor]) -> Callable[[], Any]:
    return lambda: head_called(f)


def plain() -> Any:
    return sharpen(tiny_llama())


def tempered(_: Any, x: Tensor, arguments: dict[str, Any]) -> Tensor:
    return x if arguments["temperature"] is None else x / arguments["temperature"]


def frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.clone(), False)


_ONE, _ZEROS = torch.tensor(1.0), torch.zeros(VOCABULARY)
_NOISE = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0))


def cooled(model: Any, logits: Tensor, _: Any) -> Tensor:
    return logits / model.tau


def biased(model: Any, logits: Tensor, _: Any) -> Tensor:
    return logits if model.b is None else logits + model.b


def upper_entries(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[-1]) >= 50


CASES = [
    # State that changes after the first step
    Case("a temperature, an attribute, annealed", "refused", llama(cooled, tau=1.0), set_to(tau=2.0)),
    Case("a temperature, a scalar buffer, filled", "refused", llama(cooled, tau=_ONE), set_to(tau=2.0)),
    Case(
        "a temperature, a parameter, unfrozen",
        "refused",
        llama(cooled, tau=frozen(_ONE)),
        lambda m: m.tau.requires_grad_(),
    ),
    Case("a softcap annealed", "refused", llama(lambda m, x, _: cap(m.c, x), c=30.0), set_to(c=15.0)),
    Case(
        "`config.logits_scaling` set",
        "refused",
        lambda: sharpen(tiny_model("granite")),
        lambda m: setattr(m.config, "logits_scaling", 8.0),
    ),
    Case("a bias, a buffer, filled", "exact", llama(biased, b=_ZEROS), set_to(b=_NOISE)),
    Case("a bias, a frozen parameter, filled", "exact", llama(biased, b=frozen(_ZEROS)), set_to(b=_NOISE)),
    Case(
        "a mask of the vocabulary, still empty",
        "refused",
        llama(lambda m, x, _: x.masked_fill(m.mask, -9.0), mask=_ZEROS.bool()),
        set_to(mask=True),
    ),
    Case(
        "a table (T, V), still zero",
        "exact",
        llama(lambda m, x, _: x + m.table[: x.shape[1]], table=torch.zeros(64, VOCABULARY)),
    ),
    Case("a forward hook put on the head", "refused", plain, hook(lambda x: 0.5 * x)),
    Case("a forward hook that looks at logits", "exact", plain, hook(_seen)),
    Case(
        "a hook that changes the head's input",
        "exact",
        plain,
        lambda m: m.lm_head.register_forward_pre_hook(lambda _, x: (0.5 * x[0],)),
    ),
    Case(
        "a backward hook put on the head",
        "refused",
        plain,
        lambda m: m.lm_head.register_full_backward_hook(lambda _, g, __: (0.5 * g[0],)),
    ),
    Case(
        "the head's forward replaced",
        "refused",
        plain,
        lambda m: setattr(m.lm_head, "forward", lambda x: 1.02 * F.linear(x, m.lm_head.weight)),
    ),
    Case("an argument of later batches", "refused", llama(tempered), batch={"temperature": 2.0}),
    # Some entries of the vocabulary, after the first step
    Case("a hook that halves some entries", "refused", plain, hook(lambda x: some_entries(x, lambda y: y.mul_(0.5)))),
    Case("some entries masked in place", "refused", *switched(lambda x: x.masked_fill_(upper_entries(x), -9.0))),
    Case(
        "the second half of the vocabulary halved",
        "refused",
        *switched(lambda x: torch.cat([f * y for f, y in zip((1.0, 0.5), x.chunk(2, -1), strict=False)], -1)),
    ),
    Case("all but the 50 largest masked", "refused", *switched(lambda x: x * (x >= x.topk(50).values[..., -1:]))),
    Case("all that is far below the largest masked", "exact", *switched(lambda x: x * (x >= x.amax(-1, True) - 5))),
    Case(
        "a gradient hook for some entries",
        "refused",
        *switched(lambda x: hooked(x, lambda g: some_entries(g, lambda y: y.zero_()))),
    ),
    # Position, length and row
    Case("a factor from a position on", "refused", llama(lambda _, x, __: x * _row(12, 0.5)[: x.shape[1]])),
    Case(
        "log-n scaling by length",
        "refused",
        llama(lambda _, x, __: x * max(1.0, torch.tensor(float(x.shape[1])).log().item() / 2.2)),
    ),
    Case(
        "a factor of the first row",
        "refused",
        llama(lambda _, x, __: torch.cat([0.5 * x[:1], x[1:]]) if len(x) > 1 else x),
    ),
    Case("rows sorted for the head", "refused", calls(sorted_by_first_token)),
    # The same value with another gradient
    Case("`0.5 * x + 0.5 * x.detach()`", "refused", llama(lambda _, x, __: 0.5 * x + 0.5 * x.detach())),
    Case("a gradient hook at the logits", "refused", llama(lambda _, x, __: hooked(x, lambda g: 0.5 * g))),
    Case("logits detached after the first step", "refused", *switched(lambda x: x.detach())),
    Case("the head under `no_grad`", "refused", calls(without_gradient)),
    # Other forms
    Case("`self.lm_head(input=h)`, and no `use_cache`", "exact", calls(lambda head, h, _: head(input=h))),
    Case("logits written into in place", "exact", llama(lambda _, x, __: x.mul_(0.5))),
    Case("the first entries, written into in place", "exact", llama(lambda _, x, __: x[..., :90].mul_(0.5))),
    Case(
        "logits in other shapes, and back",
        "exact",
        llama(lambda _, x, __: (2 * x.flatten(0, 1).contiguous()).view(x.shape).unsqueeze(1).squeeze(1)),
    ),
    Case(
        "rows taken apart and put together",
        "exact",
        llama(
            lambda _, x, __: torch.stack(list(torch.cat([x[:1], x[1:]])[torch.arange(len(x))])).flip(1).flip(1).mT.mT
        ),
    ),
    Case(
        "a gain for each token of the input",
        "refused",
        llama(lambda _, x, a: x * (1 + (a["input_ids"][..., None] > 50))),
    ),
    Case(
        "a parameter that trains at a neutral value",
        "exact",
        llama(lambda m, x, _: x + (0 * m.lm_head.weight).sum() if m.on else x, on=False),
        set_to(on=True),
    ),
]


def outcome(case: Case, steps: int = 3, compile: str | None = None) -> str:
    """Return "exact", "refused" or "silent". ``compile``: torch.compile's backend, for either model as a whole."""
    backbone = case.build()
    other = copy.deepcopy(backbone)
    for model in (backbone, other) if compile else ():
        model.compile(backend=compile)
    try:
        found = _trained(case, backbone, LinearCrossEntropyLoss(), steps)
    except UserError:
        return "refused"
    try:
        expected = _trained(case, other, CrossEntropyLoss(), steps)
    except RuntimeError:  # Nothing of the loss needs a gradient.
        return "silent"
    return "exact" if (found - expected).norm() <= 1e-5 * expected.norm() else "silent"


def _trained(case: Case, backbone: nn.Module, loss: Any, steps: int) -> Tensor:
    model = LanguageModel(backbone, loss)
    model.prepare(torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch: dict[str, Any] = tiny_batch(vocabulary=min(model.vocabulary, 90))
    for step in range(steps):
        optimizer.zero_grad()
        model.spot_check(batch)
        model(batch).loss.backward()
        optimizer.step()
        if step == 0:
            case.change(backbone)
            batch |= case.batch or {}
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return nn.utils.parameters_to_vector(model.parameters()).detach()
