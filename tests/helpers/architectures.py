"""Every language model architecture that transformers knows, made tiny, and the judgement whether lit_fused is exact.

The architectures are the entries of transformers' own mappings from model types to causal and sequence-to-sequence
classes, read when this module is imported: a new release of transformers brings new entries, and with them new test
cases. Most need nothing else. A configuration class is made tiny by the names of its fields: one regular expression
per kind of size, tried in order, and :data:`EXCEPTIONS` where an architecture needs other numbers. Only fields that
the class declares are set, so that whatever it derives from them is derived from the small numbers.

An entry is judged in four variants (:class:`Variant`). :func:`check` returns a verdict, *exact* or *refused*, and
raises for anything else, above all for a loss or a gradient that differs from those of the model's own logits.
"""

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from errors_of import assert_as_near, norm_of_all
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from lit_fused import LanguageModel, MaskedLanguageModel, Seq2SeqLanguageModel
from lit_fused.errors import UserError
from lit_fused.heads import OutputHead
from lit_fused.losses import LinearCrossEntropyLoss

_CLASSES = {
    "causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}


@dataclass(frozen=True, order=True)
class Entry:
    """One line of a mapping: a model type and the task it is mapped for, "causal", "masked" or "seq2seq"."""

    model_type: str
    task: str

    @property
    def class_name(self) -> str:
        return _CLASSES[self.task][self.model_type]

    def __str__(self) -> str:
        return f"{self.model_type}-{self.task}"


ENTRIES = sorted(Entry(model_type, task) for task, classes in _CLASSES.items() for model_type in classes)

OF_EACH_KIND = {
    "bart-causal",  # its own loss does not shift the labels
    "bart-masked",  # an encoder-decoder that fills in what is masked
    "bart-seq2seq",  # an encoder-decoder that adds a buffer to its logits
    "bert-causal",  # dense layer, activation and norm before the output layer
    "bert-masked",
    "cohere-causal",  # a scale
    "gemma2-causal",  # a softcap
    "gpt2-causal",
    "inkling2_text-causal",  # a softcap and a slice
    "llama-causal",
    "esm-masked",  # a bias of its own after the output layer
    "luke-masked",  # names its loss twice
    "mixtral-causal",  # a mixture of experts
    "mobilebert-masked",  # refused
    "modernbert-masked",
    "mpt-causal",  # a logit_scale that it does not apply
    "musicgen-causal",  # refused
    "phi-causal",  # a bias
    "t5-seq2seq",  # an encoder-decoder that scales its hidden states where its embeddings are tied
    "voxtral-seq2seq",  # in the mapping of sequence-to-sequence models, but a decoder alone
}


class Variant(Enum):
    """Says what an entry is judged with. All but BFLOAT16 have noise for weights, see :func:`sharpen`."""

    DEFAULT = "the configuration's own defaults"
    ACTIVE = "every attribute that acts on the logits at a value that is not neutral"
    TYING_FLIPPED = "input and output embeddings tied where they are not by default, and the other way round"
    BFLOAT16 = "defaults, in bfloat16, with the weights of the library's own initialisation"


# Their own forward joins float32 to bfloat16 weights and fails: for them BFLOAT16 is autocast over float32 weights.
AUTOCAST_ONLY = {"inkling2_text", "mra", "xlstm"}


# Tiny configurations

VOCABULARY, WIDTH, HEADS, KEY_VALUE_HEADS, HEAD_WIDTH, FEED_FORWARD, LAYERS, EXPERTS = 256, 64, 4, 2, 16, 96, 2, 4
SEQUENCES, LENGTH = 2, 16  # of a batch; reformer's axial positions need this very length
_FIRST_TOKEN, _LAST_TOKEN = 10, 200  # below lie bos, eos and pad, above the placeholders of images and sounds
_MOST_PARAMETERS = 5_000_000

# (value, the names of the fields that get it). The first line that matches a whole name counts.
_SIZES: list[tuple[Any, str]] = [
    (VOCABULARY - 11, r"unpadded_vocab_size"),
    (VOCABULARY, r"(\w+_)?vocab_size|vocab_size_per_layer_input"),
    (1, r"n_group|topk_group|first_k_dense_replace|num_sparse_(en|de)coder_layers"),
    (8, r"mamba_n(um)?_heads|n_mamba_heads|qk_rope_head_dim|rotary_dim"),
    (8, r"(sliding_|attention_)?window_size|sliding_window|local_attention"),
    (HEADS, r"(\w+_)?attention_heads|n(um)?_heads?|index_n_heads|linear_num_(value_)?heads"),
    (KEY_VALUE_HEADS, r"(swa_)?num_key_value_heads|num_kv_heads|linear_num_key_heads"),
    (HEAD_WIDTH, r"(\w+_)?head_dim|d_kv|d_head|dim_head|kv_channels|attention_head_size|mamba_d_head"),
    (48, r"output_embedding_size"),
    (2 * WIDTH, r"mamba_d_ssm"),
    (32, r"\w+_lora_rank|moe_latent_size|num_mel_bins"),
    (
        WIDTH,
        r"d_model|n_embd|lru_width|(pronunciation_|shape_)embed_dim|emb_dim|(word_)?embed(ding)?(_proj)?_(dim|size)",
    ),
    (WIDTH, r"dim|(backbone_|encoder_|router_|audio_)?hidden_(size|dim)(_global)?"),
    (FEED_FORWARD, r"\w*intermediate_size\w*|(\w+_)?ffn_dim|d_ff|dff|dim_ff|d_inner|n_inner|mlp_dim"),
    (FEED_FORWARD, r"(\w+_)?ffn_hidden_size|feed_forward_size"),
    (LAYERS, r"(conf_)?num_hidden_layers|n(um)?_layers?|(num_|speech_|t2u_)*(en|de)coder_layers"),
    (LAYERS, r"num_blocks|depth|max_window_layers|num_layers_per_stack"),
    (0, r"num_kv_shared_layers"),
    (EXPERTS, r"(moe_)?num_experts|n_routed_experts|num_local_experts"),
    (2, r"num_experts_per_tok|moe_top_?k|moe_k|top_k_experts|(mamba_)?n_groups"),
    (128, r"(\w+_)?max(_\w+)?_position_embeddings|n_positions|n_ctx|context_length"),
    (16, r"mamba_d_state|(ssm_)?state_size|(mamba_)?chunk_size|image_size|crop_size"),
    (8, r"patch_size"),
    (0, r"pad_token_id"),
    (1, r"bos_token_id"),
    (2, r"(eos|decoder_start|sep|cls)_token_id"),
    (3, r"(unk|mask)_token_id"),
    (0, r"\w*(dropout|pdrop|drop_?rate|layerdrop|jitter_noise)\w*"),  # comparisons need one and the same function
    (True, r"is_decoder"),
]

_SPEECH_ENCODER = {"hidden_dim": 32, "dim_head": 8, "num_heads": 4, "context_size": 16, "max_pos_emb": 16}
_GRANITE_SPEECH = {
    "encoder_config": _SPEECH_ENCODER | {"input_dim": 16},
    "projector_config": {"encoder_hidden_size": 32},
}
_TOKENIZER_OF_SOUND = {"num_filters": 4, "hidden_size": 16, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
_GEMMA4_ASSISTANT = {
    "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    "num_centroids": 16,
    "centroid_intermediate_top_k": 4,
}

# The names of fields do not tell these settings; they are by model type.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3], "patch_size": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0, "kv_n_heads": KEY_VALUE_HEADS},
        "ffn_config": {"ffn_hidden_size": FEED_FORWARD, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "encoder-decoder": {
        "encoder": {"model_type": "bert", "is_decoder": False},
        "decoder": {"model_type": "bert", "add_cross_attention": True},
    },
    "flaubert": {"asm": False},  # its configuration has no cutoffs
    "gemma3n": {"audio_config": {"vocab_offset": 3 * VOCABULARY}},
    "gemma4_assistant": _GEMMA4_ASSISTANT,
    "gemma4_unified_assistant": _GEMMA4_ASSISTANT,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite_speech": _GRANITE_SPEECH,
    "granite_speech_plus": _GRANITE_SPEECH,
    "led": {"attention_window": 8, "max_encoder_position_embeddings": 64},
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": HEADS},
    "perceiver": {"d_latents": WIDTH, "num_latents": 8, "num_self_attends_per_block": 2, "max_position_embeddings": 16},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [32, 32],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 2,
        "hash_seed": 0,
    },
    "squeezebert": {"embedding_size": WIDTH},  # it takes no other
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": _TOKENIZER_OF_SOUND,
        "semantic_tokenizer_encoder_config": _TOKENIZER_OF_SOUND,
    },
    "xlm": {"asm_cutoffs": [100], "asm_div_value": 4.0},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    # layers enough for each kind of layer that the architecture mixes, experts among them
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v4": {"num_hidden_layers": 8},
    "flint": {"num_hidden_layers": 6},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "nllb-moe": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
}

