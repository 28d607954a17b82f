"""Train a Hugging Face model in a loop of one's own, without logits: ``fuse`` is the one line.

python examples/loop_by_hand.py

You see the training loss fall below that of guessing (ln 2000 = 7.6). Two micro-batches make a step, and
``num_items_in_batch`` weights their tokens alike.
"""

import torch
from project import build_loaders, build_model

import lit_fused


def main() -> None:
    print("a loop by hand: seven steps of two micro-batches", flush=True)
    torch.manual_seed(0)
    model = lit_fused.fuse(build_model(2000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = iter(build_loaders(2000)[0])
    for _ in range(7):
        step = [next(batches), next(batches)]
        count = torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in step]).sum()
        losses = []
        for batch in step:
            outputs = model(**batch, num_items_in_batch=count)
            outputs.loss.backward()
            losses.append(outputs.loss.item())
        optimizer.step()
        optimizer.zero_grad()
        print(f"train/loss {sum(losses):.4f}")


if __name__ == "__main__":
    main()
