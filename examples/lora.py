"""LoRA: a frozen model, adapters of PEFT around it, and a folder of the adapters alone.

python examples/lora.py

You see how few parameters are trained, a validation loss more than a nat below that of guessing (ln 32000 = 10.4) all
the same, and that the adapters, loaded beside the untouched model, have it too. One of them is on the output layer.
Needs pip install 'lit-fused[peft]'.
"""

import tempfile
from functools import partial
from pathlib import Path

import lightning as L
import torch
from project import build_loaders, build_model, fit
from torch.optim import AdamW

from lit_fused import FusedCausalLMModule


def main() -> None:
    print("adapters, one of them on the output layer: twenty steps", flush=True)
    from peft import LoraConfig, PeftModel, get_peft_model

    L.seed_everything(0)
    base = build_model()  # stands in for AutoModelForCausalLM.from_pretrained(...)
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    layers = ["q_proj", "v_proj", "lm_head"]
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=layers))
    trained, total = adapted.get_nb_trainable_parameters()
    print(f"{trained:,} of {total:,} parameters are trained")

    module = FusedCausalLMModule(adapted, optimizer=partial(AdamW, lr=2e-2, weight_decay=0.0))
    trainer = fit(module, limit_train_batches=20)

    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(folder)
        again = build_model()
        again.load_state_dict(weights)
        loaded = FusedCausalLMModule(PeftModel.from_pretrained(again, str(Path(folder, "adapter"))))
        [metrics] = trainer.validate(loaded, build_loaders()[1], verbose=False)
    ended_with = trainer.callback_metrics["val/loss"]
    print(f"the adapters, loaded: val/loss {metrics['val/loss']:.4f}")
    torch.testing.assert_close(torch.tensor(metrics["val/loss"]), ended_with)


if __name__ == "__main__":
    main()
