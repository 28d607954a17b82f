"""reduce_memory: the same losses and gradients, with fewer numbers on the device."""

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from tiny_seq2seq import MODELS as SEQ2SEQ
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import lit_fused
from lit_fused.errors import UserError
from lit_fused.memory import checkpointing_of, host_inputs, is_offloaded
from lit_fused.memory.host_inputs import HostInputs
from lit_fused.memory.token_chunks import TokenModules, chunked_class, own_class

WAYS = {"checkpointing": "offload", "mlp_chunk_tokens": 5}
_GEMMA3 = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    if name in SEQ2SEQ:
        kind, options = SEQ2SEQ[name]
        return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(kind, vocab_size=97, **options))
    if name == "gemma3":
        options = _GEMMA3 | {"num_key_value_heads": 2, "sliding_window": 6, "layer_types": None}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3_text", vocab_size=97, **options))
    return tiny_model(name)


def padded_batch(rows: int = 2, length: int = 17) -> dict[str, Tensor]:
    ids = torch.randint(4, 97, (rows, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, length - 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def step(model: nn.Module, batch: dict[str, Tensor], seed: int = 3) -> tuple[float, dict[str, Tensor]]:
    model.train().zero_grad()
    torch.manual_seed(seed)
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


_Step = tuple[float, dict[str, Tensor]]


def assert_same(found: _Step, expected: _Step, bound: float = 1e-6) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= bound * gradient.norm() + 1e-9, name


def chunked(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if own_class(module)]


@pytest.mark.parametrize(
    ("name", "mlps"),
    [
        ("llama", 2),
        ("qwen3_tied", 2),
        ("gemma2", 2),
        ("gemma3", 2),
        ("mistral", 2),
        ("gpt2", 2),
        ("gpt_neox", 2),
        ("granite", 2),
        ("olmo2", 2),
        ("phi", 2),
        ("falcon_h1", 2),
        ("mixtral", 2),
        ("qwen3_moe", 2),
        ("t5", 4),
        ("t5_gated", 4),
        ("bart_untied", 0),  # fc1 and fc2 are parts of the layer itself
        ("mpt", 0),  # its MLP also adds the residual, a second argument
    ],
)
def test_gradients_and_names_are_those_of_the_plain_model(name, mlps):
    plain = model_of(name)
    model = lit_fused.reduce_memory(copy.deepcopy(plain), **WAYS)
    assert len(chunked(model)) == mlps
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert [*dict(model.named_modules())] == [*dict(plain.named_modules())]
    batch, copies = padded_batch(), (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
    expected = step(plain, batch)
    for each in (model, *copies):
        assert_same(step(each, batch), expected)
    assert_same(step(lit_fused.reduce_memory(model), batch), expected)
    assert not any(is_offloaded(module) or own_class(module) for module in model.modules())


def kept_on_device(model: nn.Module, batch: dict[str, Tensor], monkeypatch: Any) -> tuple[int, int]:
    """Numbers that a forward pass keeps for backward on the device, weights apart, and on the host."""
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    kept: dict[int, Tensor] = {}
    on_host: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def to_host(tensor: Tensor) -> Any:
        on_host.append(tensor.numel())
        return [tensor.to("cpu", copy=True)], None

    monkeypatch.setattr(host_inputs, "to_host", to_host)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.train()(**batch, use_cache=False).loss
    loss.backward()
    return sum(tensor.numel() for tensor in kept.values()), sum(on_host)


def test_more_layers_keep_nothing_more_on_the_device_and_their_inputs_on_the_host(monkeypatch):
    batch, found = padded_batch(), {}
    for layers in (2, 6):
        model = lit_fused.reduce_memory(tiny_model("llama", num_hidden_layers=layers), **WAYS)
        found[layers] = kept_on_device(model, batch, monkeypatch)
    assert found[6][0] == found[2][0]
    assert found[6][1] == 3 * found[2][1] == 6 * batch["input_ids"].numel() * 32


@pytest.mark.parametrize("at_once", [False, True])
def test_recomputing_changes_what_is_kept_and_nothing_else(at_once: bool, monkeypatch: Any) -> None:
    plain, model = (
        lit_fused.from_config(tiny_model("llama", num_hidden_layers=4).config, at_once=at_once) for _ in "ab"
    )
    lit_fused.reduce_memory(model, checkpointing="recompute")
    batch = padded_batch()
    for each in (plain, model):
        lit_fused.materialize(each)
    usual, kept = (kept_on_device(each, batch, monkeypatch)[0] for each in (plain, model))
    assert kept < usual / 2
    expected = step(plain, batch)[1]
    assert all(torch.equal(gradient, expected[name]) for name, gradient in step(model, batch)[1].items())


def test_the_memory_of_an_input_is_free_once_it_has_left_and_the_layer_after_has_run(monkeypatch):
    inputs: list[Any] = []

    def to_host(tensor: Tensor) -> Any:
        inputs.append(weakref.ref(tensor.untyped_storage()))
        return [tensor.to("cpu", copy=True)], None

    monkeypatch.setattr(host_inputs, "to_host", to_host)
    model = lit_fused.reduce_memory(tiny_model("llama", num_hidden_layers=6), checkpointing="offload")
    loss = model.train()(**padded_batch()).loss
    assert [storage() is not None for storage in inputs] == [False] * 5 + [True]
    loss.backward()
    assert [storage() is not None for storage in inputs] == [False] * 6


def test_chunks_alone_keep_what_goes_into_an_mlp_and_nothing_of_its_inside(monkeypatch):
    batch, found = padded_batch(), {}
    for size in (64, 64 * 9):
        model = lit_fused.reduce_memory(tiny_model("llama", intermediate_size=size), mlp_chunk_tokens=5)
        found[size] = kept_on_device(model, batch, monkeypatch)[0]
    assert found[64] == found[64 * 9]


@pytest.mark.parametrize("checkpointing", ["recompute", "offload"])
def test_dropout_draws_in_backward_what_it_drew_in_forward(checkpointing):
    options: dict[str, Any] = {"resid_pdrop": 0.3, "attn_pdrop": 0.2, "embd_pdrop": 0.1}
    plain, batch = tiny_model("gpt2", **options), padded_batch()
    model = lit_fused.reduce_memory(copy.deepcopy(plain), checkpointing=checkpointing)
    assert_same(step(model, batch), step(plain, batch))
    lit_fused.reduce_memory(model, checkpointing=checkpointing, mlp_chunk_tokens=5)
    first, again = step(model, batch), step(model, batch)
    assert first[0] == again[0]
    assert all(torch.equal(gradient, again[1][name]) for name, gradient in first[1].items())
    eager = lit_fused.reduce_memory(copy.deepcopy(plain), mlp_chunk_tokens=5)
    assert_same(first, step(eager, batch))


def test_autocast_in_backward_is_that_of_forward():
    plain, batch = tiny_model("llama"), padded_batch()
    model = lit_fused.reduce_memory(copy.deepcopy(plain), **WAYS)
    exact = step(plain, batch)[1]
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = step(plain, batch), step(model, batch)
    assert found[0] == pytest.approx(expected[0], rel=1e-3)
    for name, gradient in exact.items():
        assert (found[1][name] - gradient).norm() <= 1.2 * (expected[1][name] - gradient).norm() + 1e-6


def test_layers_that_are_trained_beside_frozen_ones_get_their_gradients():
    plain, batch = tiny_model("llama", num_hidden_layers=4), padded_batch()
    for name, p in plain.named_parameters():
        p.requires_grad = ".2." in name
    model = lit_fused.reduce_memory(copy.deepcopy(plain), **WAYS)
    assert_same(step(model, batch), step(plain, batch))


def test_adapters_around_a_model_or_within_it_get_their_gradients():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
    batch = padded_batch()

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(model, config).double()  # Such adapters make float32's rounding large.

    expected = step(adapted(tiny_model("llama")), batch)
    around = adapted(lit_fused.reduce_memory(tiny_model("llama"), **WAYS))
    within = lit_fused.reduce_memory(adapted(tiny_model("llama")), **WAYS)
    for model in (around, within):
        assert len(chunked(model)) == 2
        assert_same(step(model, batch), expected, 1e-12)


@pytest.mark.parametrize("first", ["fuse", "reduce"])
def test_a_fused_model_keeps_its_loss_and_the_layers_theirs(first):
    plain, batch = tiny_model("qwen3_tied"), padded_batch()
    model = copy.deepcopy(plain)
    for change in (lit_fused.fuse, lambda m: lit_fused.reduce_memory(m, **WAYS))[:: 1 if first == "fuse" else -1]:
        model = change(model)
    expected = step(plain, batch)
    assert_same(step(model, batch), expected, 2e-6)
    lit_fused.unfuse(model)
    assert_same(step(model, batch), expected)


def test_a_model_without_weights_yet_is_changed_as_one_with_them():
    config = tiny_model("llama").config
    model = lit_fused.reduce_memory(lit_fused.from_config(config), **WAYS)
    assert len(chunked(model)) == 2
    lit_fused.materialize(model)
    plain = lit_fused.from_config(config, at_once=True)
    assert_same(step(model, padded_batch()), step(plain, padded_batch()))


def test_checkpointing_that_a_loop_switches_on_gives_way(monkeypatch):
    batch = padded_batch()
    model = lit_fused.reduce_memory(tiny_model("llama"), **WAYS)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    passes: list[nn.Module] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: passes.append(model))
    assert_same(step(model, batch), step(tiny_model("llama"), batch))
    assert len(passes) == 2


def test_what_was_chosen_is_said_and_taken_back():
    model = tiny_model("llama")
    for way in ("recompute", "offload", "none"):
        assert checkpointing_of(lit_fused.reduce_memory(model, checkpointing=way)) == way
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    assert checkpointing_of(lit_fused.reduce_memory(model)) == "recompute"  # as the loop has chosen it


def test_generation_and_evaluation_are_those_of_the_plain_model():
    plain: Any = tiny_model("llama")
    batch = padded_batch()
    model: Any = lit_fused.reduce_memory(copy.deepcopy(plain), **WAYS).eval()
    prompt = batch["input_ids"][1:]
    options = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(prompt, **options), plain.eval().generate(prompt, **options))
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)


