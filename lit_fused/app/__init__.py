"""The application: the commands ``train.py`` and ``lit-fused``. Hydra is imported here and nowhere else.

Files of ``conf/``, and with them the folders of runs, use the names below. Each is loaded on first use.
"""

from typing import TYPE_CHECKING

from lit_fused import on_first_use

if TYPE_CHECKING:
    from lit_fused.app.commands.recommending import RecommendOptions
    from lit_fused.app.commands.scoring import ScoreOptions
    from lit_fused.app.launching import OwnGpus, SweepReport
    from lit_fused.models.generation import GenerateOptions

__getattr__ = on_first_use(__name__)[1]
