"""Training loops of other libraries: one call, or one base class, gives their model a loss without logits."""
