"""Predict what a training step takes of a GPU's memory, without a GPU and without the memory."""
