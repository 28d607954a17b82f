"""Weights that come late are those of transformers' rules or of the checkpoint, the same under every strategy."""

import copy
import itertools
import json
import multiprocessing
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import start_memory
import torch
import torch.distributed as dist
import transformers
from architectures import ENTRIES, Entry, tiny_config
from architectures import tiny_model as tiny_architecture
from errors_of import relative_error
from lightning_helpers import loader, quiet_trainer, ragged_batches
from parallel_cases import CLIP, PER_STEP, Case, backbone, batches
from parallel_fits import result_of
from parallel_job import module_of
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrun import run
from transformers import AutoConfig, AutoModelForCausalLM, MllamaTextConfig, PreTrainedModel
from weights_job import Start, deferred

import lit_fused
from lit_fused import FusedCausalLMModule, FusedSeq2SeqLMModule, UserError
from lit_fused.app.restore import load
from lit_fused.weights import deferred as deferred_module
from lit_fused.weights import is_deferred, materialize
from lit_fused.weights.deferred import index_of, with_numbers
from lit_fused.weights.rules import FromRules, named_tensors
from lit_fused.weights.twin import exact_on_twin, twin_of

JOB = Path(__file__).parents[1] / "helpers" / "weights_job.py"
CPU = torch.device("cpu")

# Their rules leave something out, or make one tensor of another.
REFUSED = {"apertus", "data2vec-text", "musicflamingo", "openai-gpt", "reformer", "rwkv"} | {
    f"{name}-masked" for name in ("fnet", "longformer", "luke", "nystromformer", "perceiver")
}

# Rules of many kinds: for children, one after another, by rejection, in a model inside the model, and refused ones.
QUICK = {
    "llama",
    "gpt2",
    "gemma2",
    "qwen3_moe",
    "mamba",
    "modernbert-decoder",
    "xlnet",
    "t5",
    "bart",
    "rwkv",
    "apertus",
}


def same(a: nn.Module, b: nn.Module) -> None:
    ours, theirs = dict(named_tensors(a)), dict(named_tensors(b))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def saved(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def built_late(entry: Entry) -> PreTrainedModel:
    """As ``from_config`` does, with the class that the mapping names."""
    model_class = getattr(transformers, entry.class_name)

    def build(config: Any) -> PreTrainedModel:
        return model_class._from_config(config, attn_implementation="eager")

    model, skeleton = deferred_module._without_memory(build, tiny_config(entry))
    return deferred_module._deferred(model, FromRules(skeleton, model.all_tied_weights_keys, seed=0))


# Random weights.


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=str(entry), marks=[] if entry.model_type in QUICK else pytest.mark.slow)
        for entry in ENTRIES
        if not entry.model_type.endswith("_assistant")
    ],
)
def test_every_tensor_of_every_architecture_is_what_its_rules_make_it(entry):
    eager = tiny_architecture(entry)
    model = built_late(entry)
    if {entry.model_type, str(entry)} & REFUSED:
        with pytest.raises(UserError, match=rf"{entry.class_name} cannot be initialised one tensor.*at_once=True"):
            materialize(model)
        return
    materialize(model)
    theirs, ours = dict(named_tensors(eager)), dict(named_tensors(model))
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        found = ours[name]
        assert (found.shape, found.dtype, found.device.type) == (expected.shape, expected.dtype, "cpu"), name
        assert [n for n in ours if ours[n] is found] == [n for n in theirs if theirs[n] is expected], "tied otherwise"
        if torch.equal(found, expected):
            continue  # a constant, or computed
        assert isinstance(expected, nn.Parameter), f"{name} is computed, and otherwise"
        a, b = (t.detach().double() for t in (expected, found))
        assert abs((a == 0).sum() - (b == 0).sum()) <= 2, f"{name} has other zeros"
        if a.numel() >= 64:
            noise = 4 / a.numel() ** 0.5
            assert abs(b.std() / a.std() - 1) <= noise + 0.05, name
            assert abs(a.mean() - b.mean()) <= 1.5 * noise * a.std(), name
            assert 0.5 <= b.abs().max() / a.abs().max() <= 2, name


