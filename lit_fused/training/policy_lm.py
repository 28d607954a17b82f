"""The module of policy gradients over given rollouts."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_fused.errors import UserError
from lit_fused.losses.loss import Batch
from lit_fused.objectives.policy_loss import PolicyLoss
from lit_fused.training.frozen import FrozenModel
from lit_fused.training.module import FusedCausalLMModule


class FusedPolicyModule(FusedCausalLMModule):
    """A causal language model that learns from rollouts with rewards or advantages, without logits.

        module = FusedPolicyModule(model, PolicyLoss("grpo", kl_weight=0.04))
        Trainer().fit(module, lit_fused.data.RolloutDataModule("rollouts.jsonl", tokenizer=...))

    Batches are those of :class:`lit_fused.objectives.PolicyLoss`. It logs the mean reward, length, advantage, entropy,
    kl, sampler_kl, ratio and share of clipped tokens beside what a
    :class:`~lit_fused.training.module.FusedLMModule` logs, whose other arguments these are.

    Args:
        loss: a :class:`PolicyLoss`; default GRPO's.
        reference: of the KL, a model, which is not trained; "copy": the backbone as it is now; "stored": batches have
            "reference_log_probs". None: "copy" if the loss has a ``kl_weight``.
    """

    learning_rate = 1e-6  # of a pretrained model
    loss_class = PolicyLoss
    _needs_loss = "needs a PolicyLoss, got {}; choose loss=policy, or PolicyLoss('grpo')"

    def __init__(
        self,
        backbone: nn.Module,
        loss: PolicyLoss | None = None,
        optimizer: Optimizer | Callable[..., Optimizer] | None = None,
        scheduler: LRScheduler | Callable[..., LRScheduler] | None = None,
        *,
        reference: nn.Module | str | None = None,
        check_every_n_steps: int = 100,
        compile: str = "none",
    ) -> None:
        options: dict[str, Any] = {"check_every_n_steps": check_every_n_steps, "compile": compile}
        super().__init__(backbone, loss, optimizer, scheduler, **options)
        used = self.model.loss
        assert isinstance(used, PolicyLoss)
        kind = ("copy" if used.kl_weight else "stored") if reference is None else reference
        if isinstance(kind, nn.Module) or kind == "copy":
            instead = "store its log-probabilities with the rollouts (reference_log_probs), or choose loss.kl_weight=0"
            frozen = self.add_frozen(kind, "reference", instead)
            used.reference = partial(_of_frozen, frozen, used)
        elif kind != "stored":
            raise UserError(f"reference must be a model, copy or stored, got {kind!r}")

    def setup(self, stage: str) -> None:
        alone, loss = self._of_data("alone"), self.model.loss
        assert isinstance(loss, PolicyLoss)
        if alone and loss.parts.needs_groups and not self._of_data("has_advantages"):
            completions = len(self._of_data("rows")["train"])
            if alone == completions:
                raise UserError(
                    f"objective={loss.objective} compares the completions of one prompt, and no prompt has two; give "
                    "at least two for each, or choose loss.objective=reinforce, or advantages with loss.objective=ppo"
                )
            rank_zero_warn(
                f"objective={loss.objective} learns nothing from {alone} of {completions} completions: it compares the "
                "completions of one prompt, and these are the only ones of theirs. Give at least two for each prompt"
            )
        super().setup(stage)


def _of_frozen(frozen: FrozenModel, loss: PolicyLoss, batch: Batch) -> Tensor:
    """Return the reference's log-probabilities (B, T) of targets, at the loss's temperature."""

    def log_probs(model: Any, batch: Batch) -> Tensor:
        hidden_states, head, _ = model.hidden_states(batch)
        return loss.scores(hidden_states, model.targets(batch), head).log_prob

    return frozen.run(log_probs, {name: value for name, value in batch.items() if name not in loss.inputs})
