"""Training loops of other libraries: one call gives their model a loss without logits."""
