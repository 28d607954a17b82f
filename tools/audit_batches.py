"""Cases of tools/audit.py: batches, and calls of the operator."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from audit import Case, same, worst
from audit_models import BATCH, IDS, V, gradients, llama
from torch import Tensor
from transformers import DataCollatorWithFlattening

import lit_fused
from lit_fused import linear_cross_entropy, token_scores

Batch = dict[str, Any]


def some(**changes: Any) -> Batch:
    return BATCH | changes


def labels(change: Callable[[Tensor], Any], dtype: torch.dtype = torch.long) -> Batch:
    """Return the batch with labels that ``change`` has written into."""
    found = IDS.clone()
    change(found)
    return some(labels=found.to(dtype))


def ragged(x: Tensor) -> None:
    for row, start in enumerate((2, 9, 15)):
        x[row, :start] = -100


MASK = torch.ones_like(IDS)
MASK[0, :6] = 0
FLAT = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": row.tolist()} for row in IDS])
BATCHES: dict[str, Batch] = {
    "labels of the answers alone": labels(ragged),
    "a row without a label": labels(lambda x: x[1].fill_(-100)),
    "no label at all": labels(lambda x: x.fill_(-100)),
    "no label, divided by no token": labels(lambda x: x.fill_(-100)) | {"num_items_in_batch": torch.tensor(0)},
    "divided by the tokens of a window": labels(ragged) | {"num_items_in_batch": torch.tensor(200)},
    "divided by a number": some(num_items_in_batch=77),
    "one label": labels(lambda x: x[:, :-1].fill_(-100)),
    "a label at the first position alone": labels(lambda x: x[:, 1:].fill_(-100)),
    "a label that is the vocabulary's size": labels(lambda x: x[0, 5:6].fill_(V)),
    "a label of -1": labels(lambda x: x[0, 5:6].fill_(-1)),
    "labels of int32": labels(ragged, torch.int32),
    "labels of float32": labels(lambda x: None, torch.float32),
    "labels that are the next tokens": labels(lambda x: x.copy_(IDS.roll(-1, 1))),
    "targets that are shifted already": some(shift_labels=IDS.roll(-1, 1)),
    "padding on the left": labels(lambda x: x.masked_fill_(MASK == 0, -100)) | {"attention_mask": MASK},
    "a mask, and labels at padding": some(attention_mask=MASK),
    "position_ids that begin anew": some(position_ids=torch.arange(18).remainder(6).expand(3, 18)),
    "embeddings in place of ids": {"inputs_embeds": 0.3 * torch.ones(3, 18, 32), "labels": IDS},
    "one token a row": {"input_ids": IDS[:, :1], "labels": IDS[:, :1]},
    "one row": {"input_ids": IDS[:1], "labels": IDS[:1]},
    "an answer as a tuple": some(return_dict=False),
    "logits of the last positions alone": some(logits_to_keep=4),
    "a cache that is asked for": some(use_cache=True),
    "hidden states that are asked for": some(output_hidden_states=True),
}


def packed() -> str:
    """Documents in one row, by ``fuse``, have the sum of their losses alone."""
    loss = lit_fused.fuse(llama())(**FLAT).loss
    plain = llama()
    alone = [plain(input_ids=row[None], labels=row[None]).loss for row in IDS]
    return same(loss, sum(alone) / len(alone))


def of_batch(batch: Batch) -> str:
    """Compare a fused model's loss and gradients with those of the plain one, which gets labels of int64, and no cache,
    by which packed documents would attend to each other."""
    as_long = {"use_cache": False, **batch, "labels": batch["labels"].long()}
    fused, plain = lit_fused.fuse(llama()), llama()
    loss = fused(**batch)[0]  # A UserError is the verdict; labels that torch refuses, it refuses here too.
    expected = plain(**as_long)[0]
    for model, of_model in ((fused, loss), (plain, expected)):
        model.zero_grad()
        of_model.backward()
    return worst([same(loss, expected), same(gradients(fused), gradients(plain))])


def operands(dtype: torch.dtype = torch.float32, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(64, 32, generator=generator), size * torch.randn(500, 32, generator=generator)
    targets = torch.randint(500, (64,), generator=generator)
    return hidden.to(dtype), weight.to(dtype), targets.masked_fill(torch.arange(64) % 5 == 0, -100)


def operated(reference: Callable[[Tensor, Tensor], Tensor], size: float = 1.0, **options: Any) -> str:
    """Compare loss and gradients of the operator with a reference on float64 logits."""
    hidden, weight, targets = operands(size=size)
    results = []
    for dtype in (torch.float64, torch.float32):
        h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
        exact = dtype == torch.float64
        loss = reference(h @ w.T, targets) if exact else linear_cross_entropy(h, w, targets, **options)[0]
        results.append((loss, *torch.autograd.grad(loss.sum(), (h, w))))
    return worst(same(ours, theirs) for theirs, ours in zip(*results, strict=True))


def scored(of_logits: Callable[[Tensor, Tensor], Tensor], name: str) -> str:
    hidden, weight, targets = operands()
    results = []
    for dtype in (torch.float64, torch.float32):
        h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
        exact = dtype == torch.float64
        value = of_logits(h @ w.T, targets) if exact else getattr(token_scores(h, w, targets), name)
        value = value * (targets != -100)
        results.append((value, *torch.autograd.grad(value.sum(), (h, w))))
    return worst(same(ours, theirs) for theirs, ours in zip(*results, strict=True))


def divided_by_no_token() -> str:
    hidden, weight, targets = operands()
    weight.requires_grad_()
    none = torch.full_like(targets, -100)
    loss, _ = linear_cross_entropy(hidden, weight, none, reduction="sum")
    (gradient,) = torch.autograd.grad(loss / (none != -100).sum(), weight)
    return same(gradient, torch.zeros_like(gradient))


def rounded(size: float) -> str:
    """In bfloat16 the loss is no further from float64 than that of a model's own rounded logits."""
    hidden, weight, targets = operands(torch.bfloat16, size)
    truth = F.cross_entropy(hidden.double() @ weight.double().T, targets)
    own = F.cross_entropy((hidden @ weight.T).float(), targets)
    found = linear_cross_entropy(hidden, weight, targets)[0]
    return "exact" if (found - truth).abs() <= 2 * (own - truth).abs() + 1e-3 * truth else "silent"


