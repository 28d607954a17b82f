"""Measure what Liger's kernels and ``torch.compile`` give in the layers, beside the chunked loss: speed and memory.

    python benchmarks/kernels_and_compile.py
    python benchmarks/kernels_and_compile.py --model llama_1b --rows 4

A model of ``conf/model`` with random weights, bf16-mixed, AdamW, random tokens, one GPU. Each of kernels none and liger
times compile none and regional is a copy with the same weights; what Liger replaces in transformers stays replaced, so
the cells of kernels none come first. Before anything is timed, its loss and gradients on the
batch are compared with those of a float32 pass of the plain model: the relative error of no parameter's gradient may
exceed twice the largest that bfloat16 gives the plain model. A cell that does is named, and has no numbers.
"""

import argparse
import copy
import gc
import importlib
import time
from collections.abc import Sequence
from typing import Any

import torch
from configured import composed
from hydra.utils import instantiate
from torch import Tensor, nn

import lit_fused
from lit_fused.models.compilation import compile_backbone

CELLS = [("none", "none"), ("none", "regional"), ("liger", "none"), ("liger", "regional")]
DEVICE = torch.device("cuda")


def built(name: str) -> nn.Module:
    """On the CPU, in training mode."""
    model = instantiate(composed(f"model={name}").model)
    lit_fused.materialize(model)
    return model.train()


def prepared(template: Any, kernels: str, how: str) -> lit_fused.LanguageModel:
    model = copy.deepcopy(template).to(DEVICE)
    if kernels == "liger":
        liger: Any = importlib.import_module("liger_kernel.transformers")
        apply = getattr(liger, f"apply_liger_kernel_to_{model.config.model_type}")
        apply(cross_entropy=False, fused_linear_cross_entropy=False, model=model)
    language_model = lit_fused.LanguageModel(model, lit_fused.LinearCrossEntropyLoss())
    language_model.prepare(DEVICE)
    compile_backbone(language_model, how)
    return language_model


def loss_of(model: lit_fused.LanguageModel, tokens: Tensor, half: bool = True) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        return model({"input_ids": tokens, "labels": tokens}).loss


def gradients(model: lit_fused.LanguageModel, tokens: Tensor, half: bool = True) -> tuple[float, dict[str, Tensor]]:
    """The loss, and each parameter's gradient, in the CPU's memory."""
    loss = loss_of(model, tokens, half)
    loss.backward()
    found = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), found


def distance(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The largest relative error of any parameter's gradient."""
    return max(((found[n] - truth[n]).norm() / truth[n].norm().clamp(min=1e-12)).item() for n in truth)


def measure(model: lit_fused.LanguageModel, tokens: Tensor, steps: int) -> tuple[float, float]:
    """Tokens per second and peak GiB of whole training steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / steps
    return tokens.numel() / seconds, torch.cuda.max_memory_allocated() / 2**30


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Liger's kernels and torch.compile in the layers, on one GPU.")
    parser.add_argument("--model", default="qwen3_0_6b", help="a file of conf/model")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")

    template = built(options.model)
    plain = prepared(template, "none", "none")
    torch.manual_seed(0)
    tokens = torch.randint(plain.vocabulary, (options.rows, options.length), device=DEVICE)
    true_loss, truth = gradients(plain, tokens, half=False)
    plain_loss, of_plain = gradients(plain, tokens)
    allowed = 2 * distance(of_plain, truth)
    allowed_loss = 2 * abs(plain_loss - true_loss) + 1e-3 * true_loss
    del plain, of_plain

    print(f"{options.model}, bf16-mixed, loss=chunked, {options.rows} x {options.length} tokens a step")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| kernels | compile | tokens/s | peak GiB | begins after (s) | error of gradients | allowed |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for kernels, how in CELLS:
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
        model = prepared(template, kernels, how)
        begun = time.perf_counter()
        loss, found = gradients(model, tokens)
        begins = time.perf_counter() - begun
        error = distance(found, truth)
        del found
        cell = f"| {kernels} | {how} |"
        if error <= allowed and abs(loss - true_loss) <= allowed_loss:
            rate, peak = measure(model, tokens, options.steps)
            print(f"{cell} {rate:,.0f} | {peak:.1f} | {begins:.1f} | {error:.1e} | {allowed:.1e} |", flush=True)
        else:
            print(f"{cell} WRONG, loss {loss:.5f} for {true_loss:.5f} | | | {error:.1e} | {allowed:.1e} |", flush=True)
        del model


if __name__ == "__main__":
    main()