def test_the_numbers_depend_on_seed_and_name_alone():
    config = AutoConfig.for_model("gpt2", vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first: Any = lit_fused.from_config(config, seed=1)
    materialize(first)
    assert torch.equal(torch.random.get_rng_state(), before)

    torch.manual_seed(8)
    pruned: Any = lit_fused.from_config(config, seed=1)
    pruned.transformer.wte = nn.Identity()
    pruned.transformer.h[0] = nn.Identity()
    materialize(pruned)
    kept = dict(pruned.named_parameters())
    assert kept.keys() > {"lm_head.weight", "transformer.h.1.mlp.c_proj.weight"}
    for name, p in kept.items():
        assert torch.equal(p, first.get_parameter(name)), name

    other = lit_fused.from_config(config, seed=2)
    materialize(other)
    assert not torch.equal(other.lm_head.weight, first.lm_head.weight)
    assert first.transformer.h[0].mlp.c_proj.weight.std() < 0.7 * first.transformer.h[0].mlp.c_fc.weight.std()


def test_neither_the_default_device_nor_the_default_dtype_of_the_moment_matters(tmp_path):
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


def test_at_once_is_decided_by_the_seed_as_well():
    config = AutoConfig.for_model("openai-gpt", vocab_size=97, n_embd=32, n_layer=1, n_head=4)
    torch.manual_seed(1)
    first = lit_fused.from_config(config, seed=3, at_once=True)
    torch.manual_seed(2)
    same(lit_fused.from_config(config, seed=3, at_once=True), first)
    assert not is_deferred(first)


# Checkpoints.


@pytest.mark.parametrize("name", ["llama_tied", "gemma2", "mixtral", "qwen3_moe", "falcon_h1", "phi", "mpt"])
@pytest.mark.parametrize("size", ["40KB", "10GB"])
def test_a_checkpoint_of_one_or_several_files_is_loaded_exactly(name, size, tmp_path):
    model = tiny_model(name)
    saved(model, tmp_path / "theirs", max_shard_size=size)
    assert (len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1) == (size == "40KB")
    ours = lit_fused.from_pretrained(tmp_path / "theirs")
    assert is_deferred(ours)
    assert not ours.training
    materialize(ours)
    same(ours, model)
    assert ours.generation_config.eos_token_id == model.generation_config.eos_token_id
    same(AutoModelForCausalLM.from_pretrained(saved(ours, tmp_path / "again")), model)


def test_a_checkpoint_in_half_precision_comes_in_float32_unless_it_is_asked_otherwise(tmp_path):
    saved(tiny_model("llama", torch.bfloat16), tmp_path)
    for dtype, expected in [("auto", torch.bfloat16), (torch.float16, torch.float16), ("float32", torch.float32)]:
        ours = lit_fused.from_pretrained(tmp_path, dtype=dtype)
        materialize(ours)
        same(ours, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=expected))
        assert ours.model.rotary_emb.inv_freq.dtype == torch.float32
    assert lit_fused.from_pretrained(tmp_path).dtype == torch.float32


def test_an_encoder_decoder_is_built_and_loaded_late(tmp_path):
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


def test_a_decoder_that_hears_is_built_and_loaded_late_and_is_a_causal_model(tmp_path):
    config: Any = tiny_config(next(entry for entry in ENTRIES if entry.model_type == "voxtral"))
    module = FusedCausalLMModule(lit_fused.from_config(config, seed=4))
    module.save_pretrained(tmp_path / "out")
    again = load(tmp_path / "out")
    assert type(again) is FusedCausalLMModule
    same(again.backbone, module.backbone)
    assert again.auto_class == "AutoModelForSeq2SeqLM"  # In transformers' own words, which the model's card gives.


def test_a_configuration_that_no_auto_class_knows_is_refused_by_name():
    config = MllamaTextConfig()
    with pytest.raises(UserError, match="no language model for a MllamaTextConfig; if there is one"):
        lit_fused.from_config(config)


