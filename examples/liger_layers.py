"""Run the norms, rotary embeddings and gated MLPs of a model in Liger's kernels, by Liger's own call, beside our loss.

python examples/liger_layers.py

You see losses more than a nat below that of guessing (ln 32000 = 10.4). Without a GPU the model trains without the
kernels, and a line says so. Liger replaces functions of transformers for the whole process. Compiled layers
(compile="regional") are faster where a compiler is there (docs/speed.md). Needs pip install 'lit-fused[liger]'.
"""

from functools import partial

import lightning as L
import torch
from project import build_model, fit
from torch.optim import AdamW

from lit_fused import FusedCausalLMModule


def main() -> None:
    print("layers of Liger beside our loss: ten steps", flush=True)
    L.seed_everything(0)
    model = build_model()  # stands in for AutoModelForCausalLM.from_pretrained(...)
    if torch.cuda.is_available():
        from liger_kernel.transformers import apply_liger_kernel_to_llama  # one for each architecture that Liger knows

        apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=False, model=model)
        print("Layers in Liger's kernels")
    else:
        print("Layers without Liger's kernels, which need a GPU")
    fit(FusedCausalLMModule(model, optimizer=partial(AdamW, lr=1e-2)))


if __name__ == "__main__":
    main()
