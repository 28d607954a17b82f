"""Encode pairs of texts for encoder-decoders: a source, and the target that the decoder learns to say.

A pair is one stored document: the first wanted token is the border, at which
:class:`lit_fused.data.packing.PairRows` divides it again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lit_fused.data.conversations import unknown_form
from lit_fused.data.encoding import Encoded, LeftOut, RecordEncoding, context_and_answer
from lit_fused.errors import UserError
from lit_fused.models.special_tokens import one_of_each


@dataclass
class PairEncoding(RecordEncoding):
    """Documents are pairs of texts: the encoder reads the source, and the decoder learns to say the target.

    They become ``tokenizer(source)`` and ``tokenizer(text_target=target)``, with the tokenizer's own special tokens. A
    target ends with the end-of-text token also where the tokenizer does not append it, so that a model learns to stop.
    Special tokens that a text spells out are encoded as ordinary text. ``block_size`` holds for each of the two.

    Attributes:
        too_long: A pair whose source or target has more than ``block_size`` tokens is cut ("cut"; end tokens stay)
            or left out ("skip").
    """

    packings = ("pairs",)
    whole_sequences = True

    source_column: str = "source"
    target_column: str = "target"

    def training_texts(self, document: Mapping[str, Any]) -> list[str]:
        """Return the source and the target. UserError: it has them not."""
        names = self.source_column, self.target_column
        if missing := [name for name in names if name not in document]:
            options = "data.source_column and data.target_column"
            raise unknown_form(f"column {' and no '.join(missing)}", document, options)
        texts = [document[name] for name in names]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f"source and target must be texts; got {str(texts)[:80]}")
        return texts

    def prepare(self) -> None:
        eos = self.end_of_text("which ends every target")
        self._end = [] if eos in self.tokenizer(text_target="a")["input_ids"] else [eos]

    def encode(self, document: Mapping[str, Any]) -> Encoded:
        source, target = self.training_texts(document)
        if not source.strip() or not target.strip():
            raise LeftOut(f"the {'target' if source.strip() else 'source'} is empty")
        context, answer = self._tokens([], text=[source]), self._tokens(self._end, text_target=[target])
        if is_long := max(len(context), len(answer)) > self.block_size:
            if self.too_long == "skip":
                raise LeftOut(f"longer than data.block_size={self.block_size}")
            cut = {"truncation": True, "max_length": self.block_size}
            context = self._tokens([], text=[source], **cut)
            cut["max_length"] -= len(self._end)
            answer = self._tokens(self._end, text_target=[target], **cut)
        return context_and_answer(context, answer, (f"cut to {self.block_size} tokens",) * is_long)

    def _tokens(self, end: list[int], **options: Any) -> list[int]:
        (tokens,) = self.tokenize(split_special_tokens=True, **options)["input_ids"]
        return one_of_each([*tokens, *end], self.tokenizer)
