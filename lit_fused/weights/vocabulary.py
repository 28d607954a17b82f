"""More rows for the tables of a vocabulary: a tokenizer has been given tokens that its model does not know.

Each new row is the mean of the old ones, of the embedding and of the output layer: a token that the model knows nothing
of is then about as likely as any other, and no logit is pushed away from what it was. transformers'
``resize_token_embeddings`` does the same, with noise of 3e-5 standard deviations, which other ranks would draw
differently. Rows never go.

A model whose weights come late gets larger shapes now, and the rows when their turn comes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.weights.rules import named_tensors
from lit_fused.weights.shards import Index
from lit_fused.weights.sources import SOURCE, WeightSource

_ORIGIN = "_lit_fused_origin"


@dataclass(frozen=True)
class Origin:
    """What a pretrained model was loaded from: a folder or a name on the hub, and how its vocabulary may grow."""

    path: str
    revision: str | None
    pad_to_multiple_of: int | None


def remember_origin(
    model: PreTrainedModel, path: str, revision: str | None = None, pad_to_multiple_of: int | None = None
) -> None:
    setattr(model, _ORIGIN, Origin(path, revision, pad_to_multiple_of))


def origin_of(model: nn.Module | None) -> Origin | None:
    """Of a model that ``from_pretrained`` of this package returned; None for any other."""
    return None if model is None else vars(model).get(_ORIGIN)


@torch.no_grad()
def grow_vocabulary(model: PreTrainedModel, entries: int | None, pad_to_multiple_of: int | None = None) -> int:
    """Give the embedding and the output layer, tied or not, at least ``entries`` rows, in place; returns how many.

    The configuration follows, also that of an exported model.

    Args:
        model: with its weights, or from this package's ``from_pretrained`` and as yet without.
        entries: None for as many as there are.
        pad_to_multiple_of: the number of rows becomes a multiple of it.

    Raises:
        UserError: fewer than the model has, or the model's tables cannot grow.
    """
    name, table = type(model).__name__, getattr(model.get_input_embeddings(), "weight", None)
    if not isinstance(table, Tensor) or table.ndim != 2:
        raise UserError(f"{name} has no single table of input embeddings, whose vocabulary could grow")
    before = len(table)
    entries = before if entries is None else entries
    if entries < before:
        raise UserError(
            f"{name} has {before} entries in its vocabulary, and {entries} were asked for: rows that it has learned "
            "would go; give a vocab_size that is not smaller"
        )
    multiple = pad_to_multiple_of or 1
    if multiple < 1:
        raise UserError(f"pad_to_multiple_of must be positive, got {multiple}")
    rows = -(-entries // multiple) * multiple
    if rows == before:
        return rows
    shapes = {n: t.shape for n, t in named_tensors(model)}
    with torch.random.fork_rng(devices=[]):  # transformers draws the rows that are replaced here
        model.resize_token_embeddings(rows, mean_resizing=False)
    for module in model.modules():  # what an inner model has noted of its configuration
        if vars(module).get("vocab_size") == before:
            module.vocab_size = rows  # type: ignore[assignment]
    grown = {n: t for n, t in named_tensors(model) if t.shape != shapes[n]}
    for changed, tensor in grown.items():
        if tensor.shape[1:] != shapes[changed][1:]:
            raise UserError(f"the vocabulary of {name} cannot grow: {changed} becomes {tuple(tensor.shape)}")
    source: WeightSource | None = vars(model).get(SOURCE)
    if source is not None and any(tensor.is_meta for tensor in grown.values()):
        setattr(model, SOURCE, _WithMoreRows(source, {n: t.shape for n, t in grown.items()}))
        return rows
    for changed, tensor in grown.items():
        old = shapes[changed][0]
        tensor[old:] = _mean(tensor[:old])
    return rows


class _WithMoreRows(WeightSource):
    """Another source, some of whose tensors have rows appended.

    Args:
        source: of the tensors without them.
        shapes: of those that grow, by each of their names.
    """

    def __init__(self, source: WeightSource, shapes: dict[str, torch.Size]) -> None:
        self.name, self.tied, self.initial = source.name, source.tied, source.initial
        self.shapes = source.shapes | shapes
        self._source = source
        self._means: dict[str, Tensor] = {}  # (1, D) float32, of tensors whose rows have been asked for

    def _read(self, name: str, index: Index) -> Tensor:
        if self.shapes[name] == self._source.shapes[name]:
            return self._source.read(name, index)
        old = self._source.shapes[name][0]
        rows, rest = index[0], index[1:]
        positions = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        known = positions[positions < old]  # they come first: positions rise
        added = len(positions) - len(known)
        if added and name not in self._means:
            whole = tuple(slice(0, size) for size in self._source.shapes[name])
            self._means[name] = _mean(self._source.read(name, whole))
        first = slice(rows.start, rows.start + len(known)) if isinstance(rows, slice) else known
        read = self._source.read(name, (first, *rest))
        if not added:
            return read
        mean = self._means[name][(slice(None), *rest)]
        return torch.cat([read.float(), mean.expand(added, *mean.shape[1:])])

    def close(self) -> None:
        self._source.close()
        self._means.clear()


def _mean(rows: Tensor) -> Tensor:
    """(1, ...) float32."""
    return rows.float().mean(0, keepdim=True)
