"""FSDP2 that gathers no output layer: each rank keeps its rows of it, and trains as one process does."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_helpers import loader, quiet_trainer
from parallel_cases import Case, as_strategy, batches
from parallel_fits import fit, judge, launch, resume
from peft import LoraConfig, get_peft_model
from ranks import Refusal, each
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_fused import FusedCausalLMModule, LanguageModel, LinearCrossEntropyLoss
from lit_fused.parallel import FSDP2Strategy
from lit_fused.parallel.collectives import objects_of_ranks
from lit_fused.parallel.sharded import Sharded

VOCABULARY = 4999  # beside which the layers and the logits of 21 tokens are small
MIXED = "bf16-mixed"


def test_three_accumulated_steps_are_those_of_the_large_batch(tmp_path):
    case = Case("fsdp2_rows", "llama")
    judge(case, launch(fit, [case], tmp_path, timeout=180)[case], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_further_models_losses_precisions_and_ranks_train_as_one_process(tmp_path):
    cases = [Case("fsdp2_rows", model) for model in ("llama_tied", "gemma2", "phi", "masked_modernbert")]
    cases += [Case("fsdp2_rows", "llama_tied", "standard"), Case("fsdp2_rows", "qwen3", precision="bf16-true")]
    cases += [Case("fsdp2_rows", "gemma2_untied", precision=MIXED), Case("context_rows", "llama_tied")]
    cases += [Case("fsdp2_rows_policy", "llama_tied", precision=MIXED), Case("fsdp2_rows_of_four", "llama_tied")]
    for case, found in launch(fit, cases, tmp_path, timeout=350).items():
        judge(case, found, tmp_path)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path):
    case = Case("fsdp2_rows", "llama_tied")
    found = launch(resume, [case], tmp_path, timeout=180)[case]
    for name, weight in found["at once"].items():
        assert torch.equal(found["resumed"][name], weight), name


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that an operation of this rank returns."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # It runs operations of this rank's parts, which come here again.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        real = [x for x in tree_leaves(result) if type(x) in (Tensor, nn.Parameter)]  # not those of DTensor's shapes
        self.numbers = max([self.numbers, *(x.numel() for x in real)])
        return result


def largest_of(gather_head: bool) -> int:
    """Return the size of the largest tensor of forward and backward, on either rank."""
    model = LanguageModel(tiny_model("llama_tied", vocab_size=VOCABULARY).train(), LinearCrossEntropyLoss())
    model.prepare(torch.device("cpu"))
    Sharded(as_strategy(gather_head=gather_head))._divide(model)
    tokens = torch.arange(10 + dist.get_rank())[None] * 400
    with Largest() as largest:
        model({"input_ids": tokens, "labels": tokens}).loss_sum.backward()
    return max(objects_of_ranks(largest.numbers))


def test_no_tensor_of_the_vocabulary_times_the_hidden_size_is_on_a_rank():
    found = each(largest_of, 2, [True, False], timeout=60)
    assert found[True] >= VOCABULARY * 32
    assert found[False] <= (VOCABULARY + 1) // 2 * 32


def fit_refused(case: tuple[Any, ...], folder: Path) -> None:
    sizes, model, loss = case
    strategy = FSDP2Strategy(*sizes, gather_head=False)
    backbone: Any = tiny_model(model)
    if loss == "chunked" and sizes == (2, 1):
        backbone = get_peft_model(backbone, LoraConfig(target_modules=["lm_head"]))
    module = FusedCausalLMModule(backbone, LinearCrossEntropyLoss(loss))
    quiet_trainer(folder, accelerator="cpu", devices=2, strategy=strategy, max_epochs=1).fit(module, loader(batches()))


def test_what_rows_of_the_output_layer_do_not_work_with_is_refused_and_says_what_to_choose(tmp_path):
    said = {
        ((1, 2), "llama", "chunked"): "as tensor parallelism does over some; choose one of them",
        ((2, 1), "llama", "chunked"): "divides an nn.Linear and an nn.Embedding tied to it, got peft.*Linear; choose",
        ((2, 1), "llama", "torch_native"): "has no vocabulary-parallel form, .* choose gather_head=true",
    }
    for case, found in each(fit_refused, 2, said, tmp_path, timeout=80).items():
        assert isinstance(found, Refusal)
        assert re.search(said[case], found), found
