"""Run the console script ``lit-fused``, which is what ``python train.py`` is in a checkout.

lit-fused data=text data.path=FILE_OR_FOLDER
lit-fused --config-dir my_conf experiment=mine
"""

import signal
import sys
import warnings
from importlib.metadata import version

import hydra

from lit_fused import __version__
from lit_fused.app.commands import run
from lit_fused.app.overrides import with_run
from lit_fused.errors import UserError
from lit_fused.ops.user_error import printable

_PACKAGED = "pkg://lit_fused.conf"
_ANSWERED = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i"}
_VERSIONS = ("torch", "lightning", "transformers")


def main(conf: str = _PACKAGED) -> None:
    """Run Hydra's command line on the configuration in ``conf``; answer ``--version`` and ``--certify`` before it."""
    if _ANSWERED.intersection(sys.argv) and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends a listing without an error
    if sys.argv[1:] == ["--version"]:
        print(f"lit-fused {__version__},", ", ".join(f"{name} {version(name)}" for name in _VERSIONS))
        return
    if sys.argv[1:2] == ["--certify"]:
        _certify(sys.argv[2:])
        return
    warnings.filterwarnings("ignore", message="The version_base parameter")  # of Hydra 1.4; 1.3 warns without it
    try:
        sys.argv[1:] = with_run(sys.argv[1:])
        hydra.main(version_base="1.3", config_path=conf, config_name="train")(run)()
    except UserError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:  # Within a job ``run`` has caught it. It ends here where others do the jobs.
        print("\nStopped by Ctrl-C", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _certify(folders: list[str]) -> None:
    """Print the certificate of a model's folder; exit with 1 if no fused loss computes its logits."""
    if len(folders) != 1:
        sys.exit("--certify takes one folder of a model: lit-fused --certify FOLDER")
    # Here, because torch takes a second, and other answers do without.
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from lit_fused.models.certificate import certify_folder, text_of

    disable_progress_bar()
    set_verbosity_error()
    try:
        certificate = certify_folder(folders[0])
    except UserError as error:
        sys.exit(str(error))
    print(printable(text_of(certificate)))
    sys.exit("refused" in certificate)
