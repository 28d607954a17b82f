"""Packing: which document goes where, what a sample is, and that documents in one row cannot attend to each other."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ENTRIES, language_model
from architectures import tiny_model as tiny_architecture
from data_modules import tokens_of
from lightning_helpers import loader, quiet_trainer
from packing_cases import flash, gpt_oss, mamba, row, seeded
from packing_table import DOCUMENT, packing_page
from strategy_cases import assert_as_in_one_process
from tiny_models import VOCABULARY, TinyBackbone, sharpen, tiny_backbone, tiny_model
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    DataCollatorWithFlattening,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_flash_attn_2_available

from lit_fused import CrossEntropyLoss, FusedCausalLMModule, LanguageModel, LinearCrossEntropyLoss, UserError
from lit_fused.data.encoding import Encoded
from lit_fused.data.loader import BatchLoader
from lit_fused.data.packing import (
    DocumentBlocks,
    SingleDocuments,
    StreamBlocks,
    best_fit,
    cut_documents,
    pad_documents,
)
from lit_fused.data.tokens import Tokens
from lit_fused.models.documents_apart import difference

# --- plans -------------------------------------------------------------------------------------------------------


def best_fit_by_the_book(lengths: list[int], block_size: int) -> list[int]:
    """The room that is left in each block, by trying every block for every piece."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
        else:
            rooms.append(block_size - length)
    return sorted(rooms)


def test_best_fit_puts_every_piece_into_one_block_and_fills_them_as_the_book_does():
    random = np.random.default_rng(0)
    for _ in range(100):
        block_size = int(random.integers(1, 40))
        lengths = random.integers(1, block_size + 1, int(random.integers(1, 80)))
        order, ends = best_fit(lengths, block_size)
        assert sorted(order) == list(range(len(lengths)))
        filled = [int(lengths[part].sum()) for part in np.split(order, ends)[:-1]]
        assert sorted(block_size - tokens for tokens in filled) == best_fit_by_the_book(lengths.tolist(), block_size)


def test_a_million_documents_are_packed_in_seconds_with_hardly_a_position_empty():
    lengths = np.random.default_rng(0).lognormal(6, 1.2, 1_000_000).astype(np.int64) + 1
    started = time.perf_counter()
    starts, pieces = cut_documents(np.cumsum(lengths), 2048)
    _, ends = best_fit(pieces, 2048)
    assert time.perf_counter() - started < 10  # 0.15 on an idle core
    assert len(starts) > 1_000_000
    assert pieces.sum() / (len(ends) * 2048) > 0.999


def test_a_long_document_is_cut_and_single_tokens_are_left_out():
    starts, lengths = cut_documents(np.array([3, 12, 13, 22]), 4)
    pieces = [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=True)]
    assert pieces == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10], [13, 14, 15, 16], [17, 18, 19, 20]]


# --- samples -----------------------------------------------------------------------------------------------------


@pytest.fixture
def documents() -> list[Encoded]:
    random = np.random.default_rng(1)
    made = []
    for length in (1, 2, 5, 9, 16, 17, 40, 3, 7, 12, 2, 30):
        tokens = random.integers(3, VOCABULARY, length)
        made.append(Encoded(tokens, random.random(length) < 0.8))
    return made


@pytest.fixture
def store(documents) -> Tokens:
    return tokens_of(documents, VOCABULARY)


