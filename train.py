"""Train or evaluate a language model. Everything is chosen on the command line, over the files in conf/.

python train.py loss=cce precision=bf16-mixed
python train.py -m loss=standard,chunked seed=1,2
python train.py ckpt_path=outputs/.../last.ckpt
"""

import warnings
from pathlib import Path

import hydra
import lightning as L
import transformers
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

from lit_fused import UserError
from lit_fused.config import validate, validate_precision
from lit_fused.reporting.run import report

warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # tokens are memory-mapped: nothing to load
warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not empty")  # Hydra has made it
warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*", category=FutureWarning)
transformers.utils.logging.disable_progress_bar()


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    try:
        run(cfg)
    except UserError as error:  # Hydra prints this class as its message alone
        raise CompactHydraException(str(error)) from error
    except InstantiationException as error:  # around what the configured objects have raised
        if isinstance(error.__cause__, UserError):
            raise CompactHydraException(str(error.__cause__)) from error
        raise


def run(cfg: DictConfig) -> None:
    """One run: validate, seed, instantiate, fit or evaluate, report."""
    validate(cfg)
    Path(cfg.output_dir, "summary.json").unlink(missing_ok=True)  # of an earlier run in the same folder
    L.seed_everything(cfg.seed, workers=True)
    trainer: L.Trainer = instantiate(cfg.trainer)
    validate_precision(cfg.precision, trainer)
    loss = instantiate(cfg.loss)
    data = instantiate(cfg.data)
    build = instantiate(cfg.module)
    module = build(instantiate(cfg.model), loss, instantiate(cfg.optimizer), instantiate(cfg.scheduler))
    if cfg.mode == "fit":
        trainer.fit(module, data, ckpt_path=cfg.ckpt_path)
    else:
        trainer.validate(module, data, ckpt_path=cfg.ckpt_path)
    report(trainer, module, cfg.output_dir, HydraConfig.get().overrides.task)


if __name__ == "__main__":
    main()
