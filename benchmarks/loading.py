"""Measure how many tokens a second a data module loads, from prepared tokens on the disk to batches.

    python benchmarks/loading.py --batch-size 16 --block-size 2048

The text is Python's standard library; it is prepared first, which does not count.
"""

import argparse
import time

from lit_fused.data import TextEncoding, TokenDataModule, load_records

WARM_UP, SECONDS = 10, 5.0


def tokens_per_second(module: TokenDataModule) -> float:
    tokens = batches = 0
    start = time.perf_counter()
    while True:
        for batch in module.train_dataloader():
            batches += 1
            if batches == WARM_UP:
                tokens, start = 0, time.perf_counter()
            tokens += batch["input_ids"].numel()
            if batches > WARM_UP and time.perf_counter() - start > SECONDS:
                return tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--block-size", type=int, default=2048)
    options = parser.parse_args()
    for packing in ("stream", "documents"):
        for workers in (0, 2):
            module = TokenDataModule(
                load_records(None, max_bytes=12_000_000),
                TextEncoding(),
                block_size=options.block_size,
                batch_size=options.batch_size,
                num_workers=workers,
                packing=packing,
            )
            module.prepare_data()
            module.setup("fit")
            shown = f"packing={packing} num_workers={workers}"
            print(f"{shown}: {tokens_per_second(module):,.0f} tokens/s")


if __name__ == "__main__":
    main()
