"""Read weights from the safetensors files of a Hugging Face checkpoint, one tensor at a time.

transformers renames, prefixes, splits and merges stored tensors by tables of its own. These first run on tensors of the
meta device, which shows before anything is read what each tensor of the model is made of, and what is missing,
superfluous or of another shape. Of a tensor that is stored unchanged only the needed part is read. One that is made of
several is made whole; the other results of its conversion stay in memory until another conversion is needed.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile, is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.utils.hub import cached_file

from lit_fused.errors import UserError, check_not_packed, explained
from lit_fused.weights.rules import FromRules, Index

_ONE_FILE, _INDEX, _PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


def safetensors_files(name: str | Path, revision: str | None = None) -> list[Path]:
    """Return the files of a checkpoint, downloaded if ``name`` is a model on the hub; UserError if it has none."""

    def found(file: str) -> Path | None:
        try:
            path = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
        except OSError as error:
            raise UserError(f"{file} of {name} cannot be fetched: {str(error).strip().splitlines()[0]}") from error
        return None if path is None else Path(path)

    one = found(_ONE_FILE)
    if one is not None:
        return [one]
    index = found(_INDEX)
    if index is None:
        hint = (
            "its weights are pickled (pytorch_model.bin): load it with at_once=True, or convert it once with "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            if any(found(file) for file in (_PICKLED, f"{_PICKLED}.index.json"))
            else "is it a model's folder?"
        )
        raise UserError(f"{name} has neither {_ONE_FILE} nor {_INDEX}; {hint}")
    files = []
    for shard in sorted(set(json.loads(index.read_text())["weight_map"].values())):
        file = found(shard)
        if file is None:
            raise UserError(f"{name} is incomplete: its index names {shard}, which is not there; download it again")
        files.append(file)
    return files


def check_pickled(folder: Path) -> None:
    """Raise UserError if a file of pickled weights in a model's folder would unpack to more than its size."""
    for file in folder.glob("*.bin"):
        with explained(f"{file} is not opened", "ask for the weights as safetensors"):
            if is_zipfile(file):
                with ZipFile(file) as archive:
                    check_not_packed(archive)


@dataclass
class _Conversion:
    """Stored tensors that become one or several tensors of the model."""

    first: str  # the name under which transformers stores the conversion
    converter: WeightConverter  # transformers' own, still without tensors
    # (name after renaming, stored name, the converter's pattern for it), in transformers' order
    stored: list[tuple[str, str, str]] = field(default_factory=list)


