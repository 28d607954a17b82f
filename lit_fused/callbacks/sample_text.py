"""Show a short sample of generated text before and after training."""

from collections.abc import Iterable

import lightning as L
import torch
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from rich.panel import Panel
from rich.text import Text

from lit_fused.callbacks.training_progress import console_beside_bar
from lit_fused.callbacks.weight_average import averaged_weights
from lit_fused.models.generation import GenerateOptions, encode_prompt
from lit_fused.modules import FusedLMModule


class SampleText(L.Callback):
    """Prints a continuation of ``prompt``, or an encoder-decoder's answer to it, when training starts and ends.

    Loggers that show text get it too. Sampling has a seed of its own, so training draws the same random numbers with
    and without this callback. The tokenizer is the datamodule's; without one (``data=synthetic``) nothing is shown.
    The options are those of :class:`~lit_fused.models.generation.GenerateOptions`.
    """

    def __init__(self, prompt: str, max_new_tokens: int = 48, temperature: float = 0.7, chat: bool = False) -> None:
        self.prompt = prompt
        self.options = GenerateOptions(max_new_tokens, temperature, chat=chat)
        self.samples: dict[str, str] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._sample("before training", trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._sample("after training", trainer, pl_module)

    def _sample(self, when: str, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
        assert isinstance(pl_module, FusedLMModule)
        if tokenizer is None or not (trainer.is_global_zero or pl_module.is_sharded):
            return
        if not pl_module.can_generate:
            rank_zero_warn("SampleText shows nothing: a model that is divided over a pipeline does not generate text")
            return
        inputs = encode_prompt(self.prompt, tokenizer, self.options.chat).to(pl_module.device)
        devices = [pl_module.device] if pl_module.device.type == "cuda" else []
        precision = trainer.precision_plugin.forward_context()
        with averaged_weights(trainer), torch.random.fork_rng(devices), precision:
            torch.manual_seed(0)
            tokens = pl_module.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=self.options.max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                **self.options.sampling,
            )
        if not trainer.is_global_zero:
            return
        self.samples[when] = tokenizer.decode(tokens[0], skip_special_tokens=True)
        console_beside_bar(trainer).print(Panel(Text(self.samples[when]), title=f"Sample {when}", title_align="left"))
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
