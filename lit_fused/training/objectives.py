"""The LightningModules of objectives beside cross entropy: preferences, policies over given rollouts, distillation.

Each says where its reference or its teacher comes from; the losses themselves are in objectives/.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_fused.errors import UserError
from lit_fused.heads import evaluation_mode, peft_model
from lit_fused.losses.loss import Batch, Forward
from lit_fused.models.drafter import is_drafter
from lit_fused.objectives import PreferenceLoss
from lit_fused.objectives.distillation import NO_TEACHER, DistillationLoss, teacher_head
from lit_fused.objectives.policy_loss import PolicyLoss
from lit_fused.objectives.preference_loss import log_probs
from lit_fused.ops import TeacherHead
from lit_fused.ops.teacher import check_vocabularies
from lit_fused.parallel import HostCopy
from lit_fused.training.frozen import FrozenModel
from lit_fused.training.module import FusedCausalLMModule
from lit_fused.training.optimizers import NO_DECAY

_INSTEAD = (
    "give data with the reference's log-probabilities (reference=stored), choose an objective without a reference "
    "(objective=simpo, orpo or cpo), or strategy=ddp or fsdp2"
)

# LoRA's ways to begin that take what the adapter has off the weights (loftq: and round them).
_MOVES_WEIGHTS = ("pissa", "corda", "olora", "loftq", "lora_ga")


class FusedPreferenceModule(FusedCausalLMModule):
    """A causal language model that learns from preferred and rejected answers, without logits.

        module = FusedPreferenceModule(AutoModelForCausalLM.from_pretrained(...), PreferenceLoss("dpo", beta=0.1))
        Trainer(precision="bf16-mixed").fit(module, datamodule)  # of lit_fused.data, or batches of one's own

    Batches are those of :class:`lit_fused.objectives.PreferenceLoss`. It logs reward_chosen, reward_rejected,
    reward_margin, reward_accuracy, log_prob_chosen and log_prob_rejected (nats), and KTO's kl (nats).

    Args:
        backbone: see :class:`LanguageModel`; perhaps with PEFT's adapters.
        loss: a :class:`PreferenceLoss`; default DPO's.
        reference: the model that an objective with a reference compares with. A module; "adapters_off": the backbone
            without its adapters; "copy": the backbone as it is now, copied; "stored": batches have
            "reference_log_prob" (``data.scores``, of ``mode=score``). None: "adapters_off" if there are adapters, else
            "copy".
        optimizer, scheduler, options: see :class:`FusedLMModule`.
    """

    learning_rate = 1e-6  # of a pretrained model
    loss_class = PreferenceLoss
    _needs_loss = "needs a loss of preferences, got {}; choose an objective: objective=dpo, or PreferenceLoss('dpo')"

    def __init__(
        self,
        backbone: nn.Module,
        loss: PreferenceLoss | None = None,
        optimizer: Optimizer | Callable[..., Optimizer] | None = None,
        scheduler: LRScheduler | Callable[..., LRScheduler] | None = None,
        *,
        reference: nn.Module | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(backbone, loss, optimizer, scheduler, **options)
        used = self.model.loss
        assert isinstance(used, PreferenceLoss)
        adapted = peft_model(backbone) is not None
        kind = ("adapters_off" if adapted else "copy") if reference is None else reference
        if not used.objective.has_reference:
            if reference is not None:
                raise UserError(f"objective={used.name} has no reference model; leave reference out")
        elif kind == "adapters_off" and adapted:
            _check_base(peft_model(backbone))
            used.reference = _without_adapters
        elif isinstance(kind, nn.Module) or kind == "copy":
            frozen = self.add_frozen(kind, "reference", _INSTEAD)
            used.reference = partial(_of_frozen, frozen)
        elif kind != "stored":
            raise UserError(
                "reference must be a model, adapters_off (the backbone has PEFT's adapters), copy, or stored (batches "
                f"have reference_log_prob); got {kind!r} for {type(backbone).__name__}"
            )

    def setup(self, stage: str) -> None:
        loss, scores = self.model.loss, self._of_data("stored_scores")
        assert isinstance(loss, PreferenceLoss)
        reads_scores = loss.objective.has_reference and loss.reference is None
        if scores is not None and not reads_scores:
            raise UserError(
                "data.scores has the log-probabilities of a reference, and this run has another one or none; choose "
                "module.reference=stored with an objective that has a reference, or leave data.scores out"
            )
        if scores is None and reads_scores and hasattr(self.trainer.datamodule, "stored_scores"):  # type: ignore[attr-defined]
            raise UserError(
                "reference=stored needs the log-probabilities of a reference; write them with mode=score and the same "
                "data, and give the file as data.scores"
            )
        super().setup(stage)


def _check_base(model: Any) -> None:
    """Raise a UserError if PEFT's model without its adapters is another one than before them, or is trained."""
    inits = [str(getattr(config, "init_lora_weights", "")) for config in model.peft_config.values()]
    moved = [name for name in inits if name.lower().startswith(_MOVES_WEIGHTS)]
    others = [n for n, p in model.named_parameters() if p.requires_grad and not model.peft_config.keys() & n.split(".")]
    if moved or others:
        raise UserError(
            f"without its adapters the model is no reference: "
            f"{f'init_lora_weights={moved[0]} has changed its weights' if moved else f'{others[0]} is trained as well'}"
            "; choose reference=copy (the model as it begins) or stored, or leave that out (bias of the adapters)"
        )


