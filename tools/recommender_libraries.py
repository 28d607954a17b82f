"""Compare the classes that docs/recommenders.md gives to users of RecTools and RePlay with these libraries' own full
softmax: loss and gradients of one batch, and a short fit.

    python tools/recommender_libraries.py [FOLDER]

makes an environment for each library in FOLDER (build/recommenders; the two pin different versions of NumPy) and runs
itself there. It needs the network once, and then 20 seconds. The classes are executed as they stand on the page.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "recommenders.md"
ENVIRONMENTS = {  # what each needs; torch is that of constraints.txt
    "rectools": ["rectools[torch]==0.19.0"],
    "replay": ["replay-rec==0.22.0", "lightning==2.6.6"],
}
ITEMS, USERS, LENGTH, WIDTH = 500, 64, 20, 32


def class_on_page(library: str) -> Any:
    """Return the class that the page's block of code for a library defines."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    sys.path.insert(0, str(ROOT / "examples"))
    exec(next(block for block in blocks if f"from {library}" in block), names)
    return next(value for value in reversed(names.values()) if isinstance(value, type))


def compare(run: Callable[[bool], tuple[Any, Iterable[Any]]]) -> None:
    """Print how ours differs in float64 from the library's own loss; ``run(ours)`` returns the loss and parameters with
    gradients. Exit if that is more than rounding."""
    import torch

    def numbers(ours: bool) -> tuple[torch.Tensor, torch.Tensor]:
        loss, parameters = run(ours)
        return loss.detach(), torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])

    (loss, gradient), (our_loss, our_gradient) = numbers(False), numbers(True)
    differences = [float((our_loss - loss).abs() / loss), float((our_gradient - gradient).norm() / gradient.norm())]
    print("  one batch in float64: loss {:.1e}, gradients {:.1e}".format(*differences))
    assert loss.dtype == torch.float64
    assert max(differences) < 1e-12


def same_fit(own: list[float], ours: list[float]) -> None:
    worst = max(abs(a - b) / abs(a) for a, b in zip(own, ours, strict=True))
    print(
        f"  fit: the last loss is {own[-1]:.6f} and {ours[-1]:.6f}; of {len(own)}, the largest difference {worst:.1e}"
    )
    assert min(own) < 0.98 * own[0]
    assert worst < 1e-4


def rectools() -> None:
    import pandas as pd
    import pytorch_lightning as pl
    import torch
    from rectools.dataset import Dataset  # pyright: ignore[reportMissingImports]
    from rectools.models import BERT4RecModel, SASRecModel  # pyright: ignore[reportMissingImports]

    fused = class_on_page("rectools")
    torch.manual_seed(0)
    users = torch.arange(USERS).repeat_interleave(LENGTH)
    items = (torch.randint(ITEMS, (USERS, 1)) + 7 * torch.arange(LENGTH)).flatten() % ITEMS
    weights = torch.rand(len(users)) + 0.5
    columns = {"user_id": users, "item_id": items, "datetime": torch.arange(len(users)), "weight": weights}
    frame = pd.DataFrame({name: column.numpy() for name, column in columns.items()})
    data = Dataset.construct(frame.assign(datetime=pd.to_datetime(frame.datetime, unit="s")))

    def model(kind: Any, ours: bool, epochs: int = 1, dropout: float = 0.0) -> Any:
        pl.seed_everything(0)
        options: Any = {"loss": "fused", "lightning_module_type": fused} if ours else {}
        sizes = {"n_factors": WIDTH, "session_max_len": LENGTH, "n_heads": 2, "batch_size": 16}
        options["get_val_mask_func"] = lambda frame: (
            frame.groupby("user_id").cumcount(ascending=False) == 0
        ).to_numpy()
        return kind(epochs=epochs, dropout_rate=dropout, deterministic=True, **sizes, **options)

    def run(kind: Any, ours: bool) -> tuple[Any, Iterable[Any]]:
        built = model(kind, ours)
        built._build_model_from_dataset(data)
        module = built.lightning_model.double()
        module.on_train_start()
        module.log = lambda *_, **__: None
        pl.seed_everything(1)
        loss = module.training_step(next(iter(built.data_preparator.get_dataloader_train())), 0)
        loss.backward()
        return loss, [*module.parameters()]

    def fitted(kind: Any, ours: bool) -> list[float]:
        built = model(kind, ours, epochs=5, dropout=0.2)
        losses: list[float] = []
        built._build_model_from_dataset(data)

        class Losses(pl.Callback):
            def on_train_batch_end(
                self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
            ) -> None:
                losses.append(float(outputs["loss"]))

            def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
                losses.extend([float(trainer.callback_metrics["val_loss"])] * (not trainer.sanity_checking))

        built._trainer.callbacks.append(Losses())
        pl.seed_everything(0)
        built.fit(data)
        return losses

    for kind in (SASRecModel, BERT4RecModel):
        print(f"  {kind.__name__}")
        compare(partial(run, kind))
        same_fit(fitted(kind, False), fitted(kind, True))


