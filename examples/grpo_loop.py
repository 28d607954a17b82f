"""Teach a small model to add by its own attempts: it answers, right answers are rewarded, GRPO makes them likelier.

    python examples/grpo_loop.py

Each epoch is an iteration: the model as it is now answers prompts, and trains on these answers once. The file of
rollouts has the sampler's log-probabilities, so that each iteration shows how far they are from the policy's. An engine
of your own would write the same file.
"""

import json
import random
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig

from lit_fused import FusedCausalLMModule, FusedPolicyModule, PolicyLoss, from_config
from lit_fused.data import RolloutDataModule

PLUS, EQUALS, END = 10, 11, 12  # The digits are the tokens 0 to 9.
SHOWN, PROMPTS, ATTEMPTS, ITERATIONS = 1800, 100, 16, 30


def digits(number: int) -> list[int]:
    return [int(digit) for digit in str(number)]


def sums(count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Return prompts "a+b=" and right answers, each of which ends with END."""
    draw = random.Random(seed)
    pairs = [(draw.randint(0, 9), draw.randint(0, 9)) for _ in range(count)]
    return [([a, PLUS, b, EQUALS], [*digits(a + b), END]) for a, b in pairs]


@torch.no_grad()
def answers(model: Any, prompts: list[list[int]], **sampling: Any) -> list[tuple[list[int], list[float]]]:
    """Return what the model says to each prompt, up to its END, and the log-probability of each token."""
    ids = torch.tensor(prompts)
    model.eval()
    wanted: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    wanted |= {"max_new_tokens": 3, "eos_token_id": END, "pad_token_id": END}
    made = model.generate(ids, attention_mask=torch.ones_like(ids), **wanted, **sampling)
    scores = model.compute_transition_scores(made.sequences, made.scores, normalize_logits=True)
    model.train()
    rows = zip(made.sequences[:, ids.shape[1] :].tolist(), scores.tolist(), strict=True)
    lengths = [(row.index(END) + 1 if END in row else len(row), row, numbers) for row, numbers in rows]
    return [(row[:length], numbers[:length]) for length, row, numbers in lengths]


def share_of_right(model: Any) -> float:
    every = [([a, PLUS, b, EQUALS], [*digits(a + b), END]) for a in range(10) for b in range(10)]
    said = answers(model, [prompt for prompt, _ in every], do_sample=False)
    return sum(answer == right for (answer, _), (_, right) in zip(said, every, strict=True)) / len(every)


def write_rollouts(model: Any, file: Path, seed: int, temperature: float = 1.0) -> None:
    """Write some attempts at each of some prompts, rewarded with 1 where they are right."""
    asked = [entry for entry in sums(PROMPTS, seed) for _ in range(ATTEMPTS)]
    said = answers(model, [prompt for prompt, _ in asked], do_sample=True, top_k=0, temperature=temperature)
    with file.open("w") as lines:
        for number, ((prompt, right), (answer, log_probs)) in enumerate(zip(asked, said, strict=True)):
            rollout = {"prompt_ids": prompt, "completion_ids": answer, "log_probs": log_probs}
            rollout |= {"reward": float(answer == right), "group": number // ATTEMPTS}
            lines.write(json.dumps(rollout) + "\n")


class OwnRollouts(RolloutDataModule):
    """Rollouts of the model that is trained, new ones in each epoch."""

    temperature = 1.0

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        module: Any = self.trainer.lightning_module
        write_rollouts(module.backbone, Path(self.path), self.trainer.current_epoch, self.temperature)
        self.rows.clear()
        self.setup()
        return super().train_dataloader()


class Shown(L.Callback):
    """Prints the reward of each iteration, and the scores that are watched."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        print(
            f"iteration {trainer.current_epoch + 1:2d}: reward {found['train/reward']:.2f}; the sampler's scores: KL "
            f"{found['train/sampler_kl']:.1e}, largest ratio {found['train/sampler_largest_ratio']:.4f}",
            flush=True,
        )


def warm_up(model: nn.Module, trainer: Any) -> None:
    """Show the model some right answers, so that it sometimes says one."""
    rows = [(prompt + right + [END] * (3 - len(right)), len(right)) for prompt, right in sums(SHOWN, seed=99)]
    ids = torch.tensor([row for row, _ in rows])
    labels = ids.clone()
    labels[:, :4] = -100
    batches: list[dict[str, Tensor]] = [
        {"input_ids": i, "labels": o} for i, o in zip(ids.split(40), labels.split(40), strict=True)
    ]
    optimizer = partial(torch.optim.AdamW, lr=2e-3)
    module = FusedCausalLMModule(model, None, optimizer, transformers.get_constant_schedule)
    trainer(max_epochs=1).fit(module, torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]


def main() -> None:
    print("a model that sees a few sums, and then tries by itself", flush=True)
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = partial(L.Trainer, enable_model_summary=False, **quiet)
    config = LlamaConfig(
        vocab_size=13, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    L.seed_everything(0)
    model: Any = from_config(config, seed=0)
    warm_up(model, trainer)
    print(f"after a few examples {share_of_right(model):.0%} of all sums are right", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rollouts.jsonl")
        write_rollouts(model, file, seed=0)
        optimizer = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0)
        loss = PolicyLoss("grpo")
        module = FusedPolicyModule(model, loss, optimizer, transformers.get_constant_schedule)
        data = OwnRollouts(file, batch_size=PROMPTS * ATTEMPTS // 4, vocab_size=13)
        options = {"reload_dataloaders_every_n_epochs": 1, "gradient_clip_val": 1.0, "limit_val_batches": 0}
        trainer(max_epochs=ITERATIONS, callbacks=[Shown()], **options).fit(module, data)
        print(f"after {ITERATIONS} iterations {share_of_right(model):.0%}")
        data.temperature = 0.7  # of the sampler alone: the loss is not told
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the sampler's")  # It is printed below.
            trainer(max_steps=1, **options).fit(module, data)
        print(loss.report)


if __name__ == "__main__":
    main()