def rewrite(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_what_does_not_fit_is_named(tmp_path):
    def refused(message: str, name: Any = None, **options: Any) -> None:
        with pytest.raises(UserError, match=message):
            lit_fused.from_pretrained(folder if name is None else name, **options)

    folder = saved(tiny_model("llama"), tmp_path / "missing")
    rewrite(folder, lambda weights: weights.pop("lm_head.weight"))
    refused(r"do not fit LlamaForCausalLM: 1 of \d+ differ \(lm_head.weight is missing\)")

    folder = saved(tiny_model("llama"), tmp_path / "extra")
    rewrite(folder, lambda weights: weights.update({"model.layers.9.mlp.up_proj.weight": torch.ones(2)}))
    refused("model.layers.9.mlp.up_proj.weight has no place in the model")

    folder = saved(tiny_model("llama"), tmp_path / "shape")
    rewrite(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(31)}))
    refused(r"model.norm.weight is \(31,\), not \(32,\)")

    folder = saved(tiny_model("llama_tied"), tmp_path / "tied")
    rewrite(folder, lambda weights: weights.update({"lm_head.weight": torch.ones(97, 32)}))
    refused("has different weights for model.embed_tokens.weight and lm_head.weight")

    folder = saved(tiny_model("llama"), tmp_path / "damaged")
    (folder / "model.safetensors").write_bytes(b"not this")
    refused("is no safetensors file, or a damaged one")

    folder = saved(tiny_model("llama"), tmp_path / "incomplete", max_shard_size="40KB")
    next(folder.glob("*-00002-*")).unlink()
    refused("is incomplete: its index names model-00002-of")

    folder = saved(tiny_model("llama"), tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused("pickled.*at_once=True")
    (folder / "pytorch_model.bin").unlink()
    refused("is it a model's folder?")

    folder = saved(tiny_model("llama"), tmp_path / "quantised")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    refused("is quantised")
    refused("there is no folder .*nowhere", tmp_path / "nowhere")
    refused("has no config.json", tmp_path)
    refused("dtype must be a floating-point dtype", saved(tiny_model("llama"), tmp_path / "fine"), dtype="int8")


def test_a_tied_weight_may_be_stored_under_either_name_and_twice(tmp_path):
    model = tiny_model("llama_tied")
    for case in ("other", "both"):
        folder = saved(model, tmp_path / case)

        def store(weights: dict[str, Tensor], case: str = case) -> None:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
            if case == "other":
                del weights["model.embed_tokens.weight"]

        rewrite(folder, store)
        ours = lit_fused.from_pretrained(folder)
        materialize(ours)
        same(ours, model)


# The models below are inside of a module.


def test_what_has_no_source_or_was_changed_before_it_had_numbers_is_refused():
    with torch.device("meta"):
        nowhere = tiny_model("llama")
    with pytest.raises(UserError, match="nothing says where its numbers come from"):
        materialize(nowhere)
    resized = lit_fused.from_config(nowhere.config)
    resized.lm_head.weight = nn.Parameter(torch.empty(120, 32, device="meta"))
    with pytest.raises(UserError, match=r"lm_head.weight, \(120, 32\), of LlamaForCausalLM has been changed"):
        materialize(resized)


def test_adapters_around_a_model_without_weights_are_refused():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    config = tiny_model("llama").config
    with pytest.raises(UserError, match="at_once=True"):
        FusedCausalLMModule(peft.get_peft_model(lit_fused.from_config(config), lora))
    FusedCausalLMModule(peft.get_peft_model(lit_fused.from_config(config, at_once=True), lora))


def test_a_state_dict_or_checkpoint_is_not_lost_on_a_model_without_weights(tmp_path):
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


def test_a_model_without_weights_generates_and_is_saved_without_a_trainer(tmp_path):
    config = tiny_model("llama").config
    module = FusedCausalLMModule(lit_fused.from_config(config, seed=1))
    prompt = torch.tensor([[3, 4, 5]])
    assert module.generate(prompt, max_new_tokens=2).shape == (1, 5)
    FusedCausalLMModule(lit_fused.from_config(config, seed=1)).save_pretrained(tmp_path / "out")
    same(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), module.backbone)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
def test_weights_that_come_late_are_those_that_the_precision_makes_of_early_ones(precision, tmp_path):
    ours: Any = lit_fused.from_config(tiny_model("llama").config, seed=1)
    early = copy.deepcopy(ours)
    materialize(early)
    for model in (ours, early):
        trainer = quiet_trainer(tmp_path, precision=precision)
        trainer.predict(FusedCausalLMModule(model), loader(batches()[:1]))
    same(ours, early)
    assert ours.model.rotary_emb.inv_freq.dtype == (torch.float64 if precision == "64-true" else torch.float32)


def test_a_tokenizer_larger_than_the_vocabulary_is_still_refused(tmp_path):
    class Data(L.LightningDataModule):
        tokenizer = range(98)

        def predict_dataloader(self) -> Any:
            return loader(batches()[:1])

    module = FusedCausalLMModule(lit_fused.from_config(tiny_model("llama").config))
    with pytest.raises(UserError, match="the tokenizer has 98 entries"):
        quiet_trainer(tmp_path).predict(module, datamodule=Data())


def test_a_failure_before_the_weights_have_come_keeps_its_own_words(tmp_path):
    class Data(L.LightningDataModule):
        def prepare_data(self) -> None:
            raise UserError("there is no text")

    module = FusedCausalLMModule(lit_fused.from_config(tiny_model("llama").config))
    with pytest.raises(UserError, match="there is no text"):
        quiet_trainer(tmp_path).fit(module, datamodule=Data())


# Parts of a tensor.


