"""Train or evaluate a language model. Everything is chosen on the command line, over the files in conf/.

python train.py loss=cce precision=bf16-mixed
python train.py -m loss=standard,chunked seed=1,2
python train.py ckpt_path=outputs/.../last.ckpt
"""

import hydra
from omegaconf import DictConfig

from lit_fused.cli import quiet
from lit_fused.commands import run


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    quiet()
    return run(cfg)


if __name__ == "__main__":
    main()
