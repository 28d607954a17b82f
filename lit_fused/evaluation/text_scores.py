"""``lit_fused.score(model, tokenizer, texts)``: log-likelihoods of texts, without logits.

Rows are padded at their ends, which the positions of a causal model before do not see. The output layer gets the hidden
states of the scored tokens alone, and of equal rows, as those of the answers of one token to a question, once.

N scored tokens of a batch, D hidden.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lit_fused.errors import UserError
from lit_fused.heads.model_state import evaluation_mode
from lit_fused.losses import LinearCrossEntropyLoss
from lit_fused.losses.fused import scores_of_targets
from lit_fused.models.language_model import LanguageModel
from lit_fused.ops.label_checks import IGNORE_INDEX


class TextScore(NamedTuple):
    """The score of a text by a model.

    Attributes:
        log_likelihood: the sum of ``log_probs``, in nats.
        num_tokens: the number of scored tokens.
        is_greedy: whether each scored token is the most probable one, so that greedy decoding would write it.
        log_probs: (num_tokens,) the log-probability of each scored token, on the CPU; float32, float64 of a float64
            model.
    """

    log_likelihood: float
    num_tokens: int
    is_greedy: bool
    log_probs: Tensor


def score(
    model: nn.Module,
    tokenizer: Any,
    texts: str | Sequence[Any],
    contexts: str | Sequence[Any] | None = None,
    *,
    batch_size: int = 8,
) -> list[TextScore]:
    """Return the log-likelihood of each text, without logits, on the device where the model is.

    Without contexts, a text's first token is predicted by nothing and not counted: it is the start token if the
    tokenizer puts one there.

    Args:
        model: a causal language model, as :class:`lit_fused.FusedCausalLMModule` takes it. It is evaluated, and left
            in the mode in which it was.
        tokenizer: of transformers; or None: texts and contexts are lists of token ids.
        texts: strings, or one.
        contexts: what stands before each text, and is not scored itself. Text and context are tokenized together.
        batch_size: rows of a forward pass. Rows of similar lengths run together.

    Raises:
        UserError: a model whose logits are none that a fused loss reproduces. The first batch is compared with the
            model's own logits.
    """

    texts = [texts] if isinstance(texts, str) else texts
    contexts = [contexts] if isinstance(contexts, str) else contexts

    def ids_of(text: Any) -> list[int]:
        return list(text if tokenizer is None else tokenizer(text)["input_ids"])

    if contexts is None:
        pairs = [(ids[:1], ids[1:]) for ids in map(ids_of, texts)]
    else:
        together = zip(contexts, texts, strict=True)
        pairs = [_divided(ids_of(context), ids_of(context + text)) for context, text in together]
    found = dict(TextScorer(model).scores(pairs, batch_size))
    return [found[index] for index in range(len(pairs))]


def _divided(context: list[int], whole: list[int]) -> tuple[list[int], list[int]]:
    """Divide tokens behind those that they share with the context: a tokenizer may end the context with a special
    token, or join its last characters with the text's first."""
    pairs = enumerate(zip(context, whole, strict=False))
    shared = next((index for index, (one, other) in pairs if one != other), min(len(context), len(whole)))
    return whole[: max(shared, 1)], whole[max(shared, 1) :]


class TextScorer:
    """A model that scores pairs of token ids. It is prepared once, and its first batch compared with its logits."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.is_checked = model, False
        self.language = LanguageModel(model, LinearCrossEntropyLoss())
        self.language.own_loss_differs = True  # Logits alone are compared.

    @torch.no_grad()
    def scores(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], batch_size: int
    ) -> Iterator[tuple[int, TextScore]]:
        """Yield the index and the score of each pair, a context of at least one token and what comes after it, the
        longest rows first, so that memory that does not suffice shows at once."""
        rows: dict[tuple[int, ...], list[int]] = {}  # the model's inputs, and the pairs that are scored with each
        for index, (context, text) in enumerate(pairs):
            if text:
                rows.setdefault((*context, *text[:-1]), []).append(index)
            else:
                yield index, TextScore(0.0, 0, True, torch.empty(0))
        longest_first = sorted(rows, key=len, reverse=True)
        device = next(self.model.parameters()).device
        with evaluation_mode(self.model), _in_words_of_scores():
            for start in range(0, len(longest_first), batch_size):
                batch = [torch.tensor(row) for row in longest_first[start : start + batch_size]]
                inputs = {"input_ids": pad_sequence(batch, batch_first=True).to(device)}
                if not self.is_checked:
                    self.language.prepare(device)
                    labels = pad_sequence(batch, batch_first=True, padding_value=IGNORE_INDEX).to(device)
                    self.language.spot_check(inputs | {"labels": labels})
                    self.is_checked = True
                indices = [rows[row] for row in longest_first[start : start + batch_size]]
                places = [(row, len(batch[row]), index) for row, of_row in enumerate(indices) for index in of_row]
                scored = [(row, end, index, pairs[index][1]) for row, end, index in places]
                yield from _scores_of_batch(self.language, inputs, scored)


def _scores_of_batch(
    language: LanguageModel, inputs: dict[str, Tensor], scored: list[tuple[int, int, int, Sequence[int]]]
) -> list[tuple[int, TextScore]]:
    """Return indices and scores of texts, each with its row, the row's length, its index and its tokens."""
    hidden_states, head, _ = language.hidden_states(inputs)
    lengths = [len(text) for *_, text in scored]
    rows_N = torch.tensor([row for row, *_ in scored]).repeat_interleave(torch.tensor(lengths))
    positions_N = torch.cat([torch.arange(end - len(text), end) for _, end, _, text in scored])
    targets_N = torch.cat([torch.tensor(text) for *_, text in scored])
    rows_N, positions_N, targets_N = torch.stack([rows_N, positions_N, targets_N]).to(hidden_states.device)
    found = scores_of_targets(hidden_states[rows_N, positions_N], head, targets_N)
    log_probs = found.log_prob.cpu().split(lengths)
    is_greedy = (found.top1 == targets_N).cpu().split(lengths)
    return [
        (index, TextScore(own.double().sum().item(), len(own), bool(greedy.all()), own))
        for (_, _, index, _), own, greedy in zip(scored, log_probs, is_greedy, strict=True)
    ]


@contextmanager
def _in_words_of_scores() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(re.sub(r"choose loss=(standard|model)", "score it with its logits", str(error))) from error
