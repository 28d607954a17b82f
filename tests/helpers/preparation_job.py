"""A preparation in a process of its own: ``python preparation_job.py CORPUS CACHE WORKERS SECONDS LOG``.

Tokens are bytes, so that it is as fast as the disk; SECONDS is how long each batch takes besides. Each batch is a line
in LOG: the number of its documents.
"""

import sys
import time
from pathlib import Path

import numpy as np

from lit_fused import UserError
from lit_fused.data import Encoded, FileSource, train_tokenizer
from lit_fused.data.encoding import Encoder
from lit_fused.data.preparation import Options, prepare


class BytesEncoder(Encoder):
    def __init__(self, seconds: float, log: str) -> None:
        self.seconds, self.log = seconds, log
        self.tokenizer = train_tokenizer(["a"], 258)

    def fingerprint(self) -> dict[str, str]:
        return {"encoder": "bytes"}

    def __call__(self, documents: list[str]) -> list[Encoded]:
        with open(self.log, "a") as file:
            file.write(f"{len(documents)}\n")
        time.sleep(self.seconds)
        return [Encoded(np.frombuffer(document.encode(), np.uint8)) for document in documents]


if __name__ == "__main__":
    corpus, cache, workers, seconds, log = sys.argv[1:]
    try:
        encoder, options = BytesEncoder(float(seconds), log), Options(Path(cache), num_workers=int(workers))
        report = prepare(FileSource(corpus), encoder, "bytes", 0.05, options)
    except UserError as error:
        sys.exit(str(error))
    print(report)
