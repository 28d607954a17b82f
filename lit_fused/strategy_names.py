"""Names of the strategies in Lightning: ``L.Trainer(strategy="lit_fused_fsdp2", devices=2)``.

``import lit_fused`` enters them into the registry of a Lightning that has been imported, ``lit_fused.parallel`` into
any. A strategy is loaded when a trainer asks for it.
"""

from functools import partial
from importlib import import_module
from typing import Any

# Each name, with what conf/strategy has under its last word: the class, its options and what it does.
STRATEGIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "lit_fused_ddp": ("lit_fused.parallel.ReplicatedStrategy", {}, "A copy of the model on every device"),
    "lit_fused_fsdp2": ("lit_fused.parallel.FSDP2Strategy", {}, "FSDP2 over all devices"),
    "lit_fused_tp": (
        "lit_fused.parallel.FSDP2Strategy",
        {"data_parallel_size": 1, "tensor_parallel_size": None},
        "All devices divide every matrix",
    ),
    "lit_fused_fsdp2_tp": (
        "lit_fused.parallel.FSDP2Strategy",
        {"tensor_parallel_size": 2},
        "Pairs of devices divide every matrix, FSDP2 over the pairs",
    ),
    "lit_fused_context": ("lit_fused.context.ContextStrategy", {}, "All devices divide each row; FSDP2 over them"),
}


def register() -> None:
    """Enter the names into Lightning's registry of strategies, which this imports."""
    registry = import_module("lightning.pytorch.strategies").StrategyRegistry
    for name, (place, options, description) in STRATEGIES.items():
        registry.register(name, partial(_made, place), description, override=True, **options)


def _made(place: str, **options: Any) -> Any:
    module, _, name = place.rpartition(".")
    return getattr(import_module(module), name)(**options)