# Fields that act between the last hidden state and the logits. Many are neutral by default: 1.0, None, False.
ACTIVE_FIELDS: dict[str, Any] = {
    "asm": True,
    "chunk_size_lm_head": 4,
    "dim_model_base": 24,
    "embedding_size": 40,
    "final_logit_softcapping": 4.0,
    "lm_head_bias": True,
    "lm_head_multiplier": 0.37,
    "logit_scale": 0.3,
    "logits_mup_width_multiplier": 3.0,
    "logits_scaling": 3.0,
    "logits_soft_cap": 4.0,
    "output_embedding_size": 40,
    "output_logit_soft_cap": 4.0,
    "unpadded_vocab_size": 200,
    "use_ordered_embeddings": True,
    "word_embed_proj_dim": 32,
}


def fields_of(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Every field that a configuration class or one of its parents declares, with its default."""
    return {
        field.name: field.default_factory()
        if field.default_factory is not dataclasses.MISSING
        else (None if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(config_class)
    }


def parts_of(config_class: type[PreTrainedConfig], chosen: dict[str, Any]) -> dict[str, type[PreTrainedConfig]]:
    """The configurations inside a composite one, of a text model, say. ``chosen`` may name their model types."""
    parts = {}
    for name, part in (config_class.sub_configs_defaults if config_class.sub_configs else {}).items():
        part_class = part.config_class
        if dataclasses.is_dataclass(part_class):
            if part.optional and name not in chosen:
                continue
        else:  # "any": a default model type, or, in an encoder-decoder, whatever the user asks for
            model_type = chosen.get(name, {}).get("model_type") or part.model_type
            if model_type is None:
                continue
            part_class = CONFIG_MAPPING[model_type]
        parts[name] = part_class
    return parts


def _tiny_arguments(
    config_class: type[PreTrainedConfig], exceptions: dict[str, Any], set_everywhere: dict[str, Any]
) -> dict[str, Any]:
    parts = parts_of(config_class, exceptions)
    arguments: dict[str, Any] = {}
    for name, default in fields_of(config_class).items():
        if name == "model_type" or name in config_class.sub_configs:  # pyright: ignore[reportOperatorIssue]
            continue
        if name in set_everywhere:
            arguments[name] = set_everywhere[name]
        elif (size := _size(name, default)) is not None:
            arguments[name] = size
    if "kv_lora_rank" in arguments:  # latent attention makes keys and values for every head
        arguments["num_key_value_heads"] = HEADS
    for name, part_class in parts.items():
        inside = _tiny_arguments(part_class, exceptions.get(name, {}), set_everywhere)
        arguments[name] = {"model_type": part_class.model_type, **inside}
    return arguments | {name: value for name, value in exceptions.items() if name not in parts}


def _size(name: str, default: Any) -> Any:
    """The tiny value for a field, or None to leave it at its default."""
    if isinstance(default, bool) and "dropout" in name:  # ESM's token_dropout scales embeddings
        return None
    value = next((value for value, names in _SIZES if re.fullmatch(names, name)), None)
    if default is None and name not in ("num_key_value_heads", "head_dim"):
        return None  # a feature that is off by default stays off
    if isinstance(default, list | tuple) and not name.endswith("token_id"):
        return None
    if value is None and re.search("_token_(id|index)$", name) and isinstance(default, int):
        return VOCABULARY - 1 - sum(map(ord, name)) % 40  # a placeholder: in the vocabulary, outside of the batches
    return float(value) if isinstance(default, float) and value is not None else value


def _config_class(entry: Entry) -> type[PreTrainedConfig]:
    config_class: Any = CONFIG_MAPPING[entry.model_type]
    own_class = getattr(transformers, entry.class_name).config_class
    # The class may take one alone of a composite type's configurations: the text model of llama4.
    return own_class if own_class in config_class.sub_configs.values() else config_class


def tied_by_default(entry: Entry) -> bool | None:
    """Return what the configuration says of input and output embeddings; None where it has no such field."""
    config_class = _config_class(entry)
    inside = parts_of(config_class, EXCEPTIONS.get(entry.model_type, {})).values()
    found = [fields_of(part) for part in (config_class, *inside) if "tie_word_embeddings" in fields_of(part)]
    if not found and entry.model_type == "t5":  # takes it all the same: T5 1.1 has False, and no scale before its head
        return True
    return found[0]["tie_word_embeddings"] if found else None


def variants_of(entry: Entry) -> list[Variant]:
    has_tying = tied_by_default(entry) is not None and entry.model_type != "dbrx"  # its own forbids it
    impossible = {Variant.TYING_FLIPPED} if not has_tying else set()
    impossible |= {Variant.BFLOAT16} if entry.model_type == "fnet" else set()  # A CPU's Fourier transform has none.
    return [variant for variant in Variant if variant not in impossible]


def tiny_config(entry: Entry, variant: Variant = Variant.DEFAULT) -> PreTrainedConfig:
    set_everywhere = {
        Variant.ACTIVE: ACTIVE_FIELDS,
        Variant.TYING_FLIPPED: {"tie_word_embeddings": not tied_by_default(entry)},
    }.get(variant, {})
    config_class = _config_class(entry)
    exceptions = EXCEPTIONS.get(entry.model_type, {})
    if entry.task == "masked" and "is_decoder" in fields_of(config_class):
        exceptions = exceptions | {"is_decoder": False}
    arguments = _tiny_arguments(config_class, exceptions, set_everywhere)
    if entry.model_type == "t5" and variant is Variant.TYING_FLIPPED:
        arguments |= set_everywhere
    config = config_class(**arguments)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id, config.pad_token_id = 2, 0  # what a pretrained model's file would add
    if entry.model_type == "gemma3n":  # its vision tower is a model of the library timm; text takes no notice of it
        tower_class = CONFIG_MAPPING["siglip_vision_model"]
        tower = tower_class(
            **_tiny_arguments(tower_class, {}, {}),
            **{"rms_norm_eps": 1e-6, "vocab_size": VOCABULARY, "vocab_offset": 2 * VOCABULARY},
        )
        object.__setattr__(config, "vision_config", tower)  # past the type check
    return config


# Tiny models and their inputs


def tiny_model(entry: Entry, variant: Variant = Variant.DEFAULT) -> PreTrainedModel:
    """The entry's model with the class that the mapping names, in float32, with the library's own initialisation,
    always the same, and without dropout."""
    config = tiny_config(entry, variant)
    with warnings.catch_warnings(), torch.random.fork_rng(), _all_layers_may_share(config):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        # the auto classes do the same, but know no class whose configuration is a part of its model type's
        model = getattr(transformers, entry.class_name)._from_config(config, attn_implementation="eager")
    size = sum(p.numel() for p in model.parameters())
    assert size <= _MOST_PARAMETERS, f"{entry} is not tiny ({size:,} parameters): it needs a line in _SIZES"
    # reformer computes its activations anew in backward and insists on training mode for that
    return model.train(entry.model_type == "reformer")


@contextlib.contextmanager
def _all_layers_may_share(config: PreTrainedConfig) -> Iterator[None]:
    """An assistant takes the keys and values of another model in all of its layers, which transformers 5.23 refuses."""
    text_class: Any = type(config.get_text_config())
    if not config.model_type.endswith("_assistant"):
        yield
        return
    own = text_class.kv_sharing_modes
    text_class.kv_sharing_modes = property(lambda self: ["reuse"] * self.num_hidden_layers)
    try:
        yield
    finally:
        text_class.kv_sharing_modes = own


@torch.no_grad()
def sharpen(model: PreTrainedModel) -> None:
    """Replace the weights by noise: no bias, gain or buffer stays neutral, and logits are large enough for a cap."""
    generator = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator)

    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.copy_(0.12 * noise(parameter))
        else:
            parameter.add_(0.1 * noise(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("logits_bias"):
            buffer.copy_(0.5 * noise(buffer))
    layer = model.get_output_embeddings()
    if isinstance(layer, nn.Linear):
        tied = layer.weight is model.get_input_embeddings().weight
        layer.weight.copy_((0.24 if tied else 0.5) * noise(layer.weight))
        if layer.bias is not None:
            layer.bias.copy_(0.5 * noise(layer.bias))


def tiny_batch(model: PreTrainedModel, *, masked: bool = False) -> dict[str, Any]:
    """Return what the model's forward needs, and "labels" (SEQUENCES, LENGTH) of which some are ignored."""
    generator = torch.Generator().manual_seed(1)
    config, dtype = model.config, model.dtype

    def tokens() -> Tensor:
        return torch.randint(_FIRST_TOKEN, _LAST_TOKEN, (SEQUENCES, LENGTH), generator=generator)

    def noise(*shape: int) -> Tensor:
        return torch.randn(SEQUENCES, *shape, generator=generator).to(dtype)

    labels = tokens()
    labels[1, -3:] = -100  # as padding is
    if config.is_encoder_decoder:
        return {"input_ids": tokens(), "labels": labels}
    if config.model_type.endswith("_assistant"):  # drafts from another model's hidden states, keys and values
        text: Any = config.get_text_config()
        widths = {layer.self_attn.layer_type: layer.self_attn.head_dim for layer in model.model.layers}
        return {
            "inputs_embeds": noise(LENGTH, 2 * config.backbone_hidden_size),
            "shared_kv_states": {
                kind: tuple(noise(text.num_key_value_heads, LENGTH, width) for _ in range(2))
                for kind, width in widths.items()
            },
            "position_ids": torch.arange(LENGTH)[None],
            "output_hidden_states": True,  # keeps gemma4 from slicing the per-layer inputs that an assistant has not
            "labels": labels,
        }
    labels[0, 2:5] = -100
    if masked:
        return {
            "input_ids": tokens(),
            "labels": labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.6, -100),
        }
    batch = {"input_ids": labels.where(labels != -100, _FIRST_TOKEN), "labels": labels}
    if config.model_type == "voxtral_realtime":  # adds sound to every token
        batch["encoder_inputs_embeds"] = noise(LENGTH * config.downsample_factor, config.audio_config.hidden_size)
    return batch


