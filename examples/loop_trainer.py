"""Train a Hugging Face model with transformers' Trainer, without logits: ``fuse`` is the one line.

python examples/loop_trainer.py

You see the losses of training and evaluation fall below that of guessing (ln 2000 = 7.6). The Trainer counts the
tokens of the two micro-batches of a step, and evaluates without logits as well.
"""

import tempfile

import transformers
from project import Documents, build_model, collate

import lit_fused


def main() -> None:
    print("transformers' Trainer: seven steps of two micro-batches", flush=True)
    transformers.set_seed(0)
    model = lit_fused.fuse(build_model(2000))
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=7,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            prediction_loss_only=True,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        train, val = Documents(2000, first=0, count=100), Documents(2000, first=1000, count=8)
        trainer = transformers.Trainer(model, arguments, collate, train_dataset=train, eval_dataset=val)
        trainer.train()
        print(f"train/loss {trainer.state.log_history[-1]['train_loss']:.4f}")
        print(f"val/loss {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