def test_a_rank_takes_the_part_that_its_placements_say():
    processes = [multiprocessing.get_context("fork").Process(target=check_parts, args=(rank,)) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0] * 4


def check_parts(rank: int) -> None:
    """On a mesh of 2 x 2 ranks, whose group is a fake that cannot communicate."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for rows in (8, 7, 3, 1):
        whole = torch.arange(rows * 5).reshape(rows, 5)
        for placements in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2):
            expected = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
            meta = distribute_tensor(whole.to("meta"), mesh, placements, src_data_rank=None)
            assert torch.equal(whole[index_of(meta)], expected), (rows, placements)
            found: Any = with_numbers(meta, expected)
            assert (found.shape, found.placements) == (meta.shape, placements)
        # FSDP2 divides once more what tensor parallelism has divided along the same dimension
        module = nn.Linear(5, rows, bias=False)
        module.weight = nn.Parameter(
            distribute_tensor(whole.float(), mesh["tensor"], [Shard(0)], src_data_rank=None), requires_grad=True
        )
        fully_shard(module, mesh=mesh["data"])
        part: Any = module.weight
        assert part.placements != (Shard(0), Shard(0))
        assert torch.equal(whole[index_of(part)].float(), part.to_local()), rows


# Under strategies.

CASES = [
    Case("ddp", "new_llama"),
    Case("fsdp2", "new_llama"),
    Case("fsdp2", "new_gemma2"),
    Case("ddp", "gemma2"),
    Case("fsdp2", "gemma2"),
    Case("fsdp2", "qwen3_moe"),
    Case("fsdp2", "new_llama_tied", "chunked", "bf16-true"),
    Case("fsdp2", "llama", "standard"),
]
BROKEN = Case("fsdp2", "broken")


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_two_processes_start_with_the_weights_of_one_and_train_as_with_a_model_that_was_whole(tmp_path):
    names = {case.model.removeprefix("new_") for case in CASES}
    for name in names | {"broken"}:
        saved(tiny_model("llama" if name == "broken" else name), tmp_path / name, max_shard_size="40KB")
    next((tmp_path / "broken").glob("*-00002-*")).unlink()
    launch(tmp_path, [*CASES, BROKEN])
    for case in CASES:
        result, whole = as_in_one_process(case, tmp_path)
        if not case.model.startswith("new_"):
            same(whole, tiny_model(case.model))
        assert case.strategy == "pp" or result["tied"] == ("tied" in case.model or "gemma2" in case.model)
    assert re.search("is incomplete", torch.load(result_of(BROKEN, tmp_path), weights_only=False)["refusal"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_no_process_holds_the_whole_model_at_start(tmp_path):
    shape = 16, 8000
    whole = start_memory.gibibytes(*shape)
    peak = start_memory.measure(tmp_path, *shape, ways=("whole", "late", "late folder"))
    assert peak["whole"] > whole
    assert peak["late"] < 0.75 * whole  # half of the parameters, one whole tensor, and what is imported
    assert peak["late folder"] < 0.75 * whole


def as_in_one_process(case: Case, folder: Path) -> tuple[dict[str, Any], nn.Module]:
    """Return what the processes have done, compared with what one process does; and the model before training."""
    result = torch.load(result_of(case, folder), weights_only=False)
    assert "refusal" not in result, f"{case}: {result['refusal']}"
    late = deferred(case.model, folder)
    whole = copy.deepcopy(late)
    materialize(whole)
    before = copy.deepcopy(whole)
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
    return result, before


DIVIDED = [
    Case("tp", "new_llama_tied"),
    Case("tp", "qwen3"),
    Case("tp", "granite", "standard"),
    Case("pp", "new_llama_tied"),
    Case("pp", "qwen3"),
    Case("pp", "granite"),
    Case("pp_interleaved", "qwen3"),
    Case("pp_zbv", "new_llama_tied"),
]
WITHOUT_TWIN = [Case("tp", "changed_qwen3"), Case("pp", "changed_qwen3")]
DIVIDED_TWICE = [Case("fsdp2_tp", "qwen3"), Case("pp_fsdp2", "new_llama_tied"), Case("pp_ddp", "qwen3")]
NOT_DIVIDED = {
    Case("tp", "plan_qwen3"): "plan changes Qwen3ForCausalLM: divided over ranks, model.layers.1.self_attn.*_norm",
    Case("pp", "scaled_llama_tied"): "cannot divide Scaled: its hidden states are not those of its stages",
    Case("pp", "ranks_llama_tied"): "ranks that share the embedding, which the output layer is tied to, began with",
}
_LAYERS = 6


def _saved_deep(cases: list[Case], folder: Path) -> None:
    for name in {re.sub("^(new|changed|plan|scaled|ranks)_", "", case.model) for case in cases}:
        saved(backbone(name, _LAYERS), folder / name, max_shard_size="40KB")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_no_process_is_given_more_than_its_part_of_a_model_that_is_divided_by_matrices_or_layers(tmp_path):
    cases = [*DIVIDED, *WITHOUT_TWIN, *NOT_DIVIDED]
    _saved_deep(cases, tmp_path)
    said = launch(tmp_path, cases)
    for case in DIVIDED:
        result, whole = as_in_one_process(case, tmp_path)
        # halves of all but gains, but a stage has the embedding, and a V's first and last stages are on one rank
        share = {"tp": 0.52, "pp": 0.56, "pp_interleaved": 0.66, "pp_zbv": 0.62}[case.strategy]
        size = sum(p.nbytes for p in whole.parameters())
        assert max(result["given"]) <= share * size, case
    for case in WITHOUT_TWIN:
        result, _ = as_in_one_process(case, tmp_path)
        assert "every rank builds it whole" in said
    for case, message in NOT_DIVIDED.items():
        refusal = torch.load(result_of(case, tmp_path), weights_only=False)["refusal"]
        assert re.search(message, refusal), refusal


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_four_processes_divide_a_model_without_weights_in_two_ways(tmp_path):
    _saved_deep(DIVIDED_TWICE, tmp_path)
    launch(tmp_path, DIVIDED_TWICE, processes=4)
    for case in DIVIDED_TWICE:
        result, whole = as_in_one_process(case, tmp_path)
        share = 0.56 if case.strategy == "pp_ddp" else 0.28
        assert max(result["given"]) <= share * sum(p.nbytes for p in whole.parameters()), case


def test_a_twin_has_a_layer_of_each_kind_and_little_of_the_rest():
    kinds = ["full_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = tiny_model("gemma2", num_hidden_layers=5, layer_types=kinds, vocab_size=1024, pad_token_id=1000).config
    model: Any = lit_fused.from_config(config)
    model.gradient_checkpointing_enable()  # it adds settings and hooks of its own
    twin: Any = twin_of(model, 2, CPU)
    assert twin.config.layer_types == ["full_attention", "sliding_attention"]
    assert twin.model.embed_tokens.weight.shape == (211, 32)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert (model.config.num_hidden_layers, model.config.vocab_size) == (5, 1024)
    assert not is_deferred(twin)
    assert twin_of(model, 4, CPU).config.layer_types == kinds[:4]
    again: Any = twin_of(model, 2, CPU)
    same(twin, again)


def patched_forward(model: Any) -> None:
    model.model.layers[3].mlp.forward = lambda x: x


def other_setting(model: Any) -> None:
    model.model.layers[3].self_attn.scaling *= 2


def other_module(model: Any) -> None:
    model.model.norm = nn.LayerNorm(32, device="meta")


def untied(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.empty(97, 32, device="meta"))


def with_weights(model: Any) -> None:
    model.model.norm.weight = nn.Parameter(torch.ones(32))


def other_configuration(model: Any) -> None:
    model.config.num_hidden_layers = 3


@pytest.mark.parametrize(
    "change", [patched_forward, other_setting, other_module, untied, with_weights, other_configuration]
)
def test_a_model_that_was_changed_after_it_was_built_has_no_twin(change):
    model = lit_fused.from_config(tiny_model("llama_tied", num_hidden_layers=4).config)
    assert exact_on_twin(model, 2, CPU, lambda twin: None)
    change(model)
    with pytest.warns(match="LlamaForCausalLM has no small twin.*so every rank builds it whole"):
        assert not exact_on_twin(model, 2, CPU, lambda twin: None)


def launch(folder: Path, cases: list[Case], processes: int = 2) -> str:
    return run(JOB, processes, folder, *cases, timeout=250)


@pytest.mark.parametrize("at_once", [False, True])
def test_activation_checkpointing_changes_what_is_kept_and_nothing_else(at_once):
    config = tiny_model("llama_tied", num_hidden_layers=4).config

    def step(**options: Any) -> tuple[int, dict[str, Tensor]]:
        """Numbers that forward keeps for backward, and gradients."""
        model = lit_fused.from_config(config, at_once=at_once, **options).train()
        materialize(model)
        kept: list[int] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(input_ids=batches()[0]["input_ids"], use_cache=False).logits.square().mean()
        loss.backward()
        return sum(kept), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    usual, expected = step()
    kept, gradients = step(activation_checkpointing=True)
    assert kept < usual / 2
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items())
