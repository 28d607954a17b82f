"""Predict what a training step takes of a GPU's memory, without a GPU and without the memory."""

from lit_fused.app.planning.step import Peak, Prediction, Spread, predict, stand_in

__all__ = ["Peak", "Prediction", "Spread", "predict", "stand_in"]
