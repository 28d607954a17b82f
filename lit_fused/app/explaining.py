"""Say in one sentence what an object of the configuration raised while it was built or took its first step.

The libraries check what they are given, in exceptions of every type and from deep inside. As long as nothing has been
trained, an exception that comes out of one of them is about the configuration's node that names it. Every other
exception is a fault of the program, and keeps its trace; a note says that a step had ended.
"""

import sys
import traceback

from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from omegaconf.errors import OmegaConfBaseException

# The node whose objects a package's code works for, the first that fits.
_NODES = {
    "torch.optim.lr_scheduler": "scheduler",
    "torch.optim": "optimizer",
    "transformers.optimization": "scheduler",
    "transformers": "model",
    "peft": "model",
    "lightning.pytorch.callbacks": "callbacks",
    "lightning.pytorch.loggers": "logger",
    "lightning": "trainer",
}
_NEUTRAL = ("torch", "huggingface_hub", "lightning_utilities", "accelerate")  # called by all of them
_LONGEST = 600  # characters of a reason
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")


def explain(error: BaseException) -> str | None:
    """Return the sentence for an exception that is about the configuration and has no note; None for others."""
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key}: {str(error).partition(chr(10))[0]}"
    if isinstance(error, InstantiationException):
        key = next(
            (line for line in str(error).splitlines() if line.startswith("full_key: ")), "full_key: what is built"
        )
        return _about(key.removeprefix("full_key: "), error.__cause__ or error)
    if not isinstance(error, Exception) or hasattr(error, "__notes__"):
        return None
    if isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY):
        return _about("the memory does not suffice for this model and this batch", error)
    node = _node_of(error)
    return None if node is None else _about(node, error)


def _node_of(error: Exception) -> str | None:
    """Return the node of the innermost code that is no common tool's; None if that is ours or the user's."""
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        module = str(frame.f_globals.get("__name__", ""))
        node = next((node for package, node in _NODES.items() if f"{module}.".startswith(f"{package}.")), None)
        if node is not None:
            return node
        if module.partition(".")[0] not in (*_NEUTRAL, *sys.stdlib_module_names):
            return None
    return None


def _about(key: str, error: BaseException) -> str:
    reason = " ".join(str(error).split()).rstrip(".!")
    if isinstance(error, KeyError | IndexError | AssertionError | AttributeError) or not reason:
        reason = f"{type(error).__name__} {reason}".rstrip()
    reason = reason if len(reason) <= _LONGEST else reason[:_LONGEST] + " ..."
    chosen = ", ".join(HydraConfig.get().overrides.task) if HydraConfig.initialized() else ""
    return (
        f"{key}: {reason}. Change what was chosen ({chosen or 'nothing'}); HYDRA_FULL_ERROR=1 shows where it was raised"
    )
