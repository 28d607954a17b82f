"""Changed losses, windows and loops of a project train exactly, or are refused."""

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from errors_of import ROUNDING, relative_error
from head_cases import grad_of
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from torch import Tensor, nn
from transformers import get_constant_schedule

from lit_fused import FusedCausalLMModule, UserError

SGD = partial(torch.optim.SGD, lr=0.3)


def module(kind: type[FusedCausalLMModule] = FusedCausalLMModule, **config: Any) -> Any:
    return kind(tiny_llama(**config), None, SGD, get_constant_schedule)


def mean_loss(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    ids, labels = (torch.cat([b[name] for b in batches]) for name in ("input_ids", "labels"))
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten())


def trained(
    windows: list[list[dict[str, Tensor]]], clip: float = float("inf")
) -> tuple[list[dict[str, Tensor]], list[float], dict[str, Tensor]]:
    """The truth: gradients and losses of one batch for each window, then the weights."""
    model, gradients, losses = tiny_llama().double(), [], []
    optimizer = SGD(model.parameters())
    for window in windows:
        optimizer.zero_grad()
        loss = mean_loss(model, window)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: grad_of(p).clone() for name, p in model.named_parameters()})
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return gradients, losses, dict(model.named_parameters())


def error_of_weights(module: FusedCausalLMModule, weights: dict[str, Tensor]) -> float:
    """Return the error of the change, in units of the change of the weights."""
    start = dict(tiny_llama().double().named_parameters())
    found = {name: p - start[name] for name, p in module.backbone.named_parameters()}
    return relative_error(found, {name: p - start[name] for name, p in weights.items()})


class Losses(L.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs["loss"].item())


