"""Tiny models with random weights, each from an explicit configuration, and batches for them.

No two sizes of a model agree, so that a shape tells what a tensor is: width 32, vocabulary 97.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

VOCABULARY, WIDTH = 97, 32

_Model = TypeVar("_Model", bound=nn.Module)

_LLAMA: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2: dict[str, Any] = {
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
_EXPERTS: dict[str, Any] = {
    "experts_implementation": "eager",
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}

# name -> (transformers' model type, configuration): what acts on the logits is set to a number that is not neutral
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA),
    "llama_tied": ("llama", _LLAMA | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", _LLAMA | {"head_dim": 8}),
    "qwen3_tied": ("qwen3", _LLAMA | {"head_dim": 8, "tie_word_embeddings": True}),
    "mistral": ("mistral", _LLAMA),
    "olmo2": ("olmo2", _LLAMA),
    "phi": ("phi", _LLAMA),
    "granite": ("granite", _LLAMA | {"logits_scaling": 4.0}),
    "cohere": ("cohere", _LLAMA | {"logit_scale": 0.3}),
    "falcon_h1": (
        "falcon_h1",
        _LLAMA
        | {"lm_head_multiplier": 0.37, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16}
        | {"mamba_n_groups": 1, "mamba_chunk_size": 16},
    ),
    "gemma2": ("gemma2", _LLAMA | {"head_dim": 8, "final_logit_softcapping": 4.0}),
    "gemma2_untied": ("gemma2", _LLAMA | {"head_dim": 8, "final_logit_softcapping": 4.0, "tie_word_embeddings": False}),
    "gemma2_default": ("gemma2", _LLAMA | {"head_dim": 8}),  # a cap of 30, far above the logits of a fresh model
    "gpt2": ("gpt2", _GPT2 | _NO_DROPOUT),
    "gptj": ("gptj", _GPT2 | _NO_DROPOUT | {"rotary_dim": 4}),
    "gpt_neox": ("gpt_neox", _LLAMA),
    "opt": (
        "opt",
        {
            "hidden_size": WIDTH,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 24,
        }
        | {"max_position_embeddings": 64, "dropout": 0.0, "pad_token_id": 0},
    ),
    "bert": ("bert", _LLAMA | {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "mpt": (
        "mpt",
        {"d_model": WIDTH, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 64, "logit_scale": 3.0},
    ),
    "mixtral": ("mixtral", _LLAMA | _EXPERTS | {"num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", _LLAMA | _EXPERTS | {"num_experts": 4, "head_dim": 8, "moe_intermediate_size": 40}),
    "bart": (  # its own loss does not shift the labels
        "bart",
        {
            "d_model": WIDTH,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
            "encoder_layers": 1,
        }
        | {"max_position_embeddings": 64, "dropout": 0.0, "is_decoder": True, "is_encoder_decoder": False},
    ),
}

# so too, of models whose positions see all tokens
MASKED_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "masked_eurobert": ("eurobert", _LLAMA | {"mask_token_id": 3}),
    "masked_eurobert_tied": ("eurobert", _LLAMA | {"tie_word_embeddings": True, "mask_token_id": 3}),
    "masked_modernbert": (  # dense layer, activation and norm before the output layer, and a bias
        "modernbert",
        _LLAMA | {"global_attn_every_n_layers": 2, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
    ),
}


def tiny_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """The model of :data:`MODELS` or :data:`MASKED_MODELS` by that name, always with the same weights, training."""
    model_type, settings = (MODELS | MASKED_MODELS)[name]
    config = AutoConfig.for_model(model_type, **({"vocab_size": VOCABULARY} | settings | changes))
    auto = AutoModelForMaskedLM if name.startswith("masked") else AutoModelForCausalLM
    return _seeded(lambda: auto.from_config(config)).to(dtype).train()


def tiny_llama(model_class: type[LlamaForCausalLM] = LlamaForCausalLM) -> LlamaForCausalLM:
    """A Llama of a class of one's own."""
    config = LlamaConfig(vocab_size=VOCABULARY, **_LLAMA)
    return _seeded(lambda: model_class(config)).train()


class ScaledInTraining(LlamaForCausalLM):
    """A scale, of its own loss as well, that no probe in evaluation mode can see."""

    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, **kwargs)
        if self.training:
            output.logits = 1.1 * output.logits
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, vocab_size=self.config.vocab_size)
        return output


def sharpen(model: _Model, factor: float = 20.0) -> _Model:
    """The model with larger output weights: its logits then reach a softcap, and its loss depends on its input."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(factor)  # type: ignore[operator]
    return model


def tiny_batch(
    sequences: int = 3, length: int = 20, *, ignored: float = 0.2, vocabulary: int = VOCABULARY
) -> dict[str, Tensor]:
    """Random "input_ids" and "labels" (sequences, length); each sequence has another number of ignored labels."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, vocabulary, (sequences, length), generator=generator)
    dropped = torch.rand(input_ids.shape, generator=generator) < ignored
    return {"input_ids": input_ids, "labels": input_ids.masked_fill(dropped, -100)}


class TinyBackbone(nn.Module):
    """A causal model that is no transformers model: it returns hidden states and names its output layer."""

    def __init__(self, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        self.mixer = nn.GRU(WIDTH, WIDTH, batch_first=True, dtype=dtype)
        self.head = None if tied else nn.Linear(WIDTH, VOCABULARY, dtype=dtype)

    def get_output_embeddings(self) -> nn.Embedding | nn.Linear:
        return self.embedding if self.head is None else self.head

    def forward(self, input_ids: Tensor) -> Any:
        return self.mixer(self.embedding(input_ids))[0]


def tiny_backbone(backbone_class: type[TinyBackbone] = TinyBackbone, **arguments: Any) -> TinyBackbone:
    return _seeded(lambda: backbone_class(**arguments))


def _seeded(build: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()
