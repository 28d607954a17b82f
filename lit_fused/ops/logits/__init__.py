"""The exact path for every device and option: it stores the logits of one chunk of tokens."""
