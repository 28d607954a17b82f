"""A router's auxiliary loss: kept with the model's own weight, averaged by tokens, logged apart; or refused."""

import copy
from typing import Any

import pytest
import torch
from lightning_helpers import loader, quiet_trainer
from tiny_models import tiny_batch, tiny_llama, tiny_model
from torch import Tensor, nn
from torch.optim import SGD
from transformers import LlamaForCausalLM, MixtralForCausalLM, get_constant_schedule

from lit_fused import (
    CrossEntropyLoss,
    FusedCausalLMModule,
    LanguageModel,
    LinearCrossEntropyLoss,
    ModelInternalLoss,
    UserError,
    fuse,
    unfuse,
)

ROUTED = ["mixtral", "qwen3_moe"]
FLOAT32 = torch.finfo(torch.float32).eps


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    "loss", [LinearCrossEntropyLoss(), LinearCrossEntropyLoss("torch_native"), CrossEntropyLoss(), ModelInternalLoss()]
)
@pytest.mark.parametrize("name", ROUTED)
def test_loss_and_gradients_are_those_of_the_models_own_loss(name, loss):
    backbone = tiny_model(name)
    batch = tiny_batch()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -6:] = 0  # the router's loss leaves out padding
    batch = {**batch, "labels": batch["labels"].masked_fill(mask == 0, -100), "attention_mask": mask}
    own = backbone(**batch)
    assert 1e-3 < 0.1 * own.aux_loss < own.loss
    truth = gradients(backbone, own.loss)

    model = LanguageModel(backbone, loss)
    model.spot_check(tiny_batch())
    output = model(batch)
    torch.testing.assert_close(output.loss, own.loss, rtol=8 * FLOAT32, atol=0)
    torch.testing.assert_close(output.aux_loss, 0.1 * own.aux_loss, rtol=8 * FLOAT32, atol=0)
    torch.testing.assert_close(output.stats["nll"] / output.num_tokens, own.loss - 0.1 * own.aux_loss)
    assert (gradients(backbone, output.loss) - truth).norm() <= 64 * FLOAT32 * truth.norm()
    without = gradients(backbone, output.loss_sum.detach() * 0 + model(batch).loss_sum / output.num_tokens)
    assert (without - truth).norm() > 1e-3 * truth.norm(), "the router's part can be seen"


class Spy(FusedCausalLMModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.applied = torch.cat([p.grad.flatten() for p in self.parameters() if p.grad is not None])


def accumulate(backbone: nn.Module, batches: list[dict[str, Tensor]], folder: Any, loss: Any = None) -> tuple[Any, Any]:
    module = Spy(backbone, loss, lambda groups: SGD(groups, lr=0.0), get_constant_schedule)
    trainer = quiet_trainer(folder, max_steps=1, accumulate_grad_batches=len(batches))
    trainer.fit(module, loader(batches))
    return module, trainer.callback_metrics


@pytest.mark.parametrize("name", ROUTED)
def test_accumulated_micro_batches_give_the_mean_of_the_models_own_losses_by_tokens(name, tmp_path):
    batches, counts = [tiny_batch(1, 8, ignored=0.0), tiny_batch(4, 30, ignored=0.0)], [7, 4 * 29]
    reference = tiny_model(name)
    own = [reference(**batch) for batch in batches]

    def mean(values: list[Tensor]) -> Tensor:
        return sum(count * value for count, value in zip(counts, values, strict=True)) / torch.tensor(sum(counts))

    truth = gradients(reference, mean([output.loss for output in own]))
    module, logged = accumulate(tiny_model(name), batches, tmp_path)
    assert (module.applied - truth).norm() <= 64 * FLOAT32 * truth.norm()
    aux_loss = 0.1 * mean([output.aux_loss for output in own])
    cross_entropy = mean([output.loss for output in own]) - aux_loss
    torch.testing.assert_close(logged["train/aux_loss"], aux_loss.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(logged["train/loss"], cross_entropy.detach(), rtol=1e-5, atol=0)
    own_loss, _ = accumulate(tiny_model(name), batches, tmp_path, ModelInternalLoss())
    assert (own_loss.applied - truth).norm() <= 64 * FLOAT32 * truth.norm()


class WithRouterZLoss(MixtralForCausalLM):
    """Adds a term to its own loss that its output does not show."""

    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, labels=labels, **kwargs)
        if labels is not None and self.config.output_router_logits:
            output.loss = output.loss + 0.05 * output.router_logits[0].logsumexp(-1).square().mean()
        return output


@pytest.mark.parametrize("loss", [LinearCrossEntropyLoss(), CrossEntropyLoss()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_term_of_the_models_own_loss_that_would_be_lost_is_refused(loss, dtype):
    config: Any = tiny_model("mixtral").config
    with pytest.raises(UserError, match=r"own loss of WithRouterZLoss has a term .*output_router_logits=False"):
        LanguageModel(nn.Module.to(WithRouterZLoss(copy.deepcopy(config)), dtype), loss).spot_check(tiny_batch())
    LanguageModel(tiny_model("mixtral", dtype), loss).spot_check(tiny_batch())
    LanguageModel(WithRouterZLoss(copy.deepcopy(config)), ModelInternalLoss()).spot_check(tiny_batch())
    config.output_router_logits = False
    LanguageModel(WithRouterZLoss(config), loss).spot_check(tiny_batch())


class OwnLoss(LlamaForCausalLM):
    """Makes its loss of the logits and targets that :meth:`weights` are for, divided by the weights or by one."""

    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, **kwargs)
        if labels is not None:
            targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
            weights = (targets != -100) * self.weights(targets, kwargs)
            losses = nn.functional.cross_entropy(output.logits.mT, targets, reduction="none")
            output.loss = (losses * weights).sum() / weights.sum().clamp(min=1)
        return output

    def weights(self, targets: Any, batch: Any) -> Any:
        return torch.ones(targets.shape)


class WeighsLatePositions(OwnLoss):
    def weights(self, targets: Any, batch: Any) -> Any:
        return 1.0 + (torch.arange(targets.shape[1]) > 8)


class ReadsTheMask(OwnLoss):
    def weights(self, targets: Any, batch: Any) -> Any:
        mask = batch.get("attention_mask")
        return super().weights(targets, batch) if mask is None else mask.float()


@pytest.mark.parametrize("kind", [WeighsLatePositions, ReadsTheMask])
@pytest.mark.parametrize("training", [True, False])
def test_an_own_loss_that_few_tokens_do_not_show_is_refused_with_the_first_batch(kind, training):
    ids = torch.randint(3, 97, (3, 12), generator=torch.Generator().manual_seed(0))
    ids[1, 4] = 50
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[2, :6], mask[0, 10:] = -100, 0
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    model = tiny_llama(kind).train(training)
    with pytest.raises(UserError, match=f"own loss of {kind.__name__} has a term .* or weighs labels"):
        fuse(model)(**batch)
    unfuse(model)
    with pytest.raises(UserError, match=f"own loss of {kind.__name__} has a term .* or weighs labels"):
        LanguageModel(model, LinearCrossEntropyLoss()).train(training).spot_check(batch)


def test_router_logits_asked_for_by_the_batch_are_refused():
    model = LanguageModel(tiny_model("mixtral"), LinearCrossEntropyLoss())
    with pytest.raises(UserError, match="a batch has output_router_logits; set it in the model's configuration"):
        model(tiny_batch() | {"output_router_logits": True})
