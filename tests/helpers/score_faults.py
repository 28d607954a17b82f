"""Tiny models that have learned a little, and samplers of them with one fault each, whose log-probabilities differ."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from tiny_models import VOCABULARY, tiny_model
from torch import Tensor

PROMPT, COMPLETION, ROWS = 6, 18, 24
_CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"final_logit_softcapping": 6.0},
    "granite": {"logits_scaling": 4.0},
    # No threshold was chosen with these.
    "phi": {},
    "cohere": {"logit_scale": 0.4},
    "mistral": {"num_hidden_layers": 3},
    "olmo2": {"num_hidden_layers": 12},
    "gemma2_untied": {"final_logit_softcapping": 9.0},
}


def _texts(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Rows (rows, length) of a language: each token has four successors, whose order depends on the one before it."""
    table = torch.randint(3, VOCABULARY, (VOCABULARY, 2, 4), generator=torch.Generator().manual_seed(7))
    chances = torch.tensor([0.6, 0.25, 0.1, 0.05])
    made = [torch.randint(3, VOCABULARY, (rows,), generator=generator) for _ in range(2)]
    for _ in range(length - 2):
        choice = torch.multinomial(chances.expand(rows, 4), 1, generator=generator)[:, 0]
        made.append(table[made[-1], made[-2] % 2, choice])
    return torch.stack(made, 1)


def _step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    logits = model(input_ids=ids).logits[:, :-1]
    F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


@cache
@torch.enable_grad()
def learned(family: str, steps: int = 150) -> Any:
    """Return a model whose distributions are peaked: a short training on :func:`_texts`."""
    model = tiny_model(family, **_CHANGES[family])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        _step(model, optimizer, _texts(32, 24, generator))
    return model.eval()


@torch.enable_grad()
def older(model: Any, steps: int, rate: float, seed: int, by: str = "text") -> Any:
    """Return a copy of a model that has gone on for some optimiser steps: the other one is that much older.

    ``by`` "rewards" takes policy gradients of its own completions, with random rewards.
    """
    newer = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(newer.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(100 + seed)
    for step in range(steps):
        if by == "text":
            _step(newer, optimizer, _texts(16, 24, generator))
            continue
        ids = completed(model, 1000 * seed + step)
        rewards = torch.randn(len(ids), 1, generator=generator)
        log_p = newer(input_ids=ids).logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        (-rewards * log_p)[:, PROMPT - 1 :].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return newer.eval()


@torch.no_grad()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids).logits


@torch.no_grad()
def completed(model: Any, seed: int, rows: int = ROWS, temperature: float = 1.0) -> Tensor:
    """Return prompts with completions that a model has sampled, (rows, PROMPT + COMPLETION)."""
    generator = torch.Generator().manual_seed(seed)
    ids = _texts(rows // 4, PROMPT, generator).repeat_interleave(4, 0)  # Four completions of each prompt.
    for _ in range(COMPLETION):
        chances = (logits_of(model, ids)[:, -1].float() / temperature).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], 1)
    return ids


def scored(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities (B, T) of what each position predicts, the last nothing: zero."""
    log_p = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].float()
    return F.pad(log_p, (0, 1))


@dataclass(frozen=True)
class Fault:
    """A fault of a sampler: its cause, as it is to be named, its size in words, and the model's family and seed."""

    cause: str
    size: str
    family: str
    seed: int
    make: Callable[["Fault"], tuple[Any, dict[str, Tensor]]]

    def __str__(self) -> str:
        return f"{self.cause}-{self.size}-{self.family}-{self.seed}".replace(" ", "_")


def batch_of(ids: Tensor, sampler: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
    """Return the batch of rollouts, whose sampler's scores are those of its completions alone."""
    if labels is None:
        labels = ids.clone()
        labels[:, :PROMPT] = -100
    advantages = torch.randn(ids.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": labels, "sampler_log_probs": sampler, "advantages": advantages}


def _of_completion(numbers: Tensor) -> Tensor:
    kept = numbers.clone()
    kept[:, : PROMPT - 1] = 0
    return kept


def temperature(value: float) -> Callable[[Fault], Any]:
    def make(fault: Fault) -> Any:
        model = learned(fault.family)
        ids = completed(model, fault.seed, temperature=value)
        return model, batch_of(ids, _of_completion(scored(logits_of(model, ids) / value, ids)))

    return make


def changed(change: Callable[[Any], None]) -> Callable[[Fault], Any]:
    """Sampler: a copy of the model with another configuration."""

    def make(fault: Fault) -> Any:
        model = learned(fault.family)
        other = copy.deepcopy(model)
        change(other)
        ids = completed(other, fault.seed)
        return model, batch_of(ids, _of_completion(scored(logits_of(other, ids), ids)))

    return make


def no_softcap(model: Any) -> None:
    model.config.final_logit_softcapping = None


def no_scale(model: Any) -> None:
    if hasattr(model, "logit_scale"):
        model.logit_scale = 1.0
    model.config.logits_scaling = 1.0


def stale(steps: int, rate: float, by: str = "text") -> Callable[[Fault], Any]:
    def make(fault: Fault) -> Any:
        model = learned(fault.family)
        ids = completed(model, fault.seed)
        return older(model, steps, rate, fault.seed, by), batch_of(
            ids, _of_completion(scored(logits_of(model, ids), ids))
        )

    return make


def shifted(by: int, *, tokens: bool = False) -> Callable[[Fault], Any]:
    """Scores that stand one place too far, or are of the wrong neighbour's token."""

    def make(fault: Fault) -> Any:
        model = learned(fault.family)
        ids = completed(model, fault.seed)
        logits = logits_of(model, ids)
        if tokens:
            wrong = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:].roll(by, 1)[..., None])[..., 0]
            return model, batch_of(ids, _of_completion(F.pad(wrong, (0, 1))))
        return model, batch_of(ids, _of_completion(scored(logits, ids)).roll(by, 1))

    return make


def other_ids(kind: str, by: int = 1) -> Callable[[Fault], Any]:
    """A sampler whose tokenizer has other ids for the same text."""

    def make(fault: Fault) -> Any:
        model = learned(fault.family)
        ids = completed(model, fault.seed)
        if kind == "permuted":
            order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(fault.seed))
        else:
            order = (torch.arange(VOCABULARY) + by) % VOCABULARY
        theirs = order[ids]
        logits = logits_of(model, ids if kind == "targets" else theirs)
        return model, batch_of(ids, _of_completion(scored(logits, theirs)))

    return make


