"""The model: a backbone and a loss in one forward pass, and what is known of a backbone."""
