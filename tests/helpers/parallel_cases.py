"""Share what distributed fits and their one-process truth have in common: models, data, the optimiser's numbers."""

from dataclasses import dataclass

from lightning_helpers import ragged_batches
from tiny_models import sharpen, tiny_model
from torch import Tensor, nn

PER_STEP = 4  # micro-batches of an optimiser step, over all ranks
STEPS = 3
CLIP = 0.05  # far below the norm of the gradients
LEARNING_RATE = 1e-2
# AdamW divides by a gradient's own size: with its usual 1e-8 what is only rounding becomes a whole step of some
# weights, in any strategy and in one process.
EPSILON = 1e-6


# strategy -> (processes, how many of them train on different data)
LAYOUTS = {
    "single": (1, 1),
    "ddp": (2, 2),
    "fsdp2": (2, 2),
    "fsdp2_kept": (2, 2),
    "fsdp2_file": (2, 2),
    "tp": (2, 1),
    "tp_file": (2, 1),
    "tp_unlike": (2, 2),  # ranks of one group that get different batches
    "fsdp2_tp": (4, 2),
    "pp": (2, 1),
    "pp_file": (2, 1),
    "pp_gpipe": (2, 1),
    "pp_interleaved": (2, 1),
    "pp_zero_bubble": (2, 1),
    "pp_bfs": (2, 1),
    "pp_zbv": (2, 1),
    "pp_dualpipe": (2, 1),
    "pp_ddp": (4, 2),
    "pp_fsdp2": (4, 2),
    "pp_interleaved_fsdp2": (4, 2),
    "pp_bfs_fsdp2": (4, 2),
    "pp_fsdp2_file": (4, 2),
}


@dataclass(frozen=True)
class Case:
    strategy: str
    model: str
    loss: str = "chunked"
    precision: str = "32-true"
    optimizer: str = "adamw"
    compile: str = "none"

    @classmethod
    def parse(cls, text: str) -> "Case":
        return cls(*text.split(":"))

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.strategy][0]

    @property
    def data_parallel(self) -> int:
        return LAYOUTS[self.strategy][1]

    @property
    def is_pipeline(self) -> bool:
        return self.strategy.startswith("pp")

    @property
    def is_masked(self) -> bool:
        return self.model.startswith("masked")

    @property
    def layers(self) -> int:
        """As many as four stages need; two stages get one and two of them."""
        if not self.is_pipeline:
            return 2
        return 3 if self.strategy in ("pp", "pp_ddp", "pp_fsdp2") else 4

    @property
    def accumulated(self) -> int:
        """Micro-batches of a rank in one optimiser step."""
        return PER_STEP // self.data_parallel

    def __str__(self) -> str:
        own = () if (self.optimizer, self.compile) == ("adamw", "none") else (self.optimizer, self.compile)
        return ":".join((self.strategy, self.model, self.loss, self.precision, *own))


def backbone(name: str, layers: int = 2) -> nn.Module:
    if name == "qwen3_wrong_plan":  # the gradients of the norms inside of attention are not summed over ranks
        model = tiny_model("qwen3")
        model._tp_plan = {name: style for name, style in model.tp_plan.items() if not name.endswith("_norm")}
        return model
    return sharpen(tiny_model(name, num_hidden_layers=layers), 5.0)


def batches(*, masked: bool = False) -> list[dict[str, Tensor]]:
    """Ragged; two of them have no valid label, and each is the whole of one rank's micro-batch."""
    made = ragged_batches(PER_STEP * STEPS)
    for batch in made if masked else ():
        batch["input_ids"] = batch["input_ids"].masked_fill(batch["labels"] != -100, 3)
    return made
