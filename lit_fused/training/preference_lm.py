"""The LightningModule of preferences: where the reference's log-probabilities come from."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_fused.errors import UserError
from lit_fused.heads import evaluation_mode, peft_model
from lit_fused.losses.loss import Batch, ForwardPass
from lit_fused.models.language_model import LanguageModel
from lit_fused.objectives import PreferenceLoss
from lit_fused.objectives.preference_loss import log_probs
from lit_fused.training.frozen import FrozenModel
from lit_fused.training.module import FusedCausalLMModule

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


def _of_frozen(frozen: FrozenModel, _: ForwardPass, batch: Batch) -> Tensor:
    return frozen.run(log_probs, batch)


def _without_adapters(model: ForwardPass, batch: Batch) -> Tensor:
    assert isinstance(model, LanguageModel)
    with torch.no_grad(), evaluation_mode(model.backbone), peft_model(model.backbone).disable_adapter():
        return log_probs(model, batch)
