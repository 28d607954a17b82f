"""Save and restore what Lightning's checkpoints lack, so that a run continues exactly where it was saved.

A checkpoint has no gradients. One that is saved between the accumulated micro-batches of an optimiser step says that
the step has not begun. So a run that resumes it runs these micro-batches again, with the same weights and the same
random numbers on each rank.

An optimiser's state numbers its parameters. torch counts them group by group, Lightning's sharded strategies in the
order of the model. So checkpoints store names in place of numbers, and any strategy resumes from any other.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loops.evaluation_loop import RestartStage as EvaluationStage
from lightning.pytorch.loops.training_epoch_loop import RestartStage
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from lit_fused.checkpoints.configured import ConfiguredOptions
from lit_fused.checkpoints.form import EVERY, check_form, weights_in
from lit_fused.checkpoints.reading import check_same_model, check_same_trained
from lit_fused.errors import UserError

_QUANTIZED = {"state1", "__bnb_optimizer_quant_state__"}  # bitsandbytes has them in a parameter's state.
_KEEP_STATES = {"torch", "transformers", "bitsandbytes", "lit_fused"}  # Their optimisers do, but for one.
_STATES_OF_RANKS = "lit_fused_random_states"  # the key of random states and the loss's own state
_IS_VALIDATED = "lit_fused_is_validated"  # the key of whether no validation after the checkpoint's batch is to come


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Map the ``id()`` of each parameter to its name, in the order of the module."""
    return {id(p): name for name, p in module.named_parameters()}