class Mixing(nn.Module):
    """Adds a mean over the tokens, by a product that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x.mean(1, keepdim=True))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * torch.arange(x.shape[-2])[:, None])


def test_a_module_that_mixes_tokens_or_counts_them_is_left_as_it_is():
    alone = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    layer = nn.ModuleDict({"mixing": Mixing(), "counting": Counting(), "alone": alone, "one": nn.Linear(32, 32)})
    random = torch.get_rng_state()
    assert [*TokenModules(32).of(layer)] == [(alone, 3)]
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(("tokens", "calls"), [(2048, 1), (4096, 2), (16 * 2048, 16), (40 * 2048, 16)])
def test_by_default_a_chunk_is_a_sixteenth_and_at_least_2048_tokens(tokens, calls):
    seen: list[int] = []

    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.shape[:-1].numel())
            return x

    with torch.no_grad():
        found = chunked_class(Noting, 3, None)()(torch.ones(2, tokens // 2, 4))
    assert found.shape == (2, tokens // 2, 4)
    assert len(seen) == calls
    assert sum(seen) == tokens


def test_backward_finds_the_input_of_the_layer_before_under_way(monkeypatch):
    events: list[str] = []

    def to_host(tensor: Tensor) -> Any:
        events.append(f"out {tensor[0].item():.0f}")
        return [tensor.clone()], None

    def to_device(kept: Any) -> Any:
        events.append(f"back {kept.pieces[0][0].item():.0f}")
        return kept.pieces[0].clone(), None

    monkeypatch.setattr(host_inputs, "to_host", to_host)
    monkeypatch.setattr(host_inputs, "to_device", to_device)
    inputs = HostInputs()
    kept = [inputs.keep(torch.full((3,), float(i)), 3) for i in range(3)]
    for each in reversed(kept):
        events.append("compute")
        inputs.give(each)
    assert events == ["out 0", "out 1", "out 2", "compute", "back 2", "back 1", "compute", "back 0", "compute"]


def test_a_host_with_too_little_memory_is_told_in_the_first_step(monkeypatch):
    model = lit_fused.reduce_memory(tiny_model("llama", num_hidden_layers=4), checkpointing="offload")
    batch = padded_batch()
    needed = 4 * batch["input_ids"].numel() * 32 * 4
    monkeypatch.setattr(host_inputs, "free_host_memory", lambda: needed - 1)
    with pytest.raises(UserError, match="inputs of 4 layers on the host: 0.0 GiB, and 0.0 GiB are free.*memory=checkp"):
        step(model, batch)
    monkeypatch.setattr(host_inputs, "free_host_memory", lambda: needed)
    step(model, batch)
    monkeypatch.setattr(host_inputs, "free_host_memory", lambda: 0)  # The memory is in use, by the inputs themselves.
    step(model, batch)


def test_free_memory_is_some_of_the_hosts():
    assert 2**20 < host_inputs.free_host_memory() <= 2**50


def test_what_cannot_be_reduced_is_refused_by_name():
    with pytest.raises(UserError, match="checkpointing must be one of none, recompute, offload, got 'offlaod' "):
        lit_fused.reduce_memory(tiny_model("llama"), checkpointing="offlaod")
    with pytest.raises(UserError, match="mlp_chunk_tokens must be auto"):
        lit_fused.reduce_memory(tiny_model("llama"), mlp_chunk_tokens="all")
    with pytest.raises(UserError, match="mlp_chunk_tokens must be a whole number"):
        lit_fused.reduce_memory(tiny_model("llama"), mlp_chunk_tokens=0)
    with pytest.raises(UserError, match="takes a transformers model, got Linear"):
        lit_fused.reduce_memory(nn.Linear(2, 2), checkpointing="offload")
    plain = nn.Linear(2, 2)
    assert lit_fused.reduce_memory(plain) is plain