class FromCheckpoint(FromRules):
    """Reads weights from the files of a checkpoint named ``where``; buffers that are never stored come from the model's
    rules. UserError if the weights do not fit the model."""

    def __init__(self, skeleton: PreTrainedModel, tied: Mapping[str, str], files: list[Path], where: str) -> None:
        super().__init__(skeleton, tied, seed=0)
        self._where = where
        self._file_of: dict[str, Path] = {}  # stored name -> file
        self._plan: dict[str, str | _Conversion] = {}  # name -> its stored name, or the conversion that makes it
        self._converted: tuple[_Conversion, dict[str, Tensor]] | None = None
        self._expected = skeleton.state_dict()
        self._check(self._plan_for(self._stored_shapes(files)))
        self._store_tied_once()

    def _stored_shapes(self, files: list[Path]) -> dict[str, Tensor]:
        """Return a tensor without memory, of the stored shape, for each stored name."""
        stored: dict[str, Tensor] = {}
        for file in files:
            try:
                with safe_open(file, framework="pt") as opened:
                    for key in opened.keys():  # noqa: SIM118 (opened is no mapping)
                        stored[key] = torch.empty(opened.get_slice(key).get_shape(), device="meta")
                        self._file_of[key] = file
            except (SafetensorError, OSError) as error:
                raise UserError(f"{file} is no safetensors file, or a damaged one ({error}); download again") from error
        return stored

    def _plan_for(self, stored: dict[str, Tensor]) -> dict[str, torch.Size]:
        """Plan how to make each tensor; return the shapes of all results, also of those that are not in the model."""
        transforms = get_model_conversion_mapping(self._skeleton)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        prefix = self._skeleton.base_model_prefix
        conversions: dict[str, _Conversion] = {}
        found: dict[str, torch.Size] = {}
        for key in sorted(stored, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, self._expected)
            if name not in self._expected and key in self._expected:
                name, pattern = key, None
            if pattern is None:
                self._plan[name], found[name] = key, stored[key].shape
            else:
                conversion = conversions.setdefault(name, _Conversion(name, by_pattern[pattern]))
                conversion.stored.append((name, key, pattern))
        for conversion in conversions.values():
            for name, tensor in self._convert(conversion, stored).items():
                self._plan[name], found[name] = conversion, tensor.shape
        self.conversions_used = [t for t in transforms if t.was_used()]
        return found

    def _convert(self, conversion: _Conversion, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        converter = deepcopy(conversion.converter)
        for name, key, pattern in conversion.stored:
            converter.add_tensor(name, key, pattern, stored[key])  # type: ignore[arg-type]
        what = f"{conversion.first} cannot be made of what {self._where} has stored for it"
        with explained(what, "load it with at_once=True"):
            made = converter.convert(conversion.first, model=self._skeleton, config=self._skeleton.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _names_of(self, source: str) -> list[str]:
        """Return all names of the weight that others are tied to as ``source``."""
        return [source, *(target for target, other in self.tied.items() if other == source)]

    def _check(self, found: dict[str, torch.Size]) -> None:
        missing = self._expected.keys() - found.keys()
        for names in map(self._names_of, self.tied.values()):
            if found.keys() & names:
                missing -= set(names)
        report: Any = SimpleNamespace(missing_keys=missing, unexpected_keys=found.keys() - self._expected.keys())
        self._skeleton._adjust_missing_and_unexpected_keys(report)  # transformers tolerates these for this model
        shapes = {n: (found[n], self._expected[n].shape) for n in found.keys() & self._expected.keys()}
        faults = [f"{n} is missing" for n in sorted(report.missing_keys)]
        faults += [f"{n} has no place in the model" for n in sorted(report.unexpected_keys)]
        faults += [f"{n} is {tuple(a)}, not {tuple(b)}" for n, (a, b) in sorted(shapes.items()) if a != b]
        if faults:
            shown = "; ".join(faults[:3]) + ("; ..." if len(faults) > 3 else "")
            raise UserError(
                f"the weights of {self._where} do not fit {self.name}: {len(faults)} of {len(self._expected)} differ "
                f"({shown}); is it a checkpoint of this architecture and with an output layer?"
            )

    def _store_tied_once(self) -> None:
        """Read each tied weight from one stored name. Weights stored under several of its names must be equal."""
        for source in set(self.tied.values()):
            names = self._names_of(source)
            stored = [name for name in names if name in self._plan]
            for other in stored[1:]:
                index = tuple(slice(0, size) for size in self.shapes[other])
                if not torch.equal(self._read(stored[0], index), self._read(other, index)):
                    raise UserError(
                        f"{self._where} has different weights for {stored[0]} and {other}, but its configuration ties "
                        "them; set tie_word_embeddings to what is true in its config.json, or load it with at_once=True"
                    )
            if stored:  # if not, it is a buffer, or transformers tolerates that it is missing
                self.tied.update(dict.fromkeys(names, stored[0]))

    def _read(self, name: str, index: Index) -> Tensor:
        plan = self._plan.get(name)
        if plan is None:
            return super()._read(name, index)
        if isinstance(plan, str):
            return self._stored(plan, index)
        if self._converted is None or self._converted[0] is not plan:
            self._converted = None  # free the memory before the next conversion
            dtype = self._expected[plan.first].dtype
            stored = {key: self._stored(key).to(dtype) for _, key, _ in plan.stored}
            self._converted = plan, self._convert(plan, stored)
        return self._converted[1][name][index]

    def _stored(self, key: str, index: Index | None = None) -> Tensor:
        # The file is opened for each tensor, because its pages leave memory when it is closed.
        with safe_open(self._file_of[key], framework="pt") as opened:
            if not index or any(isinstance(i, slice) and i.start == i.stop for i in index):
                return opened.get_tensor(key)[index or ...]  # a mapping of the file: an empty part reads nothing
            part = opened.get_slice(key)[tuple(i if isinstance(i, slice) else slice(None) for i in index)]
        return part[tuple(slice(None) if isinstance(i, slice) else i for i in index)]

    def close(self) -> None:
        super().close()
        self._converted = None
