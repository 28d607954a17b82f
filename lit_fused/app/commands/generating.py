"""``mode=generate``: continue a prompt with a run's checkpoint, or with a pretrained model, on one device."""

from pathlib import Path

import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lit_fused.app.one_device import on_device, one_device_trainer
from lit_fused.app.restore import restored, run_with, tokenizer_of
from lit_fused.errors import UserError
from lit_fused.models.generation import (
    GenerateOptions,
    check_generates,
    continue_text,
    encode_prompt,
    positions,
    room_after,
)
from lit_fused.models.load import origin_of
from lit_fused.training import FusedLMModule


def generate(cfg: DictConfig) -> None:
    options: GenerateOptions = instantiate(cfg.generate)
    if cfg.prompt is None:
        raise UserError("mode=generate needs a text to continue; give one with 'prompt=\"...\"'")
    trainer = one_device_trainer(cfg)
    L.seed_everything(cfg.seed, verbose=False)
    module, tokenizer = _trained(cfg)
    answer = _continue(cfg.prompt, options, module, tokenizer, trainer)
    is_answer = options.chat or module.backbone.config.is_encoder_decoder  # type: ignore[union-attr]
    text = Text.assemble((cfg.prompt, "bold"), "\n\n" if is_answer else "", answer)
    Console(highlight=False).print(text, soft_wrap=True)


def _continue(
    prompt: str, options: GenerateOptions, module: FusedLMModule, tokenizer: PreTrainedTokenizerBase, trainer: L.Trainer
) -> str:
    model = module.model.transformers_model
    assert model is not None
    check_generates(model)
    module, strategy = on_device(module, trainer), trainer.strategy
    is_source = bool(model.config.is_encoder_decoder)
    tokens = encode_prompt(prompt, tokenizer, options.chat, is_source=is_source).to(strategy.root_device)
    vocabulary = module.model.vocabulary
    if int(tokens.max()) >= vocabulary:
        raise UserError(
            f"the tokenizer has entries that the model has not: token {int(tokens.max())}, and its vocabulary ends at "
            f"{vocabulary}; give the model that belongs to it"
        )
    if options.max_new_tokens > room_after(model, tokens.shape[1]):
        raise UserError(
            f"{tokens.shape[1]} tokens of prompt and generate.max_new_tokens={options.max_new_tokens} are more than "
            f"the {positions(model)} positions that {type(model).__name__} has; choose fewer"
        )
    with strategy.precision_plugin.forward_context(), torch.inference_mode():
        return continue_text(module, tokens, tokenizer, options)


def _trained(cfg: DictConfig) -> tuple[FusedLMModule, PreTrainedTokenizerBase]:
    """Return a trained model and its tokenizer; UserError without either."""
    if cfg.ckpt_path is not None:
        checkpoint = Path(cfg.ckpt_path).absolute()
        tokenizer = tokenizer_of(run_with(checkpoint), cfg)
        if tokenizer is None:
            raise UserError(f"the run of {checkpoint} has no tokenizer: its data are tokens; it cannot generate text")
        return restored(cfg, checkpoint), tokenizer
    module = instantiate(cfg.module)(instantiate(cfg.model))
    model = module.model.transformers_model
    path = "" if model is None else model.name_or_path
    if not path:
        raise UserError(
            "mode=generate needs trained weights, and this model would have random ones: give ckpt_path=FILE, or "
            "model=pretrained model.path=FOLDER (a run's is its folder exported)"
        )
    origin = origin_of(model)
    try:
        revision = (origin and origin.revision) or "main"
        return module, AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} has no tokenizer to read the prompt with; put one into the folder") from error
