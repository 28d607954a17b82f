"""Cases of tools/audit.py: other objectives and kinds of models, over two ragged batches that are one step."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from audit import Case, same
from audit_loops import loader, trainer, windows
from audit_models import V, gradients, llama
from preference_cases import OPTIONS, batches_of, module_for, perturbed, plain
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

import lit_fused

Batch = dict[str, Any]
RATE = 0.1
sgd: Any = partial(torch.optim.SGD, lr=RATE)


def stepped(module: Any, batches: list[Batch], loss: Callable[[nn.Module], Tensor]) -> str:
    """Train a module with one step over all batches, and compare it with a step of the plain model's ``loss``."""
    model = copy.deepcopy(module.backbone)
    loss(model.train()).backward()
    trainer(max_epochs=1, accumulate_grad_batches=len(batches)).fit(module, loader(batches))
    moved = [(p - q).flatten() for p, q in zip(module.backbone.parameters(), model.parameters(), strict=True)]
    return same(torch.cat(moved), -RATE * gradients(model), 1e-3)


def preference(name: str) -> str:
    """Pairs: three and two of them; the mean is over all five, and of KTO's examples over all seven."""
    kind = "none" if name in ("cpo", "simpo", "orpo") else "model"
    batches = batches_of(name, kind)
    reference = None if kind == "none" else perturbed("qwen3", torch.float32)
    number = [len(batch["labels"]) for batch in batches]

    def loss(model: nn.Module) -> Tensor:
        means = [plain(name, model, reference, batch)[0] for batch in batches]
        return torch.stack([n * mean for n, mean in zip(number, means, strict=True)]).sum() / sum(number)

    return stepped(module_for(name, kind), batches, loss)


def targets_of(batch: Batch) -> tuple[Tensor, Tensor]:
    targets = batch["labels"][:, 1:].flatten()
    return targets, targets != -100


def distillation(divergence: str, **options: Any) -> str:
    """Tokens: as many labels as each batch has."""
    batches = windows(2)
    teacher = llama(initializer_range=0.5).eval()
    weights: dict[str, Any] = {"divergence_weight": 0.7, "cross_entropy_weight": 0.3} | options
    module = lit_fused.FusedDistillationModule(
        llama(), lit_fused.DistillationLoss(divergence, **weights), sgd, teacher=teacher
    )
    beta, heat = options.get("beta", 0.5), options.get("temperature", 1.0)

    def of_batch(model: Any, batch: Batch) -> Tensor:
        targets, valid = targets_of(batch)
        student = model(batch["input_ids"]).logits[:, :-1].flatten(0, 1)[valid]
        with torch.no_grad():
            taught = (teacher(batch["input_ids"]).logits[:, :-1].flatten(0, 1)[valid] / heat).log_softmax(-1)
        own = (student / heat).log_softmax(-1)
        both = torch.logaddexp(own + torch.tensor(1 - beta).log(), taught + torch.tensor(beta).log())
        found = {
            "forward_kl": lambda: taught.exp() * (taught - own),
            "reverse_kl": lambda: own.exp() * (own - taught),
            "jsd": lambda: beta * taught.exp() * (taught - both) + (1 - beta) * own.exp() * (own - both),
        }[divergence]().sum()
        return 0.7 * found + 0.3 * F.cross_entropy(student, targets[valid], reduction="sum")

    number = sum(int(targets_of(batch)[1].sum()) for batch in batches)
    return stepped(module, batches, lambda model: torch.stack([of_batch(model, b) for b in batches]).sum() / number)


def masked() -> str:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    batches = windows(2)
    for batch in batches:  # Chosen tokens become the mask token, so that labels are not their own inputs.
        batch["input_ids"] = batch["input_ids"].masked_fill(batch["labels"] != -100, 2)
    module = lit_fused.FusedMaskedLMModule(BertForMaskedLM(config), optimizer=sgd)
    return stepped(module, batches, lambda model: model(**together(batches)).loss)


def together(batches: list[Batch]) -> Batch:
    return {name: torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels")}


def encoder_decoder() -> str:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "decoder_start_token_id": 0,
        "dropout_rate": 0.0,
        "vocab_size": V,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
    }
    config = T5Config(**sizes)
    batches = windows(2)
    module = lit_fused.FusedSeq2SeqLMModule(T5ForConditionalGeneration(config), optimizer=sgd)
    return stepped(module, batches, lambda model: model(**together(batches)).loss)


def recommender() -> str:
    torch.manual_seed(0)
    module = lit_fused.FusedRecommenderModule(lit_fused.SASRec(num_items=V, hidden_size=32, dropout=0.0), optimizer=sgd)
    batches = [b | {"labels": b["labels"].masked_fill(b["labels"] == -100, 0)} for b in windows(2)]

    def loss(model: Any) -> Tensor:
        batch = together(batches)
        table = model.get_output_embeddings().weight
        logits = model(batch["input_ids"]) @ table.T
        logits = logits.index_fill(-1, torch.tensor([0]), -torch.inf)  # padding, which cannot be predicted
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=0)

    return stepped(module, batches, loss)


CASES = [
    *(Case("objectives", f"{name}, over two batches of pairs", lambda n=name: preference(n)) for name in OPTIONS),
    Case("objectives", "forward KL from a teacher", lambda: distillation("forward_kl")),
    Case("objectives", "reverse KL from a teacher", lambda: distillation("reverse_kl")),
    Case("objectives", "Jensen-Shannon, temperature 2", lambda: distillation("jsd", beta=0.3, temperature=2.0)),
    Case("objectives", "masked tokens", masked),
    Case("objectives", "an encoder-decoder", encoder_decoder),
    Case("objectives", "a recommender", recommender),
]
