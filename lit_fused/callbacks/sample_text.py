"""Show a short sample of generated text before and after training."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from rich.panel import Panel
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_fused.callbacks.text_logging import log_text
from lit_fused.callbacks.training_progress import console_beside_bar
from lit_fused.callbacks.weight_average import averaged_weights
from lit_fused.errors import UserError
from lit_fused.modules import FusedLMModule


class SampleText(L.Callback):
    """Prints a continuation of ``prompt``, or an encoder-decoder's answer to it, when training starts and ends.

    Loggers that show text get it too. Sampling has a seed of its own, so training draws the same random numbers with
    and without this callback. The tokenizer is the datamodule's; without one (``data=synthetic``) nothing is shown.

    Args:
        prompt: text to continue or to answer.
        max_new_tokens: largest number of tokens to generate.
        temperature: temperature of the sampling; 0 takes the likeliest token.
        chat: treat ``prompt`` as a user's message, in the tokenizer's chat template.
    """

    def __init__(self, prompt: str, max_new_tokens: int = 48, temperature: float = 0.7, chat: bool = False) -> None:
        if max_new_tokens < 1 or temperature < 0:
            raise UserError(
                f"max_new_tokens must be positive and temperature not negative, got {max_new_tokens} and {temperature}"
            )
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.chat = chat
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
        inputs = self._encoded_prompt(tokenizer).to(pl_module.device)
        sampling = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        devices = [pl_module.device] if pl_module.device.type == "cuda" else []
        precision = trainer.precision_plugin.forward_context()
        with averaged_weights(trainer), torch.random.fork_rng(devices), precision:
            torch.manual_seed(0)
            tokens = pl_module.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=self.max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                **sampling,
            )
        if not trainer.is_global_zero:
            return
        self.samples[when] = tokenizer.decode(tokens[0], skip_special_tokens=True)
        panel = Panel(Text(self.samples[when]), title=f"Sample {when}", title_align="left")
        console_beside_bar(trainer).print(panel)
        log_text(trainer.loggers, f"sample/{when}", self.samples[when], trainer.global_step)

    def _encoded_prompt(self, tokenizer: PreTrainedTokenizerBase) -> Tensor:
        """Return the prompt's tokens (1, T)."""
        if not self.chat:
            return tokenizer(self.prompt, return_tensors="pt")["input_ids"]
        if tokenizer.chat_template is None:
            raise UserError("callbacks.sample_text.chat=true needs a tokenizer with a chat template; set it to false")
        messages = [{"role": "user", "content": self.prompt}]
        encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        return encoded["input_ids"]
