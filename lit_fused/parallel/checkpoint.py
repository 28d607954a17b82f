"""Checkpoints: one file where a rank has the whole model, otherwise a folder into which every rank writes its part.

    last.ckpt                       Lightning's dict, by torch.save; states of optimisers by the names of parameters
    last.ckpt/shard-*.safetensors   tensors by name: state_dict.NAME, optimizer_0.state.NAME.exp_avg
    last.ckpt/meta.pt               everything else of that dict

If "state_dict" is an average, the weights that are trained are beside it, as those of Lightning's ``WeightAveraging``.

Any strategy on any number of devices resumes from either. Reading one runs no code: tensors of a folder are in
safetensors, and everything else is read with ``weights_only=True``. Either appears whole or not at all. In a fit it is
written by a thread while training goes on (:mod:`~lit_fused.parallel.snapshot`); the next save and the end wait for it.
It appears after Lightning has given the metrics of its step to the loggers, so that a kill between the two loses none.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lit_fused.atomic import (
    REST,
    newest_of,
    partial_of,
    put_in_place,
    remove,
    removed_on_failure,
    whole_checkpoint,
    written_whole,
)
from lit_fused.errors import UserError
from lit_fused.parallel.collectives import objects_of_ranks
from lit_fused.parallel.snapshot import MetricsLostError, Snapshots

_OPTIONS = "lit_fused_optimizer_options"  # in meta.pt: what states of optimisers have beside tensors, one dict each
WEIGHTS_BESIDE_AVERAGE = "current_model_state"
_WEIGHTS, _BESIDE = "state_dict.", f"{WEIGHTS_BESIDE_AVERAGE}."
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_WHOLE = StateDictOptions(full_state_dict=True)


# --- states of optimisers by the names of parameters -----------------------------------------------------------------


def names_of_groups(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each of the optimiser's groups."""
    names = {id(p): name for name, p in module.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def with_names(state: Mapping[str, Any], groups: list[list[str]]) -> dict[str, Any]:
    """Return ``Optimizer.state_dict()`` with names in place of numbers, which torch counts group by group."""
    names = [name for group in groups for name in group]
    settings = [{**group, "params": own} for group, own in zip(state["param_groups"], groups, strict=True)]
    return {"state": {names[number]: value for number, value in state["state"].items()}, "param_groups": settings}


def in_groups(state: Mapping[str, Any], groups: list[list[str]]) -> dict[str, Any]:
    """Return a state with names in the groups and in the order of an optimiser, by which its ``load_state_dict`` finds
    them. Raises UserError if it lacks a parameter."""
    theirs = {name: group for group in state["param_groups"] for name in group["params"]}
    names = [name for group in groups for name in group]
    if missing := [name for name in names if name not in theirs]:
        raise UserError(
            f"the checkpoint's optimiser did not train {missing[0]} (and {len(missing) - 1} more of {len(names)}); "
            "freeze the same parameters as in the run that wrote it"
        )
    own = {name: state["state"][name] for name in names if name in state["state"]}
    return {"state": own, "param_groups": [{**theirs[group[0]], "params": group} for group in groups if group]}


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat state, ``{"state.NAME.exp_avg": ..., "param_groups.NAME.lr": ...}``, as one with names."""
    found: dict[str, dict[str, Any]] = {"state": defaultdict(dict), "param_groups": defaultdict(dict)}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        name, _, entry = rest.rpartition(".")
        found[kind][name][entry] = value
    groups = [{**settings, "params": [name]} for name, settings in found["param_groups"].items()]
    return {"state": dict(found["state"]), "param_groups": groups}


# --- reading, in one process -----------------------------------------------------------------------------------------


def read_checkpoint(path: str | Path, *, weights_only: bool | None = None, optimizers: bool = True) -> dict[str, Any]:
    """Return the content of a file or folder as Lightning's dict, with whole tensors in CPU memory.

    Args:
        path: local. UserError if there is no whole checkpoint.
        weights_only: as of ``torch.load``; False trusts the file.
        optimizers: False leaves their states out, most of a folder's data.
    """
    place, options = whole_checkpoint(path), {"map_location": "cpu", "weights_only": weights_only is not False}
    if place.is_file():
        return torch.load(place, mmap=True, **options)
    checkpoint = torch.load(place / REST, **options)
    reader = HuggingFaceStorageReader(str(place))
    tensors: dict[str, Tensor] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if optimizers or key.startswith(_WEIGHTS)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # It is disabled on purpose.
        load(tensors, storage_reader=reader, no_dist=True)
    states = checkpoint.pop(_OPTIONS, None)
    checkpoint["state_dict"] = _below(_WEIGHTS, tensors)
    checkpoint[WEIGHTS_BESIDE_AVERAGE] = _below(_BESIDE, tensors)
    if optimizers and states is not None:
        found = ({**options, **_below(f"optimizer_{index}.", tensors)} for index, options in enumerate(states))
        checkpoint["optimizer_states"] = [_nested(state) for state in found]
    return checkpoint


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return a checkpoint's weights by name, whole, in CPU memory: their average if the run had one
    (:class:`~lit_fused.callbacks.WeightAverage`)."""
    return read_checkpoint(path, optimizers=False)["state_dict"]


def read_rest(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint without a folder's tensors; those of a file stay on the disk until they are used."""
    place = whole_checkpoint(path)
    return torch.load(place / REST if place.is_dir() else place, map_location="cpu", mmap=True, weights_only=True)


def shapes_of(state_dict: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state_dict.items() if isinstance(value, Tensor)}


def check_same_model(theirs: Mapping[str, tuple[int, ...]], ours: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UserError unless a checkpoint's weights have the names and the shapes of the model's."""
    if odd := sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name)):
        there, here = (shapes.get(odd[0], "missing") for shapes in (theirs, ours))
        raise UserError(
            f"the checkpoint is of another model: {len(odd)} weights differ ({odd[0]}: {there} there, {here} here); "
            "use the model configuration that it was trained with"
        )


def check_place_for_average(strategy: Strategy) -> None:
    """Raise UserError if a strategy's checkpoints hold one set of weights alone."""
    if isinstance(strategy, ModelParallelStrategy) and not isinstance(strategy, FolderCheckpoints):
        raise UserError("Lightning's ModelParallelStrategy saves no average; choose lit_fused.parallel.FSDP2Strategy()")


def _resumable(states: list[Any] | None) -> list[Any]:
    if states is None:
        raise UserError(
            "the checkpoint has weights alone (save_weights_only), from which training cannot go on as it was; give "
            "another one, or start a new run from these weights"
        )
    return states


@contextmanager
def _own_error() -> Iterator[None]:
    """Raise the error itself where torch has the errors of all ranks in one that is no ``Exception``."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from error


def _below(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _above(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + key: value for key, value in values.items()}


# --- writing ---------------------------------------------------------------------------------------------------------


class CheckpointFiles(TorchCheckpointIO):
    """Lightning's plugin, which writes local files whole and in the background of a fit, and reads folders as well."""

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        self.snapshots = Snapshots()
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        self.wait()  # One copy in CPU memory is enough.
        copy, target = self.snapshots.take(checkpoint, self.trainer), Path(path)

        def write() -> None:
            self.snapshots.wait()
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(MetricsLostError), written_whole(target) as partial:
                torch.save(copy, partial)
                self.snapshots.wait_for_loggers()

        self.run(write)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self.wait()
        if "://" in str(path):
            return super().load_checkpoint(path, map_location, weights_only)
        return read_checkpoint(path, weights_only=weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        self.run(lambda: super(CheckpointFiles, self).remove_checkpoint(path))  # once what replaces it is whole

    def teardown(self) -> None:
        self.wait()
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = None

    def run(self, job: Callable[[], None]) -> None:
        """Run a job in the background of a fit, after those before it; at once where no fit runs."""
        if self.trainer.state.fn != TrainerFn.FITTING or self.trainer.state.status != TrainerStatus.RUNNING:
            self.snapshots.are_logged.set()
            self.wait()
            job()
            return
        self._thread = self._thread or ThreadPoolExecutor(1, "checkpoint")
        self._jobs.append(self._thread.submit(job))

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs)

    def wait(self) -> None:
        """Wait until everything is written, but for a state whose metrics an error has lost: the one before stays, and
        a run that goes on from it logs them. Raises the error of a job that failed."""
        self.snapshots.end_wait(failed=self.trainer.state.status == TrainerStatus.INTERRUPTED)
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()


def prepare_checkpoints(trainer: L.Trainer) -> None:
    """Put :class:`CheckpointFiles` in place of Lightning's plugin, if the user has chosen no other."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        files = CheckpointFiles(trainer)
        trainer.strategy.checkpoint_io = files
        trainer.callbacks = [files.snapshots, *trainer.callbacks]  # type: ignore[attr-defined]


def wait_for_checkpoints(strategy: Strategy) -> None:
    """Wait until all checkpoints that were saved are whole."""
    if isinstance(strategy.checkpoint_io, CheckpointFiles):
        strategy.checkpoint_io.wait()


def newest_checkpoint(trainer: L.Trainer) -> str:
    """Return the path of the newest whole checkpoint from which this run can be resumed; "" if there is none."""
    wait_for_checkpoints(trainer.strategy)
    names = ("last_model_path", "best_model_path")
    saved = [getattr(callback, name, "") for callback in trainer.checkpoint_callbacks for name in names]
    return str(newest_of([path for path in (*saved, trainer.ckpt_path) if path]) or "")


class FolderCheckpoints(ModelParallelStrategy):
    """Lightning's model-parallel strategy, whose checkpoints are folders that any strategy resumes from."""

    mesh: DeviceMesh | None = None  # of a subclass whose mesh is not Lightning's
    _writers: Any = None  # the group of all ranks by which threads agree on what each of them writes

    @property
    def device_mesh(self) -> DeviceMesh:
        return super().device_mesh if self.mesh is None else self.mesh

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.model is not None
        return get_optimizer_state_dict(self.model, getattr(optimizer, "optimizer", optimizer), options=_FLAT)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        return get_model_state_dict(self.model)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        path, files = Path(self.broadcast(filepath)), self.checkpoint_io
        assert isinstance(files, CheckpointFiles)
        files.wait()
        partial = partial_of(path)
        if self.is_global_zero:
            remove(partial)
            partial.mkdir(parents=True)
        self.barrier()
        states = checkpoint.pop("optimizer_states", None)
        tensors = _above(_WEIGHTS, checkpoint.pop("state_dict"))
        tensors |= _above(_BESIDE, checkpoint.pop(WEIGHTS_BESIDE_AVERAGE, {}))
        if states is not None:
            options = [{key: v for key, v in state.items() if not isinstance(v, Tensor)} for state in states]
            of_ranks = objects_of_ranks(options)
            checkpoint[_OPTIONS] = [
                {k: v for own in parts for k, v in own.items()} for parts in zip(*of_ranks, strict=True)
            ]
            for index, state in enumerate(states):
                tensors |= _above(f"optimizer_{index}.", {k: v for k, v in state.items() if isinstance(v, Tensor)})
        self._writers = self._writers or dist.new_group(backend="gloo")
        copy = files.snapshots.take(tensors, files.trainer, shared=False)  # The format has no tensor twice.

        def write() -> None:
            with suppress(MetricsLostError), removed_on_failure(partial):
                files.snapshots.wait()
                with _own_error():
                    writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
                    save(copy, storage_writer=writer, process_group=self._writers)
                if self.is_global_zero:
                    torch.save(checkpoint, partial / REST)
                    files.snapshots.wait_for_loggers()
                    put_in_place(partial, path)

        files.run(write)
        if not files.is_busy:
            self.barrier()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.model is not None
        assert self.lightning_module is not None
        wait_for_checkpoints(self)
        path = whole_checkpoint(self.broadcast(checkpoint_path))
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if fits else []
        weights = get_model_state_dict(self.model)
        if path.is_dir():
            return self._load_folder(path, weights, optimizers, weights_only)
        checkpoint = read_checkpoint(path, weights_only=weights_only)
        whole = checkpoint.pop("state_dict")
        check_same_model(shapes_of(whole), self._shapes_of_ranks(weights))
        if beside := checkpoint.pop(WEIGHTS_BESIDE_AVERAGE, None) if fits else None:
            set_model_state_dict(self.model, {name: (whole | beside)[name] for name in weights}, options=_WHOLE)
            divided: dict[str, Any] = get_model_state_dict(self.model)
            checkpoint[WEIGHTS_BESIDE_AVERAGE] = {name: divided[name].clone() for name in weights if name in beside}
        set_model_state_dict(self.model, {name: whole[name] for name in weights}, options=_WHOLE)
        states = checkpoint.pop("optimizer_states", None)
        for optimizer, state in zip(optimizers, _resumable(states) if fits else (), strict=True):
            own = in_groups(state, names_of_groups(self.model, optimizer))
            set_optimizer_state_dict(self.model, optimizer, own, options=_WHOLE)
        return checkpoint

    def _load_folder(
        self, path: Path, weights: dict[str, Any], optimizers: list[Optimizer], weights_only: bool | None
    ) -> dict[str, Any]:
        assert self.model is not None
        reader = HuggingFaceStorageReader(str(path))
        stored = reader.read_metadata().state_dict_metadata
        theirs = {name: tuple(entry.size) for name, entry in _below(_WEIGHTS, stored).items()}
        check_same_model(theirs, self._shapes_of_ranks(weights))
        checkpoint = torch.load(path / REST, map_location="cpu", weights_only=weights_only is not False)
        options = checkpoint.pop(_OPTIONS, None)
        options = _resumable(options) if optimizers else []
        kept = _below(_BESIDE, stored) if optimizers else {}
        beside = {name: torch.empty_like(weight) for name, weight in weights.items() if name in kept}
        tensors = _above(_WEIGHTS, weights) | _above(_BESIDE, beside)
        states = [self.optimizer_state(optimizer) for optimizer in optimizers]
        for index, state in enumerate(states):
            tensors |= _above(f"optimizer_{index}.", {k: v for k, v in state.items() if isinstance(v, Tensor)})
        with _own_error():
            load(tensors, storage_reader=reader)
        set_model_state_dict(self.model, weights)
        for optimizer, state, theirs in zip(optimizers, states, options, strict=True):
            state |= {key: theirs[key] for key in state if key in theirs}
            set_optimizer_state_dict(self.model, optimizer, state, options=_FLAT)
        return checkpoint | {WEIGHTS_BESIDE_AVERAGE: beside}

    def _shapes_of_ranks(self, weights: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights of all ranks, which may have different ones."""
        return {name: shape for own in objects_of_ranks(shapes_of(weights)) for name, shape in own.items()}

    def teardown(self) -> None:
        wait_for_checkpoints(self)
        super().teardown()
