"""Score random requests as lm-evaluation-harness does: its own model beside lit_fused, in seconds and GiB.

    python benchmarks/evaluation.py --out docs/evidence/evaluation.json
    python benchmarks/evaluation.py --tiny   # on a CPU, to try the script

"Texts" are scored whole, as perplexities are; of "answers" the last four tokens are scored. Memory is the peak beyond
the model's weights; that of the backbone, which makes hidden states alone, stands beside it.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from configured import composed
from hydra.utils import instantiate
from linear_cross_entropy import machine
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import lit_fused
from lit_fused.evaluation.harness import FusedHFLM

GIB = 2**30
TINY = ["hidden_size=32", "intermediate_size=64", "num_hidden_layers=2", "vocab_size=512"]
KINDS = {"texts": None, "answers": 4}  # scored tokens


def built(options: argparse.Namespace, device: torch.device) -> Any:
    sizes = [f"model.config.{word}" for word in TINY] if options.tiny else []
    model: Any = instantiate(composed(f"model={options.model}", "data=synthetic", *sizes).model)
    lit_fused.materialize(model)
    return model.to(device, torch.bfloat16).eval()


def measured(work: Callable[[], Any], device: torch.device) -> tuple[Any, float, float]:
    """Return the work's result, its seconds, and the peak of memory beyond what is allocated before, in GiB."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    begin = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return result, seconds, (peak - before) / GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma3_1b", help="a choice of conf/model")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a request")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tiny", action="store_true", help="another width and depth, for a CPU")
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    length = 64 if options.tiny else options.length
    model = built(options, device)
    words = {str(index): index for index in range(model.config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "0")), eos_token="0")
    arguments: Any = {"pretrained": model, "tokenizer": tokenizer, "max_length": length}
    kinds: dict[str, Any] = {"hf": HFLM, "lit_fused": FusedHFLM}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (options.requests, length + 1), generator=generator).tolist()
    rows: list[dict[str, Any]] = []
    for batch in options.batches:
        tokens = torch.tensor(ids[:batch], device=device)[:, :-1]
        with torch.inference_mode():
            _, _, gib = measured(lambda tokens=tokens: model.base_model(tokens, use_cache=False), device)
        print(f"batch {batch}: the backbone alone takes {gib:.2f} GiB", flush=True)
        providers = {name: kind(batch_size=batch, **arguments) for name, kind in kinds.items()}
        for kind, scored in KINDS.items():
            cut = 1 if scored is None else length + 1 - scored
            requests: Any = [((str(row), ""), row[:cut], row[cut:]) for row in ids]
            answers: dict[str, list[float]] = {}
            for name, provider in providers.items():
                row: dict[str, Any] = {"kind": kind, "batch": batch, "model": name, "backbone_gib": gib}
                rows.append(row)

                def run(provider: Any = provider, requests: Any = requests) -> list[float]:
                    found = provider._loglikelihood_tokens(requests, disable_tqdm=True)
                    return [log_likelihood for log_likelihood, _ in found]

                try:
                    run()  # Kernels are compiled, and the first batch is compared.
                    answers[name], row["seconds"], row["gib"] = measured(run, device)
                except torch.OutOfMemoryError:
                    row["note"] = "out of memory"
                if len(answers) == len(providers):
                    of_each = torch.tensor([answers[name] for name in providers], dtype=torch.float64)
                    row["largest_difference"] = ((of_each[1] - of_each[0]) / of_each[0]).abs().max().item()
                print(json.dumps(row), flush=True)
    if options.out is not None:
        figures = {"machine": machine(device), "options": vars(options) | {"out": None}, "rows": rows}
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
