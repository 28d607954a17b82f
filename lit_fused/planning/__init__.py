"""What a training step will take of a GPU's memory, found out without a GPU and without memory."""

from lit_fused.planning.step import Division, Peak, Prediction, predict, stand_in

__all__ = ["Division", "Peak", "Prediction", "predict", "stand_in"]
