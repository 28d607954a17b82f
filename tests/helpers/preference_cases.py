"""Batches of preferences, and their losses from logits, as papers write them."""

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from tiny_models import VOCABULARY, tiny_model
from torch import Tensor
from transformers import get_constant_schedule

from lit_fused import FusedPreferenceModule, PreferenceLoss

OPTIONS: dict[str, dict[str, float]] = {
    "dpo": {"beta": 0.3},
    "rpo": {"beta": 0.3, "nll_weight": 0.7},
    "cdpo": {"beta": 0.3, "label_smoothing": 0.2},
    "robust": {"beta": 0.3, "label_smoothing": 0.2},
    "ipo": {"beta": 0.3},
    "hinge": {"beta": 0.1},
    "apo_zero": {"beta": 0.3},
    "apo_down": {"beta": 0.3},
    "cpo": {"beta": 0.3, "nll_weight": 0.7},
    "simpo": {"beta": 2.0, "margin": 0.5},
    "orpo": {"beta": 0.3},
    "kto": {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.8},
}


def perturbed(name: str, dtype: torch.dtype) -> Any:
    """The tiny model with other weights, as a reference."""
    model: Any = tiny_model(name)
    generator = torch.Generator().manual_seed(2)
    for p in model.parameters():
        p.data += 0.05 * torch.randn(p.shape, generator=generator)
    return model.to(dtype).eval()


def pairs(count: int, seed: int = 0, length: int = 14) -> dict[str, Tensor]:
    """Ragged pairs of rows, each with its prompt, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (2 * count, length), generator=generator)
    prompt = torch.randint(2, 5, (count, 1), generator=generator).repeat_interleave(2, 0)
    end = torch.randint(6, length + 1, (2 * count, 1), generator=generator)
    at = torch.arange(length)
    ids[1::2] = torch.where(at < prompt[1::2], ids[::2], ids[1::2])
    mask = (at < end).long()
    return {
        "input_ids": ids * mask,
        "labels": ids.masked_fill((at < prompt) | (at >= end), -100),
        "attention_mask": mask,
        "desirable": torch.tensor([1, 0] * count),
    }


def singles(count: int, seed: int = 0) -> dict[str, Tensor]:
    batch = {name: value[:count] for name, value in pairs(count, seed).items()}
    return batch | {"desirable": torch.tensor([1, 1, 0] * count)[:count]}


def packed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same answers one after the other in one row, with an empty place for one at the end of it."""
    lengths = batch["attention_mask"].sum(-1)
    parts = [(ids[:n], labels[:n]) for ids, labels, n in zip(batch["input_ids"], batch["labels"], lengths, strict=True)]
    row = {"input_ids": torch.cat([ids for ids, _ in parts]), "labels": torch.cat([labels for _, labels in parts])}
    row["position_ids"] = torch.cat([torch.arange(int(n)) for n in lengths] + [torch.arange(3)])
    row = {
        name: F.pad(value, (0, 3 * (name != "position_ids")), value=-100 * (name == "labels"))
        for name, value in row.items()
    }
    row["lengths"], row["desirable"] = lengths, batch["desirable"]
    return {name: value[None] for name, value in row.items()}


