"""Generate text: choose the end and padding tokens, encode a prompt, decode its continuation."""

import copy
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lit_fused.errors import check_switches, explained
from lit_fused.models.special_tokens import closing_tokens, one_of_each


def positions(model: PreTrainedModel, part: str = "decoder") -> int:
    """Return how many tokens the configuration has positions for, in the decoder or the encoder if there are two."""
    config = model.config.get_text_config()
    named = (f"max_{part}_position_embeddings", "max_target_positions", "max_position_embeddings", "max_seq_len")
    rooms = [getattr(config, name, None) for name in named]  # XLNet's is -1
    return next((room for room in rooms if isinstance(room, int) and room > 0), sys.maxsize)


def generation_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Return a copy of the model's configuration with the special tokens of ``tokenizer``; a pretrained model keeps its
    end tokens beside them. Without a padding token, the first end token pads."""
    config = copy.deepcopy(model.generation_config) or GenerationConfig()
    was_pretrained = bool(model.name_or_path)
    ends = _as_list(config.eos_token_id) if was_pretrained or tokenizer.eos_token_id is None else []
    ends += [end for end in _as_list(tokenizer.eos_token_id) if end not in ends]
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    for name in ("bos_token_id", "pad_token_id"):
        own, given = getattr(config, name), getattr(tokenizer, name)
        setattr(config, name, own if given is None or (own is not None and was_pretrained) else given)
    if config.pad_token_id is None and ends:
        config.pad_token_id = ends[0]
    return config


def _as_list(tokens: Any) -> list[int]:
    return [] if tokens is None else [tokens] if isinstance(tokens, int) else list(tokens)


@dataclass(frozen=True)
class GenerateOptions:
    """Options for continuing a prompt.

    Attributes:
        max_new_tokens: the most tokens to generate, at least 1.
        temperature: sampling temperature; 0 takes the likeliest token.
        top_p: sample from the smallest set of tokens with at least this probability, in (0, 1]; None: the model's own.
        chat: put the prompt into the tokenizer's chat template, as a user's message.
    """

    max_new_tokens: int = 128
    temperature: float = 0.7
    top_p: float | None = None
    chat: bool = False

    def __post_init__(self) -> None:
        check_switches({"chat": bool}, {"chat": self.chat})

    @property
    def sampling(self) -> dict[str, Any]:
        """Return the sampling arguments of transformers' ``generate``."""
        if not self.temperature:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        chosen = {} if self.top_p is None else {"top_p": float(self.top_p)}
        return {"do_sample": True, "temperature": float(self.temperature), **chosen}


def encode_prompt(
    prompt: str | list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, chat: bool, *, is_source: bool = False
) -> Tensor:
    """Return the prompt's tokens, (1, T) int64 with T >= 1, without the end-of-text token that some tokenizers append:
    a model goes on with a prompt. Only the source of an encoder-decoder (``is_source``) is whole with it. With ``chat``
    the prompt is a user's message, or a list of messages."""
    if chat:
        message = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        with explained("the tokenizer's chat template refuses the prompt", "leave chat=true out, or mend it"):
            text: Any = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(str(prompt))["input_ids"]
        ids = ids if is_source else ids[: len(ids) - closing_tokens(tokenizer)]
    if ids:
        return torch.tensor([one_of_each(ids, tokenizer)])
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return torch.tensor([[first]])


def room_after(model: PreTrainedModel, prompt: int) -> int:
    """Return how many tokens the model has positions for after a prompt of so many, less than 1 if not for that."""
    if not model.config.is_encoder_decoder:
        return positions(model) - prompt
    return positions(model) if prompt <= positions(model, "encoder") else 0


def continue_text(module: Any, tokens: Tensor, tokenizer: PreTrainedTokenizerBase, options: GenerateOptions) -> str:
    """Return the text with which the model of a Lightning module continues tokens (1, T), or answers them."""
    model = module.model.transformers_model
    config = generation_config(model, tokenizer)
    config.update(max_new_tokens=options.max_new_tokens, max_length=None, **options.sampling)
    made = module.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
    return continuation(made[0], 0 if model.config.is_encoder_decoder else tokens.shape[1], tokenizer)


def continuation(tokens: Tensor, length: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of ``tokens`` (T,) after the first ``length``, including a space between the two parts."""
    parts = tokens, tokens[:length], tokens[length:]
    whole, before, after = (str(tokenizer.decode(part, skip_special_tokens=True)) for part in parts)
    return whole.removeprefix(before) if whole.startswith(before) else after