def masked(kind: str) -> Callable[[Fault], Any]:
    def make(fault: Fault) -> Any:
        model = learned(fault.family)
        ids = completed(model, fault.seed)
        numbers = scored(logits_of(model, ids), ids)
        mask = torch.zeros_like(numbers)
        mask[:, PROMPT - 1 : -1] = 1
        if kind == "inverted":
            return model, batch_of(ids, numbers * (1 - mask))
        if kind in ("early", "late"):
            return model, batch_of(ids, numbers * mask.roll(-1 if kind == "early" else 1, 1))
        labels = ids.clone()  # Prompts are included.
        return model, batch_of(ids, numbers * mask, labels)

    return make


@torch.no_grad()
def in_bfloat16(model: Any, ids: Tensor, part: str) -> Tensor:
    if part == "layers":  # all but the output layer
        other = copy.deepcopy(model)
        layer = other.get_output_embeddings()
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())  # It may be tied.
        other.model.to(torch.bfloat16)
        layer.register_forward_pre_hook(lambda _, args: (args[0].float(),))
        return other(input_ids=ids).logits
    if part == "body":
        return copy.deepcopy(model).to(torch.bfloat16)(input_ids=ids).logits.float()

    def products(layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        if part == "logits":
            return output.bfloat16()
        bias = None if layer.bias is None else layer.bias.bfloat16()
        return F.linear(inputs[0].bfloat16(), layer.weight.bfloat16(), bias)

    return with_products(model, ids, products)


def with_products(model: Any, ids: Tensor, products: Callable[..., Tensor]) -> Tensor:
    """Return logits, float32, of a model whose output layer returns other products."""
    hook = model.get_output_embeddings().register_forward_hook(products)
    logits = logits_of(model, ids).float()
    hook.remove()
    return logits


def rounded(part: str) -> Callable[[Fault], Any]:
    def make(fault: Fault) -> Any:
        model = learned(fault.family)
        ids = completed(model, fault.seed)
        return model, batch_of(ids, _of_completion(scored(in_bfloat16(model, ids, part), ids)))

    return make


def float32_head(fault: Fault) -> Any:
    """A model in bfloat16, whose sampler computes its output layer in float32."""
    model = copy.deepcopy(learned(fault.family)).to(torch.bfloat16)
    ids = completed(model, fault.seed)

    def products(layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return F.linear(inputs[0].float(), layer.weight.float(), None if layer.bias is None else layer.bias.float())

    return model, batch_of(ids, _of_completion(scored(with_products(model, ids, products), ids)))


def other_layers(fault: Fault) -> Any:
    """A model in bfloat16, whose sampler has the same weights and computes in float32 until its output layer."""
    model = copy.deepcopy(learned(fault.family)).to(torch.bfloat16)
    ids = completed(model, fault.seed)
    exact = copy.deepcopy(model).float()

    def products(layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return F.linear(inputs[0].bfloat16(), layer.weight.bfloat16())

    return model, batch_of(ids, _of_completion(scored(with_products(exact, ids, products), ids)))


def honest(dtype: torch.dtype, way: str) -> Callable[[Fault], Any]:
    """The same model in the same precision, whose sampler computes batches of another shape, token by token with a
    cache, or padded on the left."""

    @torch.no_grad()
    def make(fault: Fault) -> Any:
        model = copy.deepcopy(learned(fault.family)).to(dtype)
        ids = completed(model, fault.seed)
        if way == "cached":
            parts, cache = [], None
            for token in ids.split(1, 1):
                output = model(input_ids=token, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                parts.append(output.logits)
            logits = torch.cat(parts, 1)
        elif way == "padded":
            padded = F.pad(ids, (7, 0))
            seen = F.pad(torch.ones_like(ids), (7, 0))
            places = (seen.cumsum(1) - 1).clamp(min=0)
            logits = model(input_ids=padded, attention_mask=seen, position_ids=places).logits[:, 7:]
        else:
            logits = torch.cat([logits_of(model, part) for part in ids.split(int(way))])
        return model, batch_of(ids, _of_completion(scored(logits.float(), ids)))

    return make
