"""lm-evaluation-harness's model ``lit_fused``: its own model of transformers, with log-likelihoods without logits.

lm_eval loads the model, tokenizes, and generates as with ``hf``. This module registers the model when it is imported.
"""

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from accelerate.utils import find_executable_batch_size
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from lit_fused.evaluation.text_scores import TextScorer

_log = logging.getLogger(__name__)
_Base: Any = HFLM  # Its decorator tells type checkers that it is any model.


@register_model("lit_fused")
class FusedHFLM(_Base):
    """A causal language model of transformers, with the arguments of lm_eval's ``hf``.

    Log-probabilities are float32 whatever ``softmax_dtype`` says. With ``batch_size="auto"`` batches begin with
    ``max_batch_size`` rows, and become smaller until they fit. Encoder-decoders are refused.
    """

    @cached_property
    def _scorer(self) -> TextScorer:
        return TextScorer(self.model)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each request's text, in windows of the model's length."""
        windows = [self._windows_of(*request.args) for request in requests]
        flat = [(None, *window) for of_request in windows for window in of_request]
        found = iter(self._loglikelihood_tokens(flat, disable_tqdm))
        sums = [sum(next(found)[0] for _ in of_request) for of_request in windows]
        for request, log_likelihood in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, log_likelihood)
        return sums

    def _windows_of(self, text: str) -> list[tuple[list[int], list[int]]]:
        windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
        return [make_disjoint_window(window) for window in windows]

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each request's continuation, and whether greedy decoding would write it."""
        most, pairs = self.max_length + 1, []
        for _, context, continuation in requests:
            assert 0 < len(continuation) < most
            tokens = [*context, *continuation][-most:]
            pairs.append((tokens[: -len(continuation)], tokens[-len(continuation) :]))
        cut = sum(len(context) + len(continuation) > most for _, context, continuation in requests)
        if cut:
            _log.warning("%d of %d requests lose their beginning: the model reads %d tokens", cut, len(pairs), most - 1)

        def run(batch_size: int) -> list[tuple[float, bool]]:
            answers: dict[int, tuple[float, bool]] = {}
            hide = disable_tqdm or self.rank != 0
            with self._precision(), tqdm(total=len(pairs), disable=hide, desc="log-likelihoods without logits") as bar:
                for index, found in self._scorer.scores(pairs, batch_size):
                    answers[index] = answer = found.log_likelihood, found.is_greedy
                    if requests[index][0] is not None:  # a window of a text has none
                        self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
                    bar.update()
            return [answers[index] for index in range(len(pairs))]

        if override_bs is None and self.batch_size == "auto":
            return find_executable_batch_size(run, self.max_batch_size)()
        return run(override_bs or int(self.batch_size))

    def _precision(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)


def main() -> None:
    """Run lm_eval's command, which then knows ``--model lit_fused``."""
    cli_evaluate()