def replay() -> None:
    import torch
    from replay.data import FeatureHint, FeatureSource, FeatureType  # pyright: ignore[reportMissingImports]
    from replay.data.nn import TensorFeatureInfo, TensorFeatureSource, TensorSchema  # pyright: ignore[reportMissingImports]
    from replay.nn.sequential import SasRec  # pyright: ignore[reportMissingImports]

    source = [TensorFeatureSource(FeatureSource.INTERACTIONS, "item_id")]
    kind: Any = {"feature_type": FeatureType.CATEGORICAL, "feature_hint": FeatureHint.ITEM_ID, "is_seq": True}
    sizes = {"cardinality": ITEMS, "padding_value": ITEMS, "embedding_dim": WIDTH}
    schema = TensorSchema([TensorFeatureInfo("item_id", feature_sources=source, **kind, **sizes)])
    torch.manual_seed(0)
    ids = (torch.randint(ITEMS, (USERS, 1)) + 7 * torch.arange(LENGTH + 1)) % ITEMS
    is_item = torch.arange(LENGTH + 1) >= torch.randint(LENGTH - 2, (USERS, 1))
    batch: Any = {
        "feature_tensors": {"item_id": ids.where(is_item, ITEMS)[:, :-1]},
        "padding_mask": is_item[:, :-1],
        "positive_labels": ids[:, 1:, None],
        "negative_labels": None,
        "target_padding_mask": is_item[:, :-1, None],
    }

    def model(ours: bool, dropout: float) -> Any:
        torch.manual_seed(0)
        found = SasRec.from_params(schema, WIDTH, num_heads=2, max_sequence_length=LENGTH, dropout=dropout)
        if ours:
            found = SasRec(found.body, class_on_page("replay")())
        torch.manual_seed(0)
        found.reset_parameters()
        return found

    def run(ours: bool) -> tuple[Any, Iterable[Any]]:
        found = model(ours, 0.0).double()
        loss = found(**batch)["loss"]
        loss.backward()
        return loss, [*found.parameters()]

    def fitted(ours: bool) -> list[float]:
        found, losses = model(ours, 0.2), []
        optimizer = torch.optim.Adam(found.parameters(), lr=1e-3)
        for _ in range(20):
            optimizer.zero_grad()
            loss = found(**batch)["loss"]
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    compare(run)
    same_fit(fitted(False), fitted(True))


def main(folder: Path) -> None:
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    for library, needed in ENVIRONMENTS.items():
        python = folder / library / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", folder / library], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", torch, *needed], check=True)
        subprocess.run([python, "-W", "ignore", __file__, "inside", library], check=True, env=here)


def inside(library: str) -> None:
    name = {"rectools": "RecTools", "replay": "replay-rec"}[library]
    print(f"{name} {version(name)}, torch {version('torch')}, NumPy {version('numpy')}")
    {"rectools": rectools, "replay": replay}[library]()


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        inside(sys.argv[2])
    else:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "recommenders"))
