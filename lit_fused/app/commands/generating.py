"""``mode=generate`` and ``mode=chat``: a run's checkpoint, or a pretrained model, continues a prompt on one device."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from lit_fused.app.defaults import kind_of_weights
from lit_fused.app.one_device import chosen_module, on_device, one_device_trainer
from lit_fused.app.restore import run_with, tokenizer_of
from lit_fused.data.tokenizer import load_tokenizer
from lit_fused.errors import UserError
from lit_fused.models.generation import GenerateOptions, continue_text, encode_prompt, positions, room_after
from lit_fused.ops.user_error import printable
from lit_fused.training import FusedLMModule


def generate(cfg: DictConfig) -> None:
    """Print the prompt and what the model makes of it."""
    options: GenerateOptions = instantiate(cfg.generate)
    if cfg.prompt is None:
        raise UserError("mode=generate needs a text to continue; give one with 'prompt=\"...\"'")
    module, tokenizer, trainer = _trained(cfg)
    answer = _continue(cfg.prompt, options, module, tokenizer, trainer)
    is_answer = options.chat or module.backbone.config.is_encoder_decoder  # type: ignore[union-attr]
    text = Text.assemble((cfg.prompt, "bold"), "\n\n" if is_answer else "", printable(answer))
    Console(highlight=False).print(text, soft_wrap=True)


def chat(cfg: DictConfig) -> None:
    """Talk with the model in the terminal; an empty line, or the end of the input, ends the conversation."""
    options = replace(instantiate(cfg.generate), chat=True)
    module, tokenizer, trainer = _trained(cfg)
    console, messages = Console(highlight=False), []
    console.print("An empty line ends the conversation.", style="dim")
    with suppress(EOFError):
        while said := input("> ").strip():
            messages.append({"role": "user", "content": said})
            answer = _continue(messages, options, module, tokenizer, trainer).strip()
            messages.append({"role": "assistant", "content": answer})
            console.print(printable(answer), markup=False, soft_wrap=True)


def _continue(
    prompt: str | list[dict[str, str]],
    options: GenerateOptions,
    module: FusedLMModule,
    tokenizer: PreTrainedTokenizerBase,
    trainer: L.Trainer,
) -> str:
    model, strategy = module.model.transformers_model, trainer.strategy
    assert model is not None
    is_source = bool(model.config.is_encoder_decoder)
    tokens = encode_prompt(prompt, tokenizer, options.chat, is_source=is_source).to(strategy.root_device)
    if options.max_new_tokens > room_after(model, tokens.shape[1]):
        raise UserError(
            f"{tokens.shape[1]} tokens of prompt and generate.max_new_tokens={options.max_new_tokens} are more than "
            f"the {positions(model)} positions that {type(model).__name__} has; choose fewer"
        )
    with strategy.precision_plugin.forward_context(), torch.inference_mode():
        return continue_text(module, tokens, tokenizer, options)


def _trained(cfg: DictConfig) -> tuple[FusedLMModule, PreTrainedTokenizerBase, L.Trainer]:
    """Return a trained model on its device, its tokenizer, and the trainer; UserError without either."""
    if cfg.ckpt_path is None and kind_of_weights(cfg) == "new":
        raise UserError(
            f"mode={cfg.mode} needs trained weights, and this model would have random ones: give ckpt_path=RUN, or "
            "model=pretrained model.path=FOLDER (a run's is its folder exported)"
        )
    trainer = one_device_trainer(cfg)
    L.seed_everything(cfg.seed, verbose=False)
    tokenizer = None if cfg.ckpt_path is None else tokenizer_of(run_with(Path(cfg.ckpt_path).absolute()), cfg)
    module = chosen_module(cfg)
    model: Any = module.model.transformers_model
    tokenizer = tokenizer or load_tokenizer(model.name_or_path)
    return on_device(module, trainer), tokenizer, trainer
