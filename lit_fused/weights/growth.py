"""Add rows to the tables of a vocabulary, for tokens that were added to the tokenizer.

Each new row is the mean of the old rows, in the embedding and in the output layer, as in transformers'
``resize_token_embeddings``, but without its noise, which would differ between ranks. Rows are never removed. A model
without weights gets larger shapes now, and the rows when it is materialised.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_fused.errors import UserError, explained
from lit_fused.weights.rules import SOURCE, FromRules, Index, named_tensors, places_of

ORIGIN = "_lit_fused_origin"  # the attribute of a pretrained model that has its Origin


@dataclass(frozen=True)
class Origin:
    """The folder or name on the hub that a pretrained model was loaded from, and how its vocabulary may grow."""

    path: str
    revision: str | None
    pad_to_multiple_of: int | None


def origin_of(model: nn.Module | None) -> Origin | None:
    """Return the origin of a model that this package's ``from_pretrained`` returned; None for any other model."""
    return None if model is None else vars(model).get(ORIGIN)


@torch.no_grad()
def grow_vocabulary(model: PreTrainedModel, entries: int | None, pad_to_multiple_of: int | None = None) -> int:
    """Grow the embedding and the output layer, tied or not, to at least ``entries`` rows, in place; return how many.

    The configuration changes too, also that of an exported model.

    Args:
        model: a model with weights, or one of this package's ``from_pretrained`` that has none yet.
        entries: number of vocabulary entries; None for the current number.
        pad_to_multiple_of: the number of rows becomes a multiple of it.

    Raises:
        UserError: ``entries`` is smaller than the vocabulary, or the model's tables cannot grow.
    """
    name, table = type(model).__name__, getattr(model.get_input_embeddings(), "weight", None)
    if not isinstance(table, Tensor) or table.ndim != 2:
        raise UserError(f"{name} has no single table of input embeddings, whose vocabulary could grow")
    before = len(table)
    entries = before if entries is None else entries
    multiple = pad_to_multiple_of or 1
    if entries < before:
        raise UserError(
            f"{name} has {before} entries in its vocabulary, and {entries} were asked for: rows that it has learned "
            "would go; give a vocab_size that is not smaller"
        )
    if multiple < 1:
        raise UserError(f"pad_to_multiple_of must be positive, got {multiple}")
    rows = -(-entries // multiple) * multiple
    if rows == before:
        return rows
    before_it = {n: (t.shape, t.dtype) for n, t in named_tensors(model)}
    what, advice = f"the vocabulary of {name} cannot grow to {rows}", f"choose a tokenizer of at most {before} entries"
    if table.is_meta:
        advice = f"load it with at_once=True, or {advice}"
    with explained(what, advice), torch.random.fork_rng(devices=[]):  # it may have several, or draw from its old rows
        model.resize_token_embeddings(rows, mean_resizing=False)  # transformers draws rows, replaced below
    for module in model.modules():  # an inner model may have copied it from the configuration
        if vars(module).get("vocab_size") == before:
            module.vocab_size = rows  # type: ignore[assignment]
    for changed, tensors, attribute, tensor in list(places_of(model)):
        tensors[attribute] = tensor.to(before_it[changed][1])  # transformers makes BART's bias float32
    grown = {n: (t, before_it[n][0]) for n, t in named_tensors(model) if t.shape != before_it[n][0]}
    axes = {n: _axis(old, tensor.shape) for n, (tensor, old) in grown.items()}
    for changed, axis in axes.items():
        if axis is None:
            raise UserError(f"the vocabulary of {name} cannot grow: {changed} becomes {tuple(grown[changed][0].shape)}")
    source: FromRules | None = vars(model).get(SOURCE)
    if source is not None and any(tensor.is_meta for tensor, _ in grown.values()):
        setattr(model, SOURCE, _WithMoreRows(source, {n: tensor.shape for n, (tensor, _) in grown.items()}))
        return rows
    for changed, (tensor, old) in grown.items():
        axis = axes[changed]
        assert axis is not None
        known, added = tensor.split([old[axis], tensor.shape[axis] - old[axis]], axis)
        added.copy_(_mean(known, axis))
    return rows


class _WithMoreRows(FromRules):
    """Appends rows to some tensors of another source; ``shapes`` has the new shape for each of their names."""

    def __init__(self, source: FromRules, shapes: dict[str, torch.Size]) -> None:
        self.name, self.tied, self.shapes = source.name, source.tied, source.shapes | shapes
        self._source = source

    def _read(self, name: str, index: Index) -> Tensor:
        shape = self._source.shapes[name]
        axis = _axis(shape, self.shapes[name])
        if axis is None:
            return self._source.read(name, index)
        rows = index[axis]
        positions = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        known = positions[positions < shape[axis]]  # positions are sorted: the old rows come first
        added = len(positions) - len(known)
        first = slice(rows.start, rows.start + len(known)) if isinstance(rows, slice) else known
        old = (*index[:axis], first, *index[axis + 1 :])
        if not added:
            return self._source.read(name, old)
        whole = self._source.read(name, tuple(slice(0, size) for size in shape))
        mean = _mean(whole, axis)[(*index[:axis], slice(None), *index[axis + 1 :])]
        more = mean.expand(*mean.shape[:axis], added, *mean.shape[axis + 1 :])
        return torch.cat([self._source.read(name, old).float(), more], axis)

    def close(self) -> None:
        self._source.close()


def _axis(old: torch.Size, new: torch.Size) -> int | None:
    """Return the one dimension in which two shapes differ; None if there is none, or several."""
    found = [axis for axis, (before, now) in enumerate(zip(old, new, strict=False)) if before != now]
    return found[0] if len(found) == 1 and len(old) == len(new) else None


def _mean(rows: Tensor, axis: int) -> Tensor:
    return rows.float().mean(axis, keepdim=True)
