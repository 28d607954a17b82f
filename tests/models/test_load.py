"""Weights that come late are those of transformers' rules or of the checkpoint, the same under every strategy."""

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import start_memory
import torch
from architectures import ENTRIES, Entry, tiny_config
from errors_of import relative_error
from lightning_helpers import loader, quiet_trainer, ragged_batches
from parallel_cases import CLIP, PER_STEP, Case, backbone, batches, module_of, share_of, trainer_of, whole
from parallel_fits import Recorder
from ranks import each
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import lit_fused
from lit_fused import FusedCausalLMModule, FusedSeq2SeqLMModule, UserError
from lit_fused.models.load import is_deferred, materialize, places_of
from lit_fused.parallel import local
from lit_fused.parallel.collectives import objects_of_ranks
from lit_fused.parallel.twin import small_twin

CPU = torch.device("cpu")
QUICK = {"llama", "gpt2", "gemma2", "qwen3_moe", "mamba", "modernbert-decoder", "xlnet", "t5", "bart", "rwkv"}
SEED = 5


# Fits on two ranks. The model of a case is the name of a folder with a checkpoint, or, after "new_", of one that
# only its config.json is taken of.


class Start(Recorder):
    """The weights before the first step, and what was in a rank's memory then."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.weights = whole(trainer.strategy, pl_module, lambda p: p)
        self.buffers = {name: b.detach().clone() for name, b in pl_module.backbone.named_buffers()}
        layers = pl_module.backbone.get_output_embeddings(), pl_module.backbone.get_input_embeddings()
        head, embedding = (getattr(layer, "weight", None) for layer in layers)  # of a pipeline's rank, one at most
        self.head_is_tied = head is not None and head is embedding
        self.own_bytes = sum(local(p).nbytes for p in pl_module.backbone.parameters())


def deferred(name: str, folder: Path) -> Any:
    """The model of a name; "plan_" has a tensor-parallel plan that is wrong."""
    if name.startswith("plan_"):
        model = deferred(name.removeprefix("plan_"), folder)
        model.tp_plan = {name: style for name, style in model.tp_plan.items() if not name.endswith("_norm")}
        return model
    if name.startswith("new_"):
        return lit_fused.from_config(AutoConfig.from_pretrained(folder / name.removeprefix("new_")), SEED)
    return lit_fused.from_pretrained(folder / name).train()


def run(case: Case, folder: Path) -> dict[str, Any]:
    start, own = Start(), folder / str(case).replace(":", "_")
    trainer = trainer_of(case, own, max_epochs=1, accumulate_grad_batches=case.accumulated, callbacks=[start])
    part = loader(share_of(batches(), case))
    try:
        module = module_of(case, deferred(case.model, folder))
        trainer.fit(module, part)
        trained = whole(trainer.strategy, module, lambda p: p)
        trainer.validate(module, part, verbose=False)  # calls configure_model again
    except UserError as refusal:
        return {"refusal": objects_of_ranks(str(refusal))}
    return {
        "bytes": objects_of_ranks(start.own_bytes),
        "start": start.weights,
        "buffers": start.buffers,
        "tied": start.head_is_tied,
        "gradients": start.gradients,
        "losses": start.losses,
        "weights": trained,
    }


def same(a: nn.Module, b: nn.Module) -> None:
    ours, theirs = ({name: tensor for name, _, _, tensor in places_of(model)} for model in (a, b))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def saved(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


# Random weights.

# Decoders of models that read images or make music, which transformers' auto classes do not have, and one whose class
# for masked words is not the one that they build.
NOT_BUILT = {"emu3-causal", "mllama-causal", "musicgen-causal", "musicgen_melody-causal", "reformer-masked"}


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=str(entry), marks=[] if entry.model_type in QUICK else pytest.mark.slow)
        for entry in ENTRIES
        if not entry.model_type.endswith("_assistant") and str(entry) not in NOT_BUILT
    ],
)
def test_late_weights_of_every_architecture_are_those_that_it_has_at_once(entry: Entry) -> None:
    expected = lit_fused.from_config(tiny_config(entry), seed=3, at_once=True)
    found = lit_fused.from_config(tiny_config(entry), seed=3)
    assert is_deferred(found)
    materialize(found)
    same(found, expected)
    names = [n for n, _ in expected.named_parameters()]
    assert [n for n, _ in found.named_parameters()] == names, "tied otherwise"


def test_the_numbers_depend_on_the_seed_alone() -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first, again, other = (lit_fused.from_config(config, seed=seed) for seed in (1, 1, 2))
    materialize(first)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(8)
    materialize(again)
    same(again, first)
    materialize(other)
    assert not torch.equal(other.lm_head.weight, first.lm_head.weight)


def test_neither_the_default_device_nor_the_default_dtype_of_the_moment_matters(tmp_path: Path) -> None:
    model = tiny_model("gemma2")
    saved(model, tmp_path)
    for build in (lambda: lit_fused.from_config(model.config, seed=1), lambda: lit_fused.from_pretrained(tmp_path)):
        expected, found = build(), build()
        materialize(expected)
        torch.set_default_dtype(torch.float16)
        try:
            with torch.device("meta"):  # stands for a GPU, under whose context Lightning calls configure_model
                materialize(found)
        finally:
            torch.set_default_dtype(torch.float32)
        same(found, expected)


# Checkpoints.


@pytest.mark.parametrize("name", ["llama_tied", "gemma2", "mixtral", "qwen3_moe", "falcon_h1", "phi", "mpt"])
def test_a_checkpoint_of_several_files_is_loaded_exactly(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    saved(model, tmp_path / "theirs", max_shard_size="40KB")
    ours = lit_fused.from_pretrained(tmp_path / "theirs")
    assert is_deferred(ours)
    assert not ours.training
    materialize(ours)
    same(ours, model)
    assert ours.generation_config.eos_token_id == model.generation_config.eos_token_id
    same(AutoModelForCausalLM.from_pretrained(saved(ours, tmp_path / "again")), model)


def test_a_checkpoint_in_half_precision_comes_in_float32_unless_it_is_asked_otherwise(tmp_path: Path) -> None:
    saved(tiny_model("llama", torch.bfloat16), tmp_path)
    for dtype, expected in [("auto", torch.bfloat16), (torch.float16, torch.float16), ("float32", torch.float32)]:
        ours = lit_fused.from_pretrained(tmp_path, dtype=dtype)
        materialize(ours)
        same(ours, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=expected))
        assert ours.model.rotary_emb.inv_freq.dtype == torch.float32
    assert lit_fused.from_pretrained(tmp_path).dtype == torch.float32


def test_an_encoder_decoder_is_built_and_loaded_late(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "t5", vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    ours = lit_fused.from_config(config, seed=4)
    module = FusedSeq2SeqLMModule(ours)
    quiet_trainer(tmp_path, max_steps=2).fit(module, loader(ragged_batches(2)))
    assert not is_deferred(ours)
    module.save_pretrained(tmp_path / "out")
    again = lit_fused.from_pretrained(tmp_path / "out")
    materialize(again)
    same(again, ours.eval())


def rewrite(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_weights_that_would_be_random_or_lost_are_refused(tmp_path: Path) -> None:
    missing = saved(tiny_model("llama"), tmp_path / "missing")
    rewrite(missing, lambda weights: weights.pop("lm_head.weight"))
    untied = saved(tiny_model("llama_tied"), tmp_path / "untied")
    rewrite(untied, lambda weights: weights.update({"lm_head.weight": torch.ones(97, 32)}))
    for folder, message in ((missing, "has no weights for lm_head.weight"), (untied, "are tied otherwise than")):
        with pytest.raises(UserError, match=message):
            materialize(lit_fused.from_pretrained(folder))


# The models below are inside of a module.


def test_what_has_no_source_is_refused() -> None:
    with torch.device("meta"):
        nowhere = tiny_model("llama")
    with pytest.raises(UserError, match="nothing says where its numbers come from"):
        materialize(nowhere)


def test_adapters_around_a_model_without_weights_are_refused() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    config = tiny_model("llama").config
    with pytest.raises(UserError, match="at_once=True"):
        FusedCausalLMModule(peft.get_peft_model(lit_fused.from_config(config), lora))
    FusedCausalLMModule(peft.get_peft_model(lit_fused.from_config(config, at_once=True), lora))


def test_a_state_dict_or_checkpoint_is_not_lost_on_a_model_without_weights(tmp_path: Path) -> None:
    model = tiny_model("llama")
    ours = lit_fused.from_config(model.config)
    ours.load_state_dict(model.state_dict())
    same(ours, model)

    trained = FusedCausalLMModule(lit_fused.from_config(model.config, seed=1))
    trainer = quiet_trainer(tmp_path, max_steps=2)
    trainer.fit(trained, loader(batches()[:2]))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    fresh = FusedCausalLMModule(lit_fused.from_config(model.config, seed=2))
    quiet_trainer(tmp_path).validate(fresh, loader(batches()[:2]), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    same(fresh.backbone, trained.backbone)


def test_a_model_without_weights_generates_and_is_saved_without_a_trainer(tmp_path: Path) -> None:
    config = tiny_model("llama").config
    module = FusedCausalLMModule(lit_fused.from_config(config, seed=1))
    prompt = torch.tensor([[3, 4, 5]])
    assert module.generate(prompt, max_new_tokens=2).shape == (1, 5)
    FusedCausalLMModule(lit_fused.from_config(config, seed=1)).save_pretrained(tmp_path / "out")
    same(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), module.backbone)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
def test_weights_that_come_late_are_those_that_the_precision_makes_of_early_ones(
    precision: str, tmp_path: Path
) -> None:
    ours: Any = lit_fused.from_config(tiny_model("llama").config, seed=1)
    early = copy.deepcopy(ours)
    materialize(early)
    for model in (ours, early):
        trainer = quiet_trainer(tmp_path, precision=precision)
        trainer.predict(FusedCausalLMModule(model), loader(batches()[:1]))
    same(ours, early)
    assert ours.model.rotary_emb.inv_freq.dtype == (torch.float64 if precision == "64-true" else torch.float32)


# Under strategies.

CASES = [
    Case("ddp", "new_llama"),
    Case("fsdp2", "new_gemma2"),
    Case("fsdp2", "qwen3_moe"),
    Case("fsdp2", "new_llama_tied", "chunked", "bf16-true"),
    Case("tp", "new_llama_tied"),
    Case("tp", "qwen3"),
    Case("tp", "granite", "standard"),
    Case("pp", "new_llama_tied"),
    Case("pp", "qwen3"),
]
REFUSED = {
    Case("fsdp2", "broken"): "rank 0 could not build the model: .*has no weights for lm_head.weight",
    Case("tp", "plan_qwen3"): "plan changes Qwen3ForCausalLM: divided over ranks, model.layers.1.self_attn.*_norm",
}
DIVIDED_TWICE = [Case("fsdp2_tp", "qwen3"), Case("pp_fsdp2", "new_llama_tied"), Case("pp_ddp", "qwen3")]
# A stage has the embedding, too.
SHARES = {"ddp": 1, "fsdp2": 0.51, "tp": 0.52, "pp": 0.56, "pp_ddp": 0.56}
_LAYERS = 6


def as_in_one_process(case: Case, result: dict[str, Any], folder: Path) -> None:
    """Compare what the processes have done with what one process does."""
    assert "refusal" not in result, f"{case}: {result['refusal']}"
    late = deferred(case.model, folder)
    whole = copy.deepcopy(late)
    materialize(whole)
    size = sum(p.nbytes for p in whole.parameters()) / (2 if case.precision == "bf16-true" else 1)
    assert max(result["bytes"]) <= SHARES.get(case.strategy, 0.28) * size, case
    for model in (whole, late):  # given whole, and late to a single process
        start = Start()
        options = {"accumulate_grad_batches": PER_STEP, "gradient_clip_val": CLIP, "precision": case.precision}
        trainer = quiet_trainer(folder, max_epochs=1, callbacks=[start], **options)
        trainer.fit(module_of(replace(case, strategy="ddp"), model), loader(batches()))
        for part in ("weights", "buffers"):
            expected = getattr(start, part)
            found = result["start" if part == "weights" else part]
            assert expected.keys() == found.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected), f"{case}: {part}"
        limit = 1e-5 if case.precision == "32-true" else 2e-2
        assert start.gradients is not None
        assert relative_error(result["gradients"], start.gradients) <= limit, case
        # AdamW turns the smallest gradients into whole steps, those too that are rounding
        assert relative_error(result["weights"], dict(model.named_parameters())) <= max(limit, 1e-4), case
        assert result["losses"] == pytest.approx(start.losses, rel=limit)
        assert case.is_pipeline or result["tied"] == start.head_is_tied


def launch(folder: Path, cases: list[Case], processes: int = 2) -> dict[Case, Any]:
    for name in {re.sub("^(new|plan)_", "", case.model) for case in cases} - {"broken"}:
        saved(backbone(name, _LAYERS), folder / name, max_shard_size="40KB")  # type: ignore[arg-type]
    rewrite(saved(tiny_model("llama"), folder / "broken"), lambda weights: weights.pop("lm_head.weight"))
    return each(run, processes, cases, folder, timeout=250)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_processes_have_their_parts_of_the_weights_of_one_and_train_as_it_does(tmp_path: Path) -> None:
    found = launch(tmp_path, [*CASES, *REFUSED])
    for case in CASES:
        as_in_one_process(case, found[case], tmp_path)
    for case, message in REFUSED.items():
        of_ranks = found[case]["refusal"]
        assert re.search(message, of_ranks[1], re.DOTALL), of_ranks


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_four_processes_divide_a_model_without_weights_in_two_ways(tmp_path: Path) -> None:
    for case, found in launch(tmp_path, DIVIDED_TWICE, processes=4).items():
        as_in_one_process(case, found, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_one_process_alone_holds_the_whole_model_at_start(tmp_path: Path) -> None:
    shape = 16, 8000
    whole = start_memory.gibibytes(*shape)
    for way, (first, other) in start_memory.measure(tmp_path, *shape, ways=("late", "late folder")).items():
        assert other < 0.75 * whole, way  # half of the parameters, one whole tensor, and what is imported
        assert first < 1.75 * whole, way  # and the whole model once


def test_a_twin_has_a_layer_of_each_kind_and_little_of_the_rest() -> None:
    kinds = ["full_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = tiny_model("gemma2", num_hidden_layers=5, layer_types=kinds, vocab_size=1024, pad_token_id=1000).config
    model: Any = lit_fused.from_config(config)
    twin: Any = small_twin(model, 2, CPU)
    assert twin.config.layer_types == ["full_attention", "sliding_attention"]
    assert twin.model.embed_tokens.weight.shape == (211, 32)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert (model.config.num_hidden_layers, model.config.vocab_size) == (5, 1024)
    assert not is_deferred(twin)
    assert small_twin(model, 4, CPU).config.layer_types == kinds[:4]
    same(twin, small_twin(model, 2, CPU))