def names_of_groups(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each of the optimiser's groups."""
    names = parameter_names(module)
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def numbering(module: nn.Module, optimizer: Optimizer | None) -> list[str]:
    """List the parameters by number: the first name is that of number 0.

    torch counts parameters group by group of their ``optimizer``. Lightning's sharded strategies, which write one file,
    count them in the order of the module; for these ``optimizer`` is None.
    """
    if optimizer is None:
        return list(parameter_names(module).values())
    return [name for group in names_of_groups(module, optimizer) for name in group]


def named_optimizer_state(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return a state of ``Optimizer.state_dict()`` with names in place of numbers, number n being ``names[n]``. A state
    that has names already is returned as it is."""
    if not _has(int, state):
        return state
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[number]: value for number, value in state["state"].items()}, "param_groups": groups}


def numbered_optimizer_state(state: dict[str, Any], groups: list[list[str]]) -> dict[str, Any]:
    """Return a state that has names with the numbers of an optimiser, whose ``groups`` are lists of names.

    Raises UserError if the state is of other parameters, or if parameters that share a group here had different
    settings there.
    """
    theirs = {name: group for group in state["param_groups"] for name in group["params"]}
    number = {name: index for index, name in enumerate(name for group in groups for name in group)}
    check_same_trained(theirs.keys(), number.keys())
    numbered = []
    for names in groups:
        settings = [{key: value for key, value in theirs[name].items() if key != "params"} for name in names]
        if any(other != settings[0] for other in settings):
            raise UserError(
                f"the checkpoint's optimiser has the parameters of one group ({names[0]}, ...) in several groups with "
                "different settings; configure the parameter groups as in the run that wrote it"
            )
        numbered.append({**settings[0], "params": [number[name] for name in names]})
    return {"state": {number[name]: value for name, value in state["state"].items()}, "param_groups": numbered}


def own_part(state: dict[str, Any], module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return what a state, which has names, holds of an optimiser's parameters, in this optimiser's groups."""
    groups = names_of_groups(module, optimizer)
    own = [name for group in groups for name in group]
    parts = [{**part, "params": [name for name in part["params"] if name in own]} for part in state["param_groups"]]
    mine = {"state": {name: v for name, v in state["state"].items() if name in own}, "param_groups": parts}
    return named_optimizer_state(numbered_optimizer_state(mine, groups), own)


def load_by_name(optimizers: Iterable[Optimizer], module: nn.Module) -> list[RemovableHandle]:
    """Make ``load_state_dict`` of some optimisers take states with names beside states with numbers; return the hooks
    that do it."""
    hooks: list[RemovableHandle] = []

    def numbered(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        return numbered_optimizer_state(state, names_of_groups(module, optimizer)) if _has(str, state) else None

    for optimizer in optimizers:
        check = partial(_check_loaded, options=[*optimizer.defaults])  # Loading adds one to the defaults.
        hooks.append(optimizer.register_load_state_dict_pre_hook(numbered))
        hooks.append(optimizer.register_load_state_dict_post_hook(check))
        if type(optimizer).load_state_dict is not Optimizer.load_state_dict:  # bitsandbytes' own calls no hooks.
            load = type(optimizer).load_state_dict.__get__(optimizer)

            def loaded(
                state: dict[str, Any], load: Any = load, optimizer: Optimizer = optimizer, check: Any = check
            ) -> None:
                load(numbered(optimizer, state) or state)
                check(optimizer)

            optimizer.load_state_dict = loaded  # type: ignore[method-assign]
    return hooks


def _check_loaded(optimizer: Optimizer, options: Iterable[str]) -> None:
    """Raise UserError if a loaded state lacks one of this optimiser's ``options``, which its next step needs, and
    ValueError if it does not fit its parameters."""
    if "fused" in optimizer.defaults:
        _check_fitting(optimizer)
    is_quantized = type(optimizer).__module__.startswith("bitsandbytes.")  # Its groups lack some of its defaults.
    needed = () if is_quantized else options
    missing = {option for group in optimizer.param_groups for option in needed if option not in group}
    if any(_QUANTIZED.isdisjoint(state) == is_quantized for state in optimizer.state.values()):
        missing.add("moments of 8 bits" if is_quantized else "moments of 32 bits")
    if missing:
        raise UserError(
            f"the checkpoint holds the state of another optimizer than {type(optimizer).__name__}: it has no "
            f"{', '.join(sorted(missing))}. Resume with the optimizer of the run, or begin a new run from its weights"
        )


def _check_fitting(optimizer: Optimizer) -> None:
    """Raise ValueError if a loaded state has another shape than its parameter. torch's fused kernels, which a
    checkpoint's options choose as well, do not look: they read and write whatever lies behind the tensor. They go by
    the place in memory, so a state gets the layout of its parameter."""
    for parameter, state in optimizer.state.items():
        for name, value in [item for item in state.items() if isinstance(item[1], Tensor)]:
            shape = torch.Size() if name == "step" else parameter.shape
            if value.shape != shape or value.layout != torch.strided:
                raise ValueError(f"its optimiser's {name} is {tuple(value.shape)}, {tuple(shape)} was expected")
            if value.stride() != parameter.stride() and name != "step":
                state[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def check_moments(checkpoint: Mapping[str, Any], states: Iterable[Mapping[str, Any]], optimizers: list[Any]) -> None:
    """Raise ValueError if a checkpoint has no state of any parameter after a step of optimisers that keep some."""
    steps, states = checkpoint.get("global_step", 0), [*states]
    # A loss scale that is still too large skips steps.
    is_scaled = any(isinstance(entry, Mapping) and "scale" in entry for entry in checkpoint.values())
    if not steps or is_scaled or any(state.get("state") for state in states):
        return
    for index, (state, optimizer) in enumerate(zip(states, optimizers, strict=False)):
        is_known = "betas" in optimizer.defaults or type(optimizer).__module__.partition(".")[0] in _KEEP_STATES
        if isinstance(optimizer, SGD):
            is_known = any(group.get("momentum") for group in state.get("param_groups", []))
        if is_known:
            raise ValueError(f"optimizer_states[{index}].state is empty after {steps} steps")


def _has(kind: type, state: Mapping[str, Any]) -> bool:
    return any(isinstance(key, kind) for group in state.get("param_groups", []) for key in group["params"])


class ExactResume:
    """Saves what a fit needs, beside Lightning's checkpoint, to go on exactly, and restores it."""

    def __init__(self) -> None:
        self._state: dict[str, Tensor] | None = None  # this rank's at the beginning of an optimiser step
        self._loaded: list[dict[str, Tensor]] = []  # a checkpoint's, one per rank
        self._is_validated = False
        self.options = ConfiguredOptions()

    def begin_step(self, module: L.LightningModule) -> None:
        """Remember the state with which an optimiser step of several micro-batches begins."""
        self._state = _state_of_rank(module)

    def save(self, checkpoint: dict[str, Any], module: L.LightningModule, batches: int, *, is_sharded: bool) -> None:
        """Complete Lightning's checkpoint in place. All ranks call it.

        ``batches`` micro-batches have run since the last optimiser step.
        """
        trainer, loop = module.trainer, checkpoint["loops"]["fit_loop"]
        counts = loop["epoch_loop.batch_progress"]["current"]
        checkpoint[_IS_VALIDATED] = batches > 0 or counts["completed"] == counts["processed"]
        _begin_epoch(loop)
        _reopen_epoch(loop, trainer.num_training_batches, stepped=not batches)
        if batches:
            _rewind(loop, batches)
        own = (self._state if batches else None) or _state_of_rank(module)
        ranks = getattr(trainer.strategy, "world_size", 1) if dist.is_initialized() else 1
        self.options.save(checkpoint)
        checkpoint[_STATES_OF_RANKS] = of_ranks = [own] * ranks
        if ranks > 1:
            dist.all_gather_object(of_ranks, own)
        states = checkpoint.get("optimizer_states", [])  # none if weights alone are saved
        for index, (state, optimizer) in enumerate(zip(states, trainer.optimizers, strict=False)):
            states[index] = named_optimizer_state(state, numbering(module, None if is_sharded else optimizer))

    def load(self, checkpoint: dict[str, Any], module: L.LightningModule, *, is_sharded: bool, is_return: bool) -> None:
        """Keep a checkpoint's states of ranks for :meth:`restore`. Raises UserError if it is of another model.

        ``is_return`` says that a fit goes back to where it was a while ago, as after Lightning's search of a learning
        rate or a batch size. It is no resumed one, and keeps the random numbers and the options that it has.
        """
        states = checkpoint.get(_STATES_OF_RANKS, [])
        check_form(states, [{EVERY: Tensor}], _STATES_OF_RANKS)
        for state in states:
            torch.Generator().set_state(state["cpu"].cpu())  # It says what is wrong.
        if not is_return:
            self._loaded = states
            self._is_validated = bool(checkpoint.get(_IS_VALIDATED))
            self.options.load(checkpoint)
        if not is_sharded and "state_dict" in checkpoint:  # A sharded strategy has loaded it already.
            check_same_model(weights_in(checkpoint["state_dict"]), weights_in(module.state_dict()))

    def restore(self, trainer: L.Trainer) -> None:
        """Restore this rank's state, once. States of another number of ranks, or kind of device, are ignored.

        The loader's iterator draws random numbers when it is made, so it is made again if an epoch begins here. A
        loader that has a state of its own was perhaps set up before that state was read; then it gets it here. A
        scheduler of accumulation is asked here, which Lightning asks at the beginning of an epoch alone.
        """
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(callback, GradientAccumulationScheduler):
                trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)
        self.options.restore(trainer)
        states, self._loaded = self._loaded, []
        strategy, loop = trainer.strategy, trainer.fit_loop
        is_to_validate = not self._is_validated and _validate_first(trainer)
        if loop._combined_loader_states_to_load:
            loop._load_combined_loader_states()
            iter(loop._data_fetcher)  # type: ignore[arg-type]
        if (state := _of_this_rank(states, strategy)) is None:
            return
        torch.set_rng_state(state["cpu"].cpu())
        if "cuda" in state and strategy.root_device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"].cpu(), strategy.root_device)
        at_beginning = loop.epoch_loop.batch_progress.current.ready % max(trainer.num_training_batches, 1) == 0
        loaders = loop._combined_loader.flattened if loop._combined_loader is not None else []
        if at_beginning and not is_to_validate and not any(hasattr(loader, "load_state_dict") for loader in loaders):
            iter(loop._data_fetcher)  # type: ignore[arg-type]

    def is_to_validate(self, trainer: L.Trainer) -> bool:
        """Return whether the validation that was to follow the loaded checkpoint's batch is made up for, once the
        trainer has set up its data, and before training starts."""
        trainer.fit_loop.epoch_loop.update_restart_stage()
        return not self._is_validated and _is_validation_due(trainer)

    def end_epoch(self, trainer: L.Trainer) -> None:
        """Let Lightning step the schedules that go by epochs in the first epoch of a resumed run, too, if this process
        has the metrics that they go by. Lightning leaves them out, as metrics are in no checkpoint."""
        monitors = [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
        if all(monitor in trainer.callback_metrics for monitor in monitors):
            trainer.fit_loop._restarting = False


def _validate_first(trainer: L.Trainer) -> bool:
    """Let a resumed run begin with the validation that was to follow the checkpoint's batch, if one was: Lightning
    leaves it out, and with it metrics, the best checkpoint, early stopping, and plateaus. Return whether it will run.

    The loops get the state that they have where Lightning itself repeats a validation that was saved in its middle.
    """
    loop, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    epochs: tuple[Any, ...] = (loop.epoch_progress.total, loop.epoch_progress.current)
    # Lightning has counted the epoch as ended.
    is_counted = epoch.restarted_on_train_batch_end and loop.restarted_mid_epoch and epoch.batch_progress.is_last_batch
    for counts in epochs if is_counted else ():
        counts.processed -= 1
        counts.completed -= 1
    if _is_validation_due(trainer):
        epoch._restart_stage = RestartStage.RESTARTED_ON_LAST
        epoch.batch_progress.increment_completed()
        epoch.val_loop._restart_stage = EvaluationStage.RESTARTED_MID_EVALUATION
        epoch.val_loop._restarting = False  # from its first batch on
        return True
    for counts in epochs if is_counted else ():
        counts.processed += 1
        counts.completed += 1
    return False


def _is_validation_due(trainer: L.Trainer) -> bool:
    loop, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    fetcher = loop._data_fetcher
    return epoch.restarted_on_train_batch_end and fetcher is not None and epoch._should_check_val_fx(fetcher)


def _state_of_rank(module: L.LightningModule) -> dict[str, Tensor]:
    """Return this rank's random state and the state of its loss."""
    state = {"cpu": torch.get_rng_state()}
    if module.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(module.device)
    return state


def _of_this_rank(states: list[dict[str, Tensor]], strategy: Strategy) -> dict[str, Tensor] | None:
    """Return this rank's state; None where they are of another number of ranks."""
    is_same = len(states) == getattr(strategy, "world_size", 1)
    return states[getattr(strategy, "global_rank", 0)] if is_same else None


def _begin_epoch(fit_loop: dict[str, Any]) -> None:
    """Forget the last epoch's batches, in place, if the next epoch is about to begin: Lightning would skip that one."""
    epochs = fit_loop["epoch_progress"]["current"]
    if epochs["ready"] > epochs["started"]:
        progress = fit_loop["epoch_loop.batch_progress"]
        progress["current"] = dict.fromkeys(progress["current"], 0)
        progress["is_last_batch"] = False


def _reopen_epoch(fit_loop: dict[str, Any], length: float, *, stepped: bool) -> None:
    """Change the state of Lightning's loops in place, where a fit has ended within an epoch of ``length`` batches.

    Lightning counts that epoch as ended, and a resumed run would go on with the next one. Afterwards the state is that
    after the epoch's last batch. ``stepped`` says that this batch ended an optimiser step.
    """
    epochs, progress = fit_loop["epoch_progress"], fit_loop["epoch_loop.batch_progress"]
    at_its_end = epochs["current"]["completed"] < epochs["current"]["processed"] == epochs["current"]["started"]
    if at_its_end and not progress["is_last_batch"] and progress["current"]["ready"] < length:
        for kind in ("total", "current"):
            epochs[kind]["processed"] -= 1
            progress[kind]["completed"] -= 1
        fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= stepped


def _rewind(fit_loop: dict[str, Any], batches: int) -> None:
    """Set the state of Lightning's loops, in place, ``batches`` micro-batches back."""
    progress = fit_loop["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        for name in counts:
            counts[name] -= batches
    progress["is_last_batch"] = False
    if progress["current"]["completed"] < progress["current"]["processed"]:  # at a batch's end Lightning will add one
        fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
