"""Lightning's own command line: the module and its data from a YAML file. It needs pip install 'lit-fused[cli]'.

python examples/lightning_cli.py fit --config examples/lightning_cli.yaml --trainer.max_steps=100

Without arguments it fits as lightning_cli.yaml says, on the text of these examples. You see a validation loss a nat
below that of guessing (ln 2000).
"""

import sys
from pathlib import Path

from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import LightningCLI

from lit_fused import FusedCausalLMModule
from lit_fused.data import TokenDataModule
from lit_fused.data.encoding import Encoding

set_parsing_settings(subclasses_enabled=[Encoding])  # jsonargparse takes no subclass of a dataclass otherwise


def main(arguments: list[str] | None = None) -> None:
    print("a model from a YAML file, trained on these examples", flush=True)
    here = Path(__file__)
    default = ["fit", "--config", str(here.with_suffix(".yaml")), f"--data.source={here.parent}"]
    cli = LightningCLI(FusedCausalLMModule, TokenDataModule, args=arguments or default, save_config_callback=None)
    metrics = cli.trainer.callback_metrics
    if "val/loss" in metrics:
        print(f"val/loss {metrics['val/loss']:.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
