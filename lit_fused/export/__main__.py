"""Make a Hugging Face folder of a checkpoint that lies on the disk: in one process, on the CPU.

    python -m lit_fused.export outputs/DATE/TIME/checkpoints/last.ckpt my_model

The model is built from the run's overrides, which lie beside its checkpoints, whichever strategy wrote them.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from lit_fused.errors import UserError


def export(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    tokenizer: bool = True,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
) -> None:
    """Write a new ``folder`` as :class:`~lit_fused.callbacks.ExportPretrained` does after a fit, whole or not at all.

    The checkpoint is a file or a folder in a run's folder. For the run's ``tokenizer``, its text has to be there;
    for a recommender the map of its items (RUN/items.parquet).
    ``overrides`` come after the run's own; ``config_dir`` is a folder of your own that the run was started with.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # It names the kernels that are not installed.
    # Here, because a signal while torch is loaded should end in a word, and --help does not need torch.
    import transformers

    from lit_fused.app.overrides import configuration_of
    from lit_fused.app.restore import item_map_of, restored, run_with, tokenizer_of
    from lit_fused.training import FusedRecommenderModule

    transformers.utils.logging.disable_progress_bar()
    checkpoint, folder = Path(checkpoint).absolute(), Path(folder).absolute()
    if folder.exists():
        raise UserError(f"{folder} exists already; choose another folder")
    run = run_with(checkpoint)
    with configuration_of(run, overrides, config_dir) as cfg:
        module = restored(cfg, checkpoint)
        if isinstance(module, FusedRecommenderModule):  # It has items in place of a tokenizer.
            module.item_map = item_map_of(run, checkpoint)
            tokenizer = False
        module.save_pretrained(folder, tokenizer_of(run, cfg) if tokenizer else None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m lit_fused.export", description="Export a checkpoint.")
    parser.add_argument("checkpoint", help="a file or a folder in outputs/DATE/TIME/checkpoints")
    parser.add_argument("output", help="the folder to write")
    parser.add_argument("--no-tokenizer", action="store_true", help="export the model alone")
    parser.add_argument("overrides", nargs="*", help="of the run's configuration, NAME=VALUE")
    parser.add_argument("--config-dir", help="the folder of your own choices that the run was started with")
    options = parser.parse_args(arguments)
    try:
        more = {"overrides": options.overrides, "config_dir": options.config_dir}
        export(options.checkpoint, options.output, tokenizer=not options.no_tokenizer, **more)
    except UserError as error:
        sys.exit(str(error))
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
