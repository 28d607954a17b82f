"""Export the trained model as a Hugging Face folder when training ends."""

from pathlib import Path

import lightning as L

from lit_fused.callbacks.weight_average import averaged_weights
from lit_fused.modules import FusedLMModule


class ExportPretrained(L.Callback):
    """Writes ``folder`` with weights, configuration and tokenizer, for transformers' ``from_pretrained``.

    Args:
        folder: where to write; replaced as a whole if it exists.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, FusedLMModule)
        if trainer.is_global_zero or pl_module.is_sharded:
            tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
            with averaged_weights(trainer):
                pl_module.save_pretrained(self.folder, tokenizer)
