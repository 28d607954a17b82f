"""Run the console script ``lit-fused``, which is what ``python train.py`` is in a checkout.

lit-fused data=text data.path=FILE_OR_FOLDER
lit-fused --config-dir my_conf experiment=mine
"""

import re
import signal
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import hydra

from lit_fused.app.commands import run
from lit_fused.app.continued import continue_run
from lit_fused.app.mistyped import answer_in_sentences

_PACKAGED = "pkg://lit_fused.conf"
_TOO_LONG = re.compile(r"\d{4301}")
_ANSWERED = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i"}
_VERSIONS = ("lit-fused", "torch", "lightning", "transformers")


def main(conf: str = _PACKAGED) -> None:
    """Run Hydra's command line on the configuration in ``conf``; answer ``--version`` before Hydra does."""
    if _ANSWERED.intersection(sys.argv) and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends a listing without an error
    if sys.argv[1:] == ["--version"]:
        print(", ".join(f"{name} {version(name)}" for name in _VERSIONS))
    elif any(_TOO_LONG.search(word) for word in sys.argv[1:]):
        sys.exit("a number on the command line has more than 4,300 digits, which Python does not read")
    else:
        folder = Path(conf) if conf != _PACKAGED else Path(__file__).parents[1] / "conf"
        answer_in_sentences(folder)
        warnings.filterwarnings("ignore", message="The version_base parameter")  # of Hydra 1.4; 1.3 warns without it
        try:
            hydra.main(version_base="1.3", config_path=conf, config_name=continue_run(folder, "train"))(run)()
        except KeyboardInterrupt:  # Within a job ``run`` has caught it. It ends here where others do the jobs.
            sys.exit(128 + signal.SIGINT)