def _log_prob(x: Tensor, y: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(1, y.clamp(min=0)[:, None])[:, 0]


def _other_index() -> str:
    hidden, weight, targets = operands()
    targets = targets.clamp(min=0)
    truth = F.cross_entropy(hidden.double() @ weight.double().T, targets, ignore_index=0)
    return same(linear_cross_entropy(hidden, weight, targets, ignore_index=0)[0], truth)


OPERATOR: dict[str, Callable[[], str]] = {
    "a mean": lambda: operated(F.cross_entropy),
    "a sum": lambda: operated(lambda x, y: F.cross_entropy(x, y, reduction="sum"), reduction="sum"),
    "a loss for each token": lambda: operated(lambda x, y: F.cross_entropy(x, y, reduction="none"), reduction="none"),
    "smoothed labels": lambda: operated(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.2), label_smoothing=0.2),
    "a softcap": lambda: operated(lambda x, y: F.cross_entropy(3 * torch.tanh(x / 3), y), softcap=3.0),
    "a scale": lambda: operated(lambda x, y: F.cross_entropy(0.3 * x, y), scale=0.3),
    "a z-loss": lambda: operated(
        lambda x, y: F.cross_entropy(x, y) + 0.1 * x.logsumexp(-1).square()[y != -100].mean(), z_loss=0.1
    ),
    "another ignored index": _other_index,
    "large logits": lambda: operated(F.cross_entropy, size=30.0),
    "chunks of eight rows": lambda: operated(F.cross_entropy, chunk_size=8),
    "a sum divided by no token": divided_by_no_token,
    "bfloat16": lambda: rounded(1.0),
    "bfloat16 and large logits": lambda: rounded(30.0),
    "log-probabilities": lambda: scored(_log_prob, "log_prob"),
    "log-sum-exps": lambda: scored(lambda x, y: x.logsumexp(-1), "lse"),
    "entropies": lambda: scored(lambda x, y: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1), "entropy"),
}


CASES = [
    *(Case("batches", name, lambda b=batch: of_batch(b)) for name, batch in BATCHES.items()),
    Case("batches", "documents packed into a row", packed),
    *(Case("the operator", name, run) for name, run in OPERATOR.items()),
]