# The judgement

Gradients = dict[str, Tensor]  # by parameter, and the loss as "loss"


@dataclass(frozen=True)
class Verdict:
    """Exact, with the head that was identified, or refused, with the message."""

    head: OutputHead | None = None
    refusal: str | None = None

    @property
    def exact(self) -> bool:
        return self.refusal is None


def language_model(backbone: PreTrainedModel, *, masked: bool = False) -> LanguageModel:
    """The product around an entry's model: as a user would choose it, by the configuration."""
    model_class = Seq2SeqLanguageModel if backbone.config.is_encoder_decoder else LanguageModel
    return (MaskedLanguageModel if masked else model_class)(backbone, LinearCrossEntropyLoss())


def check(entry: Entry, variant: Variant = Variant.DEFAULT) -> Verdict:
    """Judge one entry in one variant.

    Returns:
        exact: the fused loss and every parameter's gradient are those of the cross entropy of the model's own logits;
        or refused: before training, by a message that names the class.

    Raises:
        AssertionError: neither, with what differs.
        UserError: it is exact, but the product's own check on the first batch says otherwise.
    """
    backbone = tiny_model(entry, variant)
    if variant is not Variant.BFLOAT16:
        sharpen(backbone)
    elif entry.model_type not in AUTOCAST_ONLY:
        nn.Module.to(backbone, torch.bfloat16)
    masked = entry.task == "masked"
    model, batch = language_model(backbone, masked=masked), tiny_batch(backbone, masked=masked)
    try:
        model.prepare(torch.device("cpu"))
        with torch.no_grad():
            model(batch)  # it shows the head of a model that needs more than token ids
    except UserError as refusal:
        if entry.class_name not in str(refusal):
            raise AssertionError(f"a refusal that does not name {entry.class_name}") from refusal
        return Verdict(refusal=str(refusal))
    if variant is Variant.BFLOAT16:
        with torch.autocast("cpu", torch.bfloat16, enabled=entry.model_type in AUTOCAST_ONLY):
            standard, found = _both(model, batch)
            model.spot_check(batch)
        exact = tiny_model(entry, variant)
        truth = loss_and_gradients(exact, cross_entropy(exact, tiny_batch(exact, masked=masked), masked=masked))
        assert_as_near(found, standard, truth, torch.finfo(torch.bfloat16).eps / 16)
        # a fresh model's logits are so small that a wrong formula would hardly show: it has to hold for larger ones
        model.float()
        sharpen(backbone)
        batch = tiny_batch(backbone, masked=masked)
    standard, found = _both(model, batch)
    _assert_equal(found, standard)
    model.spot_check(batch)
    return Verdict(head=model.prepare_hidden_states())