def _of_frozen(frozen: FrozenModel, _: Forward, batch: Batch) -> Tensor:
    return frozen.run(log_probs, batch)


def _without_adapters(model: Any, batch: Batch) -> Tensor:
    with torch.no_grad(), evaluation_mode(model.backbone), peft_model(model.backbone).disable_adapter():
        return log_probs(model, batch)


class FusedPolicyModule(FusedCausalLMModule):
    """A causal language model that learns from rollouts with rewards or advantages, without logits.

        module = FusedPolicyModule(model, PolicyLoss("grpo", kl_weight=0.04))
        Trainer().fit(module, lit_fused.data.RolloutDataModule("rollouts.jsonl", tokenizer=...))

    Batches are those of :class:`lit_fused.objectives.PolicyLoss`. It logs the mean reward, length, advantage, entropy,
    kl, ratio and share of clipped tokens, and how far the sampler's scores are from the policy's (docs/policy.md),
    beside what a :class:`~lit_fused.training.module.FusedLMModule` logs, whose other arguments these are.

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
        no_decay: Sequence[str] = NO_DECAY,
        compile: str = "none",
    ) -> None:
        options: dict[str, Any] = {"check_every_n_steps": check_every_n_steps, "compile": compile}
        super().__init__(backbone, loss, optimizer, scheduler, no_decay=no_decay, **options)
        used = self.model.loss
        assert isinstance(used, PolicyLoss)
        kind = ("copy" if used.kl_weight else "stored") if reference is None else reference
        if isinstance(kind, nn.Module) or kind == "copy":
            instead = "store its log-probabilities with the rollouts (reference_log_probs), or choose loss.kl_weight=0"
            frozen = self.add_frozen(kind, "reference", instead)
            used.reference = partial(_log_probs_at_temperature, frozen, used)
        elif kind != "stored":
            raise UserError(f"reference must be a model, copy or stored, got {kind!r}")
        self._policy_loss = used

    def setup(self, stage: str) -> None:
        alone, equal, loss = self._of_data("alone") or 0, self._of_data("equal") or 0, self.model.loss
        assert isinstance(loss, PolicyLoss)
        if alone + equal and loss.parts.needs_groups and not self._of_data("has_advantages"):
            completions = len(self._of_data("rows")["train"])
            if alone == completions:
                raise UserError(
                    f"objective={loss.objective} compares the completions of one prompt, and no prompt has two; give "
                    "at least two for each, or choose loss.objective=reinforce, or advantages with loss.objective=ppo"
                )
            rank_zero_warn(
                f"objective={loss.objective} compares the completions of one prompt, and learns nothing from "
                f"{alone + equal} of {completions}: {alone} are the only ones of their prompt, and {equal} have the "
                "reward of all others of theirs"
            )
        super().setup(stage)
        loss.watch_anew()

    def on_train_start(self) -> None:
        super().on_train_start()
        self._policy_loss.watch_anew()

    def log_step(self, metrics: dict[str, Tensor]) -> None:
        loss = self._policy_loss
        if "sampler_kl" in metrics:  # on all ranks or on none
            largest = loss.largest_log_ratio
            largest = metrics["sampler_kl"].new_zeros(()) if largest is None else largest.float()
            numbers = torch.stack([largest, metrics["sampler_kl"]])
            watched, loss.largest_log_ratio = HostCopy(numbers), None  # the largest of all ranks
            self.log("train/sampler_largest_ratio", numbers[0].exp())
            loss.is_due = partial(_has_moved, loss, watched)
        super().log_step(metrics)


def _has_moved(loss: PolicyLoss, watched: HostCopy) -> bool:
    """Return whether the last step's scores ask for a cause. Its numbers have come by now: no device waits."""
    return loss.has_moved(watched.read()[1])