class Watched(FusedCausalLMModule):
    """Keeps the gradients as two hooks of a project see them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.after_backward: list[dict[str, Tensor]] = []
        self.steps: list[dict[str, Tensor]] = []

    def on_after_backward(self) -> None:
        self.after_backward.append(self.gradients())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps.append(self.gradients())

    def gradients(self) -> dict[str, Tensor]:
        return {n: grad_of(p).clone() for n, p in self.backbone.named_parameters()}


def test_a_callback_sees_the_mean_loss_of_a_batch_and_hooks_see_the_gradient_of_the_mean(tmp_path):
    batches, losses, watched = ragged_batches(2), Losses(), module(Watched)
    trainer = quiet_trainer(tmp_path, max_epochs=1, precision="64-true", callbacks=[losses], detect_anomaly=True)
    trainer.fit(watched, loader(batches))
    gradients, expected, _ = trained([batches[:1], batches[1:]])
    assert losses.seen == pytest.approx(expected, rel=1e-6)
    for found, gradient in zip(watched.after_backward, gradients, strict=True):
        assert relative_error(found, gradient) < ROUNDING


CHANGES: dict[str, Any] = {
    "doubled": lambda self, loss: 2 * loss,
    "with a penalty": lambda self, loss: loss + 0.1 * self.backbone.lm_head.weight.square().sum(),
    "same value, other gradient": lambda self, loss: loss - loss.detach() / 2 + loss.detach() / 2 + 0 * loss.detach(),
    "a mean of its own": lambda self, loss: self.model(ragged_batches(1)[0]).loss,
    "in a dict": lambda self, loss: {"loss": loss * 3},
    "detached": lambda self, loss: loss.detach().requires_grad_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_loss_is_refused_on_whatever_micro_batch_it_comes(change, tmp_path):
    class Changed(FusedCausalLMModule):
        def training_step(self, batch, batch_idx) -> Any:
            loss = super().training_step(batch, batch_idx)
            return CHANGES[change](self, loss) if batch_idx == 4 else loss

    trainer = quiet_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=3)
    with pytest.raises(UserError, match=r"Changed.training_step must return what super.*override compute_loss"):
        trainer.fit(module(Changed), loader(ragged_batches(6)))
    assert trainer.global_step == 1


def test_a_loss_that_is_the_same_may_come_in_a_dict_or_as_a_copy(tmp_path):
    class Same(Watched):
        def training_step(self, batch, batch_idx) -> Any:
            loss = super().training_step(batch, batch_idx)
            return [loss.clone(), {"loss": loss, "other": 1}][batch_idx]

    batches, same = ragged_batches(2), module(Same)
    quiet_trainer(tmp_path, max_epochs=1, precision="64-true", accumulate_grad_batches=2).fit(same, loader(batches))
    gradients, _, _ = trained([batches])
    assert relative_error(same.steps[0], gradients[0]) < ROUNDING


@pytest.mark.parametrize("dropped", [0, 1, 3])
def test_a_micro_batch_that_is_dropped_after_its_step_does_not_count(dropped, tmp_path):
    class Dropping(Watched):
        def training_step(self, batch, batch_idx) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == dropped else loss

    batches, dropping = [b for i, b in enumerate(ragged_batches(5)) if i != 2], module(Dropping)
    quiet_trainer(tmp_path, max_epochs=1, precision="64-true", accumulate_grad_batches=2).fit(dropping, loader(batches))
    kept = [[b for i, b in enumerate(batches) if i // 2 == step and i != dropped] for step in (0, 1)]
    gradients, _, weights = trained(kept)
    assert relative_error(dropping.steps[0], gradients[0]) < ROUNDING
    assert error_of_weights(dropping, weights) < ROUNDING


class Manual(FusedCausalLMModule):
    calls = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(self.changed(loss))
        if (batch_idx + 1) % 2 == 0:
            optimizer: Any = self.optimizers()
            for _ in range(self.calls):
                self.average_gradients()
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

    def changed(self, loss: Tensor) -> Tensor:
        return loss


def test_manual_optimization_is_exact_with_one_call(tmp_path):
    batches, manual = ragged_batches(4), module(Manual)
    trainer = quiet_trainer(tmp_path, max_epochs=1, precision="64-true")
    trainer.fit(manual, loader(batches))
    _, losses, weights = trained([batches[:2], batches[2:]], clip=0.5)
    assert error_of_weights(manual, weights) < ROUNDING
    assert trainer.callback_metrics["train/loss"].item() == pytest.approx(losses[-1], rel=1e-6)


def drop_by_optimizer(module: Any, set_to_none: bool) -> None:
    module.optimizers().zero_grad(set_to_none=set_to_none)


def drop_by_module(module: Any, set_to_none: bool) -> None:
    module.zero_grad(set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("drop", [drop_by_optimizer, drop_by_module])
@pytest.mark.parametrize("moment", ["after backward", "before the next backward"])
def test_a_batch_whose_gradients_were_dropped_does_not_count(drop, set_to_none, moment, tmp_path):
    class Dropping(Manual):
        def training_step(self, batch, batch_idx) -> Any:
            loss = super(Manual, self).training_step(batch, batch_idx)
            if batch_idx == 1 and moment == "before the next backward":
                drop(self, set_to_none)
            self.manual_backward(loss)
            if batch_idx == 0 and moment == "after backward":
                drop(self, set_to_none)
            if batch_idx == 2:
                self.average_gradients()
                self.clip_gradients(self.optimizers(), gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                self.optimizers().step()  # type: ignore[union-attr]

    batches, dropping = ragged_batches(3), module(Dropping)
    trainer = quiet_trainer(tmp_path, max_epochs=1, precision="64-true")
    trainer.fit(dropping, loader(batches))
    _, losses, weights = trained([batches[1:]], clip=0.5)
    assert error_of_weights(dropping, weights) < ROUNDING
    assert trainer.callback_metrics["train/loss"].item() == pytest.approx(losses[-1], rel=1e-6)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_that_see_sums_get_one_warning(register, tmp_path):
    hooked = module()
    for parameter in hooked.parameters():
        getattr(parameter, register)(lambda _: None)
    with pytest.warns(UserWarning, match="sees sums over the tokens of a micro-batch") as found:
        quiet_trainer(tmp_path, max_steps=1, precision="64-true").fit(hooked, loader(ragged_batches(1)))
    assert len([each for each in found if "sees sums" in str(each.message)]) == 1


class NeverCalls(Manual):
    calls = 0


class Divides(Manual):
    def changed(self, loss: Tensor) -> Tensor:
        return loss / 2


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NeverCalls, r"NeverCalls stepped with sums for gradients; call self.average_gradients\(\) once after"),
        (Divides, r"Divides.training_step must return what super\(\).training_step\(...\) returned, unchanged"),
    ],
)
def test_a_manual_backward_or_step_that_would_be_wrong_is_refused(kind, message, tmp_path):
    with pytest.raises(UserError, match=message):
        quiet_trainer(tmp_path, max_epochs=1).fit(module(kind), loader(ragged_batches(4)))


def test_manual_optimization_of_ones_own_mean_needs_no_call(tmp_path):
    class Own(Manual):
        def training_step(self, batch, batch_idx) -> Any:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.compute_loss(batch).loss)
            optimizer.step()

    batches, own = ragged_batches(2), module(Own)
    quiet_trainer(tmp_path, max_epochs=1, precision="64-true").fit(own, loader(batches))
    assert error_of_weights(own, trained([batches[:1], batches[1:]])[2]) < ROUNDING


def test_an_optimizer_step_of_ones_own_has_the_mean_gradient(tmp_path):
    class Own(Watched):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.step(closure=optimizer_closure)

    batches, own = ragged_batches(2), module(Own)
    trainer = quiet_trainer(tmp_path, max_epochs=1, precision="64-true", accumulate_grad_batches=2)
    trainer.fit(own, loader(batches))
    gradients, losses, _ = trained([batches])
    assert relative_error(own.steps[0], gradients[0]) < ROUNDING
    assert trainer.callback_metrics["train/loss"].item() == pytest.approx(losses[0], rel=1e-6)


class Norms(L.Callback):
    """The norms that were logged, and those of the whole gradients, unscaled and not clipped."""

    def __init__(self) -> None:
        self.logged: list[float] = []
        self.true: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.true.append(torch.cat([grad_of(p).double().flatten() for p in pl_module.parameters()]).norm().item())

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.logged.append(trainer.callback_metrics["train/gradient_norm"].item())


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true", "float16 with a scale"])
@pytest.mark.parametrize(("accumulated", "clip"), [(1, 0.1), (3, None), (2, 0.1)])
def test_the_norm_that_is_logged_is_that_of_the_mean_gradient_before_clipping(accumulated, clip, precision, tmp_path):
    norms, options = Norms(), {"precision": precision}
    if precision.startswith("float16"):
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)  # pyright: ignore[reportPrivateImportUsage]
        options = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    options |= {"accumulate_grad_batches": accumulated, "gradient_clip_val": clip}
    trainer = quiet_trainer(tmp_path, max_epochs=1, callbacks=[norms], **options)
    trainer.fit(module(), loader(ragged_batches(6)))
    assert len(norms.logged) == 6 // accumulated
    assert norms.logged == pytest.approx(norms.true, rel=1e-6)
    if precision == "64-true":
        windows = [ragged_batches(6)[start : start + accumulated] for start in range(0, 6, accumulated)]
        gradients, _, _ = trained(windows, clip or float("inf"))
        truth = [torch.cat([g.flatten() for g in named.values()]).norm().item() for named in gradients]
        assert norms.logged == pytest.approx(truth, rel=1e-6)


# Memory and passes over gradients


def test_gradients_of_the_last_step_are_freed_before_the_next_forward_unless_a_hook_looks_at_them(tmp_path):
    class Seen(L.Callback):
        def __init__(self) -> None:
            self.freed: list[bool] = []

        def watch(self, module: nn.Module, *_: Any) -> None:
            self.freed.append(all(p.grad is None for p in module.parameters()))

        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            pl_module.backbone.register_forward_pre_hook(self.watch)

    class Looks(Seen):
        def on_before_zero_grad(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None: ...

    for callback, expected in ((Seen(), [True, False, True, False]), (Looks(), [True, False, False, False])):
        module = FusedCausalLMModule(tiny_llama(), check_every_n_steps=0)
        trainer = quiet_trainer(tmp_path, max_steps=2, accumulate_grad_batches=2, callbacks=[callback])
        trainer.fit(module, loader(ragged_batches(4)))
        assert callback.freed == expected
