"""Evaluation only: perplexity over a whole loader, and a score for every sequence, without logits.

python examples/evaluate.py

You see the mean over all tokens, whatever the batches, and each sequence's log-likelihood in nats, whose sum over the
count of tokens is that mean. Nothing is trained.
"""

import lightning as L
import torch
from project import build_loaders, build_model

from lit_fused import FusedCausalLMModule


def main() -> None:
    print("a random model of 32,000 entries, on texts of Python's standard library", flush=True)
    L.seed_everything(0)
    module = FusedCausalLMModule(build_model())  # or AutoModelForCausalLM.from_pretrained(FOLDER)
    loader = build_loaders()[1]
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )

    [metrics] = trainer.validate(module, loader, verbose=False)
    print(f"val/loss {metrics['val/loss']:.4f} val/perplexity {metrics['val/perplexity']:.0f}")

    scores = trainer.predict(module, loader)
    assert scores is not None
    likelihoods = torch.cat([score["log_likelihood"] for score in scores])  # type: ignore[call-overload]
    counts = torch.cat([score["num_tokens"] for score in scores])  # type: ignore[call-overload]
    for index, (likelihood, count) in enumerate(zip(likelihoods.tolist(), counts.tolist(), strict=True)):
        print(f"sequence {index}: {likelihood:.2f} nats over {count} tokens")
    print(f"mean over tokens {-likelihoods.sum() / counts.sum():.4f}")


if __name__ == "__main__":
    main()
