"""Train or evaluate a language model. Everything is chosen on the command line, over the files in conf/.

python train.py loss=cce precision=bf16-mixed
python train.py -m loss=standard,chunked seed=1,2
python train.py ckpt_path=outputs/.../last.ckpt
"""

from pathlib import Path

from lit_fused.app.cli import main

if __name__ == "__main__":
    main(str(Path(__file__).resolve().parent / "conf"))
