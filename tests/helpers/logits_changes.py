"""Models that do something to their logits, at once or after some steps, and what becomes of each.

Each case trains a few steps with the fused loss and with the standard one. It is *exact* if the weights are the same,
*refused* if there was a UserError, and *silent*, which no case may be, if the weights differ without one.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tiny_models import VOCABULARY, WIDTH, TinyBackbone, sharpen, tiny_backbone, tiny_batch, tiny_llama, tiny_model
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
            setattr(model, name, value)
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
                own += 0  # ``.data`` does not count as a new version
            else:
                setattr(model, name, value)

    return torch.no_grad()(change)


def loaded(**values: Any) -> Change:
    """Load a state dict with other numbers."""
    return lambda model: model.load_state_dict(model.state_dict() | values)


def hooked(model: Any, logits: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    if logits.requires_grad:
        logits.register_hook(hook)
    return logits


def cap(c: float, logits: Tensor) -> Tensor:
    return c * torch.tanh(logits / c)


def sorted_by_first_token(head: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
    order = ids[:, 0].argsort(descending=True)
    return head(hidden[order])[order.argsort()]


def without_gradient(head: nn.Module, hidden: Tensor, _: Tensor) -> Tensor:
    with torch.no_grad():
        return head(hidden)


class ReturnsSquareLogits(TinyBackbone):
    """Its vocabulary is as large as its width, and it returns logits in place of hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Embedding(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.mixer(self.embedding(input_ids))[0]
        return F.linear(hidden, self.head.weight, self.head.bias)


def nothing(model: Any) -> None: ...


def _row(length: int, factor: float) -> Tensor:
    return torch.cat([torch.ones(length), torch.full((20 - length,), factor)])[:, None]


@dataclass(frozen=True)
class Case:
    what: str
    build: Callable[[], Any]
    outcome: str
    change: Change = nothing  # after the first step
    batch: dict[str, Any] | None = None  # added to the batches after the first step


_ONE, _ZEROS = torch.tensor(1.0), torch.zeros(VOCABULARY)
_NOISE = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0))
_PER_ROW = torch.tensor([[[1.0]], [[2.0]], [[3.0]]])

