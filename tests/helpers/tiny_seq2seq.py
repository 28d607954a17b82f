"""Tiny encoder-decoders with random weights, and padded pairs for them."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

VOCABULARY, WIDTH = 97, 32

PAD, END, START = 1, 2, 3

T5: dict[str, Any] = {
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "decoder_start_token_id": START,
}

BART: dict[str, Any] = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": END,
    "decoder_start_token_id": START,
    "forced_eos_token_id": None,
}

# name -> (transformers' model type, configuration)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", T5),  # divides the decoder's output by sqrt(d_model)
    "t5_gated": ("t5", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),  # does not
    "mt5_tied": ("mt5", T5 | {"tie_word_embeddings": True}),
    "mt5_untied": ("mt5", T5 | {"tie_word_embeddings": False}),
    "bart": ("bart", BART),
    "bart_untied": ("bart", BART | {"tie_word_embeddings": False}),
    "mbart": ("mbart", BART),  # wraps the last label around to the decoder's first position
    "marian": ("marian", BART | {"decoder_vocab_size": VOCABULARY}),
    "pegasus": ("pegasus", BART),
    "led": ("led", BART | {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}
            | {"attention_window": 4}),
}  # fmt: skip


def tiny_seq2seq(name: str, seed: int = 0) -> PreTrainedModel:
    """The model of :data:`MODELS` by that name, with weights that depend on the seed only, in training mode.

    The buffer that BART and its kin add to the logits is all zeros in a fresh model; here it is not.
    """
    model_type, settings = MODELS[name]
    config = AutoConfig.for_model(model_type, **({"vocab_size": VOCABULARY} | settings))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForSeq2SeqLM.from_config(config)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model.train()


def pair_batch(
    pairs: int = 3, read: int = 12, said: int = 7, *, ignored: int | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """Padded pairs; the inputs are of another length than the answers, each of which ends in other ignored labels."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(4, VOCABULARY, (pairs, read), generator=generator)
    labels = torch.randint(4, VOCABULARY, (pairs, said), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row in range(pairs):
        labels[row, said - (row if ignored is None else ignored) :] = -100
        attention_mask[row, read - 2 * row :] = 0
    input_ids = input_ids.masked_fill(attention_mask == 0, PAD)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
