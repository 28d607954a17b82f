"""An exported folder in a program that evaluates models: lm-evaluation-harness finds the module's own numbers."""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_helpers import loader, quiet_trainer, tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lit_fused import FusedCausalLMModule


@pytest.mark.slow
def test_lm_evaluation_harness_gives_the_log_likelihoods_of_the_module(tmp_path: Path) -> None:
    if os.environ.get("CI") != "true":
        pytest.importorskip("lm_eval")
    hf_model = importlib.import_module("lm_eval.models.huggingface").HFLM
    request = importlib.import_module("lm_eval.api.instance").Instance
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w1", unk_token="w0")
    torch.manual_seed(0)
    module = FusedCausalLMModule(tiny_llama())
    module.save_pretrained(tmp_path / "model", tokenizer)

    texts = [("w5 w6 w7", " w8 w9"), ("w30 w31", " w32 w33 w34 w2")]
    harness = hf_model(pretrained=str(tmp_path / "model"), dtype="float32", device="cpu", batch_size=1)
    requests = [request("loglikelihood", {}, arguments, 0) for arguments in texts]
    theirs = [score for score, _ in harness.loglikelihood(requests)]

    batches = []
    for context, continuation in texts:
        ids = torch.tensor([tokenizer(context + continuation)["input_ids"]])
        labels = ids.clone()
        labels[:, : len(tokenizer(context)["input_ids"])] = -100
        batches.append({"input_ids": ids, "labels": labels})
    ours: Any = quiet_trainer(tmp_path).predict(module, loader(batches))
    assert [score["log_likelihood"].item() for score in ours] == pytest.approx(theirs, rel=1e-5)
