"""A LightningModule around a language model: how the strategy places it, how it generates, and its export."""

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import lightning as L
import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedTokenizerBase

from lit_fused.checkpoints.reading import read_file, read_folder
from lit_fused.checkpoints.whole_or_not import check_whole
from lit_fused.errors import UserError
from lit_fused.export.huggingface import write_folder
from lit_fused.heads import evaluation_mode
from lit_fused.models.generation import check_generates
from lit_fused.models.hub import auto_class
from lit_fused.models.language_model import LanguageModel
from lit_fused.models.load import grow_vocabulary, is_deferred, materialize, origin_of
from lit_fused.parallel import Placement, are_finite, is_divided, local, placement_of


def _refuse_non_finite(input_ids: Tensor, scores: Tensor) -> Tensor:
    if bool((scores.isnan() | scores.isposinf()).any()):
        raise UserError(
            "the model's logits are not finite, so no token can be chosen; its weights may not be finite, or "
            "float16 too narrow for it: try precision=bf16-mixed or 32-true"
        )
    return scores


class PlacedLMModule(L.LightningModule):
    """Owns a :class:`LanguageModel`, and knows how the strategy places it."""

    model: LanguageModel
    model_card: str | None = None  # the README.md that save_pretrained writes
    _outline: tuple[nn.Module, ...] = ()  # a sharded model's with adapters, in a tuple as it is no submodule

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: Any, *args: Any, weights_only: bool | None = None, **options: Any
    ) -> Self:
        """Load as Lightning does, after a look at the checksums: a file, or the folder of a sharded strategy. Arguments
        that are no plain values (``backbone``, ``loss`` ...) and were not saved by ``save_hyperparameters`` go here."""
        if isinstance(checkpoint_path, str | Path) and "://" not in str(checkpoint_path):
            path = Path(checkpoint_path)
            check_whole(path)
            if path.is_dir():
                checkpoint_path = BytesIO()
                torch.save(read_folder(path, optimizers=False, weights_only=weights_only), checkpoint_path)
                checkpoint_path.seek(0)
            else:
                read_file(path, mmap=True, weights_only=weights_only)
        return super().load_from_checkpoint(checkpoint_path, *args, weights_only=weights_only, **options)  # type: ignore[misc]

    def make_room(self, weights: Mapping[str, Tensor]) -> None:
        """Make a model that no trainer has seen ready to load ``weights``: with parameters, and with the vocabulary of
        the run, in which that of a pretrained model grows if the tokenizer has more entries."""
        model: Any = self.model.transformers_model
        if origin_of(model) is not None:
            table = getattr(model.get_input_embeddings(), "weight", None)
            names = [name for name, p in self.named_parameters(remove_duplicate=False) if p is table]
            rows = max((len(weights[name]) for name in names if name in weights), default=0)
            if table is not None and rows > len(table):
                grow_vocabulary(model, rows)
        if is_deferred(self.model):
            materialize(self.model)

    @property
    def backbone(self) -> nn.Module:
        """The model that was passed in; its parameters are stored under the prefix ``model.backbone.``"""
        return self.model.backbone

    @property
    def placement(self) -> Placement:
        """How the trainer's strategy places the model; one device's for a module without a trainer."""
        return placement_of(None if self._trainer is None else self.trainer.strategy)

    @property
    def can_generate(self) -> bool:
        """True if ``generate`` works: no pipeline has the model's layers on different ranks."""
        return not is_divided(self.model)

    @property
    def is_sharded(self) -> bool:
        """True if no rank has the whole model. Then every rank has to call ``generate`` and ``save_pretrained``."""
        return self.placement.is_sharded

    @property
    def auto_class(self) -> str:
        """The name of transformers' class that loads what is exported: an auto class, or the model's own."""
        model = self.model.transformers_model
        with suppress(UserError):
            return type(self.backbone).__name__ if model is None else auto_class(model.config).__name__
        return type(model).__name__

    @torch.no_grad()
    def check_finite(self, consequence: str, *, together: bool) -> None:
        """Raise UserError, which names the ``consequence``, unless every weight that is trained is finite; on every
        rank if they call it ``together``."""
        weights = {name: local(p) for name, p in self.named_parameters() if p.requires_grad and p.is_floating_point()}
        finite = are_finite(weights.values()) if weights else torch.ones(1, device=self.device, dtype=torch.bool)
        if bool((self.placement.from_all_ranks(finite.all().int()) if together else finite).all()):
            return
        names = [name for name, is_finite in zip(weights, finite.tolist(), strict=False) if not is_finite]
        which = f" ({names[0]} is the first of {len(names)})" if names else ""
        step = f" after step {self.trainer.global_step}" if self._trainer is not None else ""
        raise UserError(
            f"the weights are not finite{step}{which}, so {consequence}; go on from an earlier checkpoint, with a "
            "smaller optimizer.lr or a larger scheduler.warmup_fraction"
        )

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Return what the backbone's own forward returns: ``module(input_ids=...)`` has logits, ``(B, T, V)``."""
        if not self.can_generate:
            raise UserError(
                "a model that is divided over a pipeline has no forward of its own; validate, predict, or export it"
            )
        return self.model.call_backbone(*arguments, **named)

    @torch.no_grad()
    def generate(self, input_ids: Tensor | None = None, **options: Any) -> Tensor:
        """Return what the backbone's own ``generate`` makes of (B, T) token ids, in evaluation mode: (B, T + new) of a
        causal model, (B, new) of an encoder-decoder; or of other inputs, by name."""
        self._refuse_unless_transformers("generate text")
        if not self.can_generate:
            otherwise = "export it (save_pretrained), and let one device generate"
            raise UserError(f"a model that is divided over a pipeline does not generate text; {otherwise}")
        check_generates(self.model.transformers_model)
        # Each new length would be compiled, and soon torch.compile would give up.
        eager = torch.compiler.set_stance("force_eager")
        with evaluation_mode(self.backbone), self.placement.generating(self.device), eager:
            processors = LogitsProcessorList([_refuse_non_finite, *(options.pop("logits_processor", None) or ())])
            given = options if input_ids is None else options | {"input_ids": input_ids}
            return self.model.generate(logits_processor=processors, **given)

    def save_pretrained(
        self,
        folder: str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write a folder that transformers' ``from_pretrained`` loads. It appears whole or not at all.

        PEFT's adapters are merged into the weights there; the adapters alone, for ``PeftModel.from_pretrained``, lie in
        its subfolder ``adapter``. The training model stays as it is.

        Args:
            folder: replaced as a whole if this method wrote it and nothing else is in it.
            tokenizer: written beside the model, and asked for special tokens that its generation needs.
            weights: used instead of the module's own, by the names of its state dict: those of a checkpoint, whole and
                on the CPU. Only rank 0 needs them.
        """
        self._refuse_unless_transformers("be saved as a Hugging Face folder")
        prefix = "model.backbone."
        if weights is None:
            self.check_finite("nothing is exported", together=self.is_sharded)
        elif weights and not are_finite(w for w in weights.values() if w.is_floating_point()).all():
            raise UserError("the weights of the checkpoint are not finite, so nothing is exported; export another one")
        given = {n.removeprefix(prefix): w for n, w in (weights or {}).items() if n.startswith(prefix)}
        with self.placement.whole_weights(self.backbone) if weights is None else nullcontext(given) as whole:
            if self.placement.is_global_zero:
                write_folder(Path(folder), self.backbone, tokenizer, whole, *self._outline, card=self.model_card)

    def _refuse_unless_transformers(self, purpose: str) -> None:
        """Refuse any other model, and give one that no trainer has seen its weights."""
        model = self.model.transformers_model
        if model is None:
            raise UserError(
                f"{type(self.backbone).__name__} is not a transformers model and cannot {purpose}; override this method"
            )
        if is_deferred(model):
            materialize(model)