def cross_entropy(backbone: Any, batch: dict[str, Any], *, masked: bool = False) -> Tensor:
    """The definition: the model's own logits, upcast, against each label's successor, or, in a masked model and in an
    encoder-decoder, which makes its decoder's input from the labels, against the labels as they are."""
    labels = batch["labels"]
    inputs: dict[str, Any] = {name: value for name, value in batch.items() if name != "labels"} | {"use_cache": False}
    if not backbone.config.is_encoder_decoder:
        logits = backbone(**inputs).logits
        logits, labels = (logits, labels) if masked else (logits[:, :-1], labels[:, 1:])
    elif (
        backbone.config.model_type == "fsmt"
    ):  # by itself it takes the encoder's input, and leaves labels to a collator
        shifted = backbone.prepare_decoder_input_ids_from_labels(labels.clone())
        logits = backbone(**inputs, decoder_input_ids=shifted).logits
    else:
        logits = backbone(**inputs, labels=labels).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def loss_and_gradients(model: nn.Module, loss: Tensor) -> Gradients:
    model.zero_grad()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def _both(model: LanguageModel, batch: dict[str, Any]) -> tuple[Gradients, Gradients]:
    """(the standard's, ours)"""
    backbone: Any = model.backbone
    masked = isinstance(model, MaskedLanguageModel)
    standard = loss_and_gradients(backbone, cross_entropy(backbone, batch, masked=masked))
    return standard, loss_and_gradients(backbone, model(batch).loss)


def _assert_equal(found: Gradients, expected: Gradients) -> None:
    """In float32, within 1e-5; a gradient that is small beside all others together, within 1e-7 of those: that of a
    key's bias, say, is zero but for rounding."""
    assert found.keys() == expected.keys(), f"gradients of {found.keys() ^ expected.keys()} only in one"
    whole = norm_of_all(value for name, value in expected.items() if name != "loss")
    assert whole > 0.1, f"gradients near zero ({whole:.2g}) would agree with anything"
    for name, value in expected.items():
        error = (found[name] - value).norm() / (value if name == "loss" else value.norm().clamp(min=whole / 100))
        assert error <= 1e-5, f"{name} is wrong by {error:.2g}: {found[name].norm():.7g}, not {value.norm():.7g}"
