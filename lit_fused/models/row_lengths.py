"""Say in a sentence that rows are longer than a model has positions for. A look-up beyond the end of a table ends the
process on a GPU, so there it is found before it runs, in the first pass of each new greatest length."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from lit_fused.errors import UserError

_PARTS = {"input_ids": "encoder", "decoder_input_ids": "decoder", "labels": "decoder"}
_PADDING = 8  # more positions than a table may have for padding, as RoBERTa's has


def positions(model: PreTrainedModel, part: str = "decoder") -> int:
    """Return how many tokens the configuration has positions for, in the decoder or the encoder if there are two."""
    config = model.config.get_text_config()
    named = (f"max_{part}_position_embeddings", "max_target_positions", "max_position_embeddings", "max_seq_len")
    rooms = [getattr(config, name, None) for name in named]  # XLNet's is -1
    return next((room for room in rooms if isinstance(room, int) and room > 0), sys.maxsize)


class RowLengths:
    """Watches the forward passes of rows about as long as a model's positions, or longer."""

    def __init__(self) -> None:
        self._longest: dict[str, int] = {}  # rows that a pass was seen to take, for each input

    @contextmanager
    def watched(self, language: Any, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Raise UserError in place of the error of a language model that has no positions for its longest rows."""
        model: PreTrainedModel | None = language.transformers_model
        lengths = {name: inputs[name].shape[-1] for name in _PARTS if isinstance(inputs.get(name), Tensor)}
        rooms = {} if model is None else {name: positions(model, _PARTS[name]) for name in lengths}
        name = max(rooms, key=lambda name: lengths[name] - rooms[name], default="")
        if model is None or not name or lengths[name] <= max(rooms[name] - _PADDING, self._longest.get(name, 0)):
            yield
            return
        look_ups = _LookUps(model)
        is_compiled = language.is_compiled or language.packing == "blocks"  # and would be compiled again for a mode
        try:
            with nullcontext() if is_compiled else look_ups:
                yield
        except (IndexError, RuntimeError) as error:
            excess = look_ups.excess or lengths[name] - rooms[name]
            if excess <= 0 or isinstance(error, torch.OutOfMemoryError):
                raise
            raise UserError(
                f"{name} has rows of {lengths[name]} tokens, and {type(model).__name__} positions for "
                f"{lengths[name] - excess} ({str(error).partition(chr(10))[0]}); shorten the rows where the data are "
                "encoded, or choose a model with more positions"
            ) from error
        if look_ups.have_run:
            self._longest[name] = lengths[name]


class _LookUps(TorchFunctionMode):
    """Raises IndexError before a look-up beyond the end of a table, except of tokens, and counts what is missing."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._tokens: Any = model.get_input_embeddings()
        self.have_run, self.excess = False, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.have_run = True
        index: Any = None
        size = 0
        if func is F.embedding and args[1] is not getattr(self._tokens, "weight", None):
            index, size = args[0], len(args[1])
        elif func in (torch.gather, Tensor.gather):
            table, dim, index = (*args, *(kwargs or {}).values())[:3]
            size = table.shape[dim]
        known = isinstance(index, Tensor) and not index.is_meta and not isinstance(index, FakeTensor)
        if known and index.numel():
            self.excess = max(int(index.max()) - size + 1, 0)
            if self.excess:
                raise IndexError(f"entry {index.max()} of a table of {size}")
        return func(*args, **kwargs or {})
