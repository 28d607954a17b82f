"""The console script ``lit-fused``: what ``python train.py`` is in a checkout, after ``pip install lit-fused``.

lit-fused data=text data.path=FILE_OR_FOLDER
lit-fused --config-dir my_conf experiment=mine
"""

import importlib.metadata
import logging
import sys
import warnings

import hydra
import transformers
from omegaconf import DictConfig

from lit_fused.commands import run

_VERSIONS = ("lit-fused", "torch", "lightning", "transformers")


def quiet() -> None:
    """Without the warnings and bars of others that tell a user of the command nothing."""
    # tokens are memory-mapped: nothing to load
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # Hydra has made it
    warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not empty")
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*", category=FutureWarning)
    # of backends for other devices that are not there
    logging.getLogger("liger_kernel.backends.registry").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    # of services that the user has not chosen
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_tip)


def _is_no_tip(record: logging.LogRecord) -> bool:
    return "Tip: For seamless cloud" not in record.getMessage()


def main() -> None:
    """Hydra's command line, but for ``--version``, which Hydra answers with its own."""
    if sys.argv[1:] == ["--version"]:
        print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in _VERSIONS))
    else:
        _main()


@hydra.main(version_base="1.3", config_path="pkg://lit_fused.conf", config_name="train")
def _main(cfg: DictConfig) -> float | None:
    quiet()
    return run(cfg)


if __name__ == "__main__":
    main()