def answers(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Summed log-probabilities of the labels of each row, and their number, from the logits."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    picked = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return picked.where(targets != -100, 0).sum(-1), (targets != -100).sum(-1)


def other_answers(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each prompt with the answer of the row before it, no longer than the longest row, made row by row."""
    rows, longest = [], int(batch["attention_mask"].sum(-1).max())
    for index in range(len(batch["input_ids"])):
        wanted, before = batch["labels"][index] != -100, batch["labels"][index - 1] != -100
        prompt = batch["input_ids"][index, : int(wanted.nonzero()[0])]
        answer = batch["labels"][index - 1][before]
        made = torch.cat([prompt, answer]), torch.cat([torch.full_like(prompt, -100), answer])
        rows.append(tuple(part[:longest] for part in made))
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([row for row, _ in rows], True)
    mask = pad([torch.ones_like(row) for row, _ in rows], True)
    return {"input_ids": ids, "labels": pad([labels for _, labels in rows], True, -100), "attention_mask": mask}


def plain(name: str, model: Any, reference: Any, batch: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, Any, Tensor]]:
    """The mean loss of the batch's pairs or examples, and the answers' log-probabilities under both models."""
    o = OPTIONS[name]
    policy, counts = answers(model, batch)
    theirs = None
    if reference is not None:
        with torch.no_grad():
            theirs, _ = answers(reference, batch)
    average = policy / counts
    c, r = policy[::2], policy[1::2]
    if name in ("cpo", "simpo", "orpo"):
        ac, ar = average[::2], average[1::2]
        if name == "cpo":
            losses = -(o["beta"] * (c - r)).sigmoid().log() - o["nll_weight"] * c
        elif name == "simpo":
            losses = -(o["beta"] * (ac - ar) - o["margin"]).sigmoid().log()
        else:
            odds = (ac - ar) - (torch.log1p(-ac.exp()) - torch.log1p(-ar.exp()))
            losses = -ac - o["beta"] * odds.sigmoid().log()
        return losses.mean(), (policy, theirs, counts)
    assert theirs is not None
    b, ratios = o["beta"], policy - theirs
    if name == "kto":
        with torch.no_grad():
            other = other_answers(batch)
            kl = (answers(model, other)[0] - answers(reference, other)[0]).mean().clamp(min=0)
        wanted = b * (ratios - kl)
        good, bad = 1 - wanted.sigmoid(), 1 - (-wanted).sigmoid()
        losses = torch.where(batch["desirable"] == 1, o["desirable_weight"] * good, o["undesirable_weight"] * bad)
        return losses.mean(), (policy, theirs, counts)
    if name == "ipo":
        ratios = ratios / counts
    rc, rr = ratios[::2], ratios[1::2]
    h, e = b * (rc - rr), o.get("label_smoothing", 0.0)
    losses = {
        "dpo": lambda: -h.sigmoid().log(),
        "rpo": lambda: -h.sigmoid().log() - o["nll_weight"] * average[::2],
        "cdpo": lambda: -(1 - e) * h.sigmoid().log() - e * (-h).sigmoid().log(),
        "robust": lambda: (-(1 - e) * h.sigmoid().log() + e * (-h).sigmoid().log()) / (1 - 2 * e),
        "ipo": lambda: (rc - rr - 1 / (2 * b)) ** 2,
        "hinge": lambda: torch.clamp(1 - h, min=0),
        "apo_zero": lambda: 1 - (b * rc).sigmoid() + (b * rr).sigmoid(),
        "apo_down": lambda: (b * rc).sigmoid() + 1 - h.sigmoid(),
    }[name]()
    return losses.mean(), (policy, theirs, counts)


def batches_of(objective: str, reference: str) -> list[dict[str, Tensor]]:
    """Two batches of different numbers of pairs, perhaps packed into a row or with stored sums."""
    parts = [singles(4, 1), singles(3, 2)] if objective == "kto" else [pairs(3, 1), pairs(2, 2)]
    if reference == "stored":
        with torch.no_grad():
            parts = [
                part | {"reference_log_prob": answers(perturbed("qwen3", torch.float32), part)[0]} for part in parts
            ]
    return [packed(part) for part in parts] if reference == "packed" else parts


def module_for(objective: str, reference: str) -> Any:
    loss: Any = PreferenceLoss(objective, **cast(Any, OPTIONS[objective]))
    models = dict.fromkeys(("model", "packed"), perturbed("qwen3", torch.float32)) | {"none": None}
    return FusedPreferenceModule(
        tiny_model("qwen3"),
        loss,
        partial(torch.optim.SGD, lr=0.1),
        get_constant_schedule,
        reference=models.get(reference, reference),
    )
