"""Train with the products of a model's layers in float8, by torchao's own call.

python examples/float8.py

You see losses more than a nat below that of guessing (ln 32000 = 10.4). On a GPU of compute capability 8.9 or more
the layers are compiled and their products run in float8; elsewhere torchao emulates them. Evaluation is in float8, too.
It pays for layers of 2,048 inputs and more (docs/evidence/runs.md). Needs pip install 'lit-fused[float8]'.
"""

from functools import partial

import lightning as L
import torch
from project import build_model, fit
from torch import nn
from torch.optim import AdamW
from torchao.float8 import (  # pyright: ignore[reportMissingImports]
    Float8LinearConfig,
    convert_to_float8_training,
)

from lit_fused import FusedCausalLMModule

HAS_FLOAT8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def is_converted(layer: nn.Module, name: str) -> bool:
    """Return whether a layer computes in float8: all linear ones but the output layer, which the fused loss reads."""
    return isinstance(layer, nn.Linear) and "lm_head" not in name


def main() -> None:
    print("layers whose products are in float8: ten steps", flush=True)
    L.seed_everything(0)
    model = build_model()  # stands in for AutoModelForCausalLM.from_pretrained(...)
    config = Float8LinearConfig(pad_inner_dim=True, emulate=not HAS_FLOAT8)  # pad: for any number of tokens
    convert_to_float8_training(model, config=config, module_filter_fn=is_converted)
    print(f"{sum('Float8' in type(layer).__name__ for layer in model.modules())} layers in float8")
    how = "regional" if HAS_FLOAT8 else "none"  # float8 is slow in layers that are not compiled
    module = FusedCausalLMModule(model, optimizer=partial(AdamW, lr=1e-2), compile=how)
    fit(module, precision="bf16-mixed", accelerator="auto" if HAS_FLOAT8 else "cpu")


if __name__ == "__main__":
    main()