def _log_probs_at_temperature(frozen: FrozenModel, loss: PolicyLoss, batch: Batch) -> Tensor:
    """Return the reference's log-probabilities (B, T) of targets, at the loss's temperature."""

    def log_probs(model: Any, batch: Batch) -> Tensor:
        hidden_states, head, _ = model.hidden_states(batch)
        return model.whole_rows(loss.scores(hidden_states, model.targets(batch), head).log_prob, batch)

    return frozen.run(log_probs, {name: value for name, value in batch.items() if name not in loss.inputs})


class FusedDistillationModule(FusedCausalLMModule):
    """A causal language model that learns the probabilities of another one with the same vocabulary, without logits.

        student, teacher = (AutoModelForCausalLM.from_pretrained(name) for name in (...))
        module = FusedDistillationModule(student, DistillationLoss("jsd", beta=0.5), teacher=teacher)

    It logs the divergence per token and the teacher's own loss (teacher_nll) beside what a
    :class:`~lit_fused.training.module.FusedLMModule` logs, whose other arguments these are.

    Args:
        loss: a :class:`lit_fused.objectives.DistillationLoss`; default: the forward KL alone.
        teacher: a transformers model, which is not trained, saved or exported, and runs without gradients in the dtype
            of its own weights. None: batches have stored scores (``data.scores``, of ``mode=score``).
    """

    loss_class = DistillationLoss
    _needs_loss = "needs a DistillationLoss, got {}; choose loss=distillation, or module=causal_lm without a teacher"

    def __init__(
        self,
        backbone: nn.Module,
        loss: DistillationLoss | None = None,
        optimizer: Optimizer | Callable[..., Optimizer] | None = None,
        scheduler: LRScheduler | Callable[..., LRScheduler] | None = None,
        *,
        teacher: nn.Module | None = None,
        check_every_n_steps: int = 100,
        no_decay: Sequence[str] = NO_DECAY,
        compile: str = "none",
    ) -> None:
        options: dict[str, Any] = {"check_every_n_steps": check_every_n_steps, "compile": compile}
        super().__init__(backbone, loss, optimizer, scheduler, no_decay=no_decay, **options)
        self.teacher = None
        assert isinstance(self.model.loss, DistillationLoss)
        self.model.loss.drafts = is_drafter(self.model.transformers_model)
        if teacher is not None:
            instead = "store its probabilities with mode=score, and train with data.scores=FILE and teacher=null"
            self.teacher = self.add_frozen(teacher, "teacher", instead)
            self.model.loss.teacher = partial(self.teacher.run, teacher_head, free=False)

    def setup(self, stage: str) -> None:
        stored = self._of_data("stored_scores")
        if self.teacher is None and stored is None and hasattr(self.trainer.datamodule, "stored_scores"):  # type: ignore[attr-defined]
            raise UserError(NO_TEACHER)
        super().setup(stage)
        assert isinstance(self.model.loss, DistillationLoss)
        entries = self.model.vocabulary
        if self.teacher is not None:
            if stored is not None:
                raise UserError(
                    "there are a teacher and stored scores of one (data.scores), which are two teachers; leave one out"
                )
            check_vocabularies(self.teacher.model.vocabulary, entries)
        elif stored is not None:
            loss, header = self.model.loss, stored.header
            temperature = header.temperature if header.width is None else loss.of_loss.temperature
            loss.check_stored(header.vocabulary, temperature, entries)
            if header.width is not None:
                loss.output_layer = TeacherHead(torch.empty(0), **stored.output_layer())
