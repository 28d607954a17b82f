"""What the distributed fits and their one-process truth have in common: models, data, and the optimiser's numbers."""

from dataclasses import dataclass

from lightning_helpers import ragged_batches
from tiny_models import sharpen, tiny_model
from torch import Tensor, nn

WINDOW = 2  # micro-batches per rank and optimiser step
STEPS = 3
RANKS = 2
CLIP = 0.05  # far below the norm of the gradients
LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Case:
    strategy: str
    model: str
    loss: str = "chunked"
    precision: str = "32-true"

    @classmethod
    def parse(cls, text: str) -> "Case":
        return cls(*text.split(":"))

    def __str__(self) -> str:
        return ":".join((self.strategy, self.model, self.loss, self.precision))


def backbone(name: str) -> nn.Module:
    return sharpen(tiny_model(name), 5.0)


def batches() -> list[dict[str, Tensor]]:
    """Ragged; two of them have no valid label, and each is the whole of one rank's micro-batch."""
    return ragged_batches(RANKS * WINDOW * STEPS)
