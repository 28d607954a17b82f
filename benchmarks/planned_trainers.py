"""Compare what ``lit_fused.plan`` predicts of transformers' and TRL's arguments with what their trainers then take.

    python benchmarks/planned_trainers.py --out planned_trainers.json
    python benchmarks/planned_trainers.py --tiny   # on a CPU, to try the script

Each case is planned, then trained for three steps in the same process, with layers that are not compiled. Data are
random tokens. Rows are full, for SFT and DPO every second one: they are planned with padding. GiB at the peak.
"""

import argparse
import copy
import gc
import json
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from linear_cross_entropy import machine
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Trainer, TrainingArguments
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import lit_fused

GIB, TINY = 2**30, {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
QWEN = {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
CASES: dict[str, tuple[type[TrainingArguments], int, dict[str, Any]]] = {  # arguments, tokens of a row, options
    "Trainer, bf16, 8 x 1024": (TrainingArguments, 1024, {"per_device_train_batch_size": 8}),
    "Trainer, bf16, checkpointing, 8 x 4096": (
        TrainingArguments,
        4096,
        {"per_device_train_batch_size": 8, "gradient_checkpointing": True},
    ),
    "Trainer, float32, 4 x 1024, accumulate 2": (
        TrainingArguments,
        1024,
        {"per_device_train_batch_size": 4, "bf16": False, "gradient_accumulation_steps": 2},
    ),
    "SFT, bf16, 8 x 2048": (SFTConfig, 2048, {"per_device_train_batch_size": 8, "gradient_checkpointing": False}),
    "SFT, bf16, checkpointing, 4 x 8192": (SFTConfig, 8192, {"per_device_train_batch_size": 4}),
    "DPO, bf16, 4 x 1024": (DPOConfig, 1024, {"per_device_train_batch_size": 4, "gradient_checkpointing": False}),
    "DPO, bf16, checkpointing, 4 x 2048": (DPOConfig, 2048, {"per_device_train_batch_size": 4}),
}


def trainer_of(arguments: Any, model: Any, length: int) -> Any:
    vocabulary, rows = model.config.vocab_size, 8 * arguments.per_device_train_batch_size
    words = {str(index): index for index in range(vocabulary)}
    core = Tokenizer(models.WordLevel(words, "0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="1", pad_token="2")
    ids = torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0)).tolist()
    if type(arguments) is not TrainingArguments:
        ids = [row[: length // 2] if index % 2 else row for index, row in enumerate(ids)]
    if isinstance(arguments, DPOConfig):
        texts = [" ".join(map(str, row[2:])) for row in ids]  # an end is written behind each
        data = Dataset.from_dict({"prompt": ["5 "] * rows, "chosen": texts, "rejected": texts[::-1]})
        trainer: Any = DPOTrainer(
            model, copy.deepcopy(model), args=arguments, train_dataset=data, processing_class=tokenizer
        )
        lit_fused.fuse(trainer.ref_model, compile="none")
    elif isinstance(arguments, SFTConfig):
        data = Dataset.from_dict({"input_ids": ids})
        trainer = SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer)
    else:
        data = Dataset.from_dict({"input_ids": ids, "labels": ids})
        trainer = Trainer(model, arguments, train_dataset=data)
    lit_fused.fuse(trainer.model, compile="none")
    return trainer


def case(arguments: Any, model_of: Callable[[], Any], length: int, device: torch.device) -> dict[str, float]:
    with torch.device("meta"):
        plan = lit_fused.plan(arguments, lit_fused.fuse(model_of(), compile="none"), sequence_length=length)
    planned = max(sum(sizes.values()) for sizes in plan.phases.values()) / GIB
    trainer = trainer_of(arguments, model_of(), length)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    measured = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else float("nan")
    return {"planned": planned, "measured": measured, "difference_percent": 100 * (planned / measured - 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="of Qwen3's shape at 0.6B, which has 28")
    parser.add_argument("--tiny", action="store_true", help="another width and shorter rows, for a CPU")
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1} if options.tiny else {}
    sizes |= TINY if options.tiny else QWEN | {"num_attention_heads": 16, "num_key_value_heads": 8}
    config = Qwen3Config(**sizes, num_hidden_layers=options.layers, tie_word_embeddings=True)
    common: dict[str, Any] = {"max_steps": 3, "bf16": True, "report_to": "none", "save_strategy": "no"}
    common |= {"disable_tqdm": True, "logging_strategy": "no", "use_cpu": device.type == "cpu"}
    rows: list[dict[str, Any]] = []
    for name, (kind, tokens, of_case) in CASES.items():
        length = tokens // 32 if options.tiny else tokens
        of_length = {} if kind is TrainingArguments else {"max_length": length}
        row: dict[str, Any] = {"case": name}
        try:
            with tempfile.TemporaryDirectory() as folder:
                settings: dict[str, Any] = {"output_dir": folder} | common | of_length | of_case
                arguments = kind(**settings)
                row |= case(arguments, lambda: AutoModelForCausalLM.from_config(config), length, device)
        except Exception as error:  # The other cases are worth running.
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        print(json.dumps(row), flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            row["left_gib"] = torch.cuda.memory_allocated() / GIB
    if options.out is not None:
        versions = machine(device)
        options.out.write_text(
            json.dumps({"machine": versions, "layers": options.layers, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