CASES = [
    # State that changes after the first step
    Case(
        "a temperature, an attribute, annealed",
        lambda: changed(lambda m, x, _: x / m.tau, tau=1.0),
        "refused",
        set_to(tau=2.0),
    ),
    Case(
        "a temperature, a scalar buffer, filled",
        lambda: changed(lambda m, x, _: x / m.tau, tau=_ONE),
        "exact",
        set_to(tau=2.0),
    ),
    Case(
        "a temperature, a scalar buffer, replaced",
        lambda: changed(lambda m, x, _: x / m.tau, tau=_ONE),
        "exact",
        lambda m: setattr(m, "tau", torch.tensor(2.0)),
    ),
    Case(
        "a temperature, a frozen parameter, filled",
        lambda: changed(lambda m, x, _: x / m.tau, tau=nn.Parameter(_ONE.clone(), False)),
        "exact",
        set_to(tau=2.0),
    ),
    Case(
        "a temperature, a buffer, by a state dict",
        lambda: changed(lambda m, x, _: x / m.tau, tau=_ONE),
        "exact",
        loaded(tau=torch.tensor(2.0)),
    ),
    Case(
        "a temperature, a parameter, unfrozen",
        lambda: changed(lambda m, x, _: x / m.tau, tau=nn.Parameter(_ONE.clone(), False)),
        "refused",
        lambda m: m.tau.requires_grad_(),
    ),
    Case("a softcap annealed", lambda: changed(lambda m, x, _: cap(m.c, x), c=30.0), "refused", set_to(c=15.0)),
    Case(
        "a softcap switched on",
        lambda: changed(lambda m, x, _: cap(m.c, x) if m.c else x, c=None),
        "refused",
        set_to(c=5.0),
    ),
    Case(
        "`config.logits_scaling` set",
        lambda: sharpen(tiny_model("granite")),
        "refused",
        lambda m: setattr(m.config, "logits_scaling", 8.0),
    ),
    Case("a bias, a buffer, filled", lambda: changed(lambda m, x, _: x + m.b, b=_ZEROS), "exact", set_to(b=_NOISE)),
    Case(
        "a bias, a frozen parameter, filled",
        lambda: changed(lambda m, x, _: x + m.b, b=nn.Parameter(_ZEROS.clone(), False)),
        "exact",
        set_to(b=_NOISE),
    ),
    Case(
        "a bias, a frozen parameter, unfrozen",
        lambda: changed(lambda m, x, _: x + m.b, b=nn.Parameter(_ZEROS.clone(), False)),
        "exact",
        lambda m: m.b.requires_grad_(),
    ),
    Case(
        "a mask of the vocabulary, still empty",
        lambda: changed(lambda m, x, _: x.masked_fill(m.mask, -9.0), mask=_ZEROS.bool()),
        "refused",
        set_to(mask=True),
    ),
    Case(
        "a table (T, V), still zero",
        lambda: changed(lambda m, x, _: x + m.table[: x.shape[1]], table=torch.zeros(64, VOCABULARY)),
        "refused",
    ),
    Case(
        "a forward hook put on the head",
        lambda: sharpen(tiny_llama()),
        "refused",
        lambda m: m.lm_head.register_forward_hook(lambda _, __, x: 0.5 * x),
    ),
    Case(
        "a hook that changes the head's input",
        lambda: sharpen(tiny_llama()),
        "exact",
        lambda m: m.lm_head.register_forward_pre_hook(lambda _, x: (0.5 * x[0],)),
    ),
    Case(
        "a backward hook put on the head",
        lambda: sharpen(tiny_llama()),
        "refused",
        lambda m: m.lm_head.register_full_backward_hook(lambda _, g, __: (0.5 * g[0],)),
    ),
    Case(
        "a backward pre-hook put on the head",
        lambda: sharpen(tiny_llama()),
        "refused",
        lambda m: m.lm_head.register_full_backward_pre_hook(lambda _, g: (0.5 * g[0],)),
    ),
    Case(
        "the head's forward replaced",
        lambda: sharpen(tiny_llama()),
        "refused",
        lambda m: setattr(m.lm_head, "forward", lambda x: 1.02 * F.linear(x, m.lm_head.weight)),
    ),
    Case(
        "an argument of later batches",
        lambda: changed(lambda _, x, a: x if a["temperature"] is None else x / a["temperature"]),
        "refused",
        batch={"temperature": 2.0},
    ),
    Case(
        "an argument of later batches, for each row",
        lambda: changed(lambda _, x, a: x if a["temperature"] is None else x / a["temperature"]),
        "refused",
        batch={"temperature": _PER_ROW},
    ),
    # Position, length and row
    Case("a factor from a position on", lambda: changed(lambda _, x, __: x * _row(12, 0.5)[: x.shape[1]]), "refused"),
    Case("a factor of long batches", lambda: changed(lambda _, x, __: x * 0.5 if x.shape[1] > 16 else x), "refused"),
    Case(
        "log-n scaling by length",
        lambda: changed(lambda _, x, __: x * max(1.0, torch.tensor(float(x.shape[1])).log().item() / 2.2)),
        "refused",
    ),
    Case(
        "a factor of the first row",
        lambda: changed(lambda _, x, __: torch.cat([0.5 * x[:1], x[1:]]) if len(x) > 1 else x),
        "refused",
    ),
    Case("rows sorted for the head", lambda: head_called(sorted_by_first_token), "refused"),
    Case("positions flipped for the head", lambda: head_called(lambda head, h, _: head(h.flip(1)).flip(1)), "refused"),
    # The same value with another gradient
    Case("`0.5 * x + 0.5 * x.detach()`", lambda: changed(lambda _, x, __: 0.5 * x + 0.5 * x.detach()), "refused"),
    Case("a gradient hook at the logits", lambda: changed(lambda m, x, _: hooked(m, x, lambda g: 0.5 * g)), "refused"),
    Case(
        "a gradient clamp at the logits",
        lambda: changed(lambda m, x, _: hooked(m, x, lambda g: g.clamp(-1e-3, 1e-3))),
        "refused",
    ),
    Case(
        "logits detached after the first step",
        lambda: changed(lambda m, x, _: x.detach() if m.cut else x, cut=False),
        "refused",
        set_to(cut=True),
    ),
    Case("the head under `no_grad`", lambda: head_called(without_gradient), "refused"),
    # Other forms
    Case("`self.lm_head(input=h)`, and no `use_cache`", lambda: head_called(lambda head, h, _: head(input=h)), "exact"),
    Case("logits written into in place", lambda: changed(lambda _, x, __: x.mul_(0.5)), "exact"),
    Case(
        "a penalty for the tokens of the input",
        lambda: changed(lambda _, x, a: x.scatter_add(2, a["input_ids"][..., None], torch.full_like(x[..., :1], -1.0))),
        "refused",
    ),
    Case(
        "a gain for each token of the input",
        lambda: changed(lambda _, x, a: x * (1 + (a["input_ids"][..., None] > 50))),
        "refused",
    ),
    Case("a plain module with V = D, logits for hidden states", lambda: tiny_backbone(ReturnsSquareLogits), "refused"),
    Case(
        "a parameter that trains at a neutral value",
        lambda: changed(lambda m, x, _: x + (0 * m.lm_head.weight).sum() if m.on else x, on=False),
        "refused",
        set_to(on=True),
    ),
]


def outcome(case: Case, steps: int = 3) -> str:
    """Return "exact", "refused" or "silent"."""
    backbone = case.build()
    other = copy.deepcopy(backbone)
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
    batch: dict[str, Any] = tiny_batch(vocabulary=model.vocabulary)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch).loss.backward()
        optimizer.step()
        if step == 0:
            case.change(backbone)
            batch |= case.batch or {}
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return nn.utils.parameters_to_vector(model.parameters()).detach()
