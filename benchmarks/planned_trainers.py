"""Compare what ``lit_fused.plan`` predicts of transformers' and TRL's arguments with what their trainers then take.

    python benchmarks/planned_trainers.py --out planned_trainers.json
    python benchmarks/planned_trainers.py --compile auto --only checkpointing   # cases of this word, layers compiled
    python benchmarks/planned_trainers.py --tiny   # on a CPU, to try the script

Each case is planned, then trained for three steps in the same process. Data are random tokens. Rows are full; of SFT
every second one is half as long, so that they are planned with padding, and with more labels than they have; texts of
DPO are longer than a row, which is cut, and planned without padding. GiB at the peak.
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
_ROWS = "per_device_train_batch_size"
CASES: dict[str, tuple[type[TrainingArguments], int, dict[str, Any]]] = {  # arguments, tokens of a row, options
    "Trainer, 8 x 1024": (TrainingArguments, 1024, {_ROWS: 8}),
    "Trainer, 16 x 512": (TrainingArguments, 512, {_ROWS: 16}),
    "Trainer, checkpointing, 8 x 4096": (TrainingArguments, 4096, {_ROWS: 8, "gradient_checkpointing": True}),
    "Trainer, Adafactor, 4 x 2048": (TrainingArguments, 2048, {_ROWS: 4, "optim": "adafactor"}),
    "Trainer, float32, 4 x 1024, accumulate 2": (
        TrainingArguments,
        1024,
        {_ROWS: 4, "bf16": False, "gradient_accumulation_steps": 2},
    ),
    "SFT, 8 x 2048": (SFTConfig, 2048, {_ROWS: 8, "gradient_checkpointing": False}),
    "SFT, checkpointing, 4 x 8192": (SFTConfig, 8192, {_ROWS: 4}),
    "SFT, packing, 4 x 2048": (
        SFTConfig,
        2048,
        {_ROWS: 4, "packing": True, "packing_strategy": "wrapped", "gradient_checkpointing": False},
    ),
    "SFT, checkpointing, 2 x 4096, accumulate 2": (SFTConfig, 4096, {_ROWS: 2, "gradient_accumulation_steps": 2}),
    "SFT, float32, 4 x 1024": (SFTConfig, 1024, {_ROWS: 4, "bf16": False, "gradient_checkpointing": False}),
    "DPO, 4 x 1024": (DPOConfig, 1024, {_ROWS: 4, "gradient_checkpointing": False}),
    "DPO, 8 x 512": (DPOConfig, 512, {_ROWS: 8, "gradient_checkpointing": False}),
    "DPO, checkpointing, 4 x 2048": (DPOConfig, 2048, {_ROWS: 4}),
    "DPO, checkpointing, 2 x 2048, accumulate 2": (DPOConfig, 2048, {_ROWS: 2, "gradient_accumulation_steps": 2}),
    "DPO, float32, 2 x 1024": (DPOConfig, 1024, {_ROWS: 2, "bf16": False, "gradient_checkpointing": False}),
}


def trainer_of(arguments: Any, model: Any, length: int, compile: str) -> Any:
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
        lit_fused.fuse(trainer.ref_model, compile=compile)
    elif isinstance(arguments, SFTConfig):
        data = Dataset.from_dict({"input_ids": ids})
        trainer = SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer)
    else:
        data = Dataset.from_dict({"input_ids": ids, "labels": ids})
        trainer = Trainer(model, arguments, train_dataset=data)
    lit_fused.fuse(trainer.model, compile=compile)
    return trainer


def case(
    arguments: Any, model_of: Callable[[], Any], length: int, compile: str, device: torch.device
) -> dict[str, Any]:
    with torch.device("meta"):
        model = model_of()
        model = model if compile == "auto" else lit_fused.fuse(model, compile="none")
        packing = "stream" if isinstance(arguments, DPOConfig) else None
        plan = lit_fused.plan(arguments, model, sequence_length=length, packing=packing)
    planned = max(sum(sizes.values()) for sizes in plan.phases.values()) / GIB
    trainer = trainer_of(arguments, model_of(), length, compile)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    measured = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else float("nan")
    difference = 100 * (planned / measured - 1)
    return {"compile": compile, "planned": planned, "measured": measured, "difference_percent": difference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="of Qwen3's shape at 0.6B, which has 28")
    parser.add_argument("--compile", choices=["none", "auto"], default="none", help="as fuse compiles layers")
    parser.add_argument("--only", default="", help="cases whose name has this word")
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
        if options.only not in name:
            continue
        length = tokens // 32 if options.tiny else tokens
        of_length = {} if kind is TrainingArguments else {"max_length": length}
        row: dict[str, Any] = {"case": name}
        try:
            with tempfile.TemporaryDirectory() as folder:
                settings: dict[str, Any] = {"output_dir": folder} | common | of_length | of_case
                arguments = kind(**settings)
                row |= case(
                    arguments, lambda: AutoModelForCausalLM.from_config(config), length, options.compile, device
                )
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