def pieces_of(documents: list[Encoded], block_size: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(tokens, labels) of what documents are cut into."""
    found = []
    for document in documents:
        assert document.loss_mask is not None
        labels = np.where(document.loss_mask, document.tokens, -100)
        for start in range(0, len(document.tokens), block_size):
            tokens, targets = document.tokens[start : start + block_size], labels[start : start + block_size].copy()
            targets[0] = -100
            if len(tokens) > 1:
                found.append((tuple(tokens.tolist()), tuple(targets.tolist())))
    return sorted(found)


def test_the_stream_has_every_token_once_and_ignores_what_is_not_wanted_and_the_padding(documents, store):
    blocks = StreamBlocks(store, 8, pad_token_id=1)
    assert len(blocks) == len(list(iter(blocks))) == 18
    ids, labels = (torch.cat([blocks[i][name] for i in range(18)]).tolist() for name in ("input_ids", "labels"))
    tokens = [token for document in documents for token in document.tokens.tolist()]
    learned = [flag for document in documents for flag in document.loss_mask.tolist()]
    assert ids == [*tokens, *[1] * (18 * 8 - len(tokens))]
    assert labels[: len(tokens)] == [t if flag else -100 for t, flag in zip(tokens, learned, strict=True)]
    assert set(labels[len(tokens) :]) <= {-100}
    assert blocks.share_of_tokens == len(tokens) / 144


def test_packed_blocks_hold_every_document_once_with_positions_from_zero_and_no_target_at_its_beginning(
    documents, store
):
    blocks = DocumentBlocks(store, 16, pad_token_id=1)
    found, padding = [], 0
    for block in (blocks[i] for i in range(len(blocks))):
        assert {name: (value.dtype, value.shape) for name, value in block.items()} == dict.fromkeys(
            ("input_ids", "labels", "position_ids"), (torch.int64, (16,))
        )
        begins = (block["position_ids"] == 0).nonzero().flatten().tolist()
        for start, stop in zip(begins, [*begins[1:], 16], strict=True):
            assert block["position_ids"][start:stop].tolist() == list(range(stop - start))
            part = tuple(block[name][start:stop] for name in ("input_ids", "labels"))
            if set(part[0].tolist()) == {1}:
                assert set(part[1].tolist()) == {-100}
                padding += stop - start
            else:
                found.append(tuple(tuple(values.tolist()) for values in part))
    assert sorted(found) == pieces_of(documents, 16)
    assert blocks.share_of_tokens == 1 - padding / (16 * len(blocks))


def test_without_packing_a_row_is_a_document_padded_to_the_longest_of_its_batch(documents, store):
    rows = SingleDocuments(store, 16, pad_token_id=1)
    found = []
    for batch in BatchLoader(rows, 4, collate_fn=partial(pad_documents, pad_token_id=1)):
        lengths = batch["attention_mask"].sum(1).tolist()
        assert batch["labels"].shape[1] == max(lengths)
        for number, length in enumerate(lengths):
            assert batch["attention_mask"][number, :length].all()
            assert (batch["input_ids"][number, length:] == 1).all()
            assert (batch["labels"][number, length:] == -100).all()
            found.append(tuple(tuple(batch[name][number, :length].tolist()) for name in ("input_ids", "labels")))
    assert sorted(found) == pieces_of(documents, 16)


# --- a model sees one document at a time -------------------------------------------------------------------------

Gradients = dict[str, Tensor]


def gemma3() -> nn.Module:
    config = AutoConfig.for_model(
        "gemma3_text",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    return seeded(lambda: AutoModelForCausalLM.from_config(config))


def bloom() -> nn.Module:
    """Positions are a bias on attention: it has no position_ids."""
    return seeded(lambda: BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)))


def lfm2() -> nn.Module:
    """A convolution over three tokens in one layer, attention in the other."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    config = AutoConfig.for_model("lfm2", vocab_size=VOCABULARY, **sizes, **layers)
    return seeded(lambda: AutoModelForCausalLM.from_config(config))


EXACT: dict[str, Callable[[], Any]] = {
    "llama": lambda: tiny_model("llama", attn_implementation="sdpa"),
    "llama, eager attention": lambda: tiny_model("llama", attn_implementation="eager"),
    "qwen3, tied": lambda: tiny_model("qwen3_tied"),
    "gemma2, sliding window": lambda: tiny_model("gemma2", sliding_window=8),
    "gemma3, sliding window": gemma3,
    "mistral, sliding window": lambda: tiny_model("mistral", sliding_window=8),
    "gpt2, learned positions": lambda: tiny_model("gpt2"),
    "mixtral": lambda: tiny_model("mixtral", output_router_logits=False),
    "gpt_oss, by masks": gpt_oss,
    "opt, by masks": lambda: tiny_model("opt"),
}


def sums(backbone: nn.Module, batches: list[dict[str, Tensor]], loss: Any = None) -> Gradients:
    """The summed loss over all batches as "loss", and its gradients."""
    backbone.zero_grad()
    model = LanguageModel(backbone, loss or LinearCrossEntropyLoss())
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        output = model(batch)
        output.loss_sum.backward()
        total += output.loss_sum.detach()
    return {"loss": total} | {name: p.grad.double() for name, p in backbone.named_parameters() if p.grad is not None}


def error(found: Gradients, truth: Gradients) -> float:
    assert found.keys() == truth.keys()
    norm = torch.stack([value.norm() for name, value in truth.items() if name != "loss"]).norm()
    apart = torch.stack([(found[name] - value).norm() for name, value in truth.items() if name != "loss"]).norm()
    return max((apart / norm).item(), ((found["loss"] - truth["loss"]) / truth["loss"]).abs().item())


def alone(store: Tokens, block_size: int) -> list[dict[str, Tensor]]:
    rows = SingleDocuments(store, block_size, pad_token_id=1)
    return [{name: value[None] for name, value in rows[i].items()} for i in range(len(rows))]


def packed(store: Tokens, block_size: int) -> list[dict[str, Tensor]]:
    return list(BatchLoader(DocumentBlocks(store, block_size, pad_token_id=1), 3))


@pytest.mark.parametrize("name", EXACT)
def test_loss_and_gradients_of_packed_documents_are_the_sums_over_the_documents_alone(name, store):
    backbone = sharpen(EXACT[name]())
    usual = sums(backbone, alone(store, 32))
    found = sums(backbone, packed(store, 32))
    truth = sums(backbone.double(), alone(store, 32))
    assert error(found, truth) <= max(2 * error(usual, truth), 1e-6)


def test_in_bfloat16_packing_adds_no_more_error_than_rounding(store):
    truth = sums(sharpen(tiny_model("llama")).double(), alone(store, 32))
    backbone = sharpen(tiny_model("llama")).bfloat16()
    usual, found = (error(sums(backbone, batches(store, 32)), truth) for batches in (alone, packed))
    assert found <= 2 * usual


@pytest.mark.slow
def test_a_compiled_model_keeps_documents_apart_too(store):
    backbone = sharpen(tiny_model("llama"))
    truth = sums(backbone, alone(store, 32))
    compiled: Any = torch.compile(backbone, backend="eager")
    found = sums(compiled, packed(store, 32))
    assert error({name.removeprefix("_orig_mod."): value for name, value in found.items()}, truth) < 1e-5


def test_flash_attention_is_told_the_ends_of_the_documents_of_all_rows(store, monkeypatch):
    """Its kernel needs a GPU; what it is given is seen, and obeyed, by one that does not."""

    backbone = sharpen(tiny_model("llama"))
    truth = sums(backbone, alone(store, 32))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", flash)
    backbone.config._attn_implementation_internal = "flash_attention_2"
    assert error(sums(backbone, packed(store, 32)), truth) < 1e-5


class TakesPositions(TinyBackbone):
    """A recurrent network that accepts positions and makes nothing of them."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        return super().forward(input_ids)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (bloom, "BloomForCausalLM does not keep documents in one row apart: it cannot be given them|change what the"),
        (mamba, "MambaForCausalLM does not keep documents in one row apart: .*change what the second gives by"),
        (lfm2, "Lfm2ForCausalLM .*change what the second gives by"),
        (lambda: tiny_model("falcon_h1"), "FalconH1ForCausalLM .*change what the second gives by"),
        (lambda: tiny_model("bart"), "BartForCausalLM .*(change what the second gives|something else than alone)"),
        (lambda: tiny_backbone(TakesPositions), "TakesPositions .*change what the second gives"),
        (lambda: tiny_backbone(), "TinyBackbone .*it cannot be given them .*position_ids"),
    ],
)
@pytest.mark.parametrize("loss", [LinearCrossEntropyLoss, CrossEntropyLoss])
def test_a_model_whose_documents_see_each_other_is_refused_before_the_first_step(build, reason, loss, tmp_path):
    module = FusedCausalLMModule(build(), loss())
    trainer = quiet_trainer(tmp_path, max_steps=2)
    with pytest.raises(UserError, match=f"{reason}.*") as refusal:
        trainer.fit(module, loader([row(9, 20)] * 2))
    assert "choose data.packing=none" in str(refusal.value)
    assert trainer.global_step == 0


@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_evaluation_refuses_it_as_well(stage, tmp_path):
    module = FusedCausalLMModule(mamba())
    with pytest.raises(UserError, match="does not keep documents in one row apart"):
        getattr(quiet_trainer(tmp_path), stage)(module, loader([row(9, 20)]))


def test_transformers_own_collator_of_flattened_rows_is_taken_for_what_it_is():
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=False, return_tensors="pt")
    batch: dict[str, Any] = dict(collate([{"input_ids": list(range(5, 5 + n))} for n in (4, 9, 6)]))
    with pytest.raises(UserError, match="does not keep documents"):
        LanguageModel(mamba(), LinearCrossEntropyLoss())(batch)
    backbone = sharpen(tiny_model("llama"))
    single = [{"input_ids": torch.arange(5, 5 + n)[None], "labels": torch.arange(5, 5 + n)[None]} for n in (4, 9, 6)]
    assert error(sums(backbone, [batch]), sums(backbone, single)) < 1e-5


def test_an_encoder_decoder_is_not_given_packed_rows():
    model = language_model(tiny_architecture(next(entry for entry in ENTRIES if str(entry) == "t5-seq2seq")))
    with pytest.raises(UserError, match="is an encoder-decoder, whose encoder would read all documents of a row"):
        model.check_packing(row(9, 20))


def test_the_experiment_runs_once_leaves_no_gradient_and_uses_up_no_random_number(tmp_path):
    backbone = tiny_model("gpt2", resid_pdrop=0.5)
    model = LanguageModel(backbone, LinearCrossEntropyLoss())
    calls: list[tuple[int, ...]] = []
    backbone.register_forward_pre_hook(lambda *seen: calls.append(seen[2]["input_ids"].shape), with_kwargs=True)
    model(row(9, 20))
    before, seen = torch.get_rng_state(), len(calls)
    model.packing = None
    model.check_packing(row(9, 20))
    assert torch.equal(torch.get_rng_state(), before)
    assert calls[seen:] == [(4, 32), (4, 32), (1, 16)]
    assert backbone.training
    assert all(p.grad is None for p in backbone.parameters())
    model(row(9, 20))
    assert len(calls) == seen + 4


CLOSED: dict[str, Callable[[Any], Any]] = {
    "projections of zeros": lambda model: [layer.mixer.out_proj.weight.zero_() for layer in model.backbone.layers],
    "a convolution that copies": lambda model: [
        (
            layer.mixer.conv1d.weight[..., :-1].zero_(),
            layer.mixer.D.fill_(1),
            layer.mixer.A_log.fill_(40),
        )
        for layer in model.backbone.layers
    ],
    "weights of zeros": lambda model: [parameter.zero_() for parameter in model.parameters()],
}


@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_close_a_path_for_now_do_not_hide_it_and_stay_as_they_are(closed, dtype):
    backbone = mamba().to(dtype)
    with torch.no_grad():
        CLOSED[closed](backbone)
    before = [(parameter.clone(), parameter._version) for parameter in backbone.parameters()]
    state = torch.get_rng_state()
    with pytest.raises(UserError, match="change what the second gives by .* once training has changed its weights"):
        LanguageModel(backbone, LinearCrossEntropyLoss()).check_packing(row(9, 20))
    assert torch.equal(torch.get_rng_state(), state)
    for parameter, (value, version) in zip(backbone.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter._version == version
        assert parameter.grad is None


def test_the_first_packed_batch_under_autocast_is_trained_with_the_models_own_weights():
    batch = row(16, 16)
    losses = []
    for _ in range(2):  # The experiment is made in the first pass, within the autocast of a training step.
        model = LanguageModel(tiny_model("llama"), LinearCrossEntropyLoss())
        model.packing = "positions" if losses else None
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(batch).loss)
    assert losses[0].item() == losses[1].item()


def test_a_mask_of_ones_beside_documents_of_one_row_is_refused_with_the_first_batch():
    """Beside a mask, transformers does not look for documents."""
    model = LanguageModel(sharpen(tiny_model("llama")), LinearCrossEntropyLoss())
    batch = row(9, 20)
    for mask in (torch.ones(1, 29), torch.ones(1, 29, dtype=torch.int64), (torch.arange(29) < 25)[None]):
        with pytest.raises(UserError, match=r"leave attention_mask out of the batch"):
            model.spot_check(batch | {"attention_mask": mask})
    model.spot_check(row(29) | {"attention_mask": torch.ones(1, 29)})
    padded = (torch.arange(29) >= 4).long()[None]
    for positions in ((padded.cumsum(1) - 1).clamp(min=0), (padded.cumsum(1) - 1).masked_fill(padded == 0, 1)):
        model.spot_check(row(29) | {"attention_mask": padded, "position_ids": positions})  # padding is no document


def test_a_model_of_4_bits_may_differ_as_much_as_bfloat16_rounds():
    short, long = torch.randn(2, 48, 8, generator=torch.Generator().manual_seed(0))
    exact = torch.stack([torch.cat([short[:16], long])] * 3 + [torch.cat([long, short[:16]])])
    model = torch.nn.Linear(1, 1)
    assert "something else than alone" in (difference(exact, 1.001 * long[None], model) or "")
    model.is_loaded_in_4bit = True  # type: ignore[assignment]
    assert difference(exact, 1.001 * long[None], model) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_lists_of_models_in_the_docs_are_those_of_this_code_and_this_transformers():
    assert DOCUMENT.read_text() == packing_page(), "run `make packing` and look at what changed"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_under_every_strategy_documents_are_apart_or_all_ranks_refuse(tmp_path):
    words = "does not keep documents in one row apart"
    cases = {
        "packed_llama": dict.fromkeys(("ddp", "our_fsdp2", "fsdp2_kept", "our_tp", "pp"), ""),
        "packed_gpt_oss": {"our_fsdp2": "", "pp": words},
        "packed_mamba": dict.fromkeys(("ddp", "our_fsdp2"), words),
    }
    assert_as_in_one_process(tmp_path, cases)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_on_a_gpu_a_deep_model_in_half_precision_is_not_refused_and_mamba_is(attention, precision, tmp_path):
    if attention == "flash_attention_2" and (precision == "32-true" or not is_flash_attn_2_available()):
        pytest.skip("needs FlashAttention and half precision")
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = AutoConfig.for_model(
        "qwen3", vocab_size=2000, num_hidden_layers=28, head_dim=128, tie_word_embeddings=True, **sizes
    )
    config._attn_implementation = attention
    batch = {name: value.repeat(2, 1) for name, value in row(700, 1300, 48).items()}
    module = FusedCausalLMModule(seeded(lambda: AutoModelForCausalLM.from_config(config)))
    trainer = quiet_trainer(tmp_path, accelerator="gpu", max_steps=1, precision=precision)
    trainer.fit(module, loader([batch]))
    assert module.model.packing == ("blocks" if attention == "sdpa" and precision != "32-true" else "positions")
    trainer = quiet_trainer(tmp_path, accelerator="gpu", max_steps=1, precision=precision)
    with pytest.raises(UserError, match="does not keep documents"):
        trainer.fit(FusedCausalLMModule(mamba()), loader([row(9, 20)]))
