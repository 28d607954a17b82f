"""Show a short sample of generated text before and after training."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from rich.panel import Panel
from rich.text import Text

from lit_fused.callbacks.training_progress import console_beside_bar
from lit_fused.errors import UserError
from lit_fused.models.generation import GenerateOptions, continue_text, encode_prompt, room_after
from lit_fused.ops.user_error import printable
from lit_fused.training import FusedLMModule


class SampleText(L.Callback):
    """Prints a continuation of a prompt, or an encoder-decoder's answer to it, when training starts and ends.

    Without a ``prompt``, it is the beginning of a held-out document of the run's data: of a conversation the first
    user's turn, of a pair the source. Data without a tokenizer (``data=synthetic``), and data modules that have no
    ``held_out_prompt()`` as :class:`~lit_fused.data.TokenDataModule` has it, show nothing then.

    Loggers that show text get it too. Sampling has a seed of its own, so training draws the same random numbers with
    and without this callback. The tokenizer is the datamodule's. The options are those of
    :class:`~lit_fused.models.generation.GenerateOptions`.
    """

    def __init__(
        self, prompt: str | None = None, max_new_tokens: int = 48, temperature: float = 0.7, chat: bool = False
    ) -> None:
        self.prompt = prompt
        self.options = GenerateOptions(max_new_tokens, temperature, chat=chat)
        self.samples: dict[str, str] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        step = trainer.global_step
        self._sample(f"at step {step}" if step else "before training", trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._sample("after training", trainer, pl_module)

    def _sample(self, when: str, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data = getattr(trainer, "datamodule", None)
        tokenizer = getattr(data, "tokenizer", None)
        assert isinstance(pl_module, FusedLMModule)
        model: Any = pl_module.model.transformers_model
        if tokenizer is None or not (trainer.is_global_zero or pl_module.is_sharded) or not hasattr(model, "generate"):
            return
        if self.prompt is not None:
            is_source = bool(model.config.is_encoder_decoder)
            inputs = encode_prompt(self.prompt, tokenizer, self.options.chat, is_source=is_source)
        elif hasattr(data, "held_out_prompt"):
            inputs = data.held_out_prompt()  # type: ignore[union-attr]
        else:
            return
        inputs = inputs.to(pl_module.device)
        room = room_after(model, inputs.shape[1])
        if room < 1:
            rank_zero_warn("SampleText shows nothing: the prompt fills the model's positions")
            return
        devices = [pl_module.device] if pl_module.device.type == "cuda" else []
        precision = trainer.precision_plugin.forward_context()
        with torch.random.fork_rng(devices), precision:
            torch.manual_seed(0)
            options = replace(self.options, max_new_tokens=min(self.options.max_new_tokens, room))
            try:
                answer = continue_text(pl_module, inputs, tokenizer, options)
            except UserError as error:  # Training goes on without a sample.
                rank_zero_warn(f"SampleText shows nothing: {error}")
                return
        if not trainer.is_global_zero:
            return
        prompt = tokenizer.decode(inputs[0], skip_special_tokens=True)
        self.samples[when] = prompt + ("\n\n" if model.config.is_encoder_decoder else "") + answer
        text = Text.assemble((printable(prompt), "bold"), printable(self.samples[when].removeprefix(prompt)))
        console_beside_bar(trainer).print(Panel(text, title=f"Sample {when}", title_align="left"))
        log_text(trainer.loggers, f"sample/{when}", self.samples[when], trainer.global_step)


@rank_zero_only
def log_text(loggers: Iterable[Logger], name: str, text: str, step: int) -> None:
    """Log text without formatting to the loggers that show text. Rank zero only."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), step)
        elif isinstance(logger, WandbLogger):
            logger.log_text(name, columns=["text"], data=[[text]], step=step)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_text(str(logger.run_id), text, f"{name}/step-{step}.txt")
