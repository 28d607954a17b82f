"""Rows that are longer than a model's positions are refused in a sentence, and those that a model can take are not."""

from typing import Any

import pytest
import torch
import transformers as tf

from lit_fused import LanguageModel, LinearCrossEntropyLoss, MaskedLanguageModel, Seq2SeqLanguageModel, UserError
from lit_fused.losses import CrossEntropyLoss
from lit_fused.models.generation import room_after
from lit_fused.models.row_lengths import _LookUps

SMALL: Any = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 64,
}
TWO: Any = {
    f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in [("layers", 1), ("ffn_dim", 16)]
}
TWO |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 16, "vocab_size": 64}
LIMIT: Any = {"max_position_embeddings": 32}
MODELS: dict[str, Any] = {
    "opt": lambda: tf.OPTForCausalLM(tf.OPTConfig(**SMALL, **LIMIT, ffn_dim=16, word_embed_proj_dim=16)),
    "gptj": lambda: tf.GPTJForCausalLM(
        tf.GPTJConfig(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)
    ),
    "roberta": lambda: tf.RobertaForMaskedLM(tf.RobertaConfig(**SMALL, max_position_embeddings=34)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, **LIMIT)),
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**TWO, **LIMIT)),
    "blenderbot": lambda: tf.BlenderbotForConditionalGeneration(tf.BlenderbotConfig(**TWO, **LIMIT, pad_token_id=0)),
    "led": lambda: tf.LEDForConditionalGeneration(
        tf.LEDConfig(
            **TWO, max_encoder_position_embeddings=48, max_decoder_position_embeddings=32, attention_window=[8]
        )
    ),
}
KINDS = {"roberta": MaskedLanguageModel} | dict.fromkeys(("bart", "blenderbot", "led"), Seq2SeqLanguageModel)


def run(name: str, tokens: int, labels: int, loss: Any) -> float:
    torch.manual_seed(0)
    model = KINDS.get(name, LanguageModel)(MODELS[name](), loss).eval()
    ids = torch.randint(4, 60, (2, tokens))
    batch = {"input_ids": ids, "labels": ids if tokens == labels else torch.randint(4, 60, (2, labels))}
    if name == "roberta":
        batch["input_ids"] = ids.where(torch.arange(tokens) % 3 > 0, 3)
    return model(batch).loss.item()


TOO_LONG = {"opt": (33, 33, 32), "gptj": (40, 40, 32), "roberta": (33, 33, 32), "blenderbot": (40, 8, 32)}
TOO_LONG |= {"bart": (8, 33, 32), "led": (56, 8, 48)}


@pytest.mark.parametrize("loss", [LinearCrossEntropyLoss, CrossEntropyLoss])
@pytest.mark.parametrize(("name", "tokens", "labels", "limit"), [(n, *numbers) for n, numbers in TOO_LONG.items()])
def test_rows_beyond_a_models_positions_are_refused_by_length_and_limit(name, tokens, labels, limit, loss):
    with pytest.raises(UserError, match=rf"_ids has rows of {max(tokens, labels)} tokens, .* positions for {limit} "):
        run(name, tokens, labels, loss())


@pytest.mark.parametrize(("name", "tokens"), [("opt", 32), ("roberta", 32), ("llama", 64), ("bart", 32)])
def test_rows_that_a_model_can_take_are_not(name, tokens):
    assert run(name, tokens, tokens, LinearCrossEntropyLoss()) > 0


def test_look_ups_of_positions_are_refused_before_they_run():
    model = MODELS["opt"]()
    table = model.model.decoder.embed_positions
    with pytest.raises(IndexError, match="entry 34 of a table of 34"), _LookUps(model) as look_ups:
        torch.nn.functional.embedding(torch.tensor([34]), table.weight)
    assert look_ups.excess == 1


def test_a_prompt_has_to_fit_the_positions_of_what_reads_it():
    assert room_after(MODELS["opt"](), 30) == 2
    assert room_after(MODELS["led"](), 40) == 32
    assert room_after(MODELS["led"](), 49) == 0
